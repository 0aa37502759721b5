"""Where each parameter's gradient lies inside the flat vector of one exchange."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from thinwire.kernels import Segments


def memory_flat(tensor: Tensor) -> Tensor:  # any shape -> (numel,)
    """View a tensor's elements in the order in which they lie in memory, which is the order of DDP's buckets.

    A dense tensor in another memory format (channels_last, a transposed weight) is one stretch of memory; anything else
    is taken row by row, as DDP does.
    """
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    if tensor.dim() != 4 or not tensor.is_contiguous(memory_format=torch.channels_last):
        expected = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size != 1:
                if stride != expected:
                    return tensor.reshape(-1)
                expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def shaped_like(flat: Tensor, tensor: Tensor) -> Tensor:  # (numel,) -> the tensor's shape and memory format
    """Undo memory_flat: a copy with the tensor's dtype."""
    out = torch.empty_like(tensor, requires_grad=False)
    view = memory_flat(out)
    view.copy_(flat)
    return out if view.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() else view.view_as(out)


@dataclass(frozen=True)
class Segment:
    """One parameter inside a flat vector.

    ``ordinal`` is the parameter's place in ``model.named_parameters()``: the same on every rank, whatever the buckets.
    ``start`` is its first element in the flat vector. ``coded`` says that it goes through the compressor; the others
    form the tail of the vector and travel dense inside the same frame.
    """

    name: str
    ordinal: int
    numel: int
    start: int
    coded: bool

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Layout:
    """The segments of one exchange: the coded ones first, then the dense tail, each in the order they were given.

    ``coded_sizes`` are those of all coded tensors of the model, the smallest first, for what is divided between them
    whatever they share an exchange with.
    """

    segments: tuple[Segment, ...]
    coded_sizes: tuple[int, ...]

    def __hash__(self) -> int:  # layouts are dictionary keys on the hot path
        return self.fingerprint

    @classmethod
    def of(cls, entries: Sequence[tuple[str, int, int, bool]], coded_sizes: Sequence[int] | None = None) -> Layout:
        """Build a layout from (name, ordinal, numel, coded) rows, which without ``coded_sizes`` are the whole model."""
        segments, start = [], 0
        for name, ordinal, numel, coded in sorted(entries, key=lambda entry: not entry[3]):
            segments.append(Segment(name, ordinal, numel, start, coded))
            start += numel
        own = [segment.numel for segment in segments if segment.coded]
        return cls(tuple(segments), tuple(sorted(own if coded_sizes is None else coded_sizes)))

    @cached_property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @cached_property
    def coded(self) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.coded)

    @cached_property
    def coded_numel(self) -> int:
        return sum(segment.numel for segment in self.coded)

    @property
    def tail_numel(self) -> int:
        return self.numel - self.coded_numel

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:  # (n,) -> one view a segment
        return flat.split([segment.numel for segment in self.segments])

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that differ when two ranks exchange different things; travels in every frame."""
        text = ";".join(f"{s.name}:{s.numel}:{int(s.coded)}" for s in self.segments)
        return zlib.crc32(text.encode())


@dataclass(frozen=True)
class Hyper:
    """What one optimizer group says about a parameter at one step."""

    lr: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False

    @property
    def decay(self) -> float:
        """The weights' share of the gradient; SGD negates the gradient of a maximised objective behind us."""
        return -self.weight_decay if self.maximize else self.weight_decay

    @property
    def steady_decay(self) -> float:
        """What momentum makes of the decay of weights that stand still: decay (1 + m + m^2 + ...), which is also what
        it is with Nesterov momentum."""
        return self.decay / (1 - self.momentum) if self.momentum < 1 else self.decay


