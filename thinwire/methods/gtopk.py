"""Global top-k (Shi et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.codecs import SparseCodec
from thinwire.collectives import GlobalTopK
from thinwire.compressors import TopK
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.engine.schedules import ListedWarmup
from thinwire.engine.workspace import Workspace
from thinwire.methods.adviser_traits import UNMEASURED, WARMUP, Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import Indices, Residual, Values
from thinwire.methods.options import Warmup, check_bool, check_corrected, check_sparse, require, schedule_of
from thinwire.methods.registry import method
from thinwire.methods.shared_parts import clipped, momentum_memory
from thinwire.transport import Net


@method("gtopk")
@dataclass(frozen=True, kw_only=True)
class GTopK(Method):
    """Global top-k: only the k largest sums over all ranks are applied, in O(k log P) bytes.

    density              share of the whole model that a step sends, in (0, 1]
    warmup               None, the length of the paper's list of densities in steps or "4 epochs", or a schedule
    momentum_correction  accumulate velocities instead of gradients, as DGC does; None: where the optimizer is
                         torch.optim.SGD; False: the optimizer keeps its momentum, as in the paper
    factor_masking       with momentum correction: clear the velocity of what was applied, as DGC can
    lr_rescaling         with momentum correction: apply what waited with the learning rates of its own steps
    direct_decay         with momentum correction: apply weight decay at every step, without sending it
    clip_norm            norm at which the mean gradient would be clipped; None: no clipping
    values, indices      how they travel, see DGC
    residual             how residuals and velocities are stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ?: ("4.weight", "head.*")

    Nothing is lost: an entry that a merge rejects stays in the residual of the rank that gave it. Large entries of
    single ranks wait where the ranks' sum is small. The exchange waits for the end of backward, and its lists take
    about nine times ``density`` of the gradient's memory.
    """

    paper: ClassVar[str] = "gtopk:density=0.001,momentum_correction=false"
    benched: ClassVar[tuple[str, ...]] = ("gtopk", paper)
    advised: ClassVar[Advised] = Advised(sgd=("gtopk",), why_not_other=UNMEASURED, rank=2, wants=WARMUP)

    density: float = 0.03
    warmup: Warmup = None
    momentum_correction: bool | None = None
    factor_masking: bool = False
    lr_rescaling: bool = False
    direct_decay: bool = False
    clip_norm: float | None = None
    values: Values = "fp32"
    indices: Indices = "rice"
    residual: Residual = "fp32"
    dense_below: int = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sparse(self)
        if self.momentum_correction is not None:
            check_bool(self, "momentum_correction")
        check_corrected(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd if self.momentum_correction is None else self.momentum_correction

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        corrected = self.takes_momentum(optimizer_is_sgd)
        for option in ("factor_masking", "lr_rescaling"):
            require(
                corrected or not getattr(self, option),
                f"gtopk: {option} needs the momentum of torch.optim.SGD, and this is another optimizer; leave it out",
            )
        memory = clipped(momentum_memory(self, corrected), self.clip_norm, net)
        workspace = Workspace()
        compressor = TopK(self.density, schedule_of(self.warmup, ListedWarmup), "model", workspace=workspace)
        collective = GlobalTopK(SparseCodec(self.values, self.indices), workspace)
        return Exchange(memory, compressor, collective, net, whole_model=self.whole_model, workspace=workspace)

    @property
    def whole_model(self) -> bool:
        return True
