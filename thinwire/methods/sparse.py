"""Methods that send the largest elements and keep the rest: DGC, global top-k, gradient dropping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.codecs import SparseCodec
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.values import VALUE_CODES
from thinwire.collectives import AllGather, GlobalTopK
from thinwire.compressors import TopK
from thinwire.compressors.quotas import SCOPES
from thinwire.engine.aggregators import Exchange
from thinwire.engine.local_gradients import LOCAL_MODES
from thinwire.engine.protocols import Aggregator
from thinwire.engine.schedules import DropRatioWarmup, ExponentialWarmup, ListedWarmup, Schedule
from thinwire.engine.workspace import Workspace
from thinwire.memory import ErrorFeedback, MomentumCorrection
from thinwire.methods.base import Method, clipped
from thinwire.methods.options import (
    check_bool,
    check_clip_norm,
    check_dense_below,
    check_density,
    check_exclude,
    is_count,
    one_of,
    require,
)
from thinwire.transport import Net

Warmup = Schedule | int | None


def _schedule(warmup: Warmup, paper: type) -> Schedule | None:
    return paper(warmup) if isinstance(warmup, int) else warmup


def _momentum_memory(method: DGC | GTopK, corrected: bool) -> MomentumCorrection | ErrorFeedback:
    if not corrected:
        return ErrorFeedback(method.state_dtype)
    return MomentumCorrection(method.factor_masking, method.state_dtype, method.lr_rescaling, method.direct_decay)


def _codec(method: DGC | GradientDropping) -> SparseCodec:
    # Where buckets may share an exchange, entries must not wait because of what they share it with.
    return SparseCodec(method.values, method.indices, holds_any=method.bucket_independent and not method.whole_model)


def _check_corrected(method: DGC | GTopK) -> None:
    """What acts on velocities needs them."""
    check_bool(method, "factor_masking", "lr_rescaling", "direct_decay")
    corrected = method.momentum_correction is not False
    require(
        corrected or not method.factor_masking,
        f"{method.name}: factor_masking clears velocities, which only momentum_correction keeps; leave one of them out",
    )
    require(
        corrected or not method.lr_rescaling,
        f"{method.name}: lr_rescaling needs momentum_correction, because an optimizer's own momentum would mix what "
        "comes in units of different learning rates; leave one of them out",
    )


@dataclass(frozen=True, kw_only=True)
class DGC(Method):
    """Deep Gradient Compression: top-k of every tensor, momentum correction, factor masking, local clipping, warm-up.

    The defaults are the setting with which VGG-16 (two seeds, with a learning rate that rose for four epochs) and
    ResNet-20 (two, on average) kept dense accuracy, as they did not with the paper's (docs/design.md, "Defaults and
    why"): 2 % of the model, divided between the tensors by the square roots of their sizes, with 8-bit values and no
    factor masking. Give it a warm-up of a few epochs' steps, and a learning rate that rises meanwhile. What suits a
    network better (docs/results.md):

    - residual networks and an LSTM: ``density=0.006`` kept dense accuracy on average over seeds, at a third to two
      thirds of the bytes. VGG-16 lost 0.4 points with it (two seeds; 0.7 with a learning rate that rose within an
      epoch)
    - an LSTM, short schedules: ``lr_rescaling=True`` with equal shares ended 1 % in perplexity better than without it
      (one seed, 0.6 %)
    - very deep networks: a learning rate that rises as long as the warm-up takes. ResNet-110 lost 2.9 points when it
      rose within an epoch, and nothing with four (one seed, 0.6 % of every tensor)

    The paper's own setting is ``DGC(density=0.001, scope="tensor", values="fp32", factor_masking=True)``.

    ``scope``: with "tensor" every tensor sends the same share of its elements, as in the paper. With "balanced" a small
    one sends a larger share than a large one, the sum is the same (thinwire/compressors/quotas.py). "model" takes the
    largest elements of the whole model, where a tensor with small gradients waits for the others.
    With "model" AN4's error rate rose from 29 to 35 % (one seed, 0.6 %); it also waits for the end of backward, so
    nothing overlaps.

    ``lr_rescaling``: while a schedule lowers the learning rate, what waits would be applied with a smaller one than its
    gradients had. With it v = (eta_{t-1} / eta_t) v + u, as in dist-EF-blockSGDM (Algorithm 4), and every gradient
    keeps the weight of its own step.

    ``direct_decay``: all ranks know the weights, so weight decay need not wait until an element is sent. Every step
    applies what momentum makes of it, decay / (1 - m) times the weights, and takes that off what waits; nothing is lost
    or added (see MomentumCorrection, also for what factor_masking changes). The paper is silent; its authors' code
    decays beside the compression, too.

    Tensors of fewer than ``dense_below`` elements, and one-dimensional ones, travel dense in the same frame; 0
    compresses everything. ``warmup`` as a number is the length in steps of the paper's 25 %, 6.25 %, ... ramp.
    ``clip_norm`` (here and in every method that accumulates) is the norm at which the mean gradient would be clipped:
    each worker's own is scaled down to clip_norm * sqrt(N) before it is accumulated (section 2.2, see LocalClipping),
    weight decay is added behind that, and the exchange waits for the whole model.
    ``values`` is how the chosen values travel ("fp32", "fp16", "bf16", "int8", "int4"); what rounding takes away stays
    in the residual. ``residual="bf16"`` (here and in every method with a memory) keeps residuals and velocities in half
    the memory, rounded up or down by chance so that on average nothing is lost.

    density              the share of the model, or of every tensor, that is sent in a step, in (0, 1]
    selection            "exact": the largest elements; "sampled": a threshold estimated from a sample
    scope                what they are the largest of: "balanced" (each tensor, which sends by the square root of its
                         size), "tensor" (each one, which sends the same share), "model"
    momentum_correction  accumulate velocities instead of gradients; needs torch.optim.SGD
    factor_masking       clear the velocity of what was sent (section 2.3)
    lr_rescaling         apply what waited with the learning rates of its own steps, not with the one at which it leaves
    direct_decay         with momentum correction: weight decay is applied at once, and not when its element is sent
    clip_norm            the norm at which the mean gradient would be clipped; None: no clipping
    warmup               None, steps of the ramp, or a schedule: an object with density(step, final)
    values               how values travel: "fp32", "fp16", "bf16", "int8", "int4"
    indices              how indices travel: "rice" (shortest), "delta16", "int32"
    residual             how what is kept is stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ? as in file names: ("4.weight", "head.*")
    """

    name: ClassVar[str] = "dgc"
    came_later: ClassVar[Mapping[str, Any]] = {"direct_decay": False, "scope": "tensor"}
    density: float = 0.02
    selection: str = "exact"
    scope: str = "balanced"
    momentum_correction: bool = True
    factor_masking: bool = False
    lr_rescaling: bool = False
    direct_decay: bool = True
    clip_norm: float | None = None
    warmup: Warmup = None
    values: str = "int8"
    indices: str = "rice"
    residual: str = "fp32"
    dense_below: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_density(self)
        one_of(self, "selection", ("exact", "sampled"))
        one_of(self, "scope", SCOPES)
        one_of(self, "values", tuple(VALUE_CODES))
        one_of(self, "indices", tuple(INDEX_CODES))
        one_of(self, "residual", ("fp32", "bf16"))
        check_bool(self, "momentum_correction")
        _check_corrected(self)
        check_clip_norm(self)
        check_dense_below(self)
        check_exclude(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return self.momentum_correction

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        memory = _momentum_memory(self, self.momentum_correction)
        warmup = _schedule(self.warmup, ExponentialWarmup)
        workspace = Workspace()
        compressor = TopK(self.density, warmup, self.scope, self.selection == "sampled", workspace)
        collective = AllGather(self.codec, workspace)
        clipping = clipped(memory, self.clip_norm, net)
        return Exchange(clipping, compressor, collective, net, whole_model=self.whole_model, workspace=workspace)

    @property
    def whole_model(self) -> bool:
        return self.scope == "model" or super().whole_model

    @property
    def codec(self) -> SparseCodec:
        return _codec(self)


@dataclass(frozen=True, kw_only=True)
class GTopK(Method):
    """Global top-k: only the k largest sums over all ranks are applied, in O(k log P) bytes.

    With torch.optim.SGD its momentum acts in front of the compression, as DGC's does (``momentum_correction=None``;
    other optimizers keep their own, True insists, False leaves it to the optimizer as the paper does). At 3 %, the
    default, and behind a warm-up of four epochs (Penn Treebank: one), ResNet-20 and VGG-16 on CIFAR-10 and an LSTM on
    Penn Treebank ended where dense did (the latter two: one seed); at 1 % 0.5 and 0.3 points and 5 % in perplexity
    behind, at the paper's ``density=0.001`` without momentum correction 5.1 points on ResNet-20 in 30 epochs and 1.7
    in 140 (docs/design.md, "Defaults and why").
    ResNet-110 did, too (one seed), with ``direct_decay=True`` and a learning rate that rose as long as the warm-up
    took. With 8 ranks ResNet-20 lost 0.24 points (two seeds); nothing was trained with more. Its lists need memory:
    nine times the density, so a quarter of the gradient's.

    density              the share of the whole model that is sent in a step, in (0, 1]
    warmup               None, steps of the paper's list of densities, or a schedule
    momentum_correction  accumulate velocities instead of gradients; None: where the optimizer is torch.optim.SGD
    factor_masking       with momentum correction: clear the velocity of what was applied, as DGC can
    lr_rescaling         with momentum correction: apply what waited with the learning rates of its own steps
    direct_decay         with momentum correction: weight decay is applied at once, and not when its element is sent
    clip_norm            the norm at which the mean gradient would be clipped; None: no clipping
    values, indices      how they travel, see DGC
    residual             how what is kept is stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ?: ("4.weight", "head.*")
    """

    name: ClassVar[str] = "gtopk"
    density: float = 0.03
    warmup: Warmup = None
    momentum_correction: bool | None = None
    factor_masking: bool = False
    lr_rescaling: bool = False
    direct_decay: bool = False
    clip_norm: float | None = None
    values: str = "fp32"
    indices: str = "rice"
    residual: str = "fp32"
    dense_below: int = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_density(self)
        one_of(self, "values", tuple(VALUE_CODES))
        one_of(self, "indices", tuple(INDEX_CODES))
        one_of(self, "residual", ("fp32", "bf16"))
        if self.momentum_correction is not None:
            check_bool(self, "momentum_correction")
        _check_corrected(self)
        check_clip_norm(self)
        check_dense_below(self)
        check_exclude(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd if self.momentum_correction is None else self.momentum_correction

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        corrected = self.takes_momentum(optimizer_is_sgd)
        for option in ("factor_masking", "lr_rescaling"):
            require(
                corrected or not getattr(self, option),
                f"gtopk: {option} needs the momentum of torch.optim.SGD, and this is another optimizer; leave it out",
            )
        memory = clipped(_momentum_memory(self, corrected), self.clip_norm, net)
        workspace = Workspace()
        compressor = TopK(self.density, _schedule(self.warmup, ListedWarmup), "model", workspace=workspace)
        collective = GlobalTopK(SparseCodec(self.values, self.indices), workspace)
        return Exchange(memory, compressor, collective, net, whole_model=self.whole_model, workspace=workspace)

    @property
    def whole_model(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class GradientDropping(Method):
    """Gradient dropping, alone or combined with local gradients ("sum", "partial", "error").

    The default of 3 % in 8 bits sends what the paper's 1 % in 32 bits sends. With ``local="partial"`` a Transformer on
    Multi30k ended 0.3 BLEU behind dense with it (three seeds), and 0.7 at 1 % (two); a GRU where dense did in 30 epochs
    and 0.55 behind in 15 (two each; docs/results.md). The paper's own setting is
    ``GradientDropping(density=0.01, values="fp32")``. Its lists need memory: with 4 ranks ten times the density, so
    30 % of the gradient's.

    With a local mode the replicas drift apart and are averaged every ``sync_every`` optimizer steps; with
    ``clip_norm``, the local gradient is the clipped one. What travels dense has no local part: all of it is global.
    ``sync_every=None`` is for comparisons: no step averages anything, and every rank ends with parameters of its own.

    density              the share of the whole model, or of every tensor, that is sent in a step, in (0, 1]
    scope                what they are the largest of: "model", "tensor" or "balanced" (each one), see DGC
    local                None, or how a rank's own gradient is combined with the global one
    sync_every           optimizer steps between two averagings of the parameters, with a local mode; None: never
    warmup               None, steps in which the dropped share grows, or a schedule
    momentum_correction  accumulate velocities instead of gradients; needs torch.optim.SGD
    clip_norm            the norm at which the mean gradient would be clipped; None: no clipping
    values, indices      how they travel, see DGC
    residual             how what is kept is stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ?: ("4.weight", "head.*")
    """

    name: ClassVar[str] = "dropping"
    came_later: ClassVar[Mapping[str, Any]] = {"values": "fp32"}
    density: float = 0.03
    scope: str = "model"
    local: str | None = None
    sync_every: int | None = 500
    warmup: Warmup = None
    momentum_correction: bool = False
    clip_norm: float | None = None
    values: str = "int8"
    indices: str = "rice"
    residual: str = "fp32"
    dense_below: int = 0
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_density(self)
        check_clip_norm(self)
        one_of(self, "scope", SCOPES)
        one_of(self, "values", tuple(VALUE_CODES))
        one_of(self, "indices", tuple(INDEX_CODES))
        one_of(self, "residual", ("fp32", "bf16"))
        one_of(self, "local", (None, *LOCAL_MODES))
        check_dense_below(self)
        check_exclude(self)
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

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        kept = self.state_dtype
        corrected = self.momentum_correction
        residual = MomentumCorrection(masking=False, dtype=kept, direct=False) if corrected else ErrorFeedback(kept)
        memory = clipped(residual, self.clip_norm, net)
        workspace = Workspace()
        compressor = TopK(self.density, _schedule(self.warmup, DropRatioWarmup), self.scope, workspace=workspace)
        collective = AllGather(self.codec, workspace)
        return Exchange(
            memory, compressor, collective, net, whole_model=self.whole_model, local=self.local, workspace=workspace
        )

    @property
    def whole_model(self) -> bool:
        return self.scope == "model" or super().whole_model

    @property
    def codec(self) -> SparseCodec:
        return _codec(self)
