"""Every private name of torch that thinwire reads, behind functions with plain names.

Each function says what it reads, and what happens with a torch that does not have it: a RuntimeError that names what is
missing, unless something else is said. ``tests/test_torch_private.py`` probes all of them on the installed torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode  # without it this module cannot be imported

Model = TypeVar("Model")

TESTED = ("2.13",)  # the torch versions on which the probes were run


def _missing(of: str, name: str) -> RuntimeError:
    return RuntimeError(f"torch {torch.__version__} has no {of}.{name}, which thinwire needs; use torch {TESTED[-1]}")


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _missing(getattr(owner, "__name__", type(owner).__name__), name) from None


# ------------------------------------------------------------------------------------------------------- autograd


OUTSIDE = -1  # of any backward pass


def backward_id() -> int:
    """Which backward pass this thread is inside of: the id of autograd's graph task, or OUTSIDE."""
    try:
        return torch._C._current_graph_task_id()
    except AttributeError:
        raise _missing("torch._C", "_current_graph_task_id") from None


def backward_is_running() -> bool:
    """Whether this thread is inside a backward pass."""
    return backward_id() != OUTSIDE


def after_backward(callback: Callable[[], None]) -> None:
    """Call this at the end of the backward pass that is running, behind what was queued so far: the engine's queue."""
    try:
        engine = torch.autograd.Variable._execution_engine
    except AttributeError:
        raise _missing("autograd.Variable", "_execution_engine") from None
    engine.queue_callback(callback)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place: autograd's version counter."""
    return int(_read(tensor, "_version"))


# ----------------------------------------------------------------------------------------- DistributedDataParallel


def uncompiled(model: Model) -> Model | Any:
    """What ``torch.compile`` (``_orig_mod``) or Lightning's Fabric (``_forward_module``) wrapped, or the model itself;
    without these names the wrapper is returned."""
    found: Any = model
    while not isinstance(found, DistributedDataParallel):
        # Fabric's first: it looks up the other name in the bare module.
        inner = getattr(found, "_forward_module", None) or getattr(found, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module) or inner is found:
            break
        found = inner
    return found


def ignored_by_ddp(model: DistributedDataParallel) -> set[str]:
    """The names that DDP was told to leave alone: ``parameters_to_ignore``; without it none, and attach then refuses a
    model that has some, because DDP does not exchange them."""
    return set(getattr(model, "parameters_to_ignore", ()))


def exchanged_by_ddp(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters that DDP exchanges: those that were trained when it was made, whatever they are now.

    DDP's reducer tells only by way of its buckets, for which it makes zeros of the size of all gradients; nobody reads
    them here, so it is given the buckets' own memory instead.
    """
    with _NoZeros():
        buckets = _read(model.reducer, "_get_zeros_like_grad_buckets")()
    return [parameter for bucket in buckets for parameter in bucket.parameters()]


class _NoZeros(TorchDispatchMode):
    """Where zeros like a tensor are asked for, the tensor itself takes their place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


def has_comm_hook(model: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered: ``_comm_hooks``; without it False, and DDP itself then refuses a
    second hook."""
    return bool(getattr(model, "_comm_hooks", []))


def register_uncopied_hook(model: DistributedDataParallel, hook: Callable[..., Any]) -> None:
    """Register a communication hook that is the model's alone: a copied DDP has the list of hooks (``_comm_hooks``)
    and never registers them. Without that list there is nothing to copy."""
    model.register_comm_hook(None, hook)
    if hasattr(model, "_comm_hooks"):
        model._comm_hooks = _Uncopied(model._comm_hooks)


class _Uncopied(list[Any]):
    """A list that is empty in a copy."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


def has_joined(model: DistributedDataParallel) -> bool:
    """Whether a join for uneven inputs has begun: ``_join_config``, which torch leaves as it is after the join."""
    return bool(_read(model, "_join_config").enable)


def divides_by_all_ranks(model: DistributedDataParallel) -> bool:
    """Whether a join goes on dividing by all ranks: ``_divide_by_initial_world_size``; True before the first join, and
    without it."""
    return bool(getattr(model, "_divide_by_initial_world_size", True))


def bucket_assignment(tensors: Sequence[Tensor], limits: Sequence[int]) -> list[list[int]]:
    """The places of the tensors in DDP's buckets of at most so many bytes (the first limit is the first bucket's):
    ``_compute_bucket_assignment_by_size``."""
    groups, _ = _read(dist, "_compute_bucket_assignment_by_size")(list(tensors), list(limits))
    return [list(group) for group in groups]


# ----------------------------------------------------------------------------------------------------- fully_shard


def reduction_hooks(module: Any) -> list[Callable[..., Any] | None]:
    """The all-reduce hooks of a module that ``fully_shard`` was called on, one per group of parameters that it reduces
    together: ``_get_fsdp_state``, ``_fsdp_param_groups`` and ``_all_reduce_hook``."""
    state = _read(module, "_get_fsdp_state")()
    return [_read(group, "_all_reduce_hook") for group in _read(state, "_fsdp_param_groups")]


def unhook_reduction(module: Any) -> None:
    """Take the all-reduce hook off: torch's ``set_all_reduce_hook`` stores whatever it is given, and calls no None."""
    module.set_all_reduce_hook(None)


# -------------------------------------------------------------------------------------------------- process groups


def _world() -> Any:
    return _read(dist.distributed_c10d, "_world")


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether the process group still exists: torch's table of groups."""
    return group in _read(_world(), "pg_map")


def num_groups() -> int:
    """How many process groups this process knows: torch's table of names, from which it makes new ones."""
    return len(_read(_world(), "pg_names"))


def store_of(group: dist.ProcessGroup) -> Any:
    """The store that a group's ranks met in: torch's table of groups."""
    return _read(_world(), "pg_map")[group][1]


def is_tcp(store: dist.Store) -> bool:
    """Whether a store, below its prefixes, is a server: ``_underlying_non_prefix_store``; without it False, and the
    connection is shared with whoever else waits on it."""
    return isinstance(getattr(store, "_underlying_non_prefix_store", None), dist.TCPStore)


def agent_hosts_store() -> bool:
    """Whether the store belongs to torchrun's agent and to no rank: a variable of torchrun; without it False."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that a group was made with: its backend's ``_timeout``; without it None, which is torch's default."""
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


# ------------------------------------------------------------------------------------------------- mixed precision


def has_scaled(scaler: Any) -> bool:
    """Whether a GradScaler has scaled a loss already: ``_scale``, which it makes then; without it True."""
    return getattr(scaler, "_scale", scaler) is not None
