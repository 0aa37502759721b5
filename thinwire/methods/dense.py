"""No compression: the plain mean, which everything else is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch

from thinwire.engine.aggregators import DenseMean
from thinwire.engine.protocols import Aggregator
from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.choices import DenseType
from thinwire.methods.options import one_of
from thinwire.methods.registry import method
from thinwire.transport import Net

_SETTINGS = ("dense", "dense:dtype=bf16")


@method("dense")
@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """No compression: the plain mean, with fp32 or 16 bits on the wire.

    dtype  how gradients travel: "fp32", "bf16", "fp16"

    With 16 bits gradients and their mean are rounded to the nearest, and nothing is kept for later.
    """

    benched: ClassVar[tuple[str, ...]] = ()
    also_called: ClassVar[Mapping[str, str]] = {"bf16": _SETTINGS[1], "fp16": "dense:dtype=fp16", "fp32": "dense"}
    advised: ClassVar[Advised] = Advised(sgd=_SETTINGS, other=_SETTINGS, rank=0, suits="images")
    _types: ClassVar[dict[str, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    dtype: DenseType = "fp32"

    def __post_init__(self) -> None:
        one_of(self, "dtype", get_args(DenseType))

    @property
    def gives_step_gradient(self) -> bool:
        return True

    def aggregator(self, net: Net, optimizer_is_sgd: bool) -> Aggregator:
        return DenseMean(net, self._types[self.dtype])
