"""The edge to DistributedDataParallel: one hook a model, one ordered worker a wire.

DDP accepts one communication hook in a model's life, so what is registered is a router that knows the wire of the
moment. This module has no postponed annotations: DDP compares the hook's annotations with the real classes.
"""

import logging
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import DetachedError, NonFiniteError
from thinwire.timing import DeviceSpans, mark

log = logging.getLogger("thinwire")

_DETACHED = (
    "this model was detached from thinwire and DDP cannot take a hook off: "
    "call thinwire.attach again, or wrap the module in a new DistributedDataParallel"
)


@dataclass
class Bucket:
    """One DDP bucket of one backward pass: gradients in, means out, in place."""

    parameters: list[Tensor]
    gradients: list[Tensor]  # (numel,) each, views of the buffer
    buffer: Tensor
    future: torch.futures.Future[Tensor]
    is_last: bool
    ready: Any = None  # a CUDA event after which the gradients are there
    handed_s: float = field(default_factory=time.perf_counter)  # when backward handed it over


def _value(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.value()


class Router:
    """What DDP calls: passes each bucket on to ``target``, which is None while no wire is attached.

    The target is known weakly: DDP keeps the router where no garbage collector looks, so a wire held by it would live,
    and keep its model, for ever. It is the optimizer's hook that keeps a wire whose name the user let go.
    """

    def __init__(self) -> None:
        self.saw_forward = False  # since the last bucket; without one DDP shadows a pass of the others (Join)
        self._target: weakref.WeakMethod[Callable[[Bucket], None]] | None = None

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
        target(Bucket(parameters, gradients, buffer, future, bucket.is_last(), ready))
        if bucket.is_last():
            self.saw_forward = False
        # torch hands a future's exception to C++ as if it were the result; raised in a callback it arrives as an error.
        return future.then(_value)

    def before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """Refuse a training step of a detached model before it starts: an error inside backward would break DDP."""
        if torch.is_grad_enabled() and module.require_backward_grad_sync:
            if self.target is None and module.training:
                raise DetachedError(_DETACHED)
            self.saw_forward = True


_routers: "weakref.WeakKeyDictionary[DistributedDataParallel, Router]" = weakref.WeakKeyDictionary()


def router_of(model: DistributedDataParallel) -> Router:
    """Return the model's router, registered with DDP on the first call."""
    router = _routers.get(model)
    if router is None:
        router = Router()
        model.register_comm_hook(None, router.hook)
        model.register_forward_pre_hook(router.before_forward)
        _routers[model] = router
    return router


def is_attached(model: DistributedDataParallel) -> bool:
    router = _routers.get(model)
    return router is not None and router.target is not None


def has_foreign_hook(model: DistributedDataParallel) -> bool:
    """Whether somebody else registered a communication hook; DDP takes one in a model's life."""
    return model not in _routers and bool(getattr(model, "_comm_hooks", []))


class Worker:
    """One thread that does jobs in the order they were given, so that collectives have the same order on every rank.

    On a GPU the jobs run on a stream of their own, behind the gradients' event.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="thinwire")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._broken: Exception | None = None
        self._waited_s = 0.0
        self._waited, self._busy = DeviceSpans(), DeviceSpans()

    def submit(self, buckets: list[Bucket], work: Callable[[list[Bucket]], None]) -> None:
        """Run work(buckets) behind all earlier jobs and complete the buckets' futures, with its error if it fails."""
        self._pool.submit(self._run, buckets, work)

    def _run(self, buckets: list[Bucket], work: Callable[[list[Bucket]], None]) -> None:
        try:
            if self._broken is not None:  # the ranks are out of step: every further exchange would hang or mix up
                raise self._broken
            if self._stream is None:
                work(buckets)
            else:
                with torch.cuda.stream(self._stream):
                    for bucket in buckets:
                        self._stream.wait_event(bucket.ready)
                        bucket.buffer.record_stream(self._stream)
                    begin = mark(self._stream.device)
                    work(buckets)
                    end = mark(self._stream.device)
                    self._busy.add(begin, end)
                    for bucket in filter(lambda bucket: bucket.is_last, buckets):
                        self._waited.add(bucket.ready, end)
                    for bucket in buckets:
                        bucket.future.set_result(bucket.buffer)
                return
        except Exception as error:
            log.debug("thinwire: an exchange failed", exc_info=True)  # DDP passes the sentence on, not the traceback
            self._broken = error
            for bucket in buckets:
                if not bucket.future.done():
                    bucket.future.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong
            return
        for bucket in buckets:
            if bucket.is_last:
                self._waited_s += time.perf_counter() - bucket.handed_s
            bucket.future.set_result(bucket.buffer)

    @property
    def waited_s(self) -> float:
        """Seconds from the last gradient of each backward pass to the end of its exchanges; waits for the GPU."""
        return self._waited_s if self._stream is None else self._waited.seconds

    @property
    def busy_s(self) -> float | None:
        """Seconds of all jobs on the GPU's clock, from the moment their gradients were there; None on the host."""
        return None if self._stream is None else self._busy.seconds

    @property
    def broken(self) -> bool:
        """Whether an exchange failed, after which the ranks may be out of step."""
        return self._broken is not None

    @property
    def out_of_step(self) -> bool:
        """Whether another exchange could wait for ever; a gradient that is not finite stops all ranks at one place."""
        return self._broken is not None and not isinstance(self._broken, NonFiniteError)

    def wait(self) -> None:
        """Return when all jobs so far are done."""
        self._pool.submit(lambda: None).result()

    def stop(self) -> None:
        self._pool.shutdown(wait=True)
