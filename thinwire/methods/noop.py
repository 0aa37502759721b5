"""No communication at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.engine.aggregators import NoopMean
from thinwire.engine.protocols import Aggregator
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.registry import method
from thinwire.transport import Net


@method("noop")
@dataclass(frozen=True, kw_only=True)
class Noop(Method):
    """No communication at all, to measure how fast a free network would be; replicas drift apart."""

    benched: ClassVar[tuple[str, ...]] = ()
    advised: ClassVar[Advised] = Advised(why_not_sgd="trains nothing", why_not_other="trains nothing")

    @property
    def communicates(self) -> bool:
        return False

    @property
    def gives_step_gradient(self) -> bool:
        return True

    @property
    def replicas_drift(self) -> bool:
        return True

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        return NoopMean(net)
