"""The edge to torch's ``fully_shard``: the mean over the shards is torch's, the one over the replicas is compressed.

Torch cuts the gradients and adds them up inside each replica. When the backward pass has ended, every rank holds its
replica's gradient of its own rows, and exchanges it with the ranks that hold the same rows in the other replicas: all
parameters in one go, as a method of the whole model does. Nothing hides behind the backward pass, but every method has
the same meaning as with DDP, several passes before one step are one exchange, and no order of exchanges depends on the
order in which a rank's modules ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.edges.drift_warning import DriftWarning
from thinwire.edges.fsdp_checks import (
    check_mesh,
    check_shards,
    gate_of,
    has_edge,
    make_replicas_equal,
    sharded_modules,
    shards_on,
    trained,
)
from thinwire.edges.other_optimizer_warning import OtherOptimizerWarning
from thinwire.edges.several_backwards import EnteringOpenStep, OpenStep
from thinwire.edges.used_parameters import UsedParameters
from thinwire.edges.wire import Wire
from thinwire.engine.optimizer import OptimizerView
from thinwire.engine.shards import local_of, sharded_like
from thinwire.errors import ATTACHED_ALREADY, TRAINED_INSIDE, UNCOPIED
from thinwire.methods import Dense, Method
from thinwire.monitor.clip_warning import ClipAfterExchangeWarning
from thinwire.monitor.size_warning import SizeWarning
from thinwire.reducer import EdgeTerms, HierarchySpec, Optimizers, Reducer
from thinwire.reducer.observing import needs_its_optimizer
from thinwire.torch_private import after_backward, backward_is_running, unhook_reduction
from thinwire.transport import overhead

THAWED_SHARD = (
    "parameter {!r} is trained, but was frozen when the model was attached, so nothing averages its gradient; call "
    "wire.detach() and attach again"
)
MOVED_SHARD = (
    "parameter {!r} has other memory than when the model was attached; call wire.detach() before the model is moved or "
    "assigned to, and attach again"
)


def attach_shards(
    model: Any,
    optimizer: Optimizers,
    method: Method | str | None,
    mesh: Any,
    hierarchy: HierarchySpec,
    default: Callable[[Mapping[str, Tensor], int], tuple[str, str]],
    **options: Any,
) -> tuple[Wire, str]:
    """``thinwire.attach`` of a model of ``fully_shard``; the options are the reducer's. Where no method is given,
    ``default`` makes one of the whole parameters and the number of replicas, and says why, which is returned, too."""
    if has_edge(model):
        raise ValueError(ATTACHED_ALREADY)
    check_mesh(model, mesh)
    parameters, error, why = trained(model), None, ""
    try:
        if optimizer is None:
            raise ValueError("attach needs a torch optimizer, not NoneType")
        if hierarchy is not None:
            raise ValueError("hierarchy is for DistributedDataParallel; the mesh says what is averaged exactly already")
        if isinstance(method, str) and method.strip().lower() == "auto":
            raise ValueError('method="auto" measures DistributedDataParallel models only; name a method')
        check_shards(model, parameters, mesh)
        if method is None:
            method, why = default(parameters, mesh.size(0))
    except (ValueError, RuntimeError) as problem:  # the latter: torch has not what thinwire reads
        error = str(problem)
    locals_of_this_rank = {name: local_of(parameter).detach() for name, parameter in parameters.items()}
    reducer = Reducer(
        locals_of_this_rank,
        method if method is not None else Dense(),
        mesh.get_group(0),
        optimizer,
        terms=EdgeTerms({"mesh": mesh.mesh.tolist()}, error, shards_on(mesh, parameters)),
        **options,
    )
    with overhead(reducer.nets.own):
        make_replicas_equal(model, reducer.nets.own)
    return Wire(reducer, FsdpEdge(model, reducer)), why


class FsdpEdge:
    """Takes the gradients of this rank's rows to a reducer when a backward pass has ended, and their means back."""

    def __init__(self, model: Any, reducer: Reducer) -> None:
        self.model, self.reducer = model, reducer
        self._owners = dict(reducer.shards.owners)
        self._names = {id(parameter): name for name, parameter in self._owners.items()}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._arrived: dict[str, Tensor] = {}  # parameters with a new gradient, of the backward pass that is running
        self._is_queued = False  # the exchange, behind that pass
        self._used = UsedParameters()
        self._drift_warning = DriftWarning(lambda: reducer.drifted)
        self._size_warning = SizeWarning()
        self._other_optimizer_warning = OtherOptimizerWarning()
        self._speaks = reducer.nets.own.rank == 0 and reducer.shards.place == 0
        self._clip_warning = ClipAfterExchangeWarning(self._owners.values()) if self._speaks else None
        self._open = OpenStep(list(self._owners.values()), logs=self._speaks)
        assert isinstance(reducer.view, OptimizerView)
        self._watching = self._open.watch(reducer.view.optimizers, lambda: None, self._other_optimizer_warning.stepped)
        optimizers = reducer.view.optimizers
        reducer.stepped = self._open.note_steps_of(optimizers, self._clip_warning)
        reducer.restarted = self._open.restart
        reducer.unused = self._unused
        reducer.monitors.replicas = self._replicas
        self._handles: list[Any] = []
        self._install()
        self._watching += [
            parameter.register_post_accumulate_grad_hook(_weakly(self._reduced)) for parameter in self._owners.values()
        ]
        for module in sharded_modules(model):
            module.set_all_reduce_hook(_weakly(self._before_accumulation))
        gate_of(model).edge = self

    def __reduce__(self) -> Any:
        raise TypeError(UNCOPIED)

    def renew(self) -> None:
        """Another method goes on."""
        self._open.another_method(self._taken)
        self._uninstall()
        self._install()

    def saves_own_state(self) -> None:
        self._drift_warning.saves_own_state()

    def leave(self) -> None:
        self._uninstall()
        for handle in self._watching:
            handle.remove()
        for module in sharded_modules(self.model):
            unhook_reduction(module)
        gate_of(self.model).edge = None

    def given_back(self, rest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: sharded_like(local, self._owners[name]) for name, local in rest.items()}

    def _install(self) -> None:
        taken = self.reducer.running.with_momentum | self.reducer.running.with_decay
        self._taken = {place for place, name in enumerate(self._owners) if name in taken}
        if self._speaks:
            self._handles.append(self.reducer.view.before_step(self._before_optimizer_step))
            self._other_optimizer_warning.matters = needs_its_optimizer(self.reducer)
        if self.reducer.method.averaging_interval is not None:
            self._handles += self._drift_warning.watch(self.model)

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _replicas(self) -> Mapping[str, Tensor]:
        """What should be equal in all replicas."""
        return {name: local_of(p) for name, p in {**self._owners, **self._frozen}.items()}

    def _unused(self) -> dict[str, Any]:
        names = list(self._owners)
        return {names[ordinal]: before for ordinal, before in self._open.unused().items()}

    # ---------------------------------------------------------------------------------------------------- a pass

    def before_forward(self) -> None:
        """Refuse what would be wrong in silence, and let go of what a pass that was broken off left behind."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(THAWED_SHARD.format(name))
        for name, local in self.reducer.parameters.items():
            if local_of(self._owners[name]).data_ptr() != local.data_ptr():
                raise ValueError(MOVED_SHARD.format(name))
        if not backward_is_running():
            self._arrived, self._is_queued = {}, False

    def _before_accumulation(self, _: Tensor) -> None:
        """Torch has added up a module's gradients and has not put them into .grad yet."""
        self._open.before_accumulation()

    def _reduced(self, parameter: Tensor) -> None:
        """Torch has put a parameter's gradient, or added it to what was there, into .grad."""
        self._arrived[self._names[id(parameter)]] = parameter
        if not self._is_queued:  # behind torch's own callback, which is there from the beginning of the pass
            self._is_queued = True
            after_backward(self._exchange)

    def _exchange(self) -> None:
        """The backward pass has ended: the gradients become the means over the replicas, where they lie."""
        arrived, self._arrived, self._is_queued = self._arrived, {}, False
        if self.reducer.shows_mean:
            raise ValueError(TRAINED_INSIDE)
        self.reducer.shards.together(lambda: self._exchange_of(arrived))
        if self._clip_warning is not None:
            self._clip_warning.after_backward()

    def _exchange_of(self, arrived: Mapping[str, Tensor]) -> None:
        reducer, skipper = self.reducer, self.reducer.skipper
        reducer.worker.wait()
        with reducer.nets.reporting():
            used = self._used.agreed(arrived, self._owners, reducer.nets.own)
        gradients = {name: self._gradient(name) for name in used}
        if self._open.matters:
            if self._open.continues():  # a step that earlier passes have begun
                reducer.progress.step -= 1
            self._open.keeps = reducer.running.copied
        places = [place for place, name in enumerate(self._owners) if name in gradients]
        held = self._open.held(places, ends_pass=True, all_used=True)
        skipped = skipper.skipped if skipper is not None else 0
        reducer.reduce(gradients, None if held is None else EnteringOpenStep(self._open, held, reducer))
        if skipper is not None and skipper.skipped > skipped:
            self._open.passed_over()

    def _gradient(self, name: str) -> Tensor:
        """This rank's part; zeros where another replica alone used the parameter."""
        parameter = self._owners[name]
        if parameter.grad is None:
            parameter.grad = sharded_like(torch.zeros_like(self.reducer.parameters[name]), parameter)
        return local_of(parameter.grad)

    def _before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        reducer = self.reducer
        if not reducer.shared_step.begins_with(optimizer, reducer.progress.passes):
            return
        if self._clip_warning is not None:
            scaler = reducer.skipper.scaler if reducer.skipper is not None else None
            self._clip_warning.before_step(reducer.method, float(scaler.get_scale()) if scaler is not None else 1.0)
        if reducer.nets.own.size > 1 and self._size_warning.counts(reducer.running, reducer.progress.step):
            self._size_warning.after_exchange(reducer.method, reducer.snapshot(residual_norm=False))


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A hook that does not keep alive what it calls: torch keeps it where no garbage collector looks."""
    known = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        called = known()
        if called is not None:
            called(tensor)

    return hook
