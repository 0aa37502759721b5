"""Several backward passes before one optimizer step: an exchange counts when the optimizer steps.

DDP hands over .grad as it is, so where nobody cleared it, it holds what the last exchange wrote plus the new gradient.
Only the new one may enter an exchange. Another backward pass before the optimizer's step takes the exchange before it
back and exchanges the sum of both gradients, or the new one alone where the gradient was cleared: whatever a step
was made of, its residuals, velocities, weight decay and schedules are those of one exchange.

To take an exchange back costs copies. They are made in the first steps, and from then on where a loop has shown that
it has several passes per step. Without copies a further gradient is exchanged beside the first (``Hyper.again``).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from thinwire.engine.context import Hyper
from thinwire.engine.layout import Layout, Segment, flat_like, memory_flat
from thinwire.engine.shards import local_of
from thinwire.monitor.clip_warning import ClipAfterExchangeWarning
from thinwire.reducer import Reducer
from thinwire.torch_private import backward_id

log = logging.getLogger("thinwire")

LATE = (
    "thinwire: a gradient was cleared after its exchange and before optimizer.step(), for the first time in this loop: "
    "what that exchange did to residuals and momentum stays; from now on such exchanges are taken back"
)
UNUSED = (
    "thinwire: {} backward passes without optimizer.step(): each of them takes the exchange before it back, because "
    "only the step of an optimizer tells that a gradient was used"
)
UNCLEARED = (
    "thinwire: gradients of an earlier optimizer step were not cleared before this one's, and they hold momentum or "
    "weight decay, which {} applies before gradients are sent; call optimizer.zero_grad() once in every step"
)
MANY = 100  # passes
OtherStepped = Callable[[Collection[torch.optim.Optimizer], torch.optim.Optimizer], None]
WATCHED = 3  # optimizer steps in which copies are made to see whether one has several passes


@dataclass(frozen=True)
class Held:
    """What lies in a .grad since the last exchange, and must not be exchanged again."""

    content: Tensor  # (numel,) in the gradient's type
    changed: bool  # it is not, or may not be, what the exchange wrote


@dataclass
class Share:
    """What a parameter has given to exchanges since the optimizer's last step."""

    kept: bool = False  # whether these exchanges can be taken back
    before: Any = None  # what the method kept of the parameter before them
    local: Tensor | None = None  # (numel,) float32: this rank's gradient in them; None where that is not known any more
    weight: Tensor | None = None  # (numel,) the parameter at the first of them
    rest: Tensor | None = None  # (numel,) what lay in .grad before the first of them, and is a part of what they wrote
    written: Tensor | None = None  # (numel,) what the last of them wrote


