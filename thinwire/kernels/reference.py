"""Plain-torch kernels: the specification that every faster home of the same names must equal.

Three families live here: counter-based random numbers, selection and quantisation of float vectors, and packing of
small integers into bytes. All of them are pure functions, keep to the device of their input, never touch torch's
global random state, and put the least significant bit first.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Runs = tuple[tuple[int, int], ...]
"""Consecutive blocks of a vector, run-length coded: (length of a block, how many such blocks follow each other)."""

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
_MUL1 = 0x7FEB352D
_MUL2 = 0x846CA68B


def _as_int32(value: int) -> int:
    """The signed 32-bit number with the same bits, so that torch's int32 arithmetic wraps like uint32."""
    value &= _MASK32
    return value - (1 << 32) if value >= 1 << 31 else value


# ---------------------------------------------------------------------------------------------------------------
# Random numbers from counters
# ---------------------------------------------------------------------------------------------------------------


def _mix_int(x: int) -> int:
    """The 32-bit finaliser, on a Python integer."""
    x &= _MASK32
    x ^= x >> 16
    x = (x * _MUL1) & _MASK32
    x ^= x >> 15
    x = (x * _MUL2) & _MASK32
    return x ^ (x >> 16)


def _mix(x: Tensor) -> Tensor:  # (n,) int32, changed in place -> (n,) int32
    """The same finaliser on int32; shifts are made logical by masking off the copied sign bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= _as_int32(_MUL1)
    x ^= (x >> 15) & 0x1FFFF
    x *= _as_int32(_MUL2)
    x ^= (x >> 16) & 0xFFFF
    return x


def stream_key(seed: int, step: int, rank: int, name: str) -> int:
    """Return the 32-bit key of the random stream of one parameter on one rank at one step."""
    key = _mix_int(seed ^ _GOLDEN)
    key = _mix_int(key ^ (step & _MASK32))
    key = _mix_int(key ^ (rank & _MASK32))
    return _mix_int(key ^ zlib.crc32(name.encode()))


def stream_salt(key: int) -> int:
    """The second word that a stream mixes in, as a signed 32-bit number."""
    return _as_int32(_mix_int(key + _GOLDEN))


def _random(key: int, start: int, count: int, device: torch.device) -> Tensor:  # -> (count,) int32
    """random(key, i) = mix(mix(i ^ key) ^ mix(key + golden)) for i = start .. start + count."""
    counter = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    mixed = _mix(counter ^ _as_int32(key))
    return _mix(mixed ^ stream_salt(key))


def uniform(key: int, count: int, device: torch.device, start: int = 0) -> Tensor:  # -> (count,) float32
    """Return uniform numbers in [0, 1) with 24 bits each, the same on every device."""
    return ((_random(key, start, count, device) >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def coins(streams: Sequence[tuple[int, int, int]], device: torch.device) -> Tensor:  # -> (all counts,) bool
    """Return fair coin flips from the same counters, for every stream (key, first counter, count) in order."""
    counts = torch.tensor([count for _, _, count in streams], dtype=torch.int64)
    first = torch.tensor([start for _, start, _ in streams], dtype=torch.int64) - (counts.cumsum(0) - counts)
    keys = torch.tensor([key for key, _, _ in streams], dtype=torch.int64)
    salts = torch.tensor([stream_salt(key) for key, _, _ in streams], dtype=torch.int64)
    table = torch.stack([first, keys, salts, counts]).to(device)  # (4, S), so that one upload is enough
    total = int(counts.sum())
    first, keys, salts = torch.repeat_interleave(table[:3], table[3], dim=1, output_size=total).unbind()
    counter = (torch.arange(total, device=device) + first).to(torch.int32)
    mixed = _mix(counter ^ keys.to(torch.int32))
    return (_mix(mixed ^ salts.to(torch.int32)) & 1).to(torch.bool)


def checksum(words: Tensor, start: int = 0) -> Tensor:  # (n,) int32 -> () int64 in [0, 2**32)
    """Return sum over i of mix(word_i ^ mix(start + i)) modulo 2**32.

    Every word passes through its own nonlinear map, so any changed, swapped or moved word shows with probability
    1 - 2**-32, and the sum may be taken in any order, in parallel, on any device.
    """
    position = torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device).to(torch.int32)
    return _mix(_mix(position) ^ words).sum(dtype=torch.int64) & _MASK32


def checksum_around(words: Tensor, hole: int) -> Tensor:  # (n,) int32 -> () int64 in [0, 2**32)
    """The checksum of all words but the one at ``hole``: those behind it count as if they followed those before it."""
    return (checksum(words[:hole]) + checksum(words[hole + 1 :], hole)) & _MASK32


# ---------------------------------------------------------------------------------------------------------------
# Selection
# ---------------------------------------------------------------------------------------------------------------


def _magnitude(x: Tensor) -> Tensor:  # (n,) float32 -> (n,) float32, nan counts as the largest
    return torch.nan_to_num(x.abs(), nan=float("inf"), posinf=float("inf"))


def select_topk(x: Tensor, k: int) -> Tensor:  # (n,) float32 -> (k,) int64, rising
    """Return the indices of the k largest magnitudes in rising order; ties go to the lower index.

    A nan counts as larger than everything, so that it is sent and seen instead of hiding in a residual.
    """
    n = x.numel()
    if k >= n or k == 0:
        return torch.arange(min(k, n), device=x.device)
    magnitude = _magnitude(x)
    threshold = torch.topk(magnitude, k, sorted=True).values[-1]
    above = torch.nonzero(magnitude > threshold).flatten()
    level = torch.nonzero(magnitude == threshold).flatten()[: k - above.numel()]
    return torch.cat([above, level]).sort().values


def select_sampled(x: Tensor, k: int, key: int) -> Tensor:  # (n,) float32 -> (<= k,) int64, rising
    """Return about the k largest magnitudes by DGC's hierarchical threshold (section 4 of the paper).

    A strided sample (1 %, or more when that would hold fewer than 32 of the wanted elements) estimates a threshold
    that lets a few more than k pass; when more than k do, the exact top-k of those that passed is taken, which is the
    exact answer unless the estimate was too high. Never more than k are returned.
    """
    n = x.numel()
    sample_size = max(n // 100, (32 * n + k - 1) // max(k, 1))
    if k >= n or 2 * sample_size >= n:
        return select_topk(x, k)
    stride = n // sample_size
    sample = _magnitude(x[key % stride :: stride])
    wanted = sample.numel() * k / n
    rank = min(sample.numel(), int(wanted + 2.0 * wanted**0.5) + 1)
    threshold = torch.topk(sample, rank, sorted=True).values[-1]
    passed = torch.nonzero(_magnitude(x) >= threshold).flatten()
    if passed.numel() <= k:
        return passed
    return passed[select_topk(x[passed], k)]


def first_nonfinite(parts: Sequence[Tensor]) -> int | None:
    """Return the place of the first part that holds an inf or a nan, or None."""
    # Zero times anything finite is zero, and a sum of zeros cannot overflow.
    if not parts:
        return None
    sums = torch.stack([(part * 0).sum() for part in parts]).cpu()
    bad = torch.nonzero(~torch.isfinite(sums)).flatten()
    return int(bad[0]) if bad.numel() else None


def select_among(x: Tensor, candidates: Tensor, k: int) -> Tensor:  # (n,), (c,) int64 rising -> (min(c, k),) int64
    """Return the k largest magnitudes among the candidates, by the rules of select_topk."""
    return candidates[select_topk(x[candidates], k)]


def select_scopes(
    x: Tensor, bounds: Sequence[int], ks: Sequence[int], candidates: Tensor | None
) -> tuple[Tensor, list[int], Tensor]:  # -> (sum of k,) int64, candidates, (S,) float32
    """Return the ks[s] largest magnitudes of every scope x[bounds[s]:bounds[s + 1]], by the rules of select_topk.

    ``candidates`` are the rising indices of all elements that reach their scope's threshold, or None: where a scope has
    at least k of them only those are looked at. Besides the chosen indices, one scope behind the other, come the number
    of candidates and the smallest chosen magnitude of each scope (0 where none is chosen).
    """
    chosen: list[Tensor] = []
    cuts = [0] * len(bounds)
    if candidates is not None:
        cuts = torch.searchsorted(candidates, torch.tensor(bounds, device=x.device)).tolist()
    for place, k in enumerate(ks):
        start, stop = bounds[place], bounds[place + 1]
        if candidates is not None and cuts[place + 1] - cuts[place] >= k:
            chosen.append(select_among(x, candidates[cuts[place] : cuts[place + 1]], k))
        else:
            chosen.append(select_topk(x[start:stop], k) + start)
    smallest = [x[picked].abs().min() if picked.numel() else x.new_zeros(()) for picked in chosen]
    return (
        torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64, device=x.device),
        [cuts[place + 1] - cuts[place] for place in range(len(ks))],
        torch.stack(smallest) if smallest else x.new_zeros(0),
    )


# ---------------------------------------------------------------------------------------------------------------
# Steps over the segments of an exchange: gradients lie in parts, state in flat vectors
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """One row a parameter: where its state starts in the flat vectors, and what its optimizer group says.

    ``weights`` holds the parameter where weight decay is applied here, else None.
    """

    starts: tuple[int, ...]
    momentum: tuple[float, ...]
    nesterov: tuple[bool, ...]
    decay: tuple[float, ...]
    weights: tuple[Tensor | None, ...]

    def decayed(self, place: int, grad: Tensor) -> Tensor:  # (m,) float32 -> (m,) float32
        weight = self.weights[place]
        return grad if weight is None else grad + self.decay[place] * weight


def watch(parts: Sequence[Tensor], flag: Tensor) -> None:  # T vectors, (1,) int32
    """Set the flag to one where an element is not finite."""
    for part in parts:
        flag.logical_or_(~torch.isfinite(part).all())


def _only_finite(parts: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    watch(parts, flag)
    return [torch.where(torch.isfinite(part), part, 0.0) for part in parts]


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Sequence[float] | None,
    capacity: int,
    flag: Tensor | None = None,
) -> Tensor | None:  # -> (c,) int64 or None
    """Add the gradients to the residual, through the velocity where there is one (DGC, Eq. 4 and 7), in place.

    d = g + decay w; u = m u + d; v = v + u, or v + d + m u for Nesterov; without velocity v = v + g. With
    ``thresholds``, one a part, the flat indices of all elements with |v| >= threshold are returned in rising order, or
    None when they are more than ``capacity``. Where ``flag`` is given, an element of a gradient that is not finite
    counts as zero and sets it to one.
    """
    if flag is not None:
        parts = _only_finite(parts, flag)
    found = []
    for place, (part, start) in enumerate(zip(parts, segments.starts, strict=True)):
        v = residual[start : start + part.numel()]
        if velocity is None:
            v.add_(part)
        else:
            u, m = velocity[start : start + part.numel()], segments.momentum[place]
            grad = segments.decayed(place, part)
            u.mul_(m).add_(grad)
            if segments.nesterov[place]:
                v.add_(grad).add_(u, alpha=m)
            else:
                v.add_(u)
        if thresholds is not None and thresholds[place] != float("inf"):
            found.append(torch.nonzero(~(v.abs() < thresholds[place])).flatten() + start)
    total = sum(indices.numel() for indices in found)
    if thresholds is None or total > capacity:
        return None
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=residual.device)


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor,
    flag: Tensor | None = None,
) -> None:  # fmt: skip
    """e = ratio e + q in place; q = d, or with momentum m = mu m + d: q = m, or d + mu m for Nesterov.

    ``flag`` is that of ``accumulate``.
    """
    if flag is not None:
        parts = _only_finite(parts, flag)
    for place, (part, start) in enumerate(zip(parts, segments.starts, strict=True)):
        error, mu = residual[start : start + part.numel()], segments.momentum[place]
        grad = segments.decayed(place, part)
        if mu and velocity is not None:
            m = velocity[start : start + part.numel()].mul_(mu).add_(grad)
            grad = grad.add(m, alpha=mu) if segments.nesterov[place] else m
        error.mul_(ratios[place]).add_(grad)


def scatter_add(
    parts: Sequence[Tensor], starts: Sequence[int], lists: Sequence[tuple[Tensor, Tensor]], scale: float
) -> None:
    """parts[flat index] += value * scale for every list of (k,) int64 indices, rising, and their (k,) float32 values.

    Part i is at starts[i] of the flat space. The lists are added in their order, so every element's sum has one order.
    """
    if not parts or not lists:
        return
    bounds = torch.tensor([*starts, starts[-1] + parts[-1].numel()], device=lists[0][0].device)
    for indices, values in lists:
        cuts = torch.searchsorted(indices, bounds).tolist()
        for place, (part, start) in enumerate(zip(parts, starts, strict=True)):
            inside = slice(cuts[place], cuts[place + 1])
            if inside.stop > inside.start:
                part.index_add_(0, indices[inside] - start, values[inside] * scale)


def remaining(x: Tensor, sent: Tensor) -> Tensor:  # (k,) float32 both -> (k,) float32
    """x - sent. An inf or nan that was sent has been seen and is gone; a finite x of which a nan was sent is kept."""
    rest = x - sent
    return torch.where(torch.isfinite(rest), rest, torch.where(torch.isfinite(x), x, 0.0))


def subtract_at(x: Tensor, indices: Tensor, values: Tensor) -> None:  # (n,) float32, (k,) int64, (k,) float32
    """x[indices] = remaining(x[indices], values), in place; no index twice."""
    x[indices] = remaining(x[indices], values)


def take(x: Tensor, indices: Tensor) -> Tensor:  # (n,) float32, (k,) int64 -> (k,) float32
    """x[indices]."""
    return x[indices]


def union_add(a: Tensor, a_values: Tensor, b: Tensor, b_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the union of two rising lists of indices, and the sums of their values; the same bits in either order."""
    indices, place = torch.unique(torch.cat([a, b]), sorted=True, return_inverse=True)
    values = torch.zeros(indices.numel(), dtype=torch.float32, device=indices.device)
    values.index_add_(0, place, torch.cat([a_values, b_values]))
    return indices, values


