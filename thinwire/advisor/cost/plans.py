"""The exchanges of a step and what they put on the busiest link: sums of what each part states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.advisor.microbench import DryNet
from thinwire.engine.fixed_groups import fixed_groups
from thinwire.engine.layout import Layout
from thinwire.engine.protocols import Aggregator
from thinwire.engine.traffic_plan import NoPlan, Plan, all_gather, all_reduce
from thinwire.methods import Method
from thinwire.methods.base import Rows

MEETING = 40  # bytes


def exchanged_rows(method: Method, buckets: Sequence[Rows]) -> list[tuple[Rows, int]]:
    """What each exchange of a step carries, and the place of the bucket that it waits for, in the order they begin.

    One exchange per bucket; one for the whole model where the method wants that; and where what travels together
    changes the result, groups that the model alone decides on (thinwire/edges/fixed_buckets.py).
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


def planner(method: Method) -> Aggregator:
    """The method's parts, to be asked and not to be used."""
    return method.aggregator(DryNet(1), True)


def plan_exchange(method: Method, layout: Layout, hosts: int) -> Plan:
    """The plan of one exchange; densities are those after a warm-up. NoPlan, with the reason, where there is none."""
    try:
        parts = planner(method)
        if not hasattr(parts, "plan"):
            raise NoPlan(f"{type(parts).__name__} has no plan()")
        return parts.plan(layout, hosts) if hosts > 1 else Plan()
    except Exception as error:  # a part from elsewhere, which may be tried, may raise anything
        raise NoPlan(f"there is no cost model of the method {method.name!r}: {error}") from error


def why_unplanned(method: Method) -> str | None:
    """Why nothing can be predicted of a method, or of one of a mixture's; None where something can."""
    try:
        for one in method.members:
            plan_exchange(one, one.layout([("weight", 0, torch.Size([64, 64]))]), 2)
    except NoPlan as error:
        return str(error)
    return None


def plan_meeting(hosts: int) -> Plan:
    """What local steps' ranks say to each other in front of a round (thinwire/edges/meeting.py)."""
    return all_gather(MEETING, hosts) if hosts > 1 else Plan()


def plan_averaging(method: Method, rows: Rows, hosts: int) -> Plan:
    """A step's share of averaging the parameters in which ranks may differ: an all-reduce now and then."""
    interval = method.averaging_interval if method.outer_rule is None else None  # a round is the method's exchange
    numel = sum(shape.numel() for name, _, shape in rows if method.member_of(name).replicas_drift)
    if interval is None or hosts < 2:
        return Plan()
    whole = all_reduce(4 * numel, hosts)
    return Plan(whole.rounds / interval, whole.nbytes / interval)
