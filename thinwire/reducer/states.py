"""What a reducer saves and loads. A load is prepared aside, agreed on by all ranks, and only then taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from thinwire.checkpoint.format import STATE_FORMAT, StateShape, pack, state_for
from thinwire.checkpoint.gathering import gather_parts
from thinwire.engine.layout import memory_order
from thinwire.engine.named_state import StateKind
from thinwire.methods.running_method import RunningMethod
from thinwire.monitor.replicas import check_replicas
from thinwire.transport import overhead
from thinwire.transport.groups import check_agreement

if TYPE_CHECKING:
    from thinwire.reducer.reducer import Reducer

Result = TypeVar("Result")
LOAD_THE_SAME = "load the same model on every rank first, and then its wire's state"


@dataclass(frozen=True)
class Loaded:
    """A state that all ranks can take, with a method at work that has it already."""

    step: int
    optimizer_steps: int
    density_factor: float
    pending: dict[str, Tensor]
    running: RunningMethod
    rounds: dict[str, Any]  # of ranks that take steps alone
    anew: bool  # it is of a rank of another group


def state_of(reducer: Reducer) -> dict[str, Any]:
    """This rank's state, as it is saved."""
    rounds = reducer.rounds
    plain = {
        **terms_of(reducer),
        "step": reducer.progress.step - (rounds.in_round if rounds is not None else 0),  # the same on all ranks
        "optimizer_steps": reducer.progress.optimizer_steps,
        "density_factor": reducer.running.density_factor,
        "pending": {name: tensor.clone() for name, tensor in reducer.pending.items()},
        "aggregator": {**reducer.running.aggregator.state_dict(), **_rounds_of(reducer)},
    }
    return pack(plain, _shape(reducer))


def _rounds_of(reducer: Reducer) -> dict[str, Any]:
    return {"rounds": reducer.rounds.state_dict()} if reducer.rounds is not None else {}


def state_of_all(reducer: Reducer) -> dict[str, Any]:
    """All ranks' states in one on rank 0, {} on the others; collective."""
    state, error = _tried(lambda: state_of(reducer))
    error = reducer.shards.spread({}, error)
    with overhead(reducer.nets.own):
        state = gather_parts(state, reducer.nets.own, error)
    if reducer.shards.net is not None and reducer.nets.own.rank == 0:
        return gather_parts(state, reducer.shards.net, None)
    return state


def agreed_state(reducer: Reducer, read: Callable[[], Any]) -> Loaded:
    """Prepare what ``read`` gives on this rank; collective. Where a rank's state does not fit, or the replicas differ,
    all ranks raise and nothing has changed."""
    loaded, error = _tried(lambda: _prepared(reducer, state_for(read(), terms_of(reducer), _shape(reducer))))
    counters = ("step", "optimizer_steps", "density_factor")
    mine: dict[str, object] = {} if loaded is None else {name: getattr(loaded, name) for name in counters}
    net = reducer.nets.own
    error = reducer.shards.spread(mine, error)
    with overhead(net):
        check_agreement(net, mine, error)
        replicas = reducer.monitors.replicas()
        if replicas is not None and not reducer.method.replicas_drift:
            reducer.shards.together(lambda: check_replicas(replicas, net, "where a state is loaded", LOAD_THE_SAME))
    assert loaded is not None
    return loaded


def _tried(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The result, or the sentence of the error: the other ranks wait for either."""
    try:
        return work(), None
    except ValueError as problem:
        return None, str(problem)
    except Exception as problem:  # such as too little memory
        return None, f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"


def _prepared(reducer: Reducer, state: dict[str, Any]) -> Loaded:
    running, aggregator, terms = reducer.run_of(reducer.method), dict(state["aggregator"]), terms_of(reducer)
    rounds = aggregator.pop("rounds", {})
    running.aggregator.load_state_dict(aggregator)
    running.density_factor = state["density_factor"]
    device = reducer.nets.compute_device
    pending = {name: tensor.to(device, copy=True) for name, tensor in state["pending"].items()}
    anew = any(state[key] != terms[key] for key in ("world_size", "rank", "hierarchy"))
    counters = state["step"], state["optimizer_steps"], state["density_factor"]
    return Loaded(*counters, pending, running, rounds, anew)


def terms_of(reducer: Reducer) -> dict[str, Any]:
    """What a state must have in common with the one that is loaded."""
    wholes = reducer.shards.wholes(reducer.parameters)
    forms = ((name, tuple(p.shape), memory_order(p)) for name, p in wholes.items())
    own = reducer.nets.own
    return {
        "format": STATE_FORMAT,
        "method": reducer.method.in_full,
        "parameters": tuple(forms),
        "world_size": own.size,
        "shards": reducer.shards.of,
        "rank": own.rank,
        "shard": reducer.shards.place,
        "hierarchy": reducer.nets.groups,
    }


def _shape(reducer: Reducer) -> StateShape:
    shapes = {name: p.shape for name, p in reducer.shards.wholes(reducer.parameters).items()}
    numels = {name: p.numel() for name, p in reducer.parameters.items()}
    shape = StateShape.of(reducer.running, shapes, numels, reducer.nets.compute_device)
    if reducer.rounds is None:
        return shape
    return replace(shape, kinds={**shape.kinds, "rounds": {kind: StateKind(kind) for kind in reducer.rounds.kinds}})
