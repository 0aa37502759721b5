"""A reducer's statistics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thinwire.stats import Stats

if TYPE_CHECKING:
    from thinwire.reducer.reducer import Reducer


def stats_of(reducer: Reducer, residual_norm: bool) -> Stats:
    """Totals so far; the residual's norm costs a pass over the residual."""
    nets, progress, aggregator = reducer.nets, reducer.progress, reducer.running.aggregator
    traffic, communicating = nets.between.traffic, nets.seconds
    pace = reducer.monitors.stragglers.pace
    slowest, because = pace.slowest or (None, "")
    compensating = progress.spent.compensating + aggregator.clock.compensating
    compressing = progress.spent.compressing + aggregator.clock.compressing
    busy = reducer.worker.busy_s
    if busy is not None:  # the host's clock would count the wait for the backward pass, too
        compensating, compressing = 0.0, max(0.0, busy - communicating)
    guard, health = reducer.monitors.guard, reducer.monitors.health
    return Stats(
        steps=progress.step - progress.steps_before,
        world_size=nets.between.size,
        frame_bytes=traffic.handed,
        dense_bytes=progress.dense_bytes,
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        bytes_inside=nets.inside.traffic.sent if nets.inside is not None else 0,
        seconds_compensating=compensating,
        seconds_compressing=compressing,
        seconds_communicating=communicating,
        seconds_waiting=reducer.worker.waited_s,
        residual_norm=aggregator.residual_square_sum() ** 0.5 if residual_norm else math.nan,
        steps_skipped=reducer.skipper.skipped if reducer.skipper is not None else 0,
        gradient_norm=health.gradient_norm / nets.own.size**0.5 if health is not None else None,
        residual_to_gradient=health.residual_to_gradient if health is not None else None,
        compression_error=health.compression_error if health is not None else None,
        staleness=health.staleness if health is not None else None,
        runaways=guard.runaways if guard is not None else 0,
        density=reducer.running.density(progress.step),
        waited_s=pace.waited_s,
        slowest_rank=slowest,
        slow_because=because,
        bytes_overhead=nets.bytes_overhead,
        steps_before=max(0, progress.steps_before),
        rounds=reducer.rounds.count if reducer.rounds is not None else None,
        round_distance=reducer.rounds.distance if reducer.rounds is not None else None,
    )
