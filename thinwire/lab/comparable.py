"""Whether the seconds of methods that trained one after the other may be compared."""

from __future__ import annotations

from collections.abc import Mapping

MOST = 1.2  # forward and backward are the same work for every method, so they should take as long


def why_not_comparable(compute_s: Mapping[str, float], compress_s: Mapping[str, float]) -> str:
    """One sentence where forward and backward took MOST times longer with one method than with another, by more than
    its own compressing beside them can have cost; else ""."""
    known = {method: seconds for method, seconds in compute_s.items() if seconds > 0}
    if len(known) < 2:
        return ""
    alone = {method: seconds - compress_s.get(method, 0.0) for method, seconds in known.items()}
    least, most = min(known, key=known.__getitem__), max(alone, key=alone.__getitem__)
    if alone[most] <= MOST * known[least]:
        return ""
    return (
        "Seconds do not compare: forward and backward are the same work for every method, but took "
        f"{1e3 * known[least]:.3g} ms per step with {least} and {100 * (known[most] / known[least] - 1):.0f} % more "
        f"with {most}, because other programs took processor time."
    )
