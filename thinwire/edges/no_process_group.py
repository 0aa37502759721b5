"""What a script gets that runs in one process without a process group: a wire that does nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from thinwire.checkpoint.format import STATE_FORMAT
from thinwire.edges.wire import Wire
from thinwire.errors import DetachedError
from thinwire.methods import Method
from thinwire.monitor.step_log import StepLog
from thinwire.reducer.setup import Optimizers, method_of, view_of
from thinwire.stats import Stats

log = logging.getLogger("thinwire")

ALONE = (
    "thinwire: there is no process group, so the wire does nothing and training goes on as without it; start the "
    "script with torchrun to train on several ranks"
)
FORGOTTEN = (
    "this process is one of {}, but there is no process group: call torch.distributed.init_process_group() first, wrap "
    "the model in DDP and attach that"
)
OF_A_GROUP = (
    "a process without a process group cannot take up what a wire kept; start the script with torchrun "
    "(--nproc-per-node=1 is enough), which loads states of any number of ranks"
)
NOTHING_SENT = Stats(
    steps=0, world_size=1, frame_bytes=0, dense_bytes=0, bytes_sent=0, bytes_received=0, bytes_inside=0,
    seconds_compensating=0.0, seconds_compressing=0.0, seconds_communicating=0.0, seconds_waiting=0.0,
    residual_norm=0.0,
)  # fmt: skip


def is_alone(model: object) -> bool:
    """Whether a module is attached that cannot be in DDP, because there is no process group. A ValueError where a
    launcher has started several processes."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.parallel.DistributedDataParallel):
        return False
    if dist.is_initialized():
        return False
    world = os.environ.get("WORLD_SIZE", "1").strip()
    if world.isdecimal() and int(world) > 1:
        raise ValueError(FORGOTTEN.format(world))
    return True


class WireAlone(Wire):
    """Has all that a wire has, and changes nothing; mistakes in the arguments are told as on several ranks."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizers, method: Method | str, steps_per_epoch: int | None = None
    ) -> None:
        if optimizer is None:
            raise ValueError("attach needs a torch optimizer, not NoneType")
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer, self._steps_per_epoch = optimizer, steps_per_epoch
        auto = isinstance(method, str) and method.strip().lower() == "auto"
        self._method, self._is_attached = self._checked("dense" if auto else method), True
        self.model = model
        log.warning(ALONE)

    def _checked(self, method: Method | str) -> Method:
        return method_of(method, self._parameters, view_of(self._parameters, self._optimizer), self._steps_per_epoch)

    def _check_attached(self) -> None:
        if not self._is_attached:
            raise DetachedError("this wire was detached; call thinwire.attach again")

    @property
    def method(self) -> Method:
        return self._method

    @property
    def attached(self) -> bool:
        return self._is_attached

    def __repr__(self) -> str:
        return f"<thinwire.Wire {self._method}, without a process group{'' if self._is_attached else ', detached'}>"

    @property
    def failure_detector(self) -> None:
        return None

    @property
    def stats(self) -> Stats:
        return self.snapshot()

    def snapshot(self, residual_norm: bool = True) -> Stats:
        return NOTHING_SENT

    def log_every(self, steps: int, tell: Callable[[str], None] = print) -> None:
        self._check_attached()
        StepLog(steps, NOTHING_SENT, None)  # refuses what is no number of steps

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self._check_attached()
        yield

    def switch(self, method: Method | str) -> None:
        self._check_attached()
        self._method = self._checked(method)

    def detach(self) -> dict[str, Tensor]:
        self._is_attached = False
        return {}

    def abandon(self) -> None:
        self._is_attached = False

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        self._check_attached()
        return {"format": STATE_FORMAT, "method": self._method.in_full}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        self._check_attached()
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise ValueError(OF_A_GROUP)

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "wire") -> None:
        self._check_attached()
        raise ValueError(OF_A_GROUP)
