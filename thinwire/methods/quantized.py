"""Methods that send every element in a few bits: TernGrad, dist-EF-blockSGDM, signSGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.collectives import BlockSignServer, TernaryServer, VoteServer
from thinwire.compressors import BlockSigns, Sign, Ternarize
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.memory import NoMemory, RescaledError, Velocity
from thinwire.methods.base import Method, clipped
from thinwire.methods.options import (
    check_bool,
    check_clip_norm,
    check_dense_below,
    check_exclude,
    is_count,
    is_number,
    one_of,
    require,
)
from thinwire.transport import Net


@dataclass(frozen=True, kw_only=True)
class TernGrad(Method):
    """TernGrad: stochastic ternary gradients, works with every optimizer.

    Small and one-dimensional tensors stay float (``dense_below``), and so should the output layer, as the paper
    suggests (section 4.2): from 1,024 elements on it must be named, ``exclude=("fc.*",)`` with the names of
    model.named_parameters(). ResNet-20 with both ended 0.95 points behind dense in 60 epochs (3 seeds; its first
    convolution, which is below 1,024 too, was ternary there), and 1.4 behind in 30 (1 seed) with one-dimensional
    tensors ternary. The paper's own setting is ``dense_below=0`` with the output layer excluded.

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
        return Exchange(NoMemory(), self.compressor(), server, net, whole_model=self.whole_model)

    @property
    def whole_model(self) -> bool:
        return self.scaler == "model"

    def compressor(self) -> Ternarize:
        return Ternarize(self.clip_sigma, self.share_scaler, self.seed, whole_model=self.whole_model)

    @property
    def bucket_independent(self) -> bool:
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
        memory = clipped(RescaledError(optimizer_is_sgd, self.state_dtype), self.clip_norm, net)
        return Exchange(memory, BlockSigns(block), server, net, whole_model=self.whole_model)


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
