"""What a rank computes in an exchange, as it is shipped: the memory floor and plain torch beside it, in one run.

A method's own objects work on a gradient in a group of eight ranks that are copies of this one, and no byte moves. What
they do is timed in two parts: until the first frame is ready to leave, and from when frames are there until the mean is
written and the rest is kept. What is done while frames travel is in neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.advisor.microbench import DryNet, ExchangeBenchmark, even_rows
from thinwire.lab.bench.rows import Row, commit, hardware, measure, percentiles, today
from thinwire.methods import DGC, BlockSign, GTopK, Method, TernGrad
from thinwire.transport import OverlapWith

SIZES = {"resnet20": 270_000, "resnet50": 25_557_032, "alexnet": 61_100_840, "vgg16": 138_357_544}
SMALLEST = 4096  # elements; much smaller tensors travel dense
RANKS = 8
WARMUP = 12  # steps that bring the residual, and with it the carried threshold, into a steady state
SHIFT = 4096  # elements by which the next step's gradient lies further along in the noise
DEFAULTS: tuple[Method, ...] = (DGC(), GTopK(), TernGrad(), BlockSign())

Work = Callable[[int], object]


class TimingNet(DryNet):
    """A dry net that takes the time whenever frames leave and come; one exchange at a time.

    The marks of an exchange are its start, begin and end of every call in which frames travel, and its end.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(size, device)
        self._device = device
        self._marks: list[float] = []

    def clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks.append(time.perf_counter())
        return self._marks[-1]

    def all_gather(
        self, frame: Tensor, room: Tensor | None = None, pairwise: bool = False, overlap_with: OverlapWith = None
    ) -> list[Tensor]:
        self.clock()
        frames = super().all_gather(frame, room, pairwise, overlap_with)
        self.clock()
        return frames

    def all_to_all(self, frames: Sequence[Tensor], nbytes: Sequence[int], room: Tensor | None = None) -> list[Tensor]:
        self.clock()
        incoming = super().all_to_all(frames, nbytes, room)
        self.clock()
        return incoming

    def swap(self, peer: int, frame: Tensor, room: Tensor | None = None, overlap_with: OverlapWith = None) -> Tensor:
        self.clock()
        other = super().swap(peer, frame, room, overlap_with)
        self.clock()
        return other

    def take_parts(self) -> tuple[float, float]:
        """Seconds of the last exchange until its first frame left, and of its own work after that."""
        marks, self._marks = self._marks, []
        assert len(marks) >= 4, "an exchange sends frames"
        return marks[1] - marks[0], sum(marks[at + 1] - marks[at] for at in range(2, len(marks), 2))


