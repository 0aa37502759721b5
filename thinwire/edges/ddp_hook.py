"""The edge to DistributedDataParallel: one hook a model, one ordered worker a wire.

DDP accepts one communication hook in a model's life, so what is registered is a router that knows the wire of the
moment. This module has no postponed annotations: DDP compares the hook's annotations with the real classes.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.uncopied_hook import OwnHook
from thinwire.engine.worker import Bucket
from thinwire.errors import DetachedError
from thinwire.torch_private import (
    OUTSIDE,
    after_backward,
    backward_id,
    backward_is_running,
    exchanged_by_ddp,
    has_comm_hook,
    register_uncopied_hook,
)
from thinwire.transport.device_time import mark

log = logging.getLogger("thinwire")

_DETACHED = (
    "this model was detached from thinwire and DDP cannot take a hook off: "
    "call thinwire.attach again, or wrap the module in a new DistributedDataParallel"
)

FOREIGN_HOOK = "this model has a communication hook already and DDP takes only one; wrap it in a new DDP"

THAWED = (
    "parameter {!r} is trained, but was frozen or not there when the model was wrapped in DistributedDataParallel, "
    "which does not exchange its gradient; unfreeze first, then wrap the module in a new DDP and attach that"
)


def _value(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()


class Router:
    """What DDP calls: passes each bucket on to ``target``, which is None while no wire is attached.

    The target is known weakly: DDP keeps the router where no garbage collector looks, so a wire held by it would live,
    and keep its model, for ever. It is the optimizer's hook that keeps a wire whose name the user let go.
    """

    def __init__(self, num_parameters: int) -> None:
        self.saw_forward = False  # since the last bucket; without one DDP shadows a pass of the others (Join)
        self._num_parameters = num_parameters  # that DDP exchanges in every pass
        self._arrived: set[int] = set()  # ids of the parameters whose buckets this pass has handed over
        self._target: weakref.WeakMethod[Callable[[Bucket], None]] | None = None
        self._backward: list[Bucket] = []  # of the backward pass that is running

    @property
    def target(self) -> Callable[[Bucket], None] | None:
        return self._target() if self._target is not None else None

    @target.setter
    def target(self, method: Callable[[Bucket], None] | None) -> None:
        self._target = weakref.WeakMethod(method) if method is not None else None

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        target = self.target
        if target is None:
            raise DetachedError(_DETACHED)
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        cuda = buffer.device if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[cuda] if cuda else None)
        ready = mark(cuda) if cuda else None
        gradients = list(buffer.split([parameter.numel() for parameter in parameters]))
        in_backward = backward_id() != OUTSIDE
        first, last = self._place(parameters)
        ours = Bucket(parameters, gradients, buffer, future, last, ready, is_first=first, in_backward=in_backward)
        if in_backward:
            self._backward.append(ours)
            if last:
                after_backward(self._at_the_end)
        target(ours)
        if last:
            self.saw_forward = False
        if in_backward:
            return future
        # Called by DDP's Join. torch hands a future's exception to C++ as if it were the result; raised in a callback
        # it arrives as an error.
        return future.then(_value)

    def _place(self, parameters: list[Tensor]) -> tuple[bool, bool]:
        """Count a bucket's parameters; return whether they begin a pass, and whether they complete it.

        DDP's own ``is_last`` is False for every bucket of a static graph's first pass, where there are several.
        """
        ids = {id(parameter) for parameter in parameters}
        if not ids.isdisjoint(self._arrived):  # an earlier pass was broken off
            self._arrived = set()
        first = not self._arrived
        self._arrived |= ids
        last = len(self._arrived) >= self._num_parameters
        if last:
            self._arrived = set()
        return first, last

    def _at_the_end(self) -> None:
        # DDP waits for its futures in a callback of this kind, which is queued behind this one. An error raised behind
        # that keeps its type and its one sentence, and leaves DDP able to go on.
        after_backward(self._raise_errors)

    def _raise_errors(self) -> None:
        buckets, self._backward = self._backward, []
        for bucket in buckets:
            if bucket.error is not None:
                raise bucket.error

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Refuse a training step of a detached model before it starts: an error inside backward would break DDP."""
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            if self.target is None and module.training:
                raise DetachedError(_DETACHED)
            self.saw_forward = True
            if not backward_is_running():  # one may have been broken off
                self._arrived = set()


_routers: "weakref.WeakKeyDictionary[DistributedDataParallel, Router]" = weakref.WeakKeyDictionary()


def router_of(model: DistributedDataParallel) -> Router:
    """Return the model's router, registered with DDP on the first call."""
    router = _routers.get(model)
    if router is None:
        router = Router(len(exchanged_by_ddp(model)))
        register_uncopied_hook(model, router.hook)
        model.register_forward_pre_hook(OwnHook(router.before_forward))
        _routers[model] = router
    return router


def is_attached(model: DistributedDataParallel) -> bool:
    router = _routers.get(model)
    return router is not None and router.target is not None


def has_foreign_hook(model: DistributedDataParallel) -> bool:
    """Whether somebody else registered a communication hook; DDP takes one in a model's life."""
    return model not in _routers and has_comm_hook(model)
