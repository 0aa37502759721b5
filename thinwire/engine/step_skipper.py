"""Passing over a whole step when a gradient is not finite: for loss scaling, and for whoever prefers that to an error.

A step can only be passed over as a whole, so a reducer that may skip exchanges everything after the last bucket. All
ranks first agree, with one byte, whether any gradient of any rank holds an inf, a nan or a number so large that sums of
such numbers overflow. If so no memory is touched on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.kernels import GRADIENT_LIMIT, first_nonfinite
from thinwire.torch_private import has_scaled
from thinwire.transport import Net


class Scaler(Protocol):
    """What it needs of torch.amp.GradScaler."""

    def get_scale(self) -> float: ...


def check_skipping(on_nonfinite: object, scaler: object) -> None:
    """Raise when a step cannot be passed over in these ways."""
    if on_nonfinite not in ("raise", "skip"):
        raise ValueError(f'on_nonfinite must be "raise" or "skip", not {on_nonfinite!r}')
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")


def in_use(scaler: Scaler | None) -> Scaler | None:
    """The scaler, or None where it is switched off: torch's then scales nothing and skips nothing."""
    is_enabled = getattr(scaler, "is_enabled", None)
    return None if is_enabled is not None and not is_enabled() else scaler


class StepSkipper:
    """With a ``scaler`` gradients enter the memory unscaled and leave it scaled again; the scaler sees an infinity on
    every rank when a step is passed over, skips its optimizer step and lowers its scale. Without one the optimizer's
    next step finds no gradients and changes nothing."""

    def __init__(self, scaler: Scaler | None) -> None:
        self.scaler = scaler
        self.skipped = 0  # steps passed over so far
        self._drop_gradients = False
        self._dropped: set[int] = set()  # ids of the optimizers that have passed over that step
        self._unscaled = False  # the last backward pass was of a loss that the scaler had not scaled

    def scale(self) -> float:
        """The factor on the gradients of the backward pass that is running."""
        if self.scaler is None:
            return 1.0
        # torch makes the tensor when scale() is first called; until then get_scale() tells what it will be.
        is_torchs = getattr(type(self.scaler), "scale", None) is torch.amp.GradScaler.scale
        self._unscaled = is_torchs and not has_scaled(self.scaler) and self.scaler.get_scale() != 1.0
        return float(self.scaler.get_scale())

    def passes(self, gradients: Sequence[Tensor], *nets: Net) -> bool:
        """Whether all ranks' gradients are finite; if not they are all made infinite, on all ranks alike.

        ``nets`` reach all ranks, one after the other.
        """
        floats = [gradient.to(torch.float32) for gradient in gradients]
        bad = first_nonfinite(floats, GRADIENT_LIMIT) is not None
        flag = torch.tensor([bad], dtype=torch.uint8, device=gradients[0].device)
        for net in nets:
            net.stage = "agree that gradients are finite"
            net.all_reduce(flag, largest=True)
        if not bool(flag):
            self._drop_gradients = False  # a rank that joined early took no step since the last bad one
            return True
        for gradient in gradients:
            gradient.fill_(float("inf"))
        self.skipped += 1
        self._drop_gradients = self.scaler is None
        self._dropped = set()
        return False

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """An optimizer without gradients does nothing at all: neither momentum nor weight decay nor Adam's counter
        moves. Where step() has a closure, the backward pass is still to come: it is looked at behind the closure."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
        if closure is None:
            self._refuse_unscaled()
            self._drop(optimizer)
            return None

        def guarded() -> Any:
            self._drop_gradients = False
            loss = closure()
            self._refuse_unscaled()
            self._drop(optimizer)
            return loss

        rest = {key: value for key, value in kwargs.items() if key != "closure"}
        return (args[0], guarded, *args[2:]), rest

    def _refuse_unscaled(self) -> None:
        """Momentum that a method took over is in the units of gradients without the scale: taken for scaled, those of
        a plain loss would vanish beside it."""
        if self._unscaled:
            raise ValueError(
                "scaler= was given, but the loss was not scaled: use scaler.scale(loss).backward(), "
                "scaler.step(optimizer) and scaler.update(), or leave scaler= out"
            )

    def _drop(self, optimizer: torch.optim.Optimizer) -> None:
        if self._drops_of(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def _drops_of(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._drop_gradients and id(optimizer) not in self._dropped

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer step that just ended was one to pass over; true once a skipped step, of each."""
        skipped = self._drops_of(optimizer)
        self._dropped.add(id(optimizer))
        return skipped


def left_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a GradScaler told an optimizer with ``fused=True`` in this step to change nothing: others are not called
    in such a step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
