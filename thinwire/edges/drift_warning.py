"""Telling a script that evaluates or saves one rank's model while local gradients let the ranks' parameters differ."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.edges.uncopied_hook import OwnHook
from thinwire.monitor.user_warning import line_of_user, warn_user

EVALUATED = (
    "thinwire: the model is evaluated while the ranks' parameters differ, as local gradients or steps let them; "
    "evaluate and export inside `with wire.averaged():`, on all ranks"
)
SAVED = (
    "thinwire: the model's state was taken here while the ranks' parameters differed, as local gradients or steps let "
    "them; save inside `with wire.averaged():`, on all ranks, or to resume each rank its own together with "
    "wire.state_dict()"
)


class DriftWarning:
    """Warns of either once. ``differs`` says whether the ranks' parameters differ now.

    To resume, every rank saves its own parameters and the wire's state, in any order. So what was saved is judged when
    training goes on, when this is over, or when the process ends.
    """

    def __init__(self, differs: Callable[[], bool]) -> None:
        self._differs = differs
        self._trained = False  # whether the module was trained in training mode
        self._told = False  # of an evaluation
        self._saved = _Saved()
        weakref.finalize(self, self._saved.judge)

    def watch(self, module: nn.Module) -> list[Any]:
        """Look at every forward pass of the module and at its state_dict(), also without DDP; return the handles."""
        return [
            module.register_forward_pre_hook(OwnHook(self._before_forward)),
            module.register_state_dict_pre_hook(OwnHook(self._before_state_dict)),
            self._saved,
        ]

    def saves_own_state(self) -> None:
        """The wire's state was taken."""
        self._saved.with_wire = True

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        trains = torch.is_grad_enabled()
        if module.training and trains:
            self._trained = True
            self._saved.judge()
            return
        evaluates = not module.training and (self._trained or not trains)  # a model may be trained in eval mode
        if evaluates and not self._told and self._differs():
            self._told = True
            warn_user(EVALUATED)

    def _before_state_dict(self, *_: Any) -> None:
        if self._differs():
            self._saved.line = line_of_user()


@dataclass
class _Saved:
    """What was saved since the last training step: the model, at a line of the user's, and the wire."""

    line: tuple[str, int] | None = None
    with_wire: bool = False
    told: bool = False

    def judge(self) -> None:
        if self.line is not None and not self.with_wire and not self.told:
            self.told = True
            warnings.warn_explicit(SAVED, RuntimeWarning, *self.line)
        self.line, self.with_wire = None, False

    remove = judge  # with the handles of the hooks
