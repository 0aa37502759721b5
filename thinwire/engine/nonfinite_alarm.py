"""What ranks tell each other about a gradient that is not finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from thinwire.engine.context import ExchangeContext
from thinwire.errors import NonFiniteError
from thinwire.kernels import GRADIENT_LIMIT, first_nonfinite


@dataclass(frozen=True)
class Alarm:
    """Whether a gradient of this exchange is not finite, on this rank or, as frames tell, on another.

    A value: who learns more makes a new one. Every frame that a rank builds while its alarm rings says so, so that one
    exchange is enough for all ranks to know.
    """

    parameter: str | None = None  # on a rank that has the bad gradient
    flag: Tensor | None = None  # (1,) int32 on a GPU, not zero where this rank's gradient is bad
    heard_from: str | None = None

    @property
    def rings(self) -> bool:
        return self.parameter is not None or self.heard_from is not None

    def heard(self, told: Iterable[tuple[str, bool]]) -> Alarm:
        """With what frames told: their origins, and whether their senders' alarms ring."""
        if self.heard_from is not None:
            return self
        origin = next((origin for origin, rings in told if rings), None)
        return self if origin is None else replace(self, heard_from=origin)

    def raise_if_rings(self, context: ExchangeContext, gradients: Sequence[Tensor]) -> None:
        """Raise NonFiniteError on every rank of the exchange; on a GPU the host learns here what the flag says."""
        if self.flag is not None and int(self.flag):
            bad = first_nonfinite(gradients, GRADIENT_LIMIT)
            replace(self, parameter=context.layout.segments[bad or 0].name)._raise(context)
        if self.rings:
            self._raise(context)

    def _raise(self, context: ExchangeContext) -> NoReturn:
        whose = f"of {self.parameter!r} on this rank" if self.parameter else f"on another rank ({self.heard_from})"
        raise NonFiniteError(
            f"the gradient {whose} holds an inf or a nan, or a number beyond {GRADIENT_LIMIT:.1e}, at step "
            f"{context.step}; it entered no residual; lower the learning rate or the loss scale, or pass over such "
            'steps with on_nonfinite="skip" or scaler=...'
        )


QUIET = Alarm()


def device_flag(device: torch.device) -> Tensor:  # -> (1,) int32
    """Where kernels report a gradient that is not finite, without a word to the host."""
    return torch.zeros(1, dtype=torch.int32, device=device)
