"""The one verb: attach(model, optimizer, method) -> Wire."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.advisor.auto import Auto
from thinwire.advisor.default_method import SENTENCE, default_for
from thinwire.edges.attach_local import attach_local
from thinwire.edges.bucket_fusion import choice as fusion_choice
from thinwire.edges.ddp_edge import DdpEdge
from thinwire.edges.ddp_hook import FOREIGN_HOOK, THAWED, has_foreign_hook, is_attached
from thinwire.edges.fsdp_checks import check_no_mesh, is_fully_sharded
from thinwire.edges.fsdp_edge import attach_shards
from thinwire.edges.local import has_rounds
from thinwire.edges.no_process_group import WireAlone, is_alone
from thinwire.edges.wire import Wire
from thinwire.engine.hierarchy import sends_nothing
from thinwire.engine.step_skipper import Scaler
from thinwire.errors import ATTACHED_ALREADY
from thinwire.methods import Dense, Method
from thinwire.reducer import EdgeTerms, HierarchySpec, Optimizers, Reducer
from thinwire.torch_private import exchanged_by_ddp, ignored_by_ddp, uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("thinwire")

SHORT_WARMUP = 6  # steps: as epochs smaller numbers are usual (DGC has 4), as steps they change nothing


def attach(
    model: torch.nn.Module,
    optimizer: Optimizers,
    method: Method | str | None = None,
    *,
    hierarchy: HierarchySpec = None,
    on_nonfinite: str = "raise",
    scaler: Scaler | None = None,
    guard: str | None = None,
    guard_every: int = 20,
    check_replicas_every: int | None = None,
    steps_per_epoch: int | None = None,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
) -> Wire:
    """Compress the gradients of a DistributedDataParallel model from the next backward pass on.

    In one process without a process group give the bare module: the wire then does nothing, and says so once.

    A collective call: every rank of the model's process group makes it, with the same method and model; all ranks
    raise the same ValueError when they differ, and then nothing is changed. ``method`` is a method object or its
    string form. Without one it is chosen for the optimizer, the model's size and the number of ranks, which one line in
    the log explains; "auto" trains dense for seven steps, measures, and changes to what ``thinwire.advise`` would
    recommend (one line in the log says why). A warm-up of epochs, ``DGC(warmup="4 epochs")``, needs their length:
    ``steps_per_epoch`` is the number of optimizer steps in one, often ``len(loader)``.

    ``optimizer`` is a torch optimizer, or a list of those that own the model's parameters together, such as Muon and
    AdamW; wrappers that hold one as ``.optimizer`` (Accelerate, Lightning) are seen through. Where there are several,
    a step is what they do between two backward passes.

    ``hierarchy`` averages exactly inside each machine and compresses between machines: "auto" takes the machines from
    LOCAL_WORLD_SIZE, a number is the ranks that a machine has, a list of lists names their ranks. With all ranks on one
    machine nothing is compressed, and the training is dense.

    A gradient that holds an inf, a nan or a number beyond 1.8e19, whose sums could overflow, never enters a residual.
    ``on_nonfinite="raise"`` stops all ranks with an error (``Dense`` and ``Noop`` keep nothing and pass it on, as DDP
    does). The rank with the bad gradient then has its
    memory as it was (on a GPU: with that step's finite elements in it); the others learn of it from the frames, when
    their own gradients of that step have entered theirs, so go on from a checkpoint. "skip" passes over the whole step
    on all ranks and leaves every memory as it was. With mixed precision give the ``torch.amp.GradScaler`` as
    ``scaler``: it then sees the infinity on every rank and lowers its scale, and gradients are unscaled before they
    meet a residual. "skip" and ``scaler`` exchange after the whole backward pass instead of bucket by bucket.

    ``guard="warn"`` measures every ``guard_every`` steps how much is kept back and for how long (``wire.stats``) and
    warns when the training runs away; "densify" then also raises the density by a factor of 4, on all ranks at the same
    step, until it settles. ``check_replicas_every=n`` compares a hash of all parameters between the ranks every n
    optimizer steps (8 bytes per rank) and raises a ReplicaError that names what differs, and where.

    A model of torch's ``fully_shard`` comes with the 2-D ``mesh`` of which it was sharded on the last dimension: the
    mean over that is torch's, the one over the first is compressed, and counted. Parameters and buffers are made those
    of the first replica. ``hierarchy`` and "auto" are for DistributedDataParallel.

    With local steps (``LocalSteps``, ``SparseLoCo``, ``DiLoCo``) the model may be a bare module, over the ranks of
    ``group`` (the default one unless given), or a DistributedDataParallel one, whose gradients then stay where they are
    and whose buffers are not broadcast while it is attached. Parameters and buffers are made those of the first rank.
    In the middle of a round ``wire.detach()`` makes a last exchange, so that all ranks end with the same parameters.
    ``on_nonfinite="skip"`` takes all ranks back to where the round began when the parameters of one are not finite. A
    ``scaler`` needs no mention: steps that it passes over do not count, and ranks wait for each other at the next
    exchange.
    """
    model = uncompiled(model)
    if isinstance(model, torch.optim.Optimizer):
        raise ValueError(
            f"attach takes the model first and the optimizer second, and {type(model).__name__} came first"
        )
    if is_fully_sharded(model):
        wire, why = attach_shards(
            model, optimizer, method, mesh, hierarchy,
            lambda parameters, replicas: default_for(parameters, optimizer, replicas, None, steps_per_epoch, True),
            on_nonfinite=on_nonfinite, scaler=scaler, guard=guard, guard_every=guard_every,
            check_replicas_every=check_replicas_every, steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        _tell(wire.reducer, steps_per_epoch, why)
        return wire
    check_no_mesh(model, mesh)
    if is_alone(model):
        return WireAlone(model, optimizer, method if method is not None else "dense", steps_per_epoch)
    if group is not None and (isinstance(model, DistributedDataParallel) or not has_rounds(method)):
        raise ValueError("group= is for bare modules with local steps; DistributedDataParallel has a group of its own")
    if isinstance(model, torch.nn.Module) and method is not None and has_rounds(method):
        wire = attach_local(
            model, optimizer, method, group, hierarchy=hierarchy, on_nonfinite=on_nonfinite, scaler=scaler, guard=guard,
            check_replicas_every=check_replicas_every, steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        _tell(wire.reducer, steps_per_epoch, "")
        return wire
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach needs a DistributedDataParallel model, not {type(model).__name__}; wrap it: DDP(model), or take "
            "local steps: thinwire.LocalSteps()"
        )
    if is_attached(model):
        raise ValueError(ATTACHED_ALREADY)
    auto = isinstance(method, str) and method.strip().lower() == "auto"
    error, fusion, why = None, "", ""
    try:
        if auto and hierarchy is not None:
            raise ValueError('method="auto" knows flat groups only; name a method, or leave the hierarchy out')
        if optimizer is None:
            raise ValueError("attach needs a torch optimizer, not NoneType")
        fusion = fusion_choice()
        _check_model(model)
        if method is None:
            size = dist.get_world_size(model.process_group)
            method, why = default_for(trainable(model), optimizer, size, hierarchy, steps_per_epoch)
    except (ValueError, RuntimeError) as problem:  # the latter: torch's own, when DDP is asked about its parameters
        error = str(problem)
    reducer = Reducer(
        trainable(model),
        Dense() if auto or method is None else method,
        model.process_group,
        optimizer,
        hierarchy=hierarchy,
        on_nonfinite=on_nonfinite,
        scaler=scaler,
        guard=guard,
        guard_every=guard_every,
        check_replicas_every=check_replicas_every,
        steps_per_epoch=steps_per_epoch,
        terms=EdgeTerms({**_terms_of(model), "auto": str(auto), "THINWIRE_MERGE": fusion}, error),
    )
    wire = Wire(reducer, DdpEdge(model, reducer))
    if auto and reducer.nets.own.size > 1:
        Auto(wire)
    _tell(reducer, steps_per_epoch, why)
    return wire


def trainable(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that DDP reduces, by name, in the model's order."""
    ignored = ignored_by_ddp(model)
    return {name: p for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored}


def _check_model(model: DistributedDataParallel) -> None:
    if has_foreign_hook(model):
        raise ValueError(FOREIGN_HOOK)
    for name, module in model.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ValueError(f"module {name!r} makes sparse gradients, which DDP hooks cannot take; use sparse=False")
    _check_frozen(model, trainable(model))


def _check_frozen(model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
    """Refuse parameters that were frozen or unfrozen behind DDP's back: it chose what it exchanges when it was made."""
    exchanged = {id(parameter) for parameter in exchanged_by_ddp(model)}
    for name, parameter in model.module.named_parameters():
        if name in parameters and id(parameter) not in exchanged:
            raise ValueError(THAWED.format(name))
        if name not in parameters and id(parameter) in exchanged:
            raise ValueError(
                f"parameter {name!r} is frozen, but was trained when the model was wrapped in DistributedDataParallel, "
                "which still waits for its gradient; freeze first, then wrap the module in a new DDP and attach that"
            )


def _terms_of(model: DistributedDataParallel) -> dict[str, object]:
    """What all ranks must have in common of DDP's own options: with either the ranks agree on the used parameters
    first, one exchange more."""
    return {key: bool(getattr(model, key)) for key in ("find_unused_parameters", "static_graph")}


def _tell(reducer: Reducer, steps_per_epoch: int | None, why: str) -> None:
    """One line in the log about what may surprise; ``why`` says so of a method that was not given."""
    own, method = reducer.nets.own, reducer.method
    if reducer.shards.place != 0:  # those with the first shard speak
        return
    wide = next((name for name, p in reducer.parameters.items() if p.dtype == torch.float64), None)
    if wide is not None:
        log.warning("thinwire: gradients are exchanged as float32, also those of float64 parameters such as %s", wide)
    if why:
        if own.rank == 0:
            log.warning(SENTENCE, method, why)
        return
    if sends_nothing(reducer.nets.groups) and own.size > 1 and own.rank == 0:
        update = (
            "nothing is compressed or kept back" if method.estimates_mean else f"the update is {method.name}'s of it"
        )
        log.warning("thinwire: all ranks are on one machine, so their mean is exact and %s", update)
    warmup = getattr(method, "warmup", None)
    if type(warmup) is int and warmup < SHORT_WARMUP and own.rank == 0 and steps_per_epoch is None:
        log.warning(
            "thinwire: a warm-up counts optimizer steps, so %s sends at its final density after %d steps; for a "
            'warm-up of epochs give warmup="%d epochs" to the method and steps_per_epoch=len(loader) to attach',
            method, warmup, warmup,
        )  # fmt: skip
    if own.size == 1:
        what = "gradients" if method.outer_rule is None else "differences"
        log.warning("thinwire: the group has one rank, so nothing is sent; %s still go through %s", what, method)
