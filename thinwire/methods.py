"""The methods: frozen, validated descriptions that are assembled from the engine's parts.

Every option is keyword-only and checked when the object is made; ``parse_method`` reads the same from one string.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch

from thinwire.codecs import SparseCodec
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.values import VALUE_CODES
from thinwire.collectives import AllGather, BlockSignServer, GlobalTopK, TernaryServer, VoteServer
from thinwire.compressors import BlockSigns, Sign, Ternarize, TopK
from thinwire.exchange import DenseMean, Exchange, NoopMean
from thinwire.layout import Layout
from thinwire.local import LOCAL_MODES
from thinwire.memory import ErrorFeedback, LocalClipping, MomentumCorrection, NoMemory, RescaledError, Velocity
from thinwire.method_options import (
    check_bool,
    check_clip_norm,
    check_dense_below,
    check_density,
    check_exclude,
    is_count,
    is_number,
    one_of,
    require,
)
from thinwire.method_strings import read_method, spell
from thinwire.protocols import Aggregator, Memory
from thinwire.schedules import DropRatioWarmup, ExponentialWarmup, ListedWarmup, Schedule
from thinwire.scratch import Scratch
from thinwire.transport import Net

Warmup = Schedule | int | None


@dataclass(frozen=True, kw_only=True)
class Method:
    """What all methods have. ``name`` is the one used in method strings.

    ``takes_momentum`` and ``takes_weight_decay`` say whether they are applied in front of the compression instead of
    by the optimizer; ``averaging_interval`` is the number of optimizer steps between parameter averagings.
    """

    name: ClassVar[str] = ""
    came_later: ClassVar[Mapping[str, Any]] = {}  # what options mean in older states, where defaults differ

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return False

    def takes_weight_decay(self, optimizer_is_sgd: bool) -> bool:
        return self.takes_momentum(optimizer_is_sgd)

    @property
    def averaging_interval(self) -> int | None:
        return None

    @property
    def estimates_mean(self) -> bool:
        """Whether what it gives stands for the mean gradient, so that the mean itself may take its place."""
        return True

    @property
    def state_dtype(self) -> torch.dtype:
        """The type in which residuals and velocities are kept between two steps."""
        return torch.bfloat16 if getattr(self, "residual", "fp32") == "bf16" else torch.float32

    @property
    def replicas_drift(self) -> bool:
        """Whether ranks go different ways, so that they must be made equal when the method is left."""
        return self.averaging_interval is not None

    def is_coded(self, name: str, shape: torch.Size) -> bool:
        """Whether a parameter goes through the compressor; the others travel dense in the same frame.

        Those are what ``exclude`` names and, with a ``dense_below`` above 0, one-dimensional tensors and those of fewer
        elements than it says.
        """
        below: int = getattr(self, "dense_below", 0)
        small = below > 0 and (len(shape) <= 1 or shape.numel() < below)
        return not small and not any(fnmatchcase(name, pattern) for pattern in getattr(self, "exclude", ()))

    def layout(self, rows: Iterable[tuple[str, int, torch.Size]], *, compress: bool = True) -> Layout:
        """One exchange's layout of (name, ordinal, shape) rows under this method; without ``compress`` all travel
        dense, and nothing of them is kept back."""
        return Layout.of(
            [(name, place, shape.numel(), compress and self.is_coded(name, shape)) for name, place, shape in rows]
        )

    @property
    def merges_alike(self) -> bool:
        """Whether a tensor's result is the same whichever tensors share its exchange; scales of int8 and int4 values
        are shared."""
        return getattr(self, "values", "fp32") not in ("int8", "int4")

    def check_exclude(self, names: list[str]) -> None:
        """Raise when an excluded pattern matches no parameter."""
        for pattern in getattr(self, "exclude", ()):
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                raise ValueError(
                    f"{self.name}: exclude pattern {pattern!r} matches no parameter; "
                    f"there are for example {', '.join(near)}"
                )

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        raise AssertionError("every method assembles its own parts")

    def __str__(self) -> str:
        return self._string([f.name for f in fields(self) if getattr(self, f.name) != f.default])

    @property
    def in_full(self) -> str:
        """The string with every option, which means the same whatever the defaults are by then."""
        return self._string([f.name for f in fields(self)])

    def in_full_now(self, saved: str) -> str:
        """What a method of this kind that was saved ``in_full`` is in full now: options that came later mean what was
        before, which is their default or what ``came_later`` says. Anything else stays as it is."""
        try:
            method = read_method(saved, {self.name: type(self)})
            absent = {option: old for option, old in self.came_later.items() if f"{option}=" not in saved}
            return replace(method, **absent).in_full
        except ValueError:
            return saved

    def _string(self, options: list[str]) -> str:
        given = [f"{option}={spell(getattr(self, option))}" for option in options]
        return self.name + (":" + ",".join(given) if given else "")


def _schedule(warmup: Warmup, paper: type) -> Schedule | None:
    return paper(warmup) if isinstance(warmup, int) else warmup


def _momentum_memory(method: Any, corrected: bool, masking: bool) -> MomentumCorrection | ErrorFeedback:
    kept = method.state_dtype
    return MomentumCorrection(masking, kept) if corrected else ErrorFeedback(kept)


def _clipped(memory: Memory, method: Any, net: Net) -> Memory:
    """The memory behind local clipping, where the method clips; the norm is the whole gradient's (whole_model)."""
    return LocalClipping(memory, method.clip_norm, net.size) if method.clip_norm is not None else memory


