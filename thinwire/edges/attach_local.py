"""``thinwire.attach`` with a method of local steps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.edges.ddp_hook import is_attached
from thinwire.edges.fsdp_checks import make_replicas_equal
from thinwire.edges.local import check_local, local_edge_of, optimizers_for
from thinwire.edges.local_edge import LocalEdge
from thinwire.edges.wire import Wire
from thinwire.engine.step_skipper import Scaler, check_skipping
from thinwire.errors import ATTACHED_ALREADY
from thinwire.methods import Method
from thinwire.reducer import EdgeTerms, Optimizers, Reducer
from thinwire.reducer.setup import options_of
from thinwire.transport import overhead


def attach_local(
    model: nn.Module,
    optimizer: Optimizers,
    method: Method | str,
    group: dist.ProcessGroup | None,
    *,
    on_nonfinite: str,
    scaler: Scaler | None,
    guard: str | None,
    **options: Any,
) -> Wire:
    """``thinwire.attach`` with a method of local steps; the options are the reducer's."""
    is_ddp = isinstance(model, DistributedDataParallel)
    if local_edge_of(model) is not None or (isinstance(model, DistributedDataParallel) and is_attached(model)):
        raise ValueError(ATTACHED_ALREADY)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    parameters: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    error, view, seen = None, None, {}
    try:
        check_local(model, guard)
        check_skipping(on_nonfinite, scaler)
        view = optimizers_for(parameters, optimizer, method)
        seen = {"the optimizer's options": options_of(view)}
    except (ValueError, RuntimeError) as problem:
        error = str(problem)
    reducer = Reducer(
        parameters,
        method,
        model.process_group if isinstance(model, DistributedDataParallel) else group,
        on_nonfinite=on_nonfinite if error is None else "raise",
        terms=EdgeTerms({**seen, "DistributedDataParallel": str(is_ddp)}, error, in_rounds=True),
        **options,
    )
    assert view is not None
    with overhead(reducer.nets.own):
        make_replicas_equal(module, reducer.nets.own)
    return Wire(reducer, LocalEdge(model, reducer, view))
