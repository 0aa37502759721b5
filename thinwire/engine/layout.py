"""Where each parameter's gradient lies inside the flat vector of one exchange."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's dimensions from the slowest to the fastest, as ``memory_flat`` reads its elements."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda place: (-strides[place], -tensor.shape[place])))


def memory_flat(tensor: Tensor) -> Tensor:  # any shape -> (numel,)
    """View a tensor's elements in the order in which they lie in memory, which is the order of DDP's buckets.

    A dense tensor in another memory format (channels_last, a transposed weight) is one stretch of memory; anything else
    is taken row by row, as DDP does.
    """
    if tensor.is_contiguous() or not _is_dense(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order of the dimensions."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_like(parameter: Tensor, tensor: Tensor) -> Tensor:  # -> (numel,)
    """A tensor's elements in the order in which the parameter's lie in memory: a view where that is theirs."""
    tensor = tensor.detach()
    if not _has_order_of_memory(parameter):
        return tensor.reshape(-1)
    if tensor.stride() == parameter.stride():
        return memory_flat(tensor)
    laid = torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device, requires_grad=False)
    return memory_flat(laid.copy_(tensor))


def shaped_like(flat: Tensor, tensor: Tensor) -> Tensor:  # (numel,) -> the tensor's shape and memory format
    """Undo memory_flat: a copy with the tensor's dtype."""
    if not _has_order_of_memory(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(flat.view(tensor.shape))
    out = torch.empty_like(tensor, requires_grad=False)
    memory_flat(out).copy_(flat)
    return out


def _has_order_of_memory(tensor: Tensor) -> bool:
    """Whether memory_flat is a view of the tensor."""
    return tensor.is_contiguous() or _is_dense(tensor)


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
    whatever they share an exchange with. ``of_methods`` are the layouts of the exchanges that it is made of, where
    parameters have different methods.
    """

    segments: tuple[Segment, ...]
    coded_sizes: tuple[int, ...]
    of_methods: tuple[Layout, ...] = ()

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

    def cut(self, numels: Sequence[int], model: Layout) -> Layout:
        """The same of tensors that have ``numels`` elements here, by ordinal; ``model`` is the whole model's."""
        rows = [(s.name, s.ordinal, numels[s.ordinal], s.coded) for s in self.segments]
        of_methods = zip(self.of_methods, model.of_methods, strict=True)
        own = Layout.of(rows, [numels[s.ordinal] for s in model.coded])
        return Layout(own.segments, own.coded_sizes, tuple(one.cut(numels, whole) for one, whole in of_methods))

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

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:  # (n,) -> one view per segment
        return flat.split([segment.numel for segment in self.segments])

    @cached_property
    def fingerprint(self) -> int:
        """32 bits that differ when two ranks exchange different things; travels in every frame."""
        text = ";".join(f"{s.name}:{s.numel}:{int(s.coded)}" for s in self.segments)
        return zlib.crc32(text.encode())