def exchange_seconds(method: Method, numel: int, device: torch.device, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds to the frame, and from the frames on, of exchanges of one tensor; the engine is used here alone."""
    net = TimingNet(RANKS, device)
    rows = even_rows(method, [[("gradient", 0, torch.Size([1, numel]))]], RANKS)
    run = ExchangeBenchmark(method, rows, net, True, device)
    parts = []
    for _ in range(WARMUP + repeats):
        run.seconds(net.clock)
        parts.append(net.take_parts())
    to_frame, from_frames = zip(*parts[WARMUP:], strict=True)
    return list(to_frame), list(from_frames)


def described(method: Method) -> str:
    """The name with the density and the values that it has: "dgc, 2 %, int8"."""
    density, values = getattr(method, "density", None), getattr(method, "values", None)
    return ", ".join([method.name, *([f"{100 * density:g} %"] if density else []), *([values] if values else [])])


@dataclass(frozen=True)
class Beside:
    """What a method is compared with: the fewest bytes an element that its way to the frame moves, and plain torch."""

    floor_bytes: float
    plain: Callable[[Bench, Method], Work]
    after: str  # what is done with frames


class Bench:
    """One size on one device."""

    def __init__(self, numel: int, device: torch.device, repeats: int, methods: Sequence[Method] = DEFAULTS) -> None:
        self.numel, self.device, self.repeats, self.methods = numel, device, repeats, methods
        generator = torch.Generator(device).manual_seed(0)
        noise = torch.randn(3 * SHIFT, device=device, generator=generator, dtype=torch.float32)
        self.noise = noise.repeat(1 + -(-numel // noise.numel()))  # (numel + 2 * SHIFT or more,)
        self.weights = torch.zeros(numel, dtype=torch.float32, device=device)
        other = torch.empty_like(self.weights)
        self.copy_s = measure(lambda i: other.copy_(self.gradient(i)), device, repeats)
        self.byte_ms = percentiles(self.copy_s)[1] / (8 * numel)

    def gradient(self, step: int) -> Tensor:  # -> (numel,)
        first = step % 3 * SHIFT
        return self.noise[first : first + self.numel]

    def zeros(self) -> Tensor:  # -> (numel,)
        return torch.zeros_like(self.weights)

    def rows(self) -> Iterator[Row]:
        yield self._row("memory copy", "torch", "", self.copy_s, 8)
        backend = kernels.backend_name(self.device)
        for method in self.methods:
            beside, name, setting = BESIDE[method.name], described(method), method.in_full
            work = beside.plain(self, method)
            plain_s = measure(work, self.device, max(3, self.repeats // 4), warmup=1)
            del work  # its vectors
            plain = self._row(f"{name}: to the frame", "plain torch", "", plain_s, beside.floor_bytes)
            yield plain
            to_frame, from_frames = exchange_seconds(method, self.numel, self.device, self.repeats)
            yield self._row(f"{name}: to the frame", backend, setting, to_frame, beside.floor_bytes, plain.p50_ms)
            yield self._row(f"{name}: {beside.after}", backend, setting, from_frames)

    def _row(
        self,
        name: str,
        backend: str,
        setting: str,
        seconds: list[float],
        floor_bytes: float | None = None,
        torch_ms: float | None = None,
    ) -> Row:
        p20, p50, p80 = percentiles(seconds)
        floor = floor_bytes * self.numel * self.byte_ms if floor_bytes is not None else None
        return Row(
            name=name, kernels=backend, setting=setting, device=self.device.type, numel=self.numel, p20_ms=p20,
            p50_ms=p50, p80_ms=p80, floor_ms=floor, x_floor=p50 / floor if floor else None,
            x_torch=torch_ms / p50 if torch_ms else None, threads=torch.get_num_threads(), commit=commit(),
            hardware=hardware(self.device), date=today(),
        )  # fmt: skip


# Each of these returns one step in plain torch; i counts steps.


def plain_topk(bench: Bench, method: Method) -> Work:
    """SGD's momentum and weight decay into a residual, its largest elements as fp32 values with int32 indices."""
    velocity, residual = bench.zeros(), bench.zeros()
    k = max(1, round(getattr(method, "density", 1.0) * bench.numel))

    def step(i: int) -> tuple[Tensor, Tensor]:
        velocity.mul_(0.9).add_(bench.gradient(i)).add_(bench.weights, alpha=5e-4)
        residual.add_(velocity)
        indices = torch.topk(residual.abs(), k).indices
        values = residual[indices]
        residual.index_fill_(0, indices, 0.0)
        return indices.to(torch.int32), values

    return step


def plain_ternary(bench: Bench, method: Method) -> Work:
    weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=bench.device)
    whole = bench.numel // 5 * 5

    def step(i: int) -> Tensor:
        grad = bench.gradient(i)
        limit = 2.5 * grad.std()
        clipped = grad.clamp(-limit, limit)
        scale = clipped.abs().max()
        trits = clipped.sign() * (torch.rand_like(clipped) < clipped.abs() / scale)
        return ((trits[:whole] + 1).to(torch.uint8).view(-1, 5) * weights).sum(dim=1, dtype=torch.uint8)

    return step


def plain_signs(bench: Bench, method: Method) -> Work:
    velocity, error = bench.zeros(), bench.zeros()
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bench.device)
    whole = bench.numel // 8 * 8

    def step(i: int) -> tuple[Tensor, Tensor]:
        velocity.mul_(0.9).add_(bench.gradient(i)).add_(bench.weights, alpha=5e-4)
        error.add_(velocity)
        scale = error.abs().mean()
        negative = error < 0
        error.sub_(torch.where(negative, -scale, scale))
        return scale, (negative[:whole].to(torch.uint8).view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)

    return step


# Momentum and residual are read and written, gradient and weights read; trits need the scaler before they are drawn.
BESIDE = {
    "dgc": Beside(24.0, plain_topk, f"decode + add {RANKS} frames"),
    "gtopk": Beside(24.0, plain_topk, f"merge {RANKS} ranks' frames"),
    "terngrad": Beside(8.2, plain_ternary, f"serve and read, {RANKS} ranks"),
    "blocksign": Beside(24.1, plain_signs, f"serve and read, {RANKS} ranks"),
}
