"""The way a gradient goes, in one function."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.engine.exchange_parts import Stages, Stopwatch
from thinwire.engine.flat_gradient import coded_part
from thinwire.engine.group_mean import Base
from thinwire.engine.norms import UNMEASURED, Measured


def exchange(
    stages: Stages, context: ExchangeContext, gradients: Sequence[Tensor], norms: Measured = UNMEASURED
) -> Measured:
    """Replace a rank's gradients, one vector per segment, by the group's mean; the memory keeps what was not sent."""
    compressor, collective, local, net = stages.compressor, stages.collective, stages.local, stages.net
    watch = Stopwatch(net)
    memory, hint, given, into, alarm = stages.begin(context, gradients)
    base = Base(memory.direct_decay(context), local.share(net.size))

    x, candidates = memory.compensate(context, given, base.direct_decay, hint, alarm.flag)  # to be sent now
    norms = stages.of_wanted(norms, memory, x)
    watch.compensated()

    coded, tail = coded_part(context.layout, x), stages.tail(context, x)
    agreed = stages.agree(compressor.measure(context, coded))
    payload = compressor.compress(context, coded, agreed, net.rank, candidates)  # what we choose to send
    mean, accepted, alarm = collective.mean(context, payload, tail, net, base, alarm, into)  # what the group used
    watch.exchanged()
    alarm.raise_if_rings(context, given)

    memory.retain(context, x, accepted)  # keep the rest: nothing is ever lost
    norms = stages.of_left(norms, memory, x)
    mean = local.combine(context, mean, given, x, accepted, net.size)
    memory.commit(context, net.rank)
    stages.clock.add(watch)
    mean.write(context, gradients)
    return norms
