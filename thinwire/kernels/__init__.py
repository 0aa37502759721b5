"""The one dispatch point for array work; every caller imports its kernels from here.

Three homes hold the same function names: ``reference`` is plain torch, runs on every device and is the specification;
``cpu`` is a small native library for host tensors; ``gpu`` is Triton, for CUDA tensors. What only the reference has
runs there on every device.

THINWIRE_KERNELS chooses: ``auto`` (default) takes the fast home of each device where there is one, ``reference`` never
does, ``cpu`` and ``gpu`` insist on theirs and fail loudly when it is not there. With TRITON_INTERPRET=1, ``gpu`` takes
host tensors too: slow, and good for tests.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import cpu, cpu_lists, cpu_serving, lists, native, reference, serving
from thinwire.kernels.lists import Entries
from thinwire.kernels.reference import (
    RiceStream,
    Runs,
    Segments,
    block_expand,
    coins,
    remaining,
    select_sampled,
    stream_key,
    uniform,
)

log = logging.getLogger("thinwire")

CHOICES = ("auto", "reference", "cpu", "gpu")


@lru_cache(maxsize=2)
def _kernels(device_type: str) -> ModuleType:
    """The home of a device's tensors, chosen once a process."""
    choice = _choice()
    log.info("thinwire: %s", describe())
    if choice == "reference":
        return reference
    interpreted = choice == "gpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted or (device_type == "cuda" and _why_no_gpu() is None):
        from thinwire.kernels import gpu  # Triton takes a second to import: only where it is used

        return gpu
    return cpu if device_type == "cpu" and native.library() is not None else reference


def _why_no_gpu() -> str | None:
    """Why the Triton kernels cannot be used; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang", "cc")):
        return "Triton needs a C compiler, such as gcc"
    return None


def _choice() -> str:
    choice = os.environ.get("THINWIRE_KERNELS", "auto")
    if choice not in CHOICES:
        raise ValueError(f"THINWIRE_KERNELS must be one of {', '.join(CHOICES)}, not {choice!r}")
    if choice == "cpu" and native.library() is None:
        raise RuntimeError(
            f"THINWIRE_KERNELS=cpu, but {native.why_not()}; reinstall thinwire where there is a C++ compiler"
        )
    if choice == "gpu" and _why_no_gpu() is not None:
        raise RuntimeError(f"THINWIRE_KERNELS=gpu, but {_why_no_gpu()}; unset it to use what is there")
    return choice


def describe() -> str:
    """Return one line that says which kernels are in use and why; raise where THINWIRE_KERNELS asks the impossible."""
    if _choice() == "reference":
        return "kernels: reference (plain torch), because THINWIRE_KERNELS=reference"
    host = f"reference (plain torch), because {native.why_not()}"
    if native.library() is not None:
        host = f"native ({native.vectors()} loops)"
    no_gpu = _why_no_gpu()
    device = "Triton" if no_gpu is None else f"reference (plain torch), because {no_gpu}"
    return f"kernels: on the CPU {host}; on a GPU {device}"


def home_name(device: torch.device) -> str:
    """The home that tensors on this device use: native, triton or reference."""
    home = _kernels(device.type)
    return "native" if home is cpu else "reference" if home is reference else "triton"


def on_gpu(device: torch.device) -> bool:
    """Whether tensors on this device go to the Triton kernels, which never wait for the device."""
    return home_name(device) == "triton"


def _home(tensor: Tensor, numel: int | None = None) -> Any:
    """The home of a vector of ``numel`` elements, of the tensor's own unless told."""
    home = _kernels(tensor.device.type)
    fits = home is cpu or (tensor.numel() if numel is None else numel) < 1 << 31  # Triton's kernels count with 32 bits
    return home if fits else reference


def _serving(tensor: Tensor) -> Any:
    """The home of what servers do: native, or plain torch."""
    return cpu_serving if _home(tensor) is cpu else serving


def _lists(tensor: Tensor) -> Any:
    """The home of what is done with lists of entries: native, or plain torch."""
    return cpu_lists if _home(tensor) is cpu else lists


