"""What compression is compared with: the plain mean, and no communication at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire.engine.aggregators import DenseMean, NoopMean
from thinwire.engine.protocols import Aggregator
from thinwire.methods.base import Method
from thinwire.methods.options import one_of
from thinwire.transport import Net


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
