"""Steps over the segments of an exchange: gradients lie in parts, state in flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.kernels.reference.limits import GRADIENT_LIMIT


@dataclass(frozen=True)
class Segments:
    """One row per parameter: where its state starts in the flat vectors, and what its optimizer group says.

    ``weights`` holds the parameter where weight decay is applied here, else None. ``applied`` is how many times it is
    taken off what is kept, because it is applied without being sent (see ``accumulate``).
    """

    starts: tuple[int, ...]
    momentum: tuple[float, ...]
    nesterov: tuple[bool, ...]
    decay: tuple[float, ...]
    weights: tuple[Tensor | None, ...]
    applied: tuple[float, ...]

    def decayed(self, place: int, grad: Tensor) -> Tensor:  # (m,) float32 -> (m,) float32
        weight = self.weights[place]
        return grad if weight is None else grad + self.decay[place] * weight


def first_nonfinite(parts: Sequence[Tensor], limit: float) -> int | None:
    """Return the place of the first part that holds a nan, or a magnitude of ``limit`` (a power of two, or inf) or
    more; None where all of them are below."""
    if not parts:
        return None
    largest = torch.stack([part.abs().amax() if part.numel() else part.new_zeros(()) for part in parts]).cpu()
    bad = torch.nonzero(~(largest < limit)).flatten()  # amax hands a nan on
    return int(bad[0]) if bad.numel() else None


def watch(parts: Sequence[Tensor], flag: Tensor) -> None:  # T vectors, (1,) int32
    """Set the flag to one where an element is not below GRADIENT_LIMIT."""
    for part in parts:
        flag.logical_or_(~(part.abs() < GRADIENT_LIMIT).all())


def _only_below_limit(parts: Sequence[Tensor], flag: Tensor) -> list[Tensor]:
    watch(parts, flag)
    return [torch.where(part.abs() < GRADIENT_LIMIT, part, 0.0) for part in parts]


def accumulate(
    parts: Sequence[Tensor],
    segments: Segments,
    velocity: Tensor | None,
    residual: Tensor,
    thresholds: Sequence[float] | None,
    capacity: int,
    flag: Tensor | None = None,
    ratios: Sequence[float] | None = None,
    room: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:  # -> (c,) int64 or None
    """Add the gradients to the residual, through the velocity where there is one (DGC, Eq. 4 and 7), in place.

    d = g + decay w; u = m u + d; v = v + (u - applied w), or v + (d + m u - applied w) for Nesterov; without velocity
    v = v + g. With ``thresholds``, one a part, the flat indices of all elements with |v| >= threshold are returned in
    rising order, or None when they are more than ``capacity``. Where ``flag`` is given, an element of a gradient that
    is not below GRADIENT_LIMIT counts as zero and sets it to one. With ``ratios``, one a part, v is multiplied by them
    before.

    ``room``, both int32, is memory offered: the second tensor for the indices, as many as are wanted at most, and the
    first, of ``listing_entries(capacity)``, for what is listed on the way.
    """
    if flag is not None:
        parts = _only_below_limit(parts, flag)
    if ratios is not None:
        rescale(parts, segments, residual, ratios)
    found = []
    for place, (part, start) in enumerate(zip(parts, segments.starts, strict=True)):
        v = residual[start : start + part.numel()]
        if velocity is None:
            v.add_(part)
        else:
            u, m = velocity[start : start + part.numel()], segments.momentum[place]
            grad = segments.decayed(place, part)
            u.mul_(m).add_(grad)
            step = grad + m * u if segments.nesterov[place] else u
            weight = segments.weights[place]
            v.add_(step if weight is None else step - segments.applied[place] * weight)
        if thresholds is not None and thresholds[place] != float("inf"):
            found.append(torch.nonzero(~(v.abs() < thresholds[place])).flatten() + start)
    total = sum(indices.numel() for indices in found)
    if thresholds is None or total > capacity:
        return None
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=residual.device)


def rescale(parts: Sequence[Tensor], segments: Segments, residual: Tensor, ratios: Sequence[float]) -> None:
    """Multiply the residual, (n,), by the ratios of its parts, in place."""
    rows = zip(ratios, segments.starts, parts, strict=True)
    changed = [(ratio, residual[at : at + part.numel()]) for ratio, at, part in rows if ratio != 1.0]
    if changed:
        torch._foreach_mul_([span for _, span in changed], [ratio for ratio, _ in changed])


def error_step(
    parts: Sequence[Tensor], segments: Segments, ratios: Sequence[float], velocity: Tensor | None, residual: Tensor,
    flag: Tensor | None = None,
) -> None:  # fmt: skip
    """e = ratio e + q in place; q = d, or with momentum m = mu m + d: q = m, or d + mu m for Nesterov.

    ``flag`` is that of ``accumulate``.
    """
    if flag is not None:
        parts = _only_below_limit(parts, flag)
    for place, (part, start) in enumerate(zip(parts, segments.starts, strict=True)):
        error, mu = residual[start : start + part.numel()], segments.momentum[place]
        grad = segments.decayed(place, part)
        if mu and velocity is not None:
            m = velocity[start : start + part.numel()].mul_(mu).add_(grad)
            grad = grad.add(m, alpha=mu) if segments.nesterov[place] else m
        error.mul_(ratios[place]).add_(grad)
