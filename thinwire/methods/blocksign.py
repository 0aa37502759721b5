"""dist-EF-blockSGDM (Zheng, Huang and Kwok, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from thinwire.collectives import BlockSignServer
from thinwire.compressors import BlockSigns
from thinwire.engine.aggregators import Exchange
from thinwire.engine.protocols import Aggregator
from thinwire.memory import RescaledError
from thinwire.methods.adviser_traits import EXCLUDE, UNMEASURED, Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import Residual, Topology
from thinwire.methods.options import (
    check_bool,
    check_clip_norm,
    check_dense_below,
    check_exclude,
    is_count,
    one_of,
    require,
)
from thinwire.methods.registry import method
from thinwire.methods.shared_parts import clipped
from thinwire.transport import Net


@method("blocksign")
@dataclass(frozen=True, kw_only=True)
class BlockSign(Method):
    """dist-EF-blockSGDM: one bit per element each way, with error feedback on workers and servers.

    block        elements that share a scale: "tensor", or a number
    two_way      the server answers in signs too and keeps its error; False: it answers in fp32
    topology     "sharded": every rank serves a part; "server": rank 0 serves all
    clip_norm    norm at which the mean gradient would be clipped; None: no clipping
    residual     how errors and velocities are stored: "fp32", "bf16"
    dense_below  smaller tensors and one-dimensional ones travel dense; 0: none
    exclude      names of parameters that travel dense, with * and ?: ("4.weight", "head.*")

    With torch.optim.SGD its momentum, Nesterov and weight decay act in front of the compression (Algorithm 4); any
    other optimizer keeps its own and gets the error-compensated gradient (Algorithm 3). A block b of v travels as
    ||v_b||_1 / d_b * sign(v_b) (section 3.2). Nothing is lost: the difference stays in the worker's error, and what
    the server's answer loses stays in the server's, both rescaled by eta_{t-1} / eta_t.

    The output layer gains most from travelling dense. From ``dense_below`` elements on it must be named:
    ``exclude=("fc.*",)``, with the names of model.named_parameters().
    """

    paper: ClassVar[str] = "blocksign:dense_below=0"  # everything is compressed
    benched: ClassVar[tuple[str, ...]] = ("blocksign",)
    advised: ClassVar[Advised] = Advised(sgd=("blocksign",), why_not_other=UNMEASURED, rank=3, wants=EXCLUDE)

    block: Literal["tensor"] | int = "tensor"
    two_way: bool = True
    topology: Topology = "sharded"
    clip_norm: float | None = None
    residual: Residual = "fp32"
    dense_below: int = 1024
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of(self, "residual", get_args(Residual))
        check_clip_norm(self)
        ok = self.block == "tensor" or is_count(self.block, 1)
        require(ok, f'blocksign: block must be "tensor" or a number of elements of at least 1, not {self.block!r}')
        check_bool(self, "two_way")
        one_of(self, "topology", get_args(Topology))
        check_dense_below(self)
        check_exclude(self)

    def takes_momentum(self, optimizer_is_sgd: bool) -> bool:
        return optimizer_is_sgd

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        block = self.block if isinstance(self.block, int) else None
        server = BlockSignServer(self.topology, block, self.two_way)
        memory = clipped(RescaledError(optimizer_is_sgd, self.state_dtype), self.clip_norm, net)
        return Exchange(memory, BlockSigns(block), server, net, whole_model=self.whole_model)
