"""Which models, optimizers and options local steps can be attached with, and which model has an edge of theirs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.ddp_hook import FOREIGN_HOOK, has_foreign_hook
from thinwire.engine.optimizer import OptimizerView
from thinwire.methods import Method, parse_method
from thinwire.reducer import Optimizers
from thinwire.reducer.setup import view_of

_edges: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note_edge(model: nn.Module, edge: Any) -> None:
    """This edge is the model's now; None: it has none any more."""
    if edge is None:
        _edges.pop(model, None)
    else:
        _edges[model] = weakref.ref(edge)


def local_edge_of(model: nn.Module) -> Any:
    known = _edges.get(model)
    return known() if known is not None else None


def has_rounds(method: object) -> bool:
    """Whether ranks take steps alone with it; False where it is none, which whoever takes it will say."""
    if isinstance(method, str):
        try:
            method = parse_method(method)
        except ValueError:
            return False
    return isinstance(method, Method) and method.outer_rule is not None


def check_local(model: nn.Module, guard: object) -> None:
    """Raise where a model or an option does not go with local steps."""
    if isinstance(model, DistributedDataParallel):
        if has_foreign_hook(model):
            raise ValueError(FOREIGN_HOOK)
        if model.find_unused_parameters:
            raise ValueError(
                "find_unused_parameters=True makes DDP send something at every backward pass, which local steps do "
                "without; attach the bare module, or wrap it without that option"
            )
    if guard is not None:
        raise ValueError("guard watches the gradients that are exchanged, and local steps exchange none; leave it out")


def optimizers_for(parameters: Mapping[str, Tensor], optimizer: Optimizers, method: Method | str) -> OptimizerView:
    """The optimizers whose steps count; a ValueError where ranks cannot take them alone."""
    if optimizer is None:
        raise ValueError("attach needs a torch optimizer, not NoneType")
    if not parameters:
        raise ValueError("the model has no parameter that is trained, so there is nothing to average")
    view = view_of(parameters, optimizer)
    assert isinstance(view, OptimizerView)
    if view.sharded:
        raise ValueError(
            f"{method} lets every rank go its own way, and {view.optimizer_names} gives all ranks the parameters of "
            "the one that steps them; give every rank an optimizer of its own"
        )
    if any("train_mode" in group for one in view.optimizers for group in one.param_groups):
        raise ValueError(
            f"{method} averages one set of weights, and the schedule-free {view.optimizer_names} keeps two; take "
            "another optimizer, or a method that exchanges gradients"
        )
    return view
