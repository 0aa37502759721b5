"""What a forward pass of an attached model refuses before it starts: training on would hang, or be wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.ddp_hook import THAWED
from thinwire.methods import Method
from thinwire.torch_private import divides_by_all_ranks, ignored_by_ddp

REORDERED = (
    "the memory format of parameter {!r} has changed since attach, and what is kept of it lies in the order of the "
    "earlier one; convert the model first, then wrap it in a new DDP and attach that"
)


class ForwardChecks:
    """Compares a model with what it was when it was attached."""

    def __init__(self, model: DistributedDataParallel, parameters: Mapping[str, Tensor]) -> None:
        ignored = ignored_by_ddp(model)
        self._frozen = [(n, p) for n, p in model.module.named_parameters() if not p.requires_grad and n not in ignored]
        self._strides = [(name, p, p.stride()) for name, p in parameters.items()]

    def check_parameters(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ValueError(THAWED.format(name))
        for name, parameter, strides in self._strides:
            if parameter.stride() != strides and _is_reordered(parameter, strides):
                raise ValueError(REORDERED.format(name))

    def check_join(self, model: DistributedDataParallel, method: Method) -> None:
        """Refuse what cannot be done once a rank runs out of inputs (torch.distributed.algorithms.Join)."""
        if method.applies_local_gradients:
            raise ValueError(
                f"{method} applies every rank's own gradient, which ranks without inputs do not have; "
                "use a method without local gradients inside a join, or even inputs"
            )
        if not divides_by_all_ranks(model):
            raise ValueError(
                "join(divide_by_initial_world_size=False) cannot be done here: ranks without inputs go on sending what "
                "they kept, so the mean is always over all ranks; leave it at its default, True"
            )


def _is_reordered(parameter: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether elements lie in another order: strides of dimensions of one element say nothing."""
    rows = zip(parameter.shape, parameter.stride(), strides, strict=True)
    return any(now != before for size, now, before in rows if size > 1)
