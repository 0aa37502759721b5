"""What a wire did so far."""

from __future__ import annotations

from dataclasses import dataclass

SHOWN = 0.01  # of the bytes sent: a smaller number besides them is not worth the reader's time
OVERHEAD = "more for measuring, checking, averaging or changing the method"


def readable_bytes(count: float) -> str:
    """1234567 -> '1.23 MB'."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError


@dataclass(frozen=True)
class Stats:
    """Totals of one rank since it was attached, all of the same ``steps``: those this wire exchanged itself.

    ``steps_before`` were done before, by the run whose state was loaded; their bytes are in no number here.

    ``frame_bytes`` is what this rank handed to the transport, headers included; ``dense_bytes`` what it would have
    handed over as fp32; their quotient is ``ratio``, the papers' compression ratio. ``bytes_sent`` and
    ``bytes_received`` are what crossed this rank's link under the collectives' algorithms, and ``link_ratio``
    compares that with a ring all-reduce in fp32. ``bytes_inside`` is the traffic inside a machine with a hierarchy.
    ``bytes_overhead`` is what this rank sent besides gradients and what is in none of the others: measurements of the
    links (method "auto", merging buckets, comparing the ranks' pace), checks, averaged(), and what switch and detach
    moved. Ratios are None while nothing was sent. ``residual_norm`` is the length of everything this rank still keeps.
    ``steps_skipped`` were passed over because a gradient was not finite.

    ``seconds_compensating``, ``_compressing`` and ``_communicating`` are what the exchanges took. They run beside the
    backward pass, bucket by bucket, so only a part of them makes a step longer: ``seconds_waiting``, the time from the
    last gradient of each backward pass to the end of its exchanges. On a GPU its own clock counts, and compensating is
    part of compressing there. Gloo's communicating is the host's time; waiting for a slower rank is part of it.

    With a guard, as the last measurement found them for all ranks together: ``residual_to_gradient``,
    ``compression_error`` and ``staleness`` in steps; ``runaways`` counts the measurements that found the training
    running away. ``density`` is the one of the coming step; None where the method has none.

    Every 50 steps the ranks compare how long they waited for each other (``waited_s``, a number per rank) and how fast
    their links are. ``slowest_rank`` is the one that held the others up then, if one stood out, and ``slow_because``
    says how it showed.
    """

    steps: int
    world_size: int
    frame_bytes: int
    dense_bytes: int
    bytes_sent: int
    bytes_received: int
    bytes_inside: int
    seconds_compensating: float
    seconds_compressing: float
    seconds_communicating: float
    seconds_waiting: float
    residual_norm: float
    steps_skipped: int = 0
    residual_to_gradient: float | None = None
    compression_error: float | None = None
    staleness: float | None = None
    runaways: int = 0
    density: float | None = None
    waited_s: tuple[float, ...] = ()
    slowest_rank: int | None = None
    slow_because: str = ""
    bytes_overhead: int = 0
    steps_before: int = 0

    @property
    def ratio(self) -> float | None:
        return self.dense_bytes / self.frame_bytes if self.frame_bytes else None

    @property
    def link_ratio(self) -> float | None:
        dense = 2 * (self.world_size - 1) / self.world_size * self.dense_bytes
        return dense / self.bytes_sent if self.bytes_sent else None

    def __str__(self) -> str:
        ratio = "nothing sent" if self.ratio is None else f"ratio {self.ratio:.1f}x"
        if self.link_ratio is not None:
            ratio += f", link ratio {self.link_ratio:.1f}x"
        if self.density is not None:  # which tells how far a warm-up is
            ratio += f", density {self.density:.3g}"
        before = f" (after {self.steps_before} before it was loaded)" if self.steps_before else ""
        beside = (
            f", {readable_bytes(self.bytes_overhead)} {OVERHEAD}"
            if self.bytes_overhead > SHOWN * self.bytes_sent
            else ""
        )
        slow = "" if self.slowest_rank is None else f"; rank {self.slowest_rank} is the slowest: {self.slow_because}"
        return (
            f"{self.steps} steps{before}, sent {readable_bytes(self.bytes_sent)}, "
            f"received {readable_bytes(self.bytes_received)}, {ratio}{beside}; "
            f"{self.seconds_compensating:.2f} s compensating, {self.seconds_compressing:.2f} s compressing, "
            f"{self.seconds_communicating:.2f} s communicating, "
            f"{self.seconds_waiting:.2f} s waited for; residual norm {self.residual_norm:.4g}{slow}"
        )
