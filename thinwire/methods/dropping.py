"""Gradient dropping (Aji and Heafield, 2017), alone or with local gradients (Aji, Heafield and Bogoychev, 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

from thinwire.collectives import AllGather
from thinwire.compressors import TopK
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.engine.schedules import DropRatioWarmup
from thinwire.engine.workspace import Workspace
from thinwire.memory import ErrorFeedback, MomentumCorrection
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import Indices, LocalMode, Residual, Scope, Values
from thinwire.methods.options import Warmup, check_bool, check_sparse, is_count, one_of, require, schedule_of
from thinwire.methods.registry import method
from thinwire.methods.shared_parts import clipped, gathered_codec
from thinwire.transport import Net


@method("dropping")
@dataclass(frozen=True, kw_only=True)
class GradientDropping(Method):
    """Gradient dropping: the largest elements are sent, the rest waits; optionally combined with local gradients.

    density              share of the whole model, tensor or chunk that a step sends, in (0, 1]
    scope                what they are the largest of: "model", "tensor", "balanced" or "chunk", see DGC
    local                None, or how a rank's own gradient L joins the mean G (Algorithm 2): "sum" (G + L) / 2,
                         "partial" G - S + L with S what the rank sent, "error" G + E with E what it kept
    sync_every           optimizer steps between two averagings of the parameters, with a local mode; None: never
    warmup               None, steps or "3 epochs" in which the dropped share grows, or a schedule
    momentum_correction  accumulate velocities instead of gradients; needs torch.optim.SGD
    clip_norm            norm at which the mean gradient would be clipped; None: no clipping
    values, indices      how they travel, see DGC
    residual             how residuals and velocities are stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ?: ("4.weight", "head.*")

    Nothing is lost: what is not sent stays in the residual, x = g + e, e = x - sent (Algorithm 1, lines 3 to 7).

    With a local mode the ranks' parameters differ between two averagings: evaluate and save inside
    ``wire.averaged()``. With ``sync_every=None`` every rank ends with parameters of its own. The local gradient is the
    clipped one, and what travels dense has no local part. "error" gives the residual away, so nothing waits any more.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    also_called: ClassVar[Mapping[str, str]] = {"local": "dropping:local=partial"}
    advised: ClassVar[Advised] = Advised(
        other=("dropping:local=partial",),
        why_not_sgd="alone dgc's forerunner; with local gradients for other optimizers",
        rank=4,
        suits="Transformers and GRUs",
        wants="it was trained on Transformers and GRUs, for images take terngrad or dense:dtype=bf16; give it a "
        "warm-up of a few epochs' steps (warmup=STEPS), evaluate and save inside wire.averaged()",
    )

    density: float = 0.03
    scope: Scope = "model"
    local: LocalMode | None = None
    sync_every: int | None = 500
    warmup: Warmup = None
    momentum_correction: bool = False
    clip_norm: float | None = None
    values: Values = "int8"
    indices: Indices = "rice"
    residual: Residual = "fp32"
    dense_below: int = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_sparse(self)
        one_of(self, "scope", get_args(Scope))
        one_of(self, "local", (None, *get_args(LocalMode)))
        require(
            self.sync_every is None or is_count(self.sync_every, 1),
            f"dropping: sync_every must be None (never) or a number of steps of at least 1, not {self.sync_every!r}",
        )
        check_bool(self, "momentum_correction")
        require(
            not (self.local and self.momentum_correction),
            "dropping: local gradients and momentum_correction do not go together; choose one",
        )

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return self.momentum_correction

    @property
    def averaging_interval(self) -> int | None:
        return self.sync_every if self.local else None

    @property
    def replicas_drift(self) -> bool:
        return self.local is not None

    @property
    def applies_local_gradients(self) -> bool:
        return self.local is not None

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        kept, corrected = self.state_dtype, self.momentum_correction
        residual = MomentumCorrection(masking=False, dtype=kept, direct=False) if corrected else ErrorFeedback(kept)
        memory = clipped(residual, self.clip_norm, net)
        workspace = Workspace()
        compressor = TopK(self.density, schedule_of(self.warmup, DropRatioWarmup), self.scope, workspace=workspace)
        collective = AllGather(gathered_codec(self), workspace)
        return Exchange(
            memory, compressor, collective, net, whole_model=self.whole_model, local=self.local, workspace=workspace
        )

    @property
    def whole_model(self) -> bool:
        return self.scope == "model" or super().whole_model
