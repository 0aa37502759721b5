"""Models of torch's ``fully_shard``: which of them can be attached with which mesh, and who is called before a pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.uncopied_hook import OwnHook
from thinwire.engine.layout import memory_flat
from thinwire.engine.shards import Shards, local_of
from thinwire.errors import DetachedError
from thinwire.torch_private import reduction_hooks
from thinwire.transport import Net, TorchNet

NO_MESH = (
    "a model of fully_shard is attached with the 2-D mesh of which it was sharded on the last dimension, so that the "
    "first one is compressed: thinwire.attach(model, optimizer, method, mesh=mesh)"
)
ON_TWO = (
    "the model was sharded on a mesh of two dimensions, so torch itself averages over the first; shard it on the last "
    "one alone, fully_shard(module, mesh={}), and attach it with both: thinwire.attach(model, optimizer, method, "
    "mesh=mesh)"
)
OLDER = (
    "attach takes models of fully_shard, not FullyShardedDataParallel: call fully_shard(module, mesh={}) instead, and "
    "thinwire.attach(model, optimizer, method, mesh=mesh)"
)
DETACHED = (
    "this model was detached from thinwire, so nothing averages its replicas any more: call thinwire.attach again, or "
    "shard a new model on both dimensions of the mesh"
)


def is_fully_sharded(model: object) -> bool:
    """Whether ``fully_shard`` was called on a module; who did has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def check_no_mesh(model: object, mesh: Any) -> None:
    """Raise where a model of another kind should have been one of fully_shard."""
    if type(model).__name__ == "FullyShardedDataParallel":
        raise ValueError(OLDER.format(_last(mesh)))
    if isinstance(model, nn.Module) and any(is_fully_sharded(module) for module in model.modules()):
        kind = type(model).__name__
        raise ValueError(f"parts of this {kind} are sharded and the {kind} is not; call fully_shard on it as well")
    if mesh is None:
        return
    if isinstance(model, DistributedDataParallel):
        raise ValueError("mesh= is for models of fully_shard; leave it out with DistributedDataParallel")
    raise ValueError(
        f"mesh= is for models of fully_shard, not {type(model).__name__}; call fully_shard(model, mesh={_last(mesh)})"
    )


def _last(mesh: Any) -> str:
    """How the mesh's last dimension is written."""
    names = getattr(mesh, "mesh_dim_names", None) or ("shard",)
    return f'mesh["{names[-1]}"]'


def check_mesh(model: nn.Module, mesh: Any) -> None:
    """Raise where there is no mesh of two dimensions that this rank is in: the ranks cannot speak to each other yet."""
    from torch.distributed.device_mesh import DeviceMesh  # here: imported already where a model is sharded

    if mesh is None:
        raise ValueError(ON_TWO.format(_last(mesh)) if any(map(_is_on_two, model.parameters())) else NO_MESH)
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        form = f"one of {mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ValueError(f"mesh must be a DeviceMesh of two dimensions, over replicas and over shards, not {form}")
    if mesh.get_coordinate() is None:
        raise ValueError("this rank is not in the mesh that attach was given; attach on the mesh's ranks alone")


def _is_on_two(parameter: Any) -> bool:
    placements: tuple[Any, ...] = getattr(parameter, "placements", ())
    return len(placements) > 1 and bool(placements[0].is_replicate())


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name, in the model's order and not gathered."""
    for module in sharded_modules(model):
        module.reshard()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_fully_sharded(module)]


def shards_on(mesh: Any, parameters: Mapping[str, Tensor]) -> Shards:
    """Which shard this rank has, and who has the others."""
    (_, place), size = mesh.get_coordinate(), mesh.size(1)
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    return Shards(place, size, parameters, TorchNet(mesh.get_group(1), device) if size > 1 else None)


def check_shards(model: nn.Module, parameters: Mapping[str, Tensor], mesh: Any) -> None:
    """Raise where the parameters are not the rows that the mesh's last dimension says."""
    row = mesh.mesh[mesh.get_coordinate()[0]].tolist()
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, row, mesh)
    for module in sharded_modules(model):
        hooks = reduction_hooks(module)
        if len(hooks) > 1:
            raise ValueError("the parameters of one module are sharded in several ways; leave shard_placement_fn out")
        if any(hook is not None for hook in hooks):
            raise ValueError("this model has an all-reduce hook already, and torch takes only one; shard a new model")


def _check_parameter(name: str, parameter: Any, row: list[int], mesh: Any) -> None:
    if not hasattr(parameter, "device_mesh"):
        raise ValueError(f"parameter {name!r} is trained and not sharded; take it out of ignored_params, or freeze it")
    if _is_on_two(parameter):
        raise ValueError(ON_TWO.format(_last(mesh)))
    if len(parameter.placements) > 1 or not parameter.placements[0].is_shard(0):
        raise ValueError(
            f"parameter {name!r} is not cut into rows alone but as {parameter.placements}; shard it with fully_shard, "
            "without shard_placement_fn and without tensor parallelism"
        )
    own = parameter.device_mesh.mesh.flatten().tolist()
    if own != row:
        raise ValueError(
            f"parameter {name!r} is sharded over the ranks {own}, and the mesh's last dimension has {row} here; call "
            f"fully_shard(module, mesh={_last(mesh)}) with the mesh that attach gets"
        )
    if parameter.device.type != mesh.device_type:
        raise ValueError(
            f"parameter {name!r} lies on the {parameter.device.type}, and the mesh is of {mesh.device_type}; leave the "
            "offload_policy out"
        )


def make_replicas_equal(model: nn.Module, net: Net) -> None:
    """Give all replicas the parameters and buffers of the first; collective. DDP's constructor does so, too."""
    net.stage = "make the replicas equal"
    for tensor in (*model.parameters(), *model.buffers()):
        own = local_of(tensor).detach()
        flat = memory_flat(own).contiguous()
        if flat.numel():
            net.broadcast(flat.view(torch.uint8), 0)
        if flat.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            own.copy_(flat.view_as(own))


class TrainsShards(Protocol):
    """The edge that is asked before a forward pass."""

    def before_forward(self) -> None: ...


class ShardsGate:
    """Stays on a model that was attached once: its replicas must not go on alone in silence. The edge of the moment is
    known weakly, or the model would keep it alive for ever."""

    def __init__(self) -> None:
        self._edge: Callable[[], TrainsShards | None] = lambda: None

    @property
    def edge(self) -> TrainsShards | None:
        return self._edge()

    @edge.setter
    def edge(self, edge: TrainsShards | None) -> None:
        self._edge = weakref.ref(edge) if edge is not None else lambda: None

    def before_forward(self, module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        edge = self.edge
        if edge is not None:
            edge.before_forward()
        elif module.training:
            raise DetachedError(DETACHED)


_gates: weakref.WeakKeyDictionary[nn.Module, ShardsGate] = weakref.WeakKeyDictionary()


def gate_of(model: nn.Module) -> ShardsGate:
    """The model's gate, hung in front of everything on the first call."""
    gate = _gates.get(model)
    if gate is None:
        gate = _gates[model] = ShardsGate()
        model.register_forward_pre_hook(OwnHook(gate.before_forward), prepend=True)
    return gate


def has_edge(model: nn.Module) -> bool:
    gate = _gates.get(model)
    return gate is not None and gate.edge is not None
