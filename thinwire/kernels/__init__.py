"""The one dispatch point for array work; every caller imports its kernels from here.

Two homes hold the same function names: ``reference`` is plain torch, runs on every device and is the specification;
``cpu`` is a small native library for host tensors. What only the reference has runs there on every device.

THINWIRE_KERNELS chooses: ``auto`` (default) takes the native library for host tensors where it was built, ``reference``
never does, ``cpu`` insists on it and fails loudly when it is not there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from thinwire.kernels import cpu, reference
from thinwire.kernels.reference import (
    RiceStream,
    Runs,
    Segments,
    block_expand,
    block_means,
    coin,
    int8_dequantize,
    int8_quantize,
    remaining,
    select_sampled,
    stream_key,
    uniform,
)

log = logging.getLogger("thinwire")

CHOICES = ("auto", "reference", "cpu")


@lru_cache(maxsize=1)
def _host_kernels() -> ModuleType:
    """The home of host tensors, chosen once a process."""
    choice = _choice()
    chosen = cpu if cpu.library() is not None and choice != "reference" else reference
    log.info("thinwire: %s", describe())
    return chosen


def _choice() -> str:
    choice = os.environ.get("THINWIRE_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"THINWIRE_KERNELS must be one of {', '.join(CHOICES)}, not {choice!r}")
    if choice == "cpu" and cpu.library() is None:
        raise RuntimeError(
            f"THINWIRE_KERNELS=cpu, but {cpu.why_not()}; reinstall thinwire where there is a C++ compiler"
        )
    return choice


def describe() -> str:
    """Return one line that says which kernels are in use and why; raise where THINWIRE_KERNELS asks the impossible."""
    if _choice() == "reference":
        return "kernels: reference (plain torch), because THINWIRE_KERNELS=reference"
    if cpu.library() is None:
        return f"kernels: reference (plain torch), because {cpu.why_not()}"
    return f"kernels: native for host tensors ({cpu.vectors()} loops), reference (plain torch) on other devices"


def home_name(device: torch.device) -> str:
    """The home that tensors on this device use: native or reference."""
    return "native" if device.type == "cpu" and _host_kernels() is cpu else "reference"


def _home(tensor: Tensor) -> ModuleType:
    return _host_kernels() if tensor.device.type == "cpu" else reference


def select_topk(x: Tensor, k: int) -> Tensor:
    return _home(x).select_topk(x, k)


def select_scopes(
    x: Tensor, bounds: Sequence[int], ks: Sequence[int], candidates: Tensor | None
) -> tuple[Tensor, list[int], Tensor]:
    return _home(x).select_scopes(x, bounds, ks, candidates)


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    _home(x).subtract_at(x, indices, values)


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    return _home(a).union_add(a, a_values, b, b_values)


def contained(wanted: Tensor, indices: Tensor) -> Tensor:
    return _home(wanted).contained(wanted, indices)


def first_nonfinite(parts: Sequence[Tensor]) -> int | None:
    return _home(parts[0]).first_nonfinite(parts) if parts else None


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Sequence[float] | None,
    capacity: int,
) -> Tensor | None:
    return _home(residual).accumulate(parts, segments, velocity, residual, thresholds, capacity)


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor
) -> None:
    _home(residual).error_step(parts, segments, ratios, velocity, residual)


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    if parts:
        _home(parts[0]).scatter_add(parts, starts, lists, scale)


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return _home(parts[0]).moments(parts) if parts else reference.moments(parts)


def ternarize_packed(
    parts: Sequence[Tensor], scales: Tensor, keys: Sequence[int], limits: Tensor | None = None
) -> Tensor:
    return _home(scales).ternarize_packed(parts, scales, keys, limits)


def gather_trits(packed: Tensor, spans: Sequence[slice]) -> Tensor:
    return _home(packed).gather_trits(packed, spans)


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    return _home(x).blockwise_sign(x, runs)


def add_signs(out: Tensor, negative: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    _home(out).add_signs(out, negative, scales, runs, factor)


def checksum(words: Tensor, start: int = 0) -> Tensor:
    return _home(words).checksum(words, start)


def checksum_around(words: Tensor, hole: int) -> Tensor:
    return _home(words).checksum_around(words, hole)


def pack_bits(bits: Tensor) -> Tensor:
    return _home(bits).pack_bits(bits)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    return _home(packed).unpack_bits(packed, count)


def pack_trits(trits: Tensor) -> Tensor:
    return _home(trits).pack_trits(trits)


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    return _home(packed).unpack_trits(packed, count)


def pack_uints(values: Tensor, bits: int) -> Tensor:
    return _home(values).pack_uints(values, bits)


def unpack_uints(packed: Tensor, count: int, bits: int) -> Tensor:
    return _home(packed).unpack_uints(packed, count, bits)


def rice_unary_bits(gaps: Tensor, parameter: int) -> int:
    return _home(gaps).rice_unary_bits(gaps, parameter)


def rice_encode(gaps: Tensor, parameter: int) -> tuple[Tensor, Tensor]:
    return _home(gaps).rice_encode(gaps, parameter)


def rice_decode(low: Tensor, unary: Tensor, count: int, parameter: int) -> Tensor | None:
    return _home(low).rice_decode(low, unary, count, parameter)


def rice_indices(streams: Sequence[RiceStream], numel: int) -> list[tuple[Tensor, int]]:
    return _home(streams[0].low).rice_indices(streams, numel) if streams else []


__all__ = [
    "RiceStream",
    "Runs",
    "Segments",
    "accumulate",
    "add_signs",
    "block_expand",
    "block_means",
    "blockwise_sign",
    "checksum",
    "checksum_around",
    "coin",
    "contained",
    "describe",
    "error_step",
    "first_nonfinite",
    "gather_trits",
    "home_name",
    "int8_dequantize",
    "int8_quantize",
    "moments",
    "pack_bits",
    "pack_trits",
    "pack_uints",
    "remaining",
    "rice_decode",
    "rice_encode",
    "rice_indices",
    "rice_unary_bits",
    "scatter_add",
    "select_sampled",
    "select_scopes",
    "select_topk",
    "stream_key",
    "subtract_at",
    "ternarize_packed",
    "uniform",
    "union_add",
    "unpack_bits",
    "unpack_trits",
    "unpack_uints",
]