class OpenStep:
    """What was exchanged since the optimizer's last step, and what of it lies in .grad.

    ``before_accumulation`` and ``held`` run in the backward pass; ``enter``, ``weight`` and ``wrote`` in the thread
    that exchanges. ``keeps`` are the names of those of which copies can be made at all.
    """

    def __init__(self, parameters: Sequence[Tensor], logs: bool = True) -> None:
        self.keeps: Collection[str] = ()
        self._logs = logs  # one rank of a group does
        self._parameters = parameters  # by ordinal
        self._several = False  # whether a step had several passes so far
        self._fresh = False  # the last exchange's gradients have not been looked at
        self._looked = -1  # the backward pass (torch's graph task) that looked last
        self._counted = False  # whether a pass has ended that the optimizer has not used
        self._passes = 0  # since the optimizer's last step
        self._steps = 0  # of the optimizer
        self._shares: dict[int, Share] = {}  # by ordinal
        self._held: dict[int, Held] = {}  # by ordinal, as the running pass found it
        self._left: set[int] = set()  # ordinals of what no optimizer used, where another one has stepped since
        self._used_up: set[int] = set()  # ordinals whose last exchange the optimizer has used
        self._was_taken: set[int] = set()  # ordinals whose last exchange may hold momentum of another method
        self._told_uncleared = self._told_late = False
        self._begins = True  # no bucket of the pass has been handed on
        self._listed: list[int] = []  # ordinals that the pass listed before their exchange

    def watch(
        self, optimizers: Sequence[torch.optim.Optimizer], noted: Callable[[], None], other_stepped: OtherStepped
    ) -> list[Any]:
        """Look at .grad before a backward pass changes it (``noted`` is called then, too), and after the steps of other
        optimizers that have these parameters, as one inside of ``optimizers``; return the handles of the hooks."""
        watched, refs = weakref.ref(self), [weakref.ref(one) for one in optimizers]  # a hook keeps nothing alive

        def before(_: Tensor) -> None:
            noted()
            one = watched()
            if one is not None:
                one.before_accumulation()

        def after(other: torch.optim.Optimizer, *_: Any) -> None:
            one = watched()
            own = [optimizer for optimizer in (ref() for ref in refs) if optimizer is not None]
            if one is None or any(other is optimizer for optimizer in own):
                return
            stepped = one.places_in(other)
            if stepped:
                if own:
                    other_stepped(own, other)
                one.stepped(stepped)

        of_all = register_optimizer_step_post_hook(after)
        weakref.finalize(self, of_all.remove)
        return [of_all, *(parameter.register_hook(before) for parameter in self._parameters)]

    def places_in(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """The places of the parameters that an optimizer has."""
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return {place for place, parameter in enumerate(self._parameters) if id(parameter) in theirs}

    @property
    def matters(self) -> bool:
        """Whether a pass that begins may belong to a step that earlier ones began, or copies are to be made."""
        return self._counted or self._wants_copies

    @property
    def _wants_copies(self) -> bool:
        return self._several or self._steps < WATCHED

    def continues(self) -> bool:
        """A pass begins: does it belong to a step that was counted with an earlier one?"""
        counted, self._counted = self._counted, False
        self._passes += 1
        if self._passes == MANY and self._logs:
            log.warning(UNUSED.format(MANY))
        return counted

    def before_accumulation(self) -> None:
        """Something is about to be added to a .grad: find out, once a pass, what lies in all of them."""
        if not self._fresh and not self._held:
            return  # whatever lies there is of this rank alone, and has not been exchanged
        task = backward_id()
        if task <= self._looked:
            return
        self._looked = task
        with torch.no_grad():
            self._look()

    def _look(self) -> None:
        grads = {
            ordinal: local_of(parameter.grad)
            for ordinal, parameter in enumerate(self._parameters)
            if parameter.grad is not None and (self._fresh or ordinal in self._held)
        }
        filled = _filled(grads)
        if not self._fresh:  # others were added to what is held; was it cleared meanwhile?
            self._held = {ordinal: held for ordinal, held in self._held.items() if ordinal in filled}
            return
        self._fresh = False
        for ordinal in filled:
            self._hold(ordinal)
        # Zeros are a cleared gradient, or what an exchange wrote: as the others of this step.
        if not filled.isdisjoint(self._shares):
            for ordinal in (grads.keys() & self._shares.keys()) - filled:
                written = self._shares[ordinal].written
                if written is None or not _filled({ordinal: written}):
                    self._hold(ordinal)

    def _hold(self, ordinal: int) -> None:
        parameter = self._parameters[ordinal]
        assert parameter.grad is not None
        content = flat_like(local_of(parameter), local_of(parameter.grad))
        written = self._shares[ordinal].written if ordinal in self._shares else None
        if written is not None and written.dtype == content.dtype and torch.equal(content, written):
            self._held[ordinal] = Held(written, changed=False)
        else:
            self._held[ordinal] = Held(content.clone(), changed=True)

    def held(self, ordinals: Sequence[int], ends_pass: bool, all_used: bool) -> dict[int, Held] | None:
        """What lies in these parameters' .grad without being this pass's, or no_sync's; None where nothing does, they
        were in no exchange of this step before, and nothing is to be copied: all of it is new. Where not ``all_used``
        is certain that is found out behind: what no rank used is in no exchange."""
        held = {ordinal: self._held[ordinal] for ordinal in ordinals if ordinal in self._held}
        self._left.difference_update(ordinals)
        all_new = not held and not self._wants_copies and all_used and self._shares.keys().isdisjoint(ordinals)
        if self._begins:
            self._listed, self._begins = [], False
        if all_new:
            self._listed.extend(ordinals)
            self._shares.update((ordinal, Share()) for ordinal in ordinals)
            self._written_anew(ordinals)
        if ends_pass:
            self._held, self._fresh, self._counted, self._begins = {}, True, True, True
        return None if all_new else held

    def enter(
        self,
        segment: Segment,
        part: Tensor,  # (numel,) float32: the new gradient; what is to be exchanged when this returns
        held: Held | None,
        weight: Tensor | None,
        copy_of: Callable[[str], Any],
        put_back: Callable[[str, Any], None],
    ) -> tuple[bool, Tensor | None]:
        """A parameter enters an exchange; return whether its velocity has decayed in this step already, and what is to
        be added to the mean."""
        share = self._shares.get(segment.ordinal)
        content = held.content if held is not None else None
        if share is None:
            share = self._shares[segment.ordinal] = Share(rest=content)
            if segment.name in self.keeps and self._wants_copies:
                share.kept, share.before, share.local = True, copy_of(segment.name), part.clone()
                share.weight = memory_flat(weight.detach()).clone() if weight is not None else None
            return False, content
        if segment.name in self.keeps and not share.kept and held is None and not self._told_late:
            self._told_late = True
            if self._logs:
                log.warning(LATE)
        self._several = True
        if share.kept and held is None:
            put_back(segment.name, share.before)
            share.local, share.rest = part.clone(), None
            return False, None
        if share.local is not None and held is not None and not held.changed:
            put_back(segment.name, share.before)
            part.copy_(share.local.add_(part))
            return False, share.rest
        share.local = None
        return held is not None, content

    def another_method(self, taken: Collection[int]) -> None:
        """The one before it had ``taken`` over momentum or weight decay of these ordinals."""
        self._was_taken.update(taken)

    def _written_anew(self, ordinals: Collection[int]) -> None:
        self._used_up.difference_update(ordinals)
        self._was_taken.difference_update(ordinals)

    def check_cleared(self, ordinal: int, taken: bool, method: str) -> None:
        """Something lies in a .grad: tell where that is of an earlier optimizer step, and ``taken`` over by the method
        are momentum or weight decay, which it then holds."""
        taken = taken or ordinal in self._was_taken
        if taken and ordinal in self._used_up and not self._told_uncleared:
            self._told_uncleared = True
            if self._logs:
                log.warning(UNCLEARED.format(method))

    def weight(self, ordinal: int, now: Tensor) -> Tensor:
        """The parameter as it was when the step began, where that is known: weight decay is of that one."""
        share = self._shares.get(ordinal)
        return now if share is None or share.weight is None else share.weight

    def wrote(self, ordinal: int, gradient: Tensor) -> None:  # (numel,)
        """An exchange left this in a gradient."""
        share = self._shares[ordinal]
        share.written = gradient.clone() if share.kept else None
        self._written_anew((ordinal,))

    def passed_over(self) -> None:
        """That pass gave nothing, and its step does not count."""
        self._counted = False
        for ordinal in self._listed:
            self._shares.pop(ordinal, None)

    def stepped(self, places: Collection[int] | None = None, counts: bool = True) -> None:
        """An optimizer used the gradients of parameters at these places, or of all: what was exchanged of them counts.
        Of others an optimizer of their own may still use what there is. One of several optimizers ``counts``."""
        used = set(self._shares) if places is None else self._shares.keys() & set(places)
        for place in used:
            del self._shares[place]
        self._used_up.update(used)
        self._left = set(self._shares)
        self._counted, self._passes = False, 0
        self._steps += counts

    def note_steps_of(
        self, optimizers: Sequence[torch.optim.Optimizer], clip_warning: ClipAfterExchangeWarning | None
    ) -> Callable[[torch.optim.Optimizer, bool], None]:
        """What a reducer calls after an optimizer's step; it does not keep the reducer alive."""
        places = {id(one): self.places_in(one) for one in optimizers} if len(optimizers) > 1 else {}

        def stepped(optimizer: torch.optim.Optimizer, begins: bool) -> None:
            self.stepped(places.get(id(optimizer)), begins)
            if clip_warning is not None:
                clip_warning.after_step()

        return stepped

    def unused(self) -> dict[int, Any]:
        """What was kept of parameters before exchanges that no optimizer used although another one has stepped since;
        of those that can be taken back."""
        shares = {ordinal: self._shares[ordinal] for ordinal in self._left}
        return {ordinal: share.before for ordinal, share in shares.items() if share.kept}

    def restart(self) -> None:
        """Another method follows, or another state: nothing before can be taken back."""
        self._shares.clear()
        self._left.clear()
        self._counted = False
        self._steps = 0


class EnteringOpenStep:
    """One exchange's part in an open step: takes out what an earlier one wrote, and takes that exchange back where it
    was copied. ``held`` is what lies in the gradients without being this pass's."""

    def __init__(self, step: OpenStep, held: dict[int, Held], reducer: Reducer) -> None:
        self._step, self._held, self._reducer = step, held, reducer
        self._rest: dict[int, Tensor] = {}  # by ordinal: what is to be added to the mean

    def new_only(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        for segment, part in zip(layout.segments, parts, strict=True):
            if segment.ordinal in self._held:
                part.sub_(_here(self._held[segment.ordinal].content))

    def enter(
        self, layout: Layout, parts: Sequence[Tensor], hypers: tuple[Hyper, ...], weights: tuple[Tensor, ...]
    ) -> tuple[tuple[Hyper, ...], tuple[Tensor, ...]]:
        reducer, entered = self._reducer, []
        decays = reducer.running.with_decay
        for segment, part, hyper, weight in zip(layout.segments, parts, hypers, weights, strict=True):
            decaying = weight if hyper.weight_decay and segment.name in decays else None
            if segment.ordinal in self._held and (hyper.momentum or hyper.weight_decay):
                taken = segment.name in reducer.running.with_momentum or decaying is not None
                self._step.check_cleared(segment.ordinal, taken, reducer.method.name)
            again, content = self._step.enter(
                segment, part, self._held.get(segment.ordinal), decaying, reducer.copy_of, reducer.put_back
            )
            entered.append(replace(hyper, weight_decay=0.0, again=True) if again else hyper)
            if content is not None:
                self._rest[segment.ordinal] = content
        then = tuple(self._step.weight(s.ordinal, w) for s, w in zip(layout.segments, weights, strict=True))
        return tuple(entered), then

    def leave(self, layout: Layout, parts: Sequence[Tensor]) -> None:
        for segment, part in zip(layout.segments, parts, strict=True):
            if segment.ordinal in self._rest:
                part.add_(self._rest[segment.ordinal])

    def written(self, layout: Layout, gradients: Sequence[Tensor]) -> None:
        for segment, gradient in zip(layout.segments, gradients, strict=True):
            self._step.wrote(segment.ordinal, gradient)


def _here(tensor: Tensor) -> Tensor:
    """A tensor that was made on another stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _filled(grads: dict[int, Tensor]) -> set[int]:
    """Which of the gradients hold anything but zeros, and numbers whose squares are."""
    if not grads:
        return set()
    norms = torch.stack(torch._foreach_norm(list(grads.values()), 2))
    return {ordinal for ordinal, norm in zip(grads, norms.tolist(), strict=True) if norm != 0}