def contained(wanted: Tensor, indices: Tensor) -> Tensor:  # (m,), (k,) int64 rising -> (m,) bool
    """Which of ``wanted`` are among ``indices``."""
    if not indices.numel():
        return torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(indices, wanted).clamp_(max=indices.numel() - 1)
    return indices[place] == wanted


def zero_at(x: Tensor, indices: Tensor) -> None:  # (n,), (k,) int64
    """x[indices] = 0, in place."""
    x.index_fill_(0, indices, 0.0)


# ---------------------------------------------------------------------------------------------------------------
# Quantisation
# ---------------------------------------------------------------------------------------------------------------


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # T vectors of float32 -> (T,) float32 both
    """Return each part's population standard deviation and largest magnitude: what TernGrad's clipping and scaler need.

    Both are zero of an empty part; a nan shows in both, an infinity as no deviation (nan) and an infinite magnitude.
    """
    zero = torch.zeros((), device=parts[0].device if parts else None)
    deviations = [part.std(correction=0) if part.numel() else zero for part in parts]
    largest = [part.abs().max() if part.numel() else zero for part in parts]
    return (torch.stack(deviations), torch.stack(largest)) if parts else (zero[None][:0], zero[None][:0])


ROUNDING = 1e-5  # of the largest magnitude: less than this is no deviation


