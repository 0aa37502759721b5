"""Every decoder with what its receiver expects, and good frames to begin with; see fuzz_frames.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.codecs.frame import Decoded
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.values import VALUE_CODES
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Signs, Sparse, Ternary

CPU = torch.device("cpu")
STEP, ORIGIN = 7, "rank 3"


@dataclass
class Target:
    """One decoder with what its receiver expects; ``use`` checks whatever was read and lets the kernels loose on it."""

    kind: str
    numel: int
    decode: Callable[[Tensor], Decoded[Any]]
    use: Callable[[Any, Tensor], None]
    seeds: list[bytes]
    features: set[object] = field(default_factory=set)


def _context(numel: int, tail: int) -> ExchangeContext:
    return ExchangeContext(Layout.of([("w", 0, numel, True), ("b", 1, tail, False)]), STEP, (Hyper(), Hyper()))


def _must(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(what)


def _sparse_target(values: str, indices: str, numel: int, k: int, tail: int) -> Target:
    codec, context, generator = (
        SparseCodec(values, indices),
        _context(numel, tail),
        torch.Generator().manual_seed(numel),
    )
    seeds = []
    for count in {0, k // 2, k}:
        chosen = torch.randint(0, numel, (count,), generator=generator).unique()
        payload = Sparse(chosen, torch.randn(chosen.numel(), generator=generator), numel, k)
        seeds.append(bytes(codec.encode(context, payload, torch.randn(tail, generator=generator)).tolist()))
    parts = [torch.zeros(n) for n in (numel // 3, 0, numel - numel // 3)] if numel <= 1 << 20 else []
    starts = [0, numel // 3, numel // 3]

    def use(payload: Sparse, rest: Tensor) -> None:
        chosen, count = payload.indices, payload.indices.numel()
        _must(chosen.dtype == torch.int64 and payload.values.dtype == torch.float32, "types of a sparse payload")
        _must(payload.values.shape == (count,) and count <= k, f"{count} indices, {payload.values.shape} values")
        _must(bool((chosen[1:] > chosen[:-1]).all()), "indices that do not rise")
        _must(count == 0 or (int(chosen[0]) >= 0 and int(chosen[-1]) < numel), "indices out of range")
        _must(rest.shape == (tail,), f"a tail of {rest.shape}")
        if parts:
            kernels.scatter_add(parts, starts, [(chosen, payload.values)], 0.5)

    return Target(
        f"sparse {values} {indices}", numel,
        lambda frame: codec.decode(context, frame, numel, k, tail, CPU, ORIGIN), use, seeds,
    )  # fmt: skip


def _other_targets(blocks: kernels.Runs, tail: int, ranks: int) -> Iterator[Target]:
    numel = sum(length * count for length, count in blocks)
    num_blocks = sum(count for _, count in blocks)
    context, generator = _context(numel, tail), torch.Generator().manual_seed(numel)
    negative = torch.rand(numel, generator=generator) < 0.5
    trits = torch.randint(-1, 2, (numel,), generator=generator).to(torch.int8)
    levels = torch.randint(-ranks, ranks + 1, (numel,), generator=generator)
    floats, rest = torch.randn(numel, generator=generator), torch.randn(tail, generator=generator)
    scales, none = torch.rand(num_blocks, generator=generator), torch.zeros(0)
    out = torch.zeros(numel)

    def is_signs(payload: Signs, rest: Tensor) -> None:
        _must(payload.negative.shape == (numel,) and payload.negative.dtype == torch.bool, "sign bits")
        _must(rest.shape == (tail,), f"a tail of {rest.shape}")
        if payload.scales.numel():
            _must(payload.scales.shape == (num_blocks,), f"scales of {payload.scales.shape}")
            payload.add_to(out)

    def is_trits(payload: Ternary, rest: Tensor) -> None:
        _must(payload.trits.shape == (numel,) and payload.trits.dtype == torch.int8, "trits")
        _must(not numel or int(payload.trits.abs().max()) <= 1, "a trit that is none")
        _must(payload.scales.shape == (num_blocks,) and rest.shape == (tail,), "scales or tail")
        payload.add_to(out)

    def is_levels(payload: Tensor, rest: Tensor) -> None:
        _must(payload.shape == (numel,) and rest.shape == (tail,), f"levels of {payload.shape}")
        _must(not numel or float(payload.abs().max()) <= ranks, "a level out of range")

    def is_floats(payload: Tensor, rest: Tensor) -> None:
        _must(payload.shape == (numel,) and payload.dtype == torch.float32, f"values of {payload.shape}")
        _must(rest.shape == (tail,), f"a tail of {rest.shape}")

    signs, ternary, level, dense = SignsCodec(), TernaryCodec(), LevelsCodec(), FloatsCodec()
    nbytes = level.nbytes(numel, ranks, tail) + 8  # answers of shards are as long as the longest
    summed = [kernels.pack_trits((levels.sign() * (levels.abs() > rank)).to(torch.int8)) for rank in range(ranks)]

    def read_levels(frame: Tensor) -> Decoded[Tensor]:  # with a scale of N the mean is the sum, exactly
        part = torch.empty(numel)
        read = level.decode_mean(context, frame, ranks, tail, [part], torch.tensor([float(ranks)]), ORIGIN)
        return Decoded(part, read.tail, read.alarm)

    given = Ternary.of(trits, scales, blocks)
    for kind, decode, use, seed in (
        ("signs", lambda frame: signs.decode(context, frame, blocks, num_blocks, tail, CPU, ORIGIN), is_signs,
         signs.encode(context, Signs(negative, scales, blocks), rest)),
        ("votes", lambda frame: signs.decode(context, frame, blocks, 0, tail, CPU, ORIGIN), is_signs,
         signs.encode(context, Signs(negative, none, blocks), rest)),
        ("ternary", lambda frame: ternary.decode(context, frame, blocks, None, tail, CPU, ORIGIN), is_trits,
         ternary.encode(context, given, rest, with_scales=True)),
        ("ternary shared", lambda frame: ternary.decode(context, frame, blocks, scales, tail, CPU, ORIGIN), is_trits,
         ternary.encode(context, given, rest, with_scales=False)),
        ("levels", read_levels, is_levels, level.encode_sums(context, summed, numel, rest, nbytes)),
        ("dense", lambda frame: dense.decode(context, frame, numel, tail, CPU, ORIGIN), is_floats,
         dense.encode(context, floats, rest)),
    ):  # fmt: skip
        yield Target(kind, numel, decode, use, [bytes(seed.tolist())])


def make_targets() -> list[Target]:
    """Every decoder in a few sizes: none, one, a few, more than one int8 chunk, and numbers near the format's ends."""
    shapes = [(1, 1, 0), (70_000, 4, 1), (200_000, 40, 3), (3000, 300, 0), (2**31 - 1, 3, 1)]
    targets = [
        _sparse_target(values, indices, *shape) for shape in shapes for values in VALUE_CODES for indices in INDEX_CODES
    ]
    for blocks, tail, ranks in (
        (((8, 1), (3, 1)), 1, 3), (((64, 15), (43, 1)), 0, 100), (((1, 1),), 2, 1), ((), 3, 2), (((5, 8),), 0, 8),
    ):  # fmt: skip
        targets += _other_targets(blocks, tail, ranks)
    return targets
