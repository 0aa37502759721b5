"""How fast the work on a gradient is, from gradient to frame, against the memory floor and plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import SignsCodec, SparseCodec, TernaryCodec
from thinwire.codecs.frame import open_frame, read_heads
from thinwire.codecs.indices import take_rice
from thinwire.compressors import BlockSigns, Ternarize, TopK
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Accepted
from thinwire.engine.workspace import Workspace
from thinwire.lab.bench.rows import Row, commit, hardware, measure, measure_on_gpu, percentiles, today
from thinwire.memory import MomentumCorrection, RescaledError

SIZES = {"resnet20": 270_000, "resnet50": 25_557_032, "alexnet": 61_100_840, "vgg16": 138_357_544}
DENSITY = 0.001
FRAMES = 8

Work = Callable[[int], object]


class Bench:
    """One size on one device: every work beside its plain-torch way, in turns of the same run."""

    def __init__(self, numel: int, device: torch.device, repeats: int) -> None:
        self.numel, self.device, self.repeats = numel, device, repeats
        self.layout = Layout.of([("gradient", 0, numel, True)])
        generator = torch.Generator(device).manual_seed(0)
        self.gradients = [torch.randn(numel, device=device, generator=generator) for _ in range(3)]
        other = torch.empty_like(self.gradients[0])
        self.copy_s = measure(lambda i: other.copy_(self.gradients[i % 3]), device, repeats)
        self.byte_ms = percentiles(self.copy_s)[1] / (8 * numel)

    def context(self, step: int) -> ExchangeContext:
        return ExchangeContext(self.layout, step, (Hyper(lr=0.1, momentum=0.9),), (self.gradients[0],))

    def gradient(self, step: int) -> Tensor:
        return self.gradients[step % 3]

    def row(self, name: str, home: str, seconds: list[float], floor_bytes: float | None, torch_ms: float | None) -> Row:
        p20, p50, p80 = percentiles(seconds)
        floor = floor_bytes * self.numel * self.byte_ms if floor_bytes is not None else None
        return Row(
            name=name, kernels=home, device=self.device.type, numel=self.numel, p20_ms=p20, p50_ms=p50, p80_ms=p80,
            floor_ms=floor, x_floor=p50 / floor if floor else None, x_torch=torch_ms / p50 if torch_ms else None,
            threads=torch.get_num_threads(), commit=commit(), hardware=hardware(self.device), date=today(),
        )  # fmt: skip

    def rows(self) -> Iterator[Row]:
        yield self.row("memory copy", "torch", self.copy_s, 8, None)
        home = kernels.home_name(self.device)
        for name, ours, theirs, floor_bytes in (
            ("dgc step, 0.1 %", self.dgc(), self.torch_topk(), 20.0),
            ("terngrad to bytes", self.terngrad(), self.torch_terngrad(), 8.2),
            ("blocksign step", self.blocksign(), self.torch_blocksign(), 28.0),
        ):
            plain = self.timed(theirs, max(3, self.repeats // 4), 1)
            yield self.row(name, "plain torch", plain, floor_bytes, None)
            # Twelve steps bring the residual, and with it the carried threshold, into a steady state.
            fast = self.timed(ours, self.repeats, 12)
            yield self.row(name, home, fast, floor_bytes, percentiles(plain)[1])
            if self.device.type == "cuda":
                launched = measure(ours, self.device, self.repeats)
                yield self.row(f"{name}, launched from Python", home, launched, floor_bytes, None)
        name = f"decode + add {FRAMES} frames"
        if self.device.type == "cuda" and kernels.on_gpu(self.device):
            yield self.row(name, home, self.timed(self.decode_on_gpu(), self.repeats, 3), None, None)
            name += ", launched from Python"
        # As many steps before as for the others: the first ones still fault in the pages of what they allocate.
        yield self.row(name, home, measure(self.decode(), self.device, self.repeats, warmup=12), None, None)

    def timed(self, work: Work, repeats: int, warmup: int) -> list[float]:
        if self.device.type == "cuda":
            return measure_on_gpu(work, repeats, warmup)
        return measure(work, self.device, repeats, warmup)

    # Each of these returns one step; i counts steps.

    def dgc(self) -> Work:
        workspace = Workspace()
        memory, compressor, codec = MomentumCorrection(masking=True), TopK(DENSITY, workspace=workspace), SparseCodec()
        tail = torch.zeros(0, device=self.device)

        def step(i: int) -> Tensor:
            context = self.context(i)
            workspace.begin()
            hint = compressor.hint(context, self.device)
            x, candidates = memory.compensate(context, [self.gradient(i)], (), hint, None)
            assert isinstance(x, Tensor)
            payload = compressor.compress(context, x, None, 0, candidates)
            frame = codec.encode(context, payload, tail, workspace=workspace)
            memory.retain(context, x, Accepted(payload, tail, sent=payload.indices))
            return frame

        return step

    def torch_topk(self) -> Work:
        velocity, residual = torch.zeros(self.numel, device=self.device), torch.zeros(self.numel, device=self.device)
        k = max(1, round(DENSITY * self.numel))

        def step(i: int) -> tuple[Tensor, Tensor]:
            velocity.mul_(0.9).add_(self.gradient(i))
            residual.add_(velocity)
            indices = torch.topk(residual.abs(), k).indices
            values = residual[indices]
            residual.index_fill_(0, indices, 0.0)
            velocity.index_fill_(0, indices, 0.0)
            return indices.to(torch.int32), values

        return step

    def terngrad(self) -> Work:
        compressor, codec = Ternarize(share_scaler=False), TernaryCodec()
        tail = torch.zeros(0, device=self.device)

        def step(i: int) -> Tensor:
            context = self.context(i)
            return codec.encode(
                context, compressor.compress(context, self.gradient(i), None, 0), tail, with_scales=True
            )

        return step

    def torch_terngrad(self) -> Work:
        weights = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=self.device)
        whole = self.numel // 5 * 5

        def step(i: int) -> Tensor:
            grad = self.gradient(i)
            limit = 2.5 * grad.std()
            clipped = grad.clamp(-limit, limit)
            scale = clipped.abs().max()
            trits = clipped.sign() * (torch.rand_like(clipped) < clipped.abs() / scale)
            return ((trits[:whole] + 1).to(torch.uint8).view(-1, 5) * weights).sum(dim=1, dtype=torch.uint8)

        return step

    def blocksign(self) -> Work:
        memory, compressor, codec = RescaledError(momentum_moved=True), BlockSigns(), SignsCodec()
        tail = torch.zeros(0, device=self.device)

        def step(i: int) -> Tensor:
            context = self.context(i)
            x, _ = memory.compensate(context, [self.gradient(i)], (), None, None)
            assert isinstance(x, Tensor)
            payload = compressor.compress(context, x, None, 0)
            frame = codec.encode(context, payload, tail)
            memory.retain(context, x, Accepted(payload, tail))
            return frame

        return step

    def torch_blocksign(self) -> Work:
        velocity, error = torch.zeros(self.numel, device=self.device), torch.zeros(self.numel, device=self.device)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=self.device)
        whole = self.numel // 8 * 8

        def step(i: int) -> tuple[Tensor, Tensor]:
            velocity.mul_(0.9).add_(self.gradient(i))
            error.add_(velocity)
            scale = error.abs().mean()
            sign = torch.where(error < 0, -1.0, 1.0)
            error.sub_(sign * scale)
            bits = ((sign[:whole] < 0).to(torch.uint8).view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
            return scale, bits

        return step

    def frames(self) -> list[Tensor]:
        tail, context, frames = torch.zeros(0, device=self.device), self.context(0), []
        for rank in range(FRAMES):
            x = self.gradients[rank % 3] if rank < 3 else self.gradients[rank % 3].roll(rank)
            payload = TopK(DENSITY).compress(context, x, None, rank)
            frames.append(SparseCodec().encode_finished(context, payload, tail))
        return frames

    def decode_on_gpu(self) -> Work:
        """What the device does of it: checksums, decoding with all checks, adding; the host only reads two answers."""
        context, frames = self.context(0), self.frames()
        out = torch.zeros(self.numel, device=self.device)
        streams, values = [], []
        for frame, head in zip(frames, read_heads(frames), strict=True):
            header, body = open_frame(frame, context, "sparse", self.numel, 0, self.device, "bench", head)
            values.append(body.take_floats(header.count, "values"))
            streams.append(take_rice(header.count, header.parameter, body))

        def step(i: int) -> None:
            kernels.frame_heads(frames)
            indices, _ = kernels.launch_rice_indices(streams, self.numel)
            lists = [(row[: value.numel()], value) for row, value in zip(indices, values, strict=True)]
            kernels.scatter_add([out], [0], lists, 1.0 / FRAMES)

        return step

    def decode(self) -> Work:
        codec, context, k = SparseCodec(), self.context(0), max(1, round(DENSITY * self.numel))
        frames = self.frames()
        out = torch.empty(self.numel, device=self.device)
        # The zeroing of the output is part of every dense gradient as well; it is not counted here.
        out.zero_()
        places = [Workspace().take(k, torch.int32, self.device) for _ in frames]
        rooms = [(place, None) for place in places if place is not None] or None  # only the native kernels use them

        def step(i: int) -> None:
            parts = codec.decode_all(
                context, [(frame, "bench") for frame in frames], self.numel, k, 0, self.device, rooms
            )
            kernels.scatter_add([out], [0], [(part.indices, part.values) for part, _, _ in parts], 1.0 / FRAMES)

        return step
