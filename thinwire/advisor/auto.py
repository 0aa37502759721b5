"""method="auto": begin dense, watch a few steps, and change to what the cost model recommends."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.advisor.advice import Advice, advise_from, compared, planned, with_dense
from thinwire.advisor.cost import Workload
from thinwire.advisor.link import measure_link
from thinwire.advisor.profile import Profile, buckets_of, measure_exchange
from thinwire.edges.uncopied_hook import OwnHook
from thinwire.edges.wire import Wire
from thinwire.methods import Method, parse_method
from thinwire.reducer.setup import method_of
from thinwire.transport import overhead

log = logging.getLogger("thinwire")

WARMUP = 3  # DDP rebuilds its buckets after the first step, and caches fill
WATCHED = 4
LONGEST_S = 0.5  # planned wire time of an exchange that is rehearsed


class Auto:
    """Watches a wire that is dense, and switches it once.

    A step goes from one forward pass after an optimizer step to the next. Its time without communication is what is
    left without the wait between the last gradient and the optimizer. After ``WARMUP + WATCHED`` steps all ranks
    measure the link and the methods' encoding speed together, which takes a few seconds, and get the same advice. The
    choice is by speed alone: a method that only a changed training schedule makes accurate is the user's to choose.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._view, self._net = wire, wire.reducer.view, wire.reducer.nets.own
        self._parameters = wire.reducer.parameters
        self._ready: dict[str, float] = {}
        self._rows: list[tuple[float, dict[str, float]]] = []  # seconds without communication, and when gradients came
        self._started: float | None = None
        self._last = self._waited = 0.0
        self._stepped = False
        self._steps = 0
        self._handles: list[Any] = [
            wire.model.register_forward_pre_hook(OwnHook(self._before_forward)),
            self._view.before_step(self._before_optimizer),
            self._view.after_step(self._after_optimizer),
        ]
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._note(name)))

    def _now(self) -> float:
        if self._net.compute_device.type == "cuda":
            torch.cuda.synchronize(self._net.compute_device)
        return time.perf_counter()

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._last = self._now()
            if self._started is not None:
                self._ready[name] = self._last - self._started

        return hook

    def _before_optimizer(self, *_: Any) -> None:
        if self._stepped:  # another optimizer of this step has
            return
        self._waited = self._now() - self._last

    def _after_optimizer(self, *_: Any) -> None:
        self._stepped = True

    def _before_forward(self, *_: Any) -> None:
        if self._started is not None and not self._stepped:
            return  # a further forward pass of the same step
        now = self._now()
        if self._started is not None:
            self._steps += 1
            if self._steps > WARMUP:
                self._rows.append((now - self._started - self._waited, dict(self._ready)))
        self._stepped = False
        if len(self._rows) == WATCHED:
            self._finish()
            return
        self._started = now

    def _finish(self) -> None:
        for handle in self._handles:
            handle.remove()
        wire = self._wire
        if not wire.attached or str(wire.method) != "dense":
            return  # the user has decided meanwhile
        advice = self._advice()
        if self._net.rank == 0:
            caution = f" {advice.caution}" if advice.compress else ""
            log.warning("thinwire: auto chose %s: %s%s", advice.recommended, advice.reason, caution)
        if advice.compress:
            wire.switch(advice.recommended)

    def _advice(self) -> Advice:
        net, parameters = self._net, self._parameters
        names = list(parameters)
        own = [statistics.median(seconds for seconds, _ in self._rows)]
        own += [statistics.median(ready.get(name, own[0]) for _, ready in self._rows) for name in names]
        agreed = torch.tensor(own, dtype=torch.float64)
        with overhead(net):
            net.all_reduce(agreed, largest=True)
        compute_s, *ready_s = agreed.tolist()
        work = Workload(compute_s, tuple(buckets_of(parameters, dict(zip(names, ready_s, strict=True)))))
        sgd, device = len(self._view.sgd) == len(parameters), net.compute_device
        steps = [method for method in map(parse_method, compared(sgd)) if method.outer_rule is None]
        suited = [method for method in steps if self._accepts(method)]
        methods, _ = planned(with_dense(suited))
        with overhead(net):
            link = measure_link(net)
            costs = {
                str(method): measure_exchange(net, method, work, link, sgd, device, 2, longest_s=LONGEST_S)
                for method in methods
            }
        # What sending costs of the processor was not measured; half of its time lies between the two extremes.
        profile = Profile(net.size, work, link, 0.5, costs)
        return advise_from(profile, methods)

    def _accepts(self, method: Method) -> bool:
        """Whether the user's optimizer lets the method take its momentum. Replicas that drift want averaged() around
        evaluation, which is the user's to know of."""
        if method.replicas_drift:
            return False
        try:
            method_of(method, self._parameters, self._view)
        except ValueError:
            return False
        return True
