"""signSGD with majority vote (Bernstein et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from thinwire.collectives import VoteServer
from thinwire.compressors import Sign
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.memory import NoMemory, Velocity
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import Topology
from thinwire.methods.options import one_of
from thinwire.methods.registry import method
from thinwire.transport import Net

_OWN_RATES = "its updates need learning rates of their own"


@method("signsgd")
@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """signSGD with majority vote; with the momentum of torch.optim.SGD it is Signum.

    topology  "sharded": every rank serves a part; "server": rank 0 serves all

    Updates are +-1 times the learning rate, so magnitudes are lost, and learning rates are not those of SGD. Zeros and
    ties are decided by a fair coin that is the same on every rerun. Nothing is kept for later.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    advised: ClassVar[Advised] = Advised(why_not_sgd=_OWN_RATES, why_not_other=_OWN_RATES)

    topology: Topology = "sharded"

    def __post_init__(self) -> None:
        one_of(self, "topology", get_args(Topology))

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd

    def takes_weight_decay(self, optimizer_is_sgd: bool) -> bool:
        return False  # Signum decays the weights beside the vote, which is what the optimizer then does

    @property
    def estimates_mean(self) -> bool:
        return False  # a vote's +-1 is an update of its own

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        memory = Velocity() if optimizer_is_sgd else NoMemory()
        return Exchange(memory, Sign(), VoteServer(self.topology), net)
