"""Deep Gradient Compression (Lin et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from thinwire.collectives import AllGather
from thinwire.compressors import TopK
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.engine.schedules import ExponentialWarmup
from thinwire.engine.workspace import Workspace
from thinwire.methods.adviser_traits import WARMUP, Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import Indices, Residual, Scope, Selection, Values
from thinwire.methods.options import Warmup, check_bool, check_corrected, check_sparse, one_of, require, schedule_of
from thinwire.methods.registry import method
from thinwire.methods.shared_parts import clipped, gathered_codec, momentum_memory
from thinwire.transport import Net


@method("dgc")
@dataclass(frozen=True, kw_only=True)
class DGC(Method):
    """Deep Gradient Compression: top-k with momentum correction, factor masking, local clipping and warm-up.

    density              share of the elements that a step sends, in (0, 1]
    selection            "exact": the largest elements; "sampled": those above a threshold estimated from a sample
    scope                what they are the largest of: "tensor" (each sends the same share), "balanced" (each, a small
                         one sends a larger share), "model" (all together; waits for the end of backward), "chunk"
                         (those of each 4,096 consecutive elements of a tensor)
    momentum_correction  accumulate velocities instead of gradients (Eq. 4 and 7); needs torch.optim.SGD
    factor_masking       clear the velocity of what was sent (section 2.3)
    lr_rescaling         apply what waited with the learning rates of its own steps: v = (eta_{t-1} / eta_t) v + u
    direct_decay         with momentum correction: apply weight decay at every step, without sending it
    clip_norm            norm at which the mean gradient would be clipped; None: no clipping
    warmup               None, the length in steps of the paper's ramp (25 %, 6.25 %, ...), or in epochs ("4 epochs",
                         with steps_per_epoch given to attach), or a schedule: an object with density(step, final)
    values               how values travel: "fp32", "fp16", "bf16", "int8", "int4", "int2"
    indices              how indices travel: "rice" (shortest), "delta16", "int32"
    residual             how residuals and velocities are stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ?: ("4.weight", "head.*")

    Nothing is lost: an element that is not sent, and what rounding takes from one that is, stays in the residual. It
    is applied late, though. ``factor_masking`` takes velocity away, so the sum of all updates is not momentum SGD's.
    ``direct_decay`` adds s w to the mean on every rank, s = decay / (1 - m), and takes it off the residual:
    v = v + (u - s w).

    ``clip_norm`` scales every worker's gradient down to clip_norm * sqrt(N) before it is accumulated (section 2.2).
    The paper's threshold is N^-1/2 times the norm, because its gradients are divided by N before. Clipping waits for
    the end of backward.

    ``residual="bf16"`` rounds up or down by chance, so that on average nothing is lost.
    """

    paper: ClassVar[str] = "dgc:density=0.001,scope=tensor,values=fp32,factor_masking=true"
    benched: ClassVar[tuple[str, ...]] = ("dgc", paper)
    advised: ClassVar[Advised] = Advised(
        sgd=("dgc",),
        why_not_other="it needs torch.optim.SGD",
        rank=1,
        wants=f"{WARMUP}; residual networks and an LSTM were content with fewer bytes "
        "({}:density=0.006,warmup=STEPS)",
    )

    density: float = 0.02
    selection: Selection = "exact"
    scope: Scope = "balanced"
    momentum_correction: bool = True
    factor_masking: bool = False
    lr_rescaling: bool = False
    direct_decay: bool = True
    clip_norm: float | None = None
    warmup: Warmup = None
    values: Values = "int8"
    indices: Indices = "rice"
    residual: Residual = "fp32"
    dense_below: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sparse(self)
        one_of(self, "selection", get_args(Selection))
        one_of(self, "scope", get_args(Scope))
        require(
            not (self.scope == "chunk" and self.selection == "sampled"),
            'dgc: selection="sampled" estimates thresholds of whole tensors, and scope="chunk" has none; choose one',
        )
        check_bool(self, "momentum_correction")
        check_corrected(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return self.momentum_correction

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        memory = clipped(momentum_memory(self, self.momentum_correction), self.clip_norm, net)
        warmup, workspace = schedule_of(self.warmup, ExponentialWarmup), Workspace()
        compressor = TopK(self.density, warmup, self.scope, self.selection == "sampled", workspace)
        collective = AllGather(gathered_codec(self), workspace)
        return Exchange(memory, compressor, collective, net, whole_model=self.whole_model, workspace=workspace)

    @property
    def whole_model(self) -> bool:
        return self.scope == "model" or super().whole_model
