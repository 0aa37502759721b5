"""A state names its method option by option, and another one is refused with the way out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire


def loaded_from(group: dist.ProcessGroup, spec: str, changes: list[tuple[str, str]]) -> list[str]:
    """Save a wire's state, change the method that it names, and load it: what is said, nothing where it is taken."""
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 8), process_group=group)
    wire = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), spec)
    model(torch.ones(2, 8)).sum().backward()
    state, said = wire.state_dict(), []
    for old, new in changes:
        assert old in state["method"]
        try:
            wire.load_state_dict({**state, "method": state["method"].replace(old, new)})
            said.append("")
        except ValueError as error:
            said.append(str(error))
    wire.detach()
    return said


def test_state_of_another_method_is_refused_option_by_option(cluster: Cluster) -> None:
    changes = [
        ("dense_below=0,", "dense_below=9,"),
        ("seed=0", "zeal=0"),
        ("clip_sigma=2.5,", ""),
    ]
    for said in cluster.run(loaded_from, 2, "terngrad:dense_below=0", changes):
        assert all("belongs to method terngrad:" in sentence for sentence in said)
        assert said[0].endswith("use the state's method (dense_below=9)")
    changes = [("dgc:", "dgc:"), (f"density={thinwire.DGC().density}", "density=0.5")]
    for own, other in cluster.run(loaded_from, 2, thinwire.DGC(warmup=thinwire.ListedWarmup(4)), changes):
        assert own == "", "a schedule has no string that can be read, and is still its own"
        assert other.endswith("use the state's method (density=0.5)")


OTHER = {"blocksign": "blocksign:dense_below=1", "terngrad": "terngrad:dense_below=0"}


def attached(group: dist.ProcessGroup, spec: str) -> thinwire.Wire:
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 8), process_group=group)
    wire = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), spec)
    model(torch.ones(2, 8)).sum().backward()
    return wire


def loaded(group: dist.ProcessGroup, saved_with: str, loaded_into: str) -> str:
    """What is said when a state is loaded; nothing where it is taken."""
    first, second = attached(group, saved_with), attached(group, loaded_into)
    state, said = first.state_dict(), ""
    try:
        second.load_state_dict(state)
    except ValueError as error:
        said = str(error)
    first.detach()
    second.detach()
    return said


@pytest.mark.parametrize("now", OTHER)
def test_state_of_another_option_is_refused_with_the_way_out(cluster: Cluster, now: str) -> None:
    other = OTHER[now]
    option = other.partition(":")[2]
    for said in cluster.run(loaded, 2, other, now):
        assert said.startswith(f"the state belongs to method {now}:") and "\n" not in said
        assert said.endswith(f"; to go on from it use the state's method ({option})")
    assert cluster.run(loaded, 2, other, other) == ["", ""]
