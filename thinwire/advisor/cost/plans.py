"""What one exchange of a method puts on the busiest link, from the codecs' own size functions.

The collectives behind it, as torch's Gloo backend runs them: the all-gather is a ring of P - 1 rounds (each frame goes
in two halves, so that one half travels while the other is waited for), the all-reduce a ring of 2 (P - 1) rounds, the
all-to-all posts all its messages at once. The global top-k is our butterfly of swaps. Rings use a link best; how much
longer than its plan a method's exchanges take is measured (thinwire.advisor.profile).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from thinwire.advisor.link import Link
from thinwire.codecs import FloatsCodec, LevelsCodec, SignsCodec, SparseCodec, TernaryCodec
from thinwire.compressors.blocksign import cut_into_blocks
from thinwire.compressors.quotas import entries_kept, quotas, spread_of
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.layout import Layout
from thinwire.methods import DGC, BlockSign, Dense, GradientDropping, GTopK, Method, Noop, SignSGD, TernGrad
from thinwire.methods.base import Rows
from thinwire.methods.parts import gathered_codec


@dataclass(frozen=True)
class Plan:
    """Rounds of latency, and bytes over the busiest link, one way; ``frames`` is how many of them a rank decodes."""

    rounds: float = 0.0
    nbytes: float = 0.0
    frames: float = 0.0

    def __add__(self, other: Plan) -> Plan:
        return Plan(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def seconds(self, link: Link) -> float:
        """What this takes on a link where nothing else happens."""
        return link.seconds(self.nbytes, self.rounds)


def exchanged_rows(method: Method, buckets: Sequence[Rows]) -> list[tuple[Rows, int]]:
    """What each exchange of a step carries, and the place of the bucket that it waits for, in the order they begin.

    One exchange a bucket; one for the whole model where the method wants that; and where what travels together changes
    the result, groups that the model alone decides on (thinwire/edges/fixed_buckets.py).
    """
    if method.whole_model:
        return [([row for rows in buckets for row in rows], len(buckets) - 1)] if buckets else []
    if method.bucket_independent:
        return [(rows, place) for place, rows in enumerate(buckets)]
    model = sorted((row[1], row, place) for place, rows in enumerate(buckets) for row in rows)  # by ordinal
    groups = [[model[i] for i in reversed(group)] for group in fixed_groups([row[2].numel() for _, row, _ in model])]
    waiting = [([row for _, row, _ in group], max(place for _, _, place in group)) for group in groups]
    return sorted(waiting, key=lambda one: one[1])


def bucket_layouts(method: Method, buckets: Sequence[Rows]) -> list[Layout]:
    """The layouts of a step's exchanges, in the order they begin."""
    return layouts_of(method, [rows for rows, _ in exchanged_rows(method, buckets)])


def layouts_of(method: Method, exchanges: Sequence[Rows]) -> list[Layout]:
    """One layout an exchange; together they are the model."""
    model = [row for rows in exchanges for row in rows]
    return [method.layout(rows, model=model) for rows in exchanges]


def plan_exchange(method: Method, layout: Layout, hosts: int) -> Plan:
    """The plan of one exchange; densities are those after a warm-up."""
    planner = _PLANS.get(type(method))
    if planner is None:
        raise ValueError(f"there is no cost model of the method {method.name!r}; known: {', '.join(_known())}")
    return planner(method, layout, hosts) if hosts > 1 else Plan()


def plan_averaging(method: Method, numel: int, hosts: int) -> Plan:
    """A step's share of averaging the parameters, where ranks may differ in between: an all-reduce now and then."""
    interval = method.averaging_interval
    if interval is None or hosts < 2:
        return Plan()
    whole = _all_reduce(4 * numel, hosts)
    return Plan(whole.rounds / interval, whole.nbytes / interval)


def _known() -> list[str]:
    return [method.name for method in _PLANS]


# ------------------------------------------------------------------------------------------------------ collectives


def _all_gather(nbytes: float, hosts: int) -> Plan:
    return Plan(hosts - 1, (hosts - 1) * nbytes, hosts)


def _all_reduce(nbytes: float, hosts: int) -> Plan:
    return Plan(2 * (hosts - 1), 2 * (hosts - 1) / hosts * nbytes)


def _all_to_all(nbytes: float, hosts: int, frames: int = 0) -> Plan:
    """``nbytes`` to each other rank."""
    return Plan(1, (hosts - 1) * nbytes, frames)


