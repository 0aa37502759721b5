"""What a wire did so far."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

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

    ``str(stats)`` is a sentence for people, ``stats.to_dict()`` numbers for TensorBoard, wandb and the like, and
    ``stats.since(earlier)`` what happened between two snapshots.

    ``steps_before`` were done before, by the run whose state was loaded; their bytes are in no number here.

    ``frame_bytes`` is what this rank handed to the transport, headers included; ``dense_bytes`` what it would have
    handed over as fp32; their quotient is ``ratio``, the papers' compression ratio. ``bytes_sent`` and
    ``bytes_received`` are what crossed this rank's link under the collectives' algorithms, ``dense_bytes_sent`` what a
    ring all-reduce in fp32 would have sent over it; their quotient is ``link_ratio``. ``bytes_inside`` is the traffic
    inside a machine with a hierarchy. ``bytes_overhead`` is what this rank sent besides gradients and what is in none
    of the others: measurements of the links (method "auto", merging buckets, comparing the ranks' pace), checks,
    averaged(), and what switch and detach moved. Ratios are None while nothing was sent. ``residual_norm`` is the
    length of everything this rank still keeps. ``steps_skipped`` were passed over because a gradient was not finite.

    ``seconds_compensating``, ``_compressing`` and ``_communicating`` are what the exchanges took. They run beside the
    backward pass, bucket by bucket, so only a part of them makes a step longer: ``seconds_waiting``, the time from the
    last gradient of each backward pass to the end of its exchanges; ``added_ms`` is that per step. On a GPU its own
    clock counts, and compensating is part of compressing there. Gloo's communicating is the host's time; waiting for a
    slower rank is part of it.

    With a guard or ``log_every``, as the last measurement found them: ``gradient_norm``, of the ranks' own gradients
    before anything is kept or added (the root of their mean square; what lies in ``.grad`` behind the exchange of a
    sparse method is no such gradient); ``residual_to_gradient``, ``compression_error`` and ``staleness`` in steps, for
    all ranks together. ``runaways`` counts the measurements that found the training running away (with a guard).
    ``density`` is the one of the coming step; None where the method has none.

    Every 50 steps the ranks compare how long they waited for each other (``waited_s``, a number per rank) and how fast
    their links are. ``slowest_rank`` is the one that held the others up then, if one stood out, and ``slow_because``
    says how it showed.

    With local steps ``steps`` are the optimizer's and ``dense_bytes`` those of a gradient at each of them. ``rounds``
    were exchanged, those of an earlier run included. ``round_distance`` is how far a rank went in the last one,
    |x_i - theta|, as a share of |theta|; the root of its mean square over the ranks.
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
    gradient_norm: float | None = None
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
    rounds: int | None = None
    round_distance: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.dense_bytes / self.frame_bytes if self.frame_bytes else None

    @property
    def dense_bytes_sent(self) -> float:
        return 2 * (self.world_size - 1) / self.world_size * self.dense_bytes

    @property
    def link_ratio(self) -> float | None:
        return self.dense_bytes_sent / self.bytes_sent if self.bytes_sent else None

    @property
    def added_ms(self) -> float:
        return 1e3 * self.seconds_waiting / self.steps if self.steps else 0.0

    def since(self, earlier: Stats) -> Stats:
        """What happened after an earlier snapshot of the same wire; what is no sum is as it is now."""
        now, then = vars(self), vars(earlier)
        sums = {name: now[name] - then[name] for name in SUMS}
        return replace(self, **sums, steps_before=earlier.steps_before + earlier.steps)

    def to_dict(self) -> dict[str, float]:
        """Every number that is known, the ratios among them, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        named |= {name: getattr(self, name) for name in ("ratio", "link_ratio", "dense_bytes_sent", "added_ms")}
        known = {name: value for name, value in named.items() if isinstance(value, int | float) and value == value}
        return known | {f"waited_s/rank{rank}": seconds for rank, seconds in enumerate(self.waited_s)}

    def __str__(self) -> str:
        return f"{self.steps} steps: {self.sentence()}"

    def sentence(self) -> str:
        """What was sent, what it cost, and whom the others waited for."""
        sent = "nothing sent"
        if self.link_ratio == 0.0:  # an exchange without a step, as the last one of local steps
            sent = f"sent {readable_bytes(self.bytes_sent)}"
        elif self.link_ratio is not None:
            sent = f"sent {readable_bytes(self.bytes_sent)} instead of {readable_bytes(self.dense_bytes_sent)} ("
            sent += f"{self.link_ratio:.3g}x less)" if self.link_ratio >= 1 else f"{1 / self.link_ratio:.3g}x more)"
        if self.bytes_overhead > SHOWN * self.bytes_sent:
            sent += f", {readable_bytes(self.bytes_overhead)} {OVERHEAD}"
        slow = "" if self.slowest_rank is None else f"; rank {self.slowest_rank} is the slowest: {self.slow_because}"
        return f"{sent}; communication added {self.added_ms:.3g} ms per step{slow}"


SUMS = (
    "steps",
    "frame_bytes",
    "dense_bytes",
    "bytes_sent",
    "bytes_received",
    "bytes_inside",
    "bytes_overhead",
    "seconds_compensating",
    "seconds_compressing",
    "seconds_communicating",
    "seconds_waiting",
    "steps_skipped",
    "runaways",
)  # what adds up from step to step