@dataclass(frozen=True, kw_only=True)
class DGC(Method):
    """Deep Gradient Compression: top-k of every tensor, momentum correction, factor masking, local clipping, warm-up.

    The defaults are the setting that kept dense accuracy where the paper's did not (docs/design.md, "Defaults and
    why"): 0.6 % of every tensor with 8-bit values and no factor masking. It was measured behind a warm-up of one to
    four epochs, whose length in steps is yours to give. The paper's own setting is
    ``DGC(density=0.001, values="fp32", factor_masking=True)``.

    Tensors of fewer than ``dense_below`` elements, and one-dimensional ones, travel dense in the same frame; 0
    compresses everything. ``warmup`` as a number is the length in steps of the paper's 25 %, 6.25 %, ... ramp.
    ``clip_norm`` (here and in every method that accumulates) is the norm at which the mean gradient would be clipped:
    each worker's own is scaled down to clip_norm * sqrt(N) before it is accumulated (section 2.2, see LocalClipping),
    weight decay is added behind that, and the exchange waits for the whole model.
    ``values`` is how the chosen values travel ("fp32", "fp16", "bf16", "int8", "int4"); what rounding takes away stays
    in the residual. ``residual="bf16"`` (here and in every method with a memory) keeps residuals and velocities in half
    the memory, rounded up or down by chance so that on average nothing is lost.

    density              the share of every tensor that is sent in a step, in (0, 1]
    selection            "exact": the largest elements; "sampled": a threshold estimated from a sample
    momentum_correction  accumulate velocities instead of gradients; needs torch.optim.SGD
    factor_masking       clear the velocity of what was sent (section 2.3)
    clip_norm            the norm at which the mean gradient would be clipped; None: no clipping
    warmup               None, steps of the ramp, or a schedule: an object with density(step, final)
    values               how values travel: "fp32", "fp16", "bf16", "int8", "int4"
    indices              how indices travel: "rice" (shortest), "delta16", "int32"
    residual             how what is kept is stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ? as in file names: ("4.weight", "head.*")
    """

    name: ClassVar[str] = "dgc"
    density: float = 0.006
    selection: str = "exact"
    momentum_correction: bool = True
    factor_masking: bool = False
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
        one_of(self, "values", tuple(VALUE_CODES))
        one_of(self, "indices", tuple(INDEX_CODES))
        one_of(self, "residual", ("fp32", "bf16"))
        check_bool(self, "momentum_correction", "factor_masking")
        check_clip_norm(self)
        check_dense_below(self)
        check_exclude(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return self.momentum_correction

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        memory = _clipped(_momentum_memory(self, self.momentum_correction, self.factor_masking), self, net)
        warmup = _schedule(self.warmup, ExponentialWarmup)
        scratch = Scratch()
        compressor = TopK(self.density, warmup, sampled=self.selection == "sampled", scratch=scratch)
        # Clipping needs the norm of the whole gradient, so it waits for the last bucket.
        whole = self.clip_norm is not None
        collective = AllGather(self.codec, scratch)
        return Exchange(memory, compressor, collective, net, whole_model=whole, scratch=scratch)

    @property
    def codec(self) -> SparseCodec:
        # Where buckets may share an exchange, entries must not wait because of what they share it with.
        return SparseCodec(self.values, self.indices, holds_any=self.merges_alike)


@dataclass(frozen=True, kw_only=True)
class GTopK(Method):
    """Global top-k: only the k largest sums over all ranks are applied, in O(k log P) bytes.

    With torch.optim.SGD its momentum acts in front of the compression, as DGC's does (``momentum_correction=None``;
    other optimizers keep their own, True insists, False leaves it to the optimizer as the paper does). So ResNet-20 on
    CIFAR-10 ended 0.09 points behind dense in 30 epochs at 1 %, the default, and 1.15 behind without it; at the paper's
    ``density=0.001`` without it 5.1 (docs/design.md, "Defaults and why"). All of these are one seed behind a warm-up of
    four epochs; a language model (Penn Treebank) lost 9 % in perplexity at 0.5 % with it.

    density              the share of the whole model that is sent in a step, in (0, 1]
    warmup               None, steps of the paper's list of densities, or a schedule
    momentum_correction  accumulate velocities instead of gradients; None: where the optimizer is torch.optim.SGD
    clip_norm            the norm at which the mean gradient would be clipped; None: no clipping
    values, indices      how they travel, see DGC
    residual             how what is kept is stored: "fp32", "bf16"
    dense_below          smaller tensors and one-dimensional ones travel dense; 0: none
    exclude              names of parameters that travel dense, with * and ?: ("4.weight", "head.*")
    """

    name: ClassVar[str] = "gtopk"
    density: float = 0.01
    warmup: Warmup = None
    momentum_correction: bool | None = None
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
        check_clip_norm(self)
        check_dense_below(self)
        check_exclude(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd if self.momentum_correction is None else self.momentum_correction

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        corrected = self.takes_momentum(optimizer_is_sgd)
        memory = _clipped(_momentum_memory(self, corrected, masking=False), self, net)
        scratch = Scratch()
        compressor = TopK(self.density, _schedule(self.warmup, ListedWarmup), per_tensor=False, scratch=scratch)
        collective = GlobalTopK(SparseCodec(self.values, self.indices), scratch)
        return Exchange(memory, compressor, collective, net, whole_model=True, scratch=scratch)


@dataclass(frozen=True, kw_only=True)
class TernGrad(Method):
    """TernGrad: stochastic ternary gradients, works with every optimizer.

    Small and one-dimensional tensors stay float (``dense_below``), and so should the output layer, as the paper
    suggests (section 4.2): from 1,024 elements on it must be named, ``exclude=("fc.*",)`` with the names of
    model.named_parameters(). ResNet-20 with both ended 0.95 points behind dense in 60 epochs (3 seeds; its first
    convolution, which is below 1,024 too, was ternary there), and 1.56 behind in 30 with one-dimensional tensors
    ternary. The paper's own setting is ``dense_below=0`` with the output layer excluded.

    ``scaler="model"`` takes one scaler for all tensors instead of one each: the paper's ablation (section 3.3), which
    costs accuracy and waits for the whole model. Clipping stays per tensor: it answers to the range within a layer.

    clip_sigma    clip every tensor at so many of its standard deviations first (section 3.3); None: do not
    share_scaler  all ranks use the largest scaler (Eq. 4), so that levels can be added up; False: answers in fp32
    scaler        "tensor": one a tensor; "model": one for all
    dense_below   smaller tensors and one-dimensional ones travel dense; 0: none
    exclude       names of parameters that travel dense, with * and ?: ("4.weight", "head.*"), the output layer
    topology      "sharded": every rank serves a part; "server": rank 0 serves all
    seed          of the coins that round
    """

    name: ClassVar[str] = "terngrad"
    came_later: ClassVar[Mapping[str, Any]] = {"dense_below": 0}
    clip_sigma: float | None = 2.5
    share_scaler: bool = True
    scaler: str = "tensor"
    dense_below: int = 1024
    exclude: tuple[str, ...] = ()
    topology: str = "sharded"
    seed: int = 0

    def __post_init__(self) -> None:
        clip = self.clip_sigma
        ok = clip is None or (is_number(clip) and clip > 0)
        require(ok, f"terngrad: clip_sigma must be None or above 0, not {clip!r}")
        check_bool(self, "share_scaler")
        one_of(self, "scaler", ("tensor", "model"))
        one_of(self, "topology", ("sharded", "server"))
        require(is_count(self.seed, 0), f"terngrad: seed must be a whole number of at least 0, not {self.seed!r}")
        check_dense_below(self)
        check_exclude(self)

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        server = TernaryServer(self.topology, self.share_scaler)
        return Exchange(NoMemory(), self.compressor(), server, net, whole_model=self.scaler == "model")

    def compressor(self) -> Ternarize:
        return Ternarize(self.clip_sigma, self.share_scaler, self.seed, whole_model=self.scaler == "model")

    @property
    def merges_alike(self) -> bool:
        return self.scaler == "tensor"


@dataclass(frozen=True, kw_only=True)
class BlockSign(Method):
    """dist-EF-blockSGDM: one bit an element each way, error feedback on worker and server.

    With torch.optim.SGD its momentum, Nesterov and weight decay act in front of the compression (Algorithm 4); any
    other optimizer keeps its own and gets the error-compensated gradient (Algorithm 3).
    Small and one-dimensional tensors travel dense (``dense_below``), and so should the output layer, which gains most:
    from 1,024 elements on it must be named, ``exclude=("fc.*",)`` with the names of model.named_parameters(). ResNet-20
    with both ended 0.64 points ahead of dense in 60 epochs (1 seed; its first convolution, which is below 1,024 too,
    travelled as signs there); everything as signs, as in the paper (``dense_below=0``), lost 3 points in 20.

    block        elements that share a scale: "tensor", or a number
    two_way      the server answers in signs too and keeps its error; False: answers in fp32
    topology     "sharded": every rank serves a part; "server": rank 0 serves all
    clip_norm    the norm at which the mean gradient would be clipped; None: no clipping
    residual     how what is kept is stored: "fp32", "bf16"
    dense_below  smaller tensors and one-dimensional ones travel dense; 0: none
    exclude      names of parameters that travel dense, with * and ?: ("4.weight", "head.*"), the output layer
    """

    name: ClassVar[str] = "blocksign"
    block: str | int = "tensor"
    two_way: bool = True
    topology: str = "sharded"
    clip_norm: float | None = None
    residual: str = "fp32"
    dense_below: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of(self, "residual", ("fp32", "bf16"))
        check_clip_norm(self)
        ok = self.block == "tensor" or is_count(self.block, 1)
        require(ok, f'blocksign: block must be "tensor" or a number of elements of at least 1, not {self.block!r}')
        check_bool(self, "two_way")
        one_of(self, "topology", ("sharded", "server"))
        check_dense_below(self)
        check_exclude(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        block = self.block if isinstance(self.block, int) else None
        server = BlockSignServer(self.topology, block, self.two_way)
        memory = _clipped(RescaledError(optimizer_is_sgd, self.state_dtype), self, net)
        return Exchange(memory, BlockSigns(block), server, net, whole_model=self.clip_norm is not None)


@dataclass(frozen=True, kw_only=True)
class GradientDropping(Method):
    """Gradient dropping, alone or combined with local gradients ("sum", "partial", "error").

    With a local mode the replicas drift apart and are averaged every ``sync_every`` optimizer steps; with
    ``clip_norm``, the local gradient is the clipped one.

    density              the share of the whole model that is sent in a step, in (0, 1]
    local                None, or how a rank's own gradient is combined with the global one
    sync_every           optimizer steps between two averagings of the parameters, with a local mode
    warmup               None, steps in which the dropped share grows, or a schedule
    momentum_correction  accumulate velocities instead of gradients; needs torch.optim.SGD
    clip_norm            the norm at which the mean gradient would be clipped; None: no clipping
    residual             how what is kept is stored: "fp32", "bf16"
    """

    name: ClassVar[str] = "dropping"
    density: float = 0.01
    local: str | None = None
    sync_every: int = 500
    warmup: Warmup = None
    momentum_correction: bool = False
    clip_norm: float | None = None
    residual: str = "fp32"

    def __post_init__(self) -> None:
        check_density(self)
        check_clip_norm(self)
        one_of(self, "residual", ("fp32", "bf16"))
        one_of(self, "local", (None, *LOCAL_MODES))
        require(
            is_count(self.sync_every, 1), f"dropping: sync_every must be a number of steps, not {self.sync_every!r}"
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

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        memory = _clipped(_momentum_memory(self, self.momentum_correction, masking=False), self, net)
        scratch = Scratch()
        compressor = TopK(self.density, _schedule(self.warmup, DropRatioWarmup), per_tensor=False, scratch=scratch)
        collective = AllGather(SparseCodec(), scratch)
        return Exchange(memory, compressor, collective, net, whole_model=True, local=self.local, scratch=scratch)


@dataclass(frozen=True, kw_only=True)
class SignSGD(Method):
    """signSGD with majority vote; with the momentum of torch.optim.SGD it is Signum. Updates are +-1 times the rate.

    topology  "sharded": every rank serves a part; "server": rank 0 serves all
    """

    name: ClassVar[str] = "signsgd"
    topology: str = "sharded"

    def __post_init__(self) -> None:
        one_of(self, "topology", ("sharded", "server"))

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd

    @property
    def estimates_mean(self) -> bool:
        return False  # a vote's +-1 is an update of its own, with learning rates of its own

    def takes_weight_decay(self, optimizer_is_sgd: bool) -> bool:
        return False  # Signum decays the weights beside the vote, which is what the optimizer then does

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        memory = Velocity() if optimizer_is_sgd else NoMemory()
        return Exchange(memory, Sign(), VoteServer(self.topology), net)


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """No compression: the plain mean, with fp32 or 16 bits on the wire.

    dtype  how gradients travel: "fp32", "bf16", "fp16"
    """

    name: ClassVar[str] = "dense"
    dtype: str = "fp32"
    _types: ClassVar[dict[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    def __post_init__(self) -> None:
        one_of(self, "dtype", tuple(self._types))

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        return DenseMean(net, self._types[self.dtype])


@dataclass(frozen=True, kw_only=True)
class Noop(Method):
    """No communication at all: how fast would it be with a free network? Replicas drift apart; for measuring only."""

    name: ClassVar[str] = "noop"

    @property
    def replicas_drift(self) -> bool:
        return True

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        return NoopMean(net)


METHODS: dict[str, type[Method]] = {
    method.name: method for method in (DGC, GTopK, TernGrad, BlockSign, GradientDropping, SignSGD, Dense, Noop)
}


def parse_method(spec: str, methods: Mapping[str, type[Method]] = METHODS, others: Sequence[str] = ()) -> Method:
    """Return the method that a string such as ``dgc:density=0.01,values=fp32`` describes.

    Several patterns of one option are joined with ``+``. Anything unknown is a ValueError that names what is known:
    ``methods``, and the names in ``others``, which the caller knows itself.
    """
    return read_method(spec, methods, others)