def _total(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def select_topk(x: Tensor, k: int) -> Tensor:
    return _home(x).select_topk(x, k)


def select_scopes(
    x: Tensor, bounds: Sequence[int], ks: Sequence[int], candidates: Tensor | None
) -> tuple[Tensor, list[int], Tensor]:
    return _home(x).select_scopes(x, bounds, ks, candidates)


def select_scopes_into(
    x: Tensor, bounds: Sequence[int], ks: Sequence[int], candidates: Tensor | None, out: Tensor, workspace: Tensor
) -> tuple[Tensor, list[int], Tensor]:
    """``select_scopes`` in given memory, with int32 indices; only native."""
    return cpu.select_scopes(x, bounds, ks, candidates, out, workspace)


def listing_entries(capacity: int) -> int:
    """The length of the first part of the room of ``accumulate``; only native."""
    return cpu.listing_entries(capacity)


def take_at(x: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    return _lists(x).take_at(x, indices, out)


def keep_largest(indices: Tensor, values: Tensor, k: int, room: Entries | None = None) -> tuple[Tensor, Tensor]:
    return _lists(values).keep_largest(indices, values, k, room)


def keep_masked(indices: Tensor, values: Tensor, mask: Tensor, room: Entries | None = None) -> tuple[Tensor, Tensor]:
    return _lists(values).keep_masked(indices, values, mask, room)


def mask_contained(mask: Tensor, wanted: Tensor, indices: Tensor) -> None:
    _lists(wanted).mask_contained(mask, wanted, indices)


def merge_topk(
    a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor, k: int, room: Entries | None = None
) -> tuple[Tensor, Tensor]:
    return _lists(a).merge_topk(a, a_values, b, b_values, k, room)


def int8_quantize(values: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _lists(values).int8_quantize(values, out)


def int8_dequantize(codes: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    return _lists(codes).int8_dequantize(codes, scales, out)


def rice_unary_bits_of(indices: Tensor, parameters: range) -> list[int]:
    return _lists(indices).rice_unary_bits_of(indices, parameters)


def rice_write(indices: Tensor, parameter: int, low: Tensor, unary: Tensor) -> None:
    _lists(indices).rice_write(indices, parameter, low, unary)


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:
    _home(x).subtract_at(x, indices, values)


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    return _home(a).union_add(a, a_values, b, b_values)


def first_nonfinite(parts: Sequence[Tensor]) -> int | None:
    return _home(parts[0]).first_nonfinite(parts) if parts else None


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Any,
    capacity: int,
    flag: Tensor | None = None,
    room: tuple[Tensor, Tensor] | None = None,
    ratios: Sequence[float] | None = None,
) -> Any:
    if room is not None:  # only native
        return cpu.accumulate(parts, segments, velocity, residual, thresholds, capacity, flag, ratios, room)
    return _home(residual).accumulate(parts, segments, velocity, residual, thresholds, capacity, flag, ratios)


def search(
    starts: Sequence[int], numels: Sequence[int], scope_of: Sequence[int], wanted: Sequence[int], device: torch.device
) -> Any:
    """The device's own top-k, given to ``accumulate`` in place of thresholds; only on a GPU."""
    return _kernels(device.type).Search(starts, numels, scope_of, wanted, device)


def watch(parts: Sequence[Tensor], flag: Tensor) -> None:
    _home(flag).watch(parts, flag)


def frame_heads(frames: Sequence[Tensor]) -> Tensor:
    """Header words and checksum of frames of one length that lie on a GPU: (P, 10) int32."""
    return _home(frames[0]).frame_heads(frames)


def launch_rice_indices(streams: Sequence[RiceStream], numel: int) -> tuple[Tensor, Tensor]:
    """``rice_indices`` without waiting for the device; only on a GPU."""
    return _home(streams[0].low).launch_rice_indices(streams, numel)


def encode_rice_frame(*arguments: Any) -> Tensor:
    """A whole frame, written by the device; only on a GPU."""
    return _home(arguments[3]).encode_rice_frame(*arguments)


def zero_at(x: Tensor, indices: Tensor) -> None:
    _home(x).zero_at(x, indices)


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor,
    flag: Tensor | None = None,
) -> None:  # fmt: skip
    _home(residual).error_step(parts, segments, ratios, velocity, residual, flag)


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    if parts:
        _home(parts[0]).scatter_add(parts, starts, lists, scale)


def clipped_scalers(parts: Sequence[Tensor], clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    home = _home(parts[0], _total(parts)) if parts else reference
    return home.clipped_scalers(parts, clip_sigma)


def ternarize_packed(
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None = None,
    counters: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return _home(scales, _total(parts)).ternarize_packed(parts, scales, keys, limits, counters, out)


def encode_ternary_frame(*arguments: Any) -> Tensor:
    """A whole frame of trits, drawn and written by the device; only on a GPU."""
    return _home(arguments[4]).encode_ternary_frame(*arguments)


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    return _home(x).blockwise_sign(x, runs)


def add_signs(out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float) -> None:
    _home(out).add_signs(out, bits, scales, runs, factor)


def sign_scales(x: Tensor, runs: Runs) -> Tensor:
    return _serving(x).sign_scales(x, runs)


def pack_signs(parts: Sequence[Tensor], out: Tensor) -> None:
    _serving(out).pack_signs(parts, out)


def subtract_own_signs(x: Tensor, scales: Tensor, runs: Runs) -> None:
    _serving(x).subtract_own_signs(x, scales, runs)


def add_mean_of_signs(out: Tensor, frames: Sequence[tuple[Tensor, Tensor]], runs: Runs) -> None:
    if on_gpu(out.device):
        serving.add_mean_of_signs(out, frames, runs, _home(out).add_signs)
    else:
        _serving(out).add_mean_of_signs(out, frames, runs)


def write_signs(parts: Sequence[Tensor], packed: Tensor, scales: Tensor, runs: Runs) -> None:
    _serving(packed).write_signs(parts, packed, scales, runs)


def sum_trits(frames: Sequence[Tensor], count: int, bits: int, out: Tensor) -> None:
    _serving(out).sum_trits(frames, count, bits, out)


def write_levels(parts: Sequence[Tensor], scales: Tensor, packed: Tensor, bits: int, ranks: int) -> bool:
    return _serving(packed).write_levels(parts, scales, packed, bits, ranks)


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


def rice_indices(
    streams: Sequence[RiceStream], numel: int, outs: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, int]]:
    if outs is not None:  # only native
        return cpu.rice_indices(streams, numel, outs)
    return _home(streams[0].low).rice_indices(streams, numel) if streams else []


__all__ = [
    "Entries",
    "RiceStream",
    "Runs",
    "Segments",
    "accumulate",
    "add_mean_of_signs",
    "add_signs",
    "block_expand",
    "blockwise_sign",
    "checksum",
    "checksum_around",
    "clipped_scalers",
    "coins",
    "describe",
    "encode_rice_frame",
    "encode_ternary_frame",
    "error_step",
    "first_nonfinite",
    "frame_heads",
    "home_name",
    "int8_dequantize",
    "int8_quantize",
    "keep_largest",
    "keep_masked",
    "launch_rice_indices",
    "listing_entries",
    "mask_contained",
    "merge_topk",
    "on_gpu",
    "pack_bits",
    "pack_signs",
    "pack_trits",
    "remaining",
    "rice_indices",
    "rice_unary_bits_of",
    "rice_write",
    "scatter_add",
    "search",
    "select_sampled",
    "select_scopes",
    "select_scopes_into",
    "select_topk",
    "sign_scales",
    "stream_key",
    "subtract_at",
    "subtract_own_signs",
    "sum_trits",
    "take_at",
    "ternarize_packed",
    "uniform",
    "union_add",
    "unpack_bits",
    "unpack_trits",
    "watch",
    "write_levels",
    "write_signs",
    "zero_at",
]
