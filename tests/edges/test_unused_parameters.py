"""Parameters that some or all ranks do not use in a step, as DDP treats them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import DGC, EXACT, LR, SHAPES, Run, Training, close, flat, pulls

import thinwire


def unused(group: dist.ProcessGroup, static_graph: bool) -> None:
    """Step 0: all used. Steps 1, 2: c on rank 0 alone, a on no rank. Step 3: all used again."""
    options = {"static_graph": True} if static_graph else {"find_unused_parameters": True}
    for form in (options, {**options, "bucket_cap_mb": 1e-5}):
        for method in (
            None,
            EXACT,
            DGC,
            thinwire.GTopK(density=0.02),
            thinwire.BlockSign(dense_below=1),
            thinwire.Dense(),
        ):
            training = Training(group, Run(method, "plain", ddp=form))
            module, rank = training.module, training.rank
            total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
            start = {name: p.detach().clone() for name, p in module.named_parameters()}
            for step in range(4):
                training.optimizer.zero_grad()
                everybody = [pulls(r, step) for r in range(dist.get_world_size(group))]
                if static_graph or step in (1, 2):  # a static graph never changes: a is never used
                    for r, mine in enumerate(everybody):
                        del mine["a"]
                        if r and not static_graph:
                            del mine["c"]
                training.model(everybody[rank]).backward()
                if "a" not in everybody[0] and (not static_graph or step == 0):
                    assert module.a.grad is None, f"{method}: nobody used it, DDP leaves it alone"
                training.optimizer.step()
                for name in SHAPES:
                    total[name] += sum(m.get(name, torch.zeros(SHAPES[name])) for m in everybody) / len(everybody)
            rest = training.wire.detach() if training.wire is not None else {}
            for name, p in module.named_parameters():
                whole = p.detach() - LR * rest.get(name, torch.zeros(()))
                close(whole, start[name] - LR * total[name], f"{method} {name} {form}", atol=1e-5)
                if method is DGC and not (static_graph and name == "a"):
                    assert rest[name].abs().max() > 0 or name == "e"


@pytest.mark.parametrize("static_graph", [False, True])
def test_unused_parameters_keep_their_residual_and_their_grad_as_ddp_leaves_it(
    cluster: Cluster, static_graph: bool
) -> None:
    """Unused on one rank: zeros there, as in DDP; on all ranks: .grad stays as it was and nothing is sent."""
    cluster.run(unused, 3, static_graph)


def used_under_no_sync(group: dist.ProcessGroup) -> None:
    """A parameter that only the accumulating pass used counts as used, as in DDP."""
    for method in (None, EXACT):
        training = Training(group, Run(method, "plain", ddp={"find_unused_parameters": True}))
        start = training.module.a.detach().clone()
        with training.model.no_sync():
            training.model(pulls(training.rank, 0)).backward()
        later = pulls(training.rank, 1)
        del later["a"]
        training.model(later).backward()
        training.optimizer.step()
        mean = sum(pulls(r, 0)["a"] for r in range(dist.get_world_size(group))) / dist.get_world_size(group)
        close(training.module.a.detach(), start - LR * mean, str(method))
        if training.wire is not None:
            training.wire.detach()


def test_parameter_used_only_under_no_sync_is_sent(cluster: Cluster) -> None:
    cluster.run(used_under_no_sync, 2)


def late_static_graph(group: dist.ProcessGroup) -> int:
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = thinwire.attach(model, optimizer, "dgc:dense_below=0")
    model._set_static_graph()
    for _ in range(2):
        model(torch.full((2, 4), 1.0 + dist.get_rank(group))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dense = wire.stats.dense_bytes
    wire.detach()
    return dense


def test_static_graph_declared_after_attach_is_exchanged(cluster: Cluster) -> None:
    """Every parameter counted as unused, and nothing was sent at all."""
    assert cluster.run(late_static_graph, 2) == [2 * 4 * 15] * 2


def idle(group: dist.ProcessGroup, optimizer: str, form: dict[str, Any]) -> None:
    """a is used at steps 0 and 3, c by rank 0 alone; their gradients are made zero, or left as they are, between."""
    options = {"find_unused_parameters": True, **form}
    methods = (None, "dgc", "gtopk", "dropping", "perlayer:a=(dgc:{0}),*=dense", "dense")
    exact = "density=1.0,dense_below=0,values=fp32"
    finals = []
    for method in methods:
        spec = method and (method.format(exact) if ":" in method or method == "dense" else f"{method}:{exact}")
        training = Training(group, Run(spec, optimizer, ddp=options))
        trajectory = []
        for step in range(6):
            training.optimizer.zero_grad(set_to_none=step == 4)
            for number in range(1 + step % 2):
                mine = pulls(training.rank, 10 * step + number)
                if step % 3:
                    del mine["a"]
                if training.rank:
                    del mine["c"]
                training.model(mine).backward()
            training.optimizer.step()
            trajectory.append(flat(training.module))
        finals.append(torch.stack(trajectory))
        if training.wire is not None:
            training.wire.detach()
    for method, final in zip(methods, finals, strict=True):
        close(final, finals[0], f"{method} with {optimizer}", atol=2e-5)


@pytest.mark.parametrize("form", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5}])
def test_a_parameter_that_nobody_uses_goes_on_by_its_momentum_where_its_gradient_is_zero(
    cluster: Cluster, form: dict[str, Any]
) -> None:
    """As with plain DDP, whose optimizer steps wherever there is a .grad; DDP hands none of it to a hook."""
    for optimizer in ("heavy", "nesterov-decay", "groups"):
        cluster.run(idle, 2, optimizer, form)
