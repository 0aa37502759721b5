"""The method that ``attach`` takes when none was given: from what is known without measuring anything.

What decides is what the project's trainings showed (docs/results.md) and the planned bytes of a step. Nothing that
needs more of a script than the line with ``attach`` is chosen: local gradients want ``averaged()`` around evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.advisor.cost.plans import bucket_layouts, plan_exchange
from thinwire.engine.hierarchy import machine_groups
from thinwire.engine.several_optimizers import optimizers_of
from thinwire.methods import SparseLoCo, parse_method
from thinwire.methods.base import Rows
from thinwire.methods.epochs import check_steps_per_epoch
from thinwire.reducer import HierarchySpec, Optimizers

SMALL = 100_000  # elements: 0.4 MB travel faster than a step is worth compressing
WORTH_BYTES = 2.0  # a method must send this many times less than dense, or it is not worth its trouble
EPOCHS = 4  # of warm-up, as DGC was trained
(LOCAL,) = SparseLoCo.advised.sgd  # as accurate as dense with SGD, ResNet-20 and VGG-16
SENTENCE = "thinwire: no method was given, so %s is used: %s"


class DefaultMethod(NamedTuple):
    """A method as a string, and why it was chosen."""

    spec: str
    reason: str


def default_method(
    rows: Rows, ranks: int, other_optimizer: str | None, epochs_known: bool, sharded: bool = False
) -> DefaultMethod:
    """The method for parameters of these names and shapes and so many ranks that exchange.

    ``other_optimizer`` is what steps them where that is not torch.optim.SGD alone; with ``epochs_known`` a warm-up of
    epochs can be given.
    """
    numel = sum(shape.numel() for _, _, shape in rows)
    if ranks == 1:
        return DefaultMethod("dense", "there is nobody to send to")
    if numel < SMALL:
        return DefaultMethod("dense", f"a model of {numel:,} parameters is too small to gain from compression")
    if other_optimizer is not None:
        return DefaultMethod(
            "dense:dtype=bf16",
            f"with {other_optimizer} nothing that sends less was as accurate on every model; for Transformers and GRUs "
            '"dropping:local=partial" sends less, and wants wire.averaged() around evaluation',
        )
    dense, dgc, blocksign = (_nbytes(spec, rows, ranks) for spec in ("dense", "dgc", "blocksign"))
    if dense < WORTH_BYTES * min(dgc, blocksign):
        return DefaultMethod("dense", f"with these tensors and {ranks} ranks no method sends much less")
    if dgc > blocksign:
        return DefaultMethod(
            "blocksign",
            f"with SGD on {ranks} ranks it sends {dense / blocksign:.0f} times less than dense and DGC only "
            f'{dense / dgc:.0f} times; leaving the output layer out ("blocksign:exclude=PATTERN") was more accurate',
        )
    reason = f"with SGD it sends {dense / dgc:.0f} times less than dense behind its warm-up, and was as accurate"
    if not sharded and (local := _nbytes(LOCAL, rows, ranks)) * WORTH_BYTES <= dgc:
        reason = (
            f'{reason} ("{LOCAL}" sends {dense / local:.0f} times less, and wants wire.averaged() around evaluation)'
        )
    if epochs_known:
        return DefaultMethod(f"dgc:warmup={EPOCHS} epochs", reason)
    return DefaultMethod(
        "dgc", f"{reason} with a warm-up of {EPOCHS} epochs, for which give steps_per_epoch=len(loader)"
    )


def _nbytes(spec: str, rows: Rows, ranks: int) -> float:
    """What a step of a method puts on the busiest link, behind a warm-up; of a round, an equal part per step."""
    method = parse_method(spec)
    nbytes = float(sum(plan_exchange(method, layout, ranks).nbytes for layout in bucket_layouts(method, [rows])))
    return nbytes / method.outer_rule.every if method.outer_rule is not None else nbytes


def default_for(
    parameters: Mapping[str, Tensor],
    optimizer: Optimizers,
    size: int,
    hierarchy: HierarchySpec,
    steps_per_epoch: int | None,
    sharded: bool = False,
) -> DefaultMethod:
    """The method for this model, its optimizers and a group of this size: the same on all ranks. Parameters that are
    ``sharded`` have no local steps."""
    check_steps_per_epoch(steps_per_epoch)
    machines = machine_groups(hierarchy, size)
    rows = [(name, place, parameter.shape) for place, (name, parameter) in enumerate(parameters.items())]
    other = _other_than_sgd(optimizers_of(optimizer))
    return default_method(rows, len(machines) if machines else size, other, steps_per_epoch is not None, sharded)


def _other_than_sgd(optimizers: Sequence[Optimizer]) -> str | None:
    """What keeps momentum from being taken over; None where nothing does."""
    others = [type(one).__name__ for one in optimizers if not isinstance(one, SGD)]
    if others:
        return " and ".join(dict.fromkeys(others))
    damped = any(group.get("dampening") for one in optimizers for group in one.param_groups)
    return "an SGD that has dampening" if damped else None
