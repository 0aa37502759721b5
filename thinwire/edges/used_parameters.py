"""Which parameters a pass of any replica used: all replicas exchange these, or they would exchange different things."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from thinwire.transport import Net, overhead

# In which the ranks ask each other; where all of them used everything, they save the round trip from then on.
PASSES = 3
UNUSED_LATER = (
    "parameter {!r} got no gradient in this backward pass, and all did in the first ones, so other replicas may wait; "
    "call model.set_reduce_scatter_unused_params(True), which makes zeros of what a pass does not use"
)


class UsedParameters:
    """Asks in every pass while one of the first has left something out on some rank."""

    def __init__(self) -> None:
        self._passes = 0
        self._all_used = True  # by all ranks in all passes so far

    def agreed(self, arrived: Collection[str], owners: Mapping[str, Tensor], net: Net) -> list[str]:
        """The names that some rank of the net used, in the model's order; collective."""
        trained = [name for name, parameter in owners.items() if parameter.requires_grad]
        left_out = [name for name in trained if name not in arrived]
        if self._passes >= PASSES and self._all_used:
            if left_out:
                raise ValueError(UNUSED_LATER.format(left_out[0]))
            return [name for name in owners if name in arrived]
        self._passes += 1
        used = [name in arrived for name in owners]
        flags = torch.tensor([*used, bool(left_out)], dtype=torch.uint8, device=net.device)  # type: ignore[attr-defined]
        net.stage = "agree on used parameters"
        with overhead(net):
            net.all_reduce(flags, largest=True)
        *anywhere, some_left_out = flags.tolist()
        self._all_used = self._all_used and not some_left_out
        return [name for name, flag in zip(owners, anywhere, strict=True) if flag]
