"""What a reducer is made from, checked and agreed on: its group, its tensors, its optimizer, its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.engine.hierarchy import machine_groups
from thinwire.engine.optimizer import NoOptimizer, OptimizerView
from thinwire.engine.several_optimizers import optimizers_of
from thinwire.engine.shards import WHOLE, Shards
from thinwire.engine.step_skipper import Scaler, check_skipping
from thinwire.methods import Method, parse_method
from thinwire.methods.epochs import check_steps_per_epoch
from thinwire.methods.registry import for_other_optimizers
from thinwire.monitor.health import check_watched
from thinwire.monitor.monitors import Monitors
from thinwire.transport import Net, TorchNet, overhead
from thinwire.transport.attach_roll_call import agree_to_attach
from thinwire.transport.groups import check_agreement
from thinwire.transport.reducer_nets import GroupNets, Nets

HierarchySpec = str | int | Sequence[Sequence[int]] | None
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]  # also in wrappers that hold them as .optimizer


@dataclass(frozen=True)
class EdgeTerms:
    """What an edge adds to what all ranks must agree on before anything is changed, or the error that it found; and
    which shard of the model the tensors are."""

    description: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None
    shards: Shards = WHOLE
    in_rounds: bool = False  # ranks take optimizer steps alone, and the edge gives differences of parameters


@dataclass(frozen=True)
class Watching:
    """Options about what may go wrong in a step, as a user gives them."""

    on_nonfinite: str
    scaler: Scaler | None
    guard: str | None
    guard_every: int
    check_replicas_every: int | None

    @property
    def skips(self) -> bool:
        return self.scaler is not None or self.on_nonfinite == "skip"

    def description(self) -> dict[str, object]:
        return {
            "on_nonfinite": self.on_nonfinite,
            "gated": str(self.skips),
            "guard": str(self.guard),
            "guard_every": str(self.guard_every),
            "check_replicas_every": str(self.check_replicas_every),
        }


@dataclass(frozen=True)
class Agreed:
    """What all ranks agreed on, ready to be assembled."""

    view: OptimizerView | NoOptimizer
    method: Method
    nets: Nets


def agree(
    parameters: dict[str, Tensor],
    method: Method | str,
    group: Any,
    optimizer: Optimizers | None,
    hierarchy: HierarchySpec,
    watching: Watching,
    steps_per_epoch: int | None,
    terms: EdgeTerms,
) -> Agreed:
    """Check what a reducer is made from, and that all ranks make the same one; a ValueError on all of them, and nothing
    is changed."""
    wholes = terms.shards.wholes(parameters)
    parent, ranks, make_nets = group_of(group, parameters)
    error, machines, view, chosen = terms.error, None, None, None
    try:
        if error is None:
            view = view_of(wholes, optimizer)
            chosen = method_of(method, parameters, view, steps_per_epoch)
            machines = machine_groups(hierarchy, ranks)
            check_skipping(watching.on_nonfinite, watching.scaler)
            check_watched(chosen, watching.guard, watching.check_replicas_every, watching.guard_every)
            check_sharded(chosen, watching.guard, terms.shards)
            check_rounds(chosen, terms.in_rounds)
            check_seen(parent, machines, optimizer is not None or terms.in_rounds, watching.check_replicas_every)
    except (ValueError, RuntimeError) as problem:
        error = str(problem)
    if parent is not None:
        options = {**watching.description(), **terms.description}
        description = description_of(chosen, machines, wholes, view, options)
        error = terms.shards.spread(description, error)
        agree_to_attach(parent, description, error)
    elif error is not None:
        raise ValueError(error)
    assert chosen is not None and view is not None
    return Agreed(view, chosen, make_nets(machines))


def group_of(group: Any, parameters: Mapping[str, Tensor]) -> tuple[TorchNet | None, int, Callable[[Any], Nets]]:
    """A net for small agreements (None where all ranks run in one process, from one call), the number of ranks, and
    what makes the nets of the exchanges when all ranks have agreed."""
    if group is None or isinstance(group, dist.ProcessGroup):
        if not dist.is_initialized():
            raise ValueError(
                "a Reducer needs a process group: call torch.distributed.init_process_group first, or start the script "
                "with torchrun"
            )
        process_group: Any = group if group is not None else dist.group.WORLD
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        parent = TorchNet(process_group, device)
        return parent, parent.size, lambda machines: GroupNets(process_group, device, machines)
    return None, group.size, lambda machines: Nets(group)


def form_of(parameter: Tensor) -> str:
    return f"{list(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"


def description_of(
    method: Method | None,
    machines: Sequence[Sequence[int]] | None,
    parameters: Mapping[str, Tensor],
    view: OptimizerView | NoOptimizer | None,
    options: Mapping[str, object],
) -> dict[str, object]:
    """What all ranks must agree on."""
    return {
        "method": repr(method),
        "hierarchy": [list(ranks) for ranks in machines] if machines is not None else None,
        "parameters": {name: form_of(p) for name, p in parameters.items()},
        "the optimizer's options": options_of(view) if view is not None else {},
        **options,
    }


def options_of(view: OptimizerView | NoOptimizer) -> dict[str, str]:
    """Those that the engine reads, at each parameter where they change; a float and a tensor of it read alike."""
    found: dict[str, str] = {}
    last = None
    for name, hyper in view.hypers().items():
        if hyper is not last:
            found[name] = f"lr={hyper.lr:.6g}, momentum={hyper.momentum:.6g}, weight_decay={hyper.weight_decay:.6g}"
        last = hyper
    return found


def view_of(parameters: Mapping[str, Tensor], optimizer: Optimizers | None) -> OptimizerView | NoOptimizer:
    """The optimizers as the engine reads them; a ValueError where they do not fit the parameters."""
    optimizers = optimizers_of(optimizer) if optimizer is not None else None
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(
                f"parameter {name!r} is {kind}; gradients are exchanged as float32, so use real parameters"
            )
    return OptimizerView(optimizers, dict(parameters)) if optimizers is not None else NoOptimizer(parameters)


def method_of(
    method: Method | str,
    parameters: Mapping[str, Tensor],
    view: OptimizerView | NoOptimizer,
    steps_per_epoch: int | None = None,
) -> Method:
    """The method, with all lengths in steps; a ValueError where it does not fit the parameters and their optimizer."""
    chosen: object = parse_method(method) if isinstance(method, str) else method
    if isinstance(chosen, type) and issubclass(chosen, Method):
        raise ValueError(f"method is the class {chosen.__name__}; make one of it: thinwire.{chosen.__name__}()")
    if not isinstance(chosen, Method):
        raise ValueError(f"method must be a thinwire method such as thinwire.DGC() or its string form, not {chosen!r}")
    check_steps_per_epoch(steps_per_epoch)
    chosen = chosen.in_steps(steps_per_epoch)
    chosen.check_names(list(parameters))
    if isinstance(view, NoOptimizer) and chosen.averaging_interval is not None and chosen.outer_rule is None:
        raise ValueError(
            f"{chosen} averages the parameters every {chosen.averaging_interval} optimizer steps and must see them; "
            "give optimizer="
        )
    if view.sharded and chosen.replicas_drift:
        raise ValueError(
            f"{chosen} lets every rank go its own way, and {view.optimizer_names} gives all ranks the parameters of "
            "the one that steps them; take a method without local gradients"
        )
    of_sgd = chosen.of_sgd(parameters, view.sgd)
    for one in chosen.members:
        if one.takes_momentum(of_sgd(one)):
            own = [name for name in parameters if chosen.member_of(name) is one]
            view.check_takeover(one.name, partial(for_other_optimizers, one), own)
    return chosen


def agreed_method(
    method: Method | str,
    parameters: Mapping[str, Tensor],
    view: OptimizerView | NoOptimizer,
    monitors: Monitors,
    net: Net,
    steps_per_epoch: int | None,
    shards: Shards,
    in_rounds: bool,
) -> Method:
    """The method that all ranks switch to; the same ValueError on all of them where one cannot."""
    error, chosen = None, None
    try:
        chosen = method_of(method, parameters, view, steps_per_epoch)
        check_rounds(chosen, in_rounds)
        guard = monitors.guard
        check_watched(chosen, guard.mode if guard is not None else None, monitors.check_every)
        check_sharded(chosen, guard.mode if guard is not None else None, shards)
    except ValueError as problem:
        error = str(problem)
    mine: dict[str, object] = {"method": repr(chosen)}
    error = shards.spread(mine, error)
    with overhead(net):
        check_agreement(net, mine, error)
    assert chosen is not None
    return chosen


def check_sharded(method: Method, guard: str | None, shards: Shards) -> None:
    """Raise where something is of a whole gradient, and a rank has a part of it."""
    if shards.of == 1:
        return
    if any(getattr(one, "clip_norm", None) is not None for one in method.members):
        raise ValueError(
            f"{method}: clip_norm is the norm of a whole gradient, and every rank has a shard of it; leave it out"
        )
    if guard == "densify":
        raise ValueError(
            'guard="densify" could raise the density of one shard and not of another, as it measures each alone; use '
            'guard="warn"'
        )


def check_rounds(method: Method, in_rounds: bool) -> None:
    """Raise where the edge, or that there is none, does not suit the method."""
    if method.outer_rule is not None and not in_rounds:
        raise ValueError(
            f"{method} lets ranks take optimizer steps alone, and here every gradient is exchanged; give it to "
            "thinwire.attach with a bare module or a DistributedDataParallel model that is not attached"
        )
    if method.outer_rule is None and in_rounds:
        raise ValueError(
            f"{method} exchanges gradients, and here they stay on their ranks; call wire.detach() and attach the model "
            "in DistributedDataParallel"
        )


def check_seen(parent: Any, machines: Any, sees_steps: bool, check_replicas_every: int | None) -> None:
    """Raise where an option would do nothing."""
    if machines is not None and parent is None:
        raise ValueError("hierarchy needs a process group: ranks that are threads are all on one machine")
    if check_replicas_every is not None and not sees_steps:
        raise ValueError(
            "check_replicas_every compares the parameters after optimizer steps and must see them; give optimizer="
        )