def scalers_of(deviations: Tensor, largest: Tensor, clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    """TernGrad's scaler and clipping limit of every tensor (Eq. 2 and 21), from its moments."""
    if clip_sigma is None:
        return largest, None
    limits = (clip_sigma * deviations).to(torch.float32)
    # One element, or equal ones, deviate by nothing but rounding: clipped at that they would never move.
    limits = torch.where(limits > ROUNDING * largest, limits, largest)
    return torch.minimum(largest, limits), limits


def clipped_scalers(parts: Sequence[Tensor], clip_sigma: float | None) -> tuple[Tensor, Tensor | None]:
    """Return each part's scaler (T,), and its clipping limit (T,) or None where nothing is clipped."""
    return scalers_of(*moments(parts), clip_sigma)


def ternarize(
    x: Tensor, scale: Tensor, key: int, limit: Tensor | None = None, counter: int = 0
) -> Tensor:  # (n,) float32 -> (n,) int8
    """Return sign(x) * b with P(b = 1) = min(|x|, limit) / scale (TernGrad, Eq. 1, 3 and 21), as -1, 0, 1.

    ``counter`` is where x begins in its stream of random numbers: the place of x[0] in its tensor.
    """
    magnitude = x.abs() if limit is None else torch.minimum(x.abs(), limit)
    keep = uniform(key, x.numel(), x.device, counter) * scale < magnitude
    return torch.where(keep, torch.sign(x), 0.0).to(torch.int8)  # a nan is never kept: it shows in the scale


def ternarize_packed(
    parts: Sequence[Tensor],
    scales: Tensor,
    keys: Sequence[int],
    limits: Tensor | None = None,
    counters: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:  # T vectors, (T,) float32 -> (ceil(n/5),) uint8
    """``ternarize`` every part with its own scale, random stream and limit, and pack them one behind the other.

    ``counters``, zeros unless given, say where each part begins in its stream; the result goes to ``out`` where given.
    """
    trits = [
        ternarize(
            part, scales[place], keys[place], limits[place] if limits is not None else None,
            counters[place] if counters is not None else 0,
        )
        for place, part in enumerate(parts)
    ]  # fmt: skip
    packed = pack_trits(torch.cat(trits) if trits else torch.zeros(0, dtype=torch.int8, device=scales.device))
    return packed if out is None else out.copy_(packed)


def block_means(x: Tensor, runs: Runs) -> Tensor:  # (n,) float32 -> (B,) float32
    """Return the mean of every block; ``runs`` lists (length, how many blocks of it) in order."""
    means, start = [], 0
    for length, count in runs:
        stop = start + length * count
        means.append(x[start:stop].view(count, length).mean(dim=1))
        start = stop
    return torch.cat(means) if means else x.new_zeros(0)


@lru_cache(maxsize=1024)
def _block_lengths(runs: Runs, device: torch.device, thread: int) -> Tensor:  # -> (B,) int64
    # A thread has its own: it copies on its own stream, and another one's would not wait for that.
    lengths = [torch.full((count,), length, dtype=torch.int64) for length, count in runs]
    return torch.cat(lengths).to(device) if lengths else torch.zeros(0, dtype=torch.int64, device=device)


def block_expand(scales: Tensor, runs: Runs) -> Tensor:  # (B,) -> (n,)
    """Return every block's scale repeated over the block."""
    if scales.device.type != "cpu":  # one kernel, where each run's own would cost its launch
        numel = sum(length * count for length, count in runs)
        lengths = _block_lengths(runs, scales.device, threading.get_ident())
        return torch.repeat_interleave(scales, lengths, output_size=numel)
    parts, start = [], 0
    for length, count in runs:
        parts.append(scales[start : start + count, None].expand(count, length).reshape(-1))
        start += count
    return torch.cat(parts) if parts else scales.new_zeros(0)


def blockwise_sign(x: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:  # (n,) float32 -> (n,) bool, (B,) float32
    """Return (x < 0) and the scales ||x_b||_1 / d_b of consecutive blocks (dist-EF-blockSGDM, section 3.2)."""
    return x < 0, block_means(x.abs(), runs)


def add_signs(
    out: Tensor, bits: Tensor, scales: Tensor, runs: Runs, factor: float
) -> None:  # (n,) float32, (n,) bool or (ceil(n/8),) uint8, (B,) float32
    """out += factor * (-scale where negative, +scale elsewhere), in place; ``bits`` are bool, or packed in bytes."""
    negative = bits if bits.dtype == torch.bool else unpack_bits(bits, out.numel())
    magnitude = block_expand(scales * factor, runs)
    out.add_(torch.where(negative, -magnitude, magnitude))


INT8_CHUNK = 256
_INT8_LARGEST_SCALE = 2.67938838e36  # the largest float32 that 127 times is still finite


def int8_quantize(values: Tensor) -> tuple[Tensor, Tensor]:  # (k,) float32 -> (k,) int8, (ceil(k/256),) float32
    """Round each chunk of 256 values to multiples of its largest magnitude / 127.

    A chunk that holds an inf or a nan gets a nan scale, so that it decodes to nan and is seen.
    """
    count = values.numel()
    chunks = -(-count // INT8_CHUNK)
    padded = torch.nn.functional.pad(values, (0, chunks * INT8_CHUNK - count)).view(chunks, INT8_CHUNK)
    # Divided by a tensor: by a plain number, a GPU multiplies with the reciprocal, which rounds differently.
    scales = padded.abs().amax(dim=1) / torch.full((), 127.0, device=values.device) if chunks else values.new_zeros(0)
    scales = torch.where(torch.isfinite(scales), scales, float("nan")).clamp(max=_INT8_LARGEST_SCALE)
    # A denormal scale makes the quotient overflow; the clamp keeps such a chunk within +-127.
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = (padded / divisor[:, None]).round_().clamp_(-127, 127)
    return torch.nan_to_num(codes, nan=0.0).to(torch.int8).flatten()[:count], scales


def int8_dequantize(codes: Tensor, scales: Tensor) -> Tensor:  # (k,) int8, (ceil(k/256),) float32 -> (k,) float32
    """Undo int8_quantize."""
    return codes.to(torch.float32) * scales.repeat_interleave(INT8_CHUNK)[: codes.numel()]


# ---------------------------------------------------------------------------------------------------------------
# Packing
# ---------------------------------------------------------------------------------------------------------------

_BIT_WEIGHTS = [1, 2, 4, 8, 16, 32, 64, 128]
_TRIT_WEIGHTS = [1, 3, 9, 27, 81]


def pack_bits(bits: Tensor) -> Tensor:  # (n,) bool -> (ceil(n/8),) uint8
    """Pack eight bits a byte, the first in the lowest place."""
    nbytes = -(-bits.numel() // 8)
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, nbytes * 8 - bits.numel())).view(nbytes, 8)
    packed = padded[:, 0].clone()
    for place in range(1, 8):
        packed |= padded[:, place] << place
    return packed


def unpack_bits(packed: Tensor, count: int) -> Tensor:  # (>= ceil(count/8),) uint8 -> (count,) bool
    """Undo pack_bits."""
    nbytes = -(-count // 8)
    weights = torch.tensor(_BIT_WEIGHTS, dtype=torch.uint8, device=packed.device)
    return (packed[:nbytes, None] & weights).ne(0).flatten()[:count]


def pack_trits(trits: Tensor) -> Tensor:  # (n,) int8 in {-1, 0, 1} -> (ceil(n/5),) uint8
    """Pack five trits a byte in base 3 (3**5 = 243), the first in the lowest place; a trit travels as trit + 1."""
    nbytes = -(-trits.numel() // 5)
    padded = torch.nn.functional.pad((trits + 1).to(torch.uint8), (0, nbytes * 5 - trits.numel())).view(nbytes, 5)
    packed = padded[:, 0].clone()
    for place in range(1, 5):
        packed += padded[:, place] * _TRIT_WEIGHTS[place]
    return packed


def unpack_trits(packed: Tensor, count: int) -> Tensor:  # (>= ceil(count/5),) uint8 < 243 -> (count,) int8
    """Undo pack_trits."""
    nbytes = -(-count // 5)
    weights = torch.tensor(_TRIT_WEIGHTS, dtype=torch.uint8, device=packed.device)
    digits = torch.div(packed[:nbytes, None], weights, rounding_mode="floor") % 3
    return digits.flatten()[:count].to(torch.int8) - 1


def pack_uints(values: Tensor, bits: int) -> Tensor:  # (n,) int64 in [0, 2**bits) -> (ceil(n*bits/8),) uint8
    """Pack ``bits`` bits a number, lowest bit first, with no gaps."""
    if bits == 0:
        return torch.zeros(0, dtype=torch.uint8, device=values.device)
    places = torch.arange(bits, device=values.device)
    return pack_bits(((values[:, None] >> places) & 1).to(torch.bool).flatten())


def unpack_uints(packed: Tensor, count: int, bits: int) -> Tensor:  # uint8 -> (count,) int64
    """Undo pack_uints."""
    if bits == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    places = torch.arange(bits, device=packed.device)
    return (unpack_bits(packed, count * bits).view(count, bits).to(torch.int64) << places).sum(dim=1)


def rice_unary_bits(gaps: Tensor, parameters: range) -> list[int]:  # (k,) int64
    """Return the length in bits of the unary part with each of some parameters: sum of (gap >> parameter) + 1."""
    return [int((gaps >> parameter).sum()) + gaps.numel() for parameter in parameters]


def rice_encode(gaps: Tensor, parameter: int) -> tuple[Tensor, Tensor]:  # (k,) int64 -> uint8, uint8
    """Golomb-Rice code of non-negative gaps in two streams that can be written and read in parallel.

    The first holds the ``parameter`` low bits of every gap, packed; the second holds every quotient q in unary, q zeros
    and a one.
    """
    low = pack_uints(gaps & ((1 << parameter) - 1), parameter)
    ones = torch.cumsum((gaps >> parameter) + 1, dim=0) - 1  # (k,) position of the one that ends each quotient
    length = int(ones[-1]) + 1 if gaps.numel() else 0
    unary = torch.zeros(length, dtype=torch.bool, device=gaps.device)
    unary[ones] = True
    return low, pack_bits(unary)


def rice_decode(low: Tensor, unary: Tensor, count: int, parameter: int) -> Tensor | None:  # -> (count,) int64
    """Undo rice_encode; None when the unary stream does not hold exactly ``count`` ones."""
    ones = torch.nonzero(unpack_bits(unary, unary.numel() * 8)).flatten()
    if ones.numel() != count:
        return None
    before = torch.nn.functional.pad(ones[:-1], (1, 0), value=-1) if count else ones
    return ((ones - before - 1) << parameter) | unpack_uints(low, count, parameter)


@dataclass(frozen=True)
class RiceStream:
    """What rice_encode made of ``count`` gaps, as it came from the wire: untrusted."""

    low: Tensor  # uint8
    unary: Tensor  # uint8
    count: int
    parameter: int


RICE_COUNT, RICE_GAP, RICE_REST, RICE_OUTSIDE = 1, 2, 3, 4


def rice_indices(streams: Sequence[RiceStream], numel: int) -> list[tuple[Tensor, int]]:
    """Decode and check rising indices below ``numel``: of every stream (count,) int64 and 0, or what is wrong first.

    RICE_COUNT: the unary stream has another number of entries. RICE_GAP: a gap is ``numel`` or more. RICE_REST: the
    quotients do not fill the stream, which is a whole number of four bytes. RICE_OUTSIDE: the last index is ``numel``
    or more. The indices mean something only without a fault, or with the last one.
    """
    return [_checked_indices(stream, numel) for stream in streams]


def _checked_indices(stream: RiceStream, numel: int) -> tuple[Tensor, int]:
    gaps = rice_decode(stream.low, stream.unary, stream.count, stream.parameter)
    if gaps is None:
        return stream.unary.new_zeros(0, dtype=torch.int64), RICE_COUNT
    # A huge quotient shifted left may wrap around int64: both ends of the range are checked.
    if stream.count and (int(gaps.min()) < 0 or int(gaps.max()) >= numel):
        return gaps, RICE_GAP
    (bits,) = rice_unary_bits(gaps, range(stream.parameter, stream.parameter + 1))
    if -(-bits // 32) * 4 != stream.unary.numel():
        return gaps, RICE_REST
    indices = torch.cumsum(gaps + 1, dim=0) - 1
    return indices, RICE_OUTSIDE if stream.count and int(indices[-1]) >= numel else 0
