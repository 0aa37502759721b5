"""TernGrad (Wen et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from thinwire.collectives import TernaryServer
from thinwire.compressors import Ternarize
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.memory import NoMemory
from thinwire.methods.adviser_traits import EXCLUDE, Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import ScalerOf, Topology
from thinwire.methods.options import (
    check_bool,
    check_dense_below,
    check_exclude,
    is_count,
    is_number,
    one_of,
    require,
)
from thinwire.methods.registry import method
from thinwire.transport import Net


@method("terngrad")
@dataclass(frozen=True, kw_only=True)
class TernGrad(Method):
    """TernGrad: stochastic ternary gradients, for every optimizer.

    clip_sigma    clip every tensor at so many of its standard deviations first (Eq. 21); None: do not
    share_scaler  all ranks use the largest scaler (Eq. 4), so that levels can be added up; False: answers in fp32
    scaler        "tensor": one per tensor; "model": one for all (section 3.3), which waits for the whole model
    dense_below   smaller tensors and one-dimensional ones travel dense; 0: none
    exclude       names of parameters that travel dense, with * and ?: ("4.weight", "head.*")
    topology      "sharded": every rank serves a part; "server": rank 0 serves all
    seed          of the random numbers that round

    Every element becomes s * sign(g) * b with P(b = 1) = |g| / s (Eq. 1 to 3), s the largest magnitude. That is
    unbiased for the clipped gradient; clipping is a bias, by design. Nothing is kept for later.

    The paper leaves the output layer float (section 4.2). From ``dense_below`` elements on it must be named:
    ``exclude=("fc.*",)``, with the names of model.named_parameters().
    """

    paper: ClassVar[str] = "terngrad:dense_below=0"  # with exclude=... for the output layer where the paper leaves it
    benched: ClassVar[tuple[str, ...]] = ("terngrad",)
    advised: ClassVar[Advised] = Advised(sgd=("terngrad",), other=("terngrad",), rank=5, suits="images", wants=EXCLUDE)
    gives_step_gradient: ClassVar[bool] = True

    clip_sigma: float | None = 2.5
    share_scaler: bool = True
    scaler: ScalerOf = "tensor"
    dense_below: int = 1024
    exclude: tuple[str, ...] = ()
    topology: Topology = "sharded"
    seed: int = 0

    def __post_init__(self) -> None:
        clip = self.clip_sigma
        ok = clip is None or (is_number(clip) and clip > 0)
        require(ok, f"terngrad: clip_sigma must be None or above 0, not {clip!r}")
        check_bool(self, "share_scaler")
        one_of(self, "scaler", get_args(ScalerOf))
        one_of(self, "topology", get_args(Topology))
        require(is_count(self.seed, 0), f"terngrad: seed must be a whole number of at least 0, not {self.seed!r}")
        check_dense_below(self)
        check_exclude(self)

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        compressor = Ternarize(self.clip_sigma, self.share_scaler, self.seed, whole_model=self.whole_model)
        server = TernaryServer(self.topology, self.share_scaler)
        return Exchange(NoMemory(), compressor, server, net, whole_model=self.whole_model)

    @property
    def whole_model(self) -> bool:
        return self.scaler == "model"

    @property
    def bucket_independent(self) -> bool:
        return self.scaler == "tensor"