@dataclass
class Alarm:
    """Whether a gradient of this exchange is not finite, on this rank or, as frames tell, on another.

    Every frame that a rank builds while it rings says so, so that one exchange is enough for all ranks to know.
    """

    own: str | None = None  # the parameter, on a rank that has the bad gradient
    flag: Tensor | None = None  # (1,) int32 on the device, not zero where this rank's gradient is bad
    heard_from: str | None = None

    @property
    def rings(self) -> bool:
        return self.own is not None or self.heard_from is not None


class Probe:
    """Sums that the exchanges of one step fill in for whoever watches the training; left out of all other steps.

    g is the gradient, x what should be sent, e what remains of x after the exchange.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._sums: list[Tensor] = [torch.zeros((), dtype=torch.float64) for _ in range(5)]  # g2, x2, x1, e2, e1

    def _add(self, place: int, vector: Tensor, order: int) -> None:
        norm = torch.linalg.vector_norm(vector, order, dtype=torch.float64)
        self._sums[place] = self._sums[place].to(norm.device) + norm**order

    def gradient(self, parts: Sequence[Tensor]) -> None:
        for part in parts:
            self._add(0, part, 2)

    def wanted(self, x: Tensor) -> None:
        self._add(1, x, 2)
        self._add(2, x, 1)

    def left(self, e: Tensor) -> None:
        self._add(3, e, 2)
        self._add(4, e, 1)

    def as_bytes(self) -> Tensor:  # -> (40,) uint8
        device = self._sums[0].device
        return torch.stack([one.to(device) for one in self._sums]).view(torch.uint8)


@dataclass(frozen=True)
class Turn:
    """Everything that one exchange needs to know besides the gradient itself.

    ``hypers`` and ``weights`` run parallel to ``layout.segments``; ``weights`` are the parameters, read by methods that
    move weight decay in front of the compression. ``applied``, parallel to them or empty, is how many times its weights
    are added to a coded segment's mean on every rank alike, without being sent; a memory takes that off what it keeps.
    ``own``, where it is not 0, is the share of this rank's own gradient that the coded mean is added to, and not to
    zeros (thinwire/local.py).
    """

    layout: Layout
    step: int
    hypers: tuple[Hyper, ...]
    weights: tuple[Tensor, ...] = ()
    applied: tuple[float, ...] = ()
    own: float = 0.0
    alarm: Alarm = field(default_factory=Alarm, compare=False)
    probe: Probe | None = field(default=None, compare=False)

    def runs(self) -> Iterator[tuple[slice, Hyper]]:
        """Yield the longest stretches of the flat vector whose parameters share their hyper-parameters."""
        start, stop, current = 0, 0, None
        for segment, hyper in zip(self.layout.segments, self.hypers, strict=True):
            if hyper != current:
                if current is not None and stop > start:
                    yield slice(start, stop), current
                start, current = segment.start, hyper
            stop = segment.start + segment.numel
        if current is not None and stop > start:
            yield slice(start, stop), current

    def flat_weight(self, place: int) -> Tensor:  # -> (numel,)
        """A segment's parameter, its elements as they lie in memory, in its own type."""
        return memory_flat(self.weights[place].detach())

    def segments(self, *, with_decay: bool, coded_decay: bool = True) -> Segments:
        """The rows that the kernels read; with weight decay where it acts in front of the compression: that of coded
        segments only with ``coded_decay``."""
        whose = [with_decay and (coded_decay or not segment.coded) for segment in self.layout.segments]
        decays = [hyper.decay if has else 0.0 for hyper, has in zip(self.hypers, whose, strict=True)]
        applied = self.applied or (0.0,) * len(decays)
        weights = [self.flat_weight(place).to(torch.float32) if decay else None for place, decay in enumerate(decays)]
        return Segments(
            starts=tuple(segment.start for segment in self.layout.segments),
            momentum=tuple(hyper.momentum for hyper in self.hypers),
            nesterov=tuple(hyper.nesterov for hyper in self.hypers),
            decay=tuple(decays),
            weights=tuple(weights),
            applied=tuple(share if has else 0.0 for share, has in zip(applied, whose, strict=True)),
        )