def _served(topology: str, hosts: int, push: Callable[[int], int], reply: Callable[[int], int]) -> Plan:
    """Up and down through servers; ``push`` and ``reply`` give a frame's bytes when this many ranks serve."""
    if topology == "server":  # one rank's link carries everybody's frames, first one way and then the other
        return _all_to_all(push(1), hosts, hosts) + _all_to_all(reply(1), hosts)
    return _all_to_all(push(hosts), hosts, hosts) + _all_gather(reply(hosts), hosts)


def _share(count: int, servers: int) -> int:
    return -(-count // servers)


# ---------------------------------------------------------------------------------------------------------- methods


def _gathered(method: DGC | GradientDropping, layout: Layout, hosts: int) -> Plan:
    entries = quotas(method.scope, method.density, layout)
    spread = spread_of(method.scope, layout, entries)
    return _all_gather(
        gathered_codec(method).nbytes(layout.coded_numel, sum(entries), layout.tail_numel, spread), hosts
    )


def _gtopk(method: GTopK, layout: Layout, hosts: int) -> Plan:
    entries = entries_kept(method.density, layout.coded_numel)
    nbytes = SparseCodec(method.values, method.indices).nbytes(layout.coded_numel, entries, layout.tail_numel)
    swaps = hosts.bit_length() - 1
    if hosts & (hosts - 1):  # ranks beyond the power of two: their set to a proxy, the result and a bit an entry back
        back = nbytes + SignsCodec().nbytes(entries, 0, 0)
        return Plan(swaps + 2, swaps * nbytes + max(nbytes, back), swaps + 1)
    return Plan(swaps, swaps * nbytes, swaps)


def _terngrad(method: TernGrad, layout: Layout, hosts: int) -> Plan:
    coded, tail, tensors = layout.coded_numel, layout.tail_numel, len(layout.coded)
    scales = 0 if method.share_scaler else tensors

    def push(servers: int) -> int:
        return TernaryCodec().nbytes(_share(coded, servers), scales, _share(tail, servers))

    def reply(servers: int) -> int:
        if method.share_scaler:
            return LevelsCodec().nbytes(_share(coded, servers), hosts, _share(tail, servers))
        return FloatsCodec().nbytes(_share(coded, servers), _share(tail, servers))

    scalers = tensors if method.scaler == "tensor" else 1
    agreed = _all_reduce(4 * scalers, hosts) if method.share_scaler and tensors else Plan()
    return agreed + _served(method.topology, hosts, push, reply)


def _blocksign(method: BlockSign, layout: Layout, hosts: int) -> Plan:
    coded, tail = layout.coded_numel, layout.tail_numel
    block = method.block if isinstance(method.block, int) else None

    def blocks(servers: int) -> int:
        """Scales of one server's frame: every tensor has at least one there."""
        return sum(count for s in layout.coded for _, count in cut_into_blocks(_share(s.numel, servers), block))

    def push(servers: int) -> int:
        return SignsCodec().nbytes(_share(coded, servers), blocks(servers), _share(tail, servers))

    def reply(servers: int) -> int:
        if method.two_way:
            return push(servers)
        return FloatsCodec().nbytes(_share(coded, servers), _share(tail, servers))

    return _served(method.topology, hosts, push, reply)


def _signsgd(method: SignSGD, layout: Layout, hosts: int) -> Plan:
    def vote(servers: int) -> int:
        return SignsCodec().nbytes(_share(layout.coded_numel, servers), 0, _share(layout.tail_numel, servers))

    return _served(method.topology, hosts, vote, vote)


def _dense(method: Dense, layout: Layout, hosts: int) -> Plan:
    if method.dtype == "fp32":
        return _all_reduce(4 * layout.numel, hosts)
    share = 2 * _share(layout.numel, hosts)
    return _all_to_all(share, hosts) + Plan(hosts - 1, (hosts - 1) * share)


def _noop(method: Noop, layout: Layout, hosts: int) -> Plan:
    return Plan()


_PLANS: dict[type[Method], Callable[[Any, Layout, int], Plan]] = {
    DGC: _gathered,
    GTopK: _gtopk,
    TernGrad: _terngrad,
    BlockSign: _blocksign,
    GradientDropping: _gathered,
    SignSGD: _signsgd,
    Dense: _dense,
    Noop: _noop,
}
