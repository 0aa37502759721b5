"""A state names its method option by option: older ones are taken, and what differs is refused with the way out."""

from __future__ import annotations

from typing import Any

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


def test_state_from_before_an_option_was_added_is_taken(cluster: Any) -> None:
    changes = [
        ("dense_below=0,", ""),
        ("dense_below=0,", "dense_below=9,"),
        ("seed=0", "zeal=0"),
        ("clip_sigma=2.5", ""),
    ]
    for taken, other, unknown, absent in cluster.run(loaded_from, 2, "terngrad:dense_below=0", changes):
        assert taken == "" and absent == ""
        assert "belongs to method terngrad:" in other and "belongs to method terngrad:" in unknown
    idle = [("factor_masking=false", "factor_masking=true")]  # how it was saved when DGC took that, and ignored it
    assert cluster.run(loaded_from, 2, "dgc:momentum_correction=false", idle) == [[""], [""]]
    older = [("direct_decay=false,", "")]
    assert cluster.run(loaded_from, 2, "gtopk", older) == [[""], [""]], "the decay waited when there was no option"
    older.append(("scope=tensor,", ""))
    assert cluster.run(loaded_from, 2, "dgc:scope=tensor,direct_decay=false", older) == [["", ""], ["", ""]]
    added = [(",values=fp32,indices=rice,residual=fp32,dense_below=0,exclude=", ",residual=fp32")]
    assert cluster.run(loaded_from, 2, "dropping:values=fp32", added) == [[""], [""]]
    added = [(added[0][0].replace("fp32,indices", "int8,indices"), added[0][1])]
    for (said,) in cluster.run(loaded_from, 2, "dropping", added):
        assert "values=fp32" in said, "values of 32 bits were the only ones then"
    changes = [("dgc:", "dgc:"), (f"density={thinwire.DGC().density}", "density=0.5")]
    for own, other in cluster.run(loaded_from, 2, thinwire.DGC(warmup=thinwire.ListedWarmup(4)), changes):
        assert own == "", "a schedule has no string that can be read, and is still its own"
        assert other.endswith("attach the state's method (density=0.5)")


OLD = {"blocksign": "blocksign:dense_below=1", "terngrad": "terngrad:dense_below=0"}


def attached(group: dist.ProcessGroup, spec: str) -> thinwire.Wire:
    torch.manual_seed(0)
    model = DDP(nn.Linear(8, 8), process_group=group)
    wire = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), spec)
    model(torch.ones(2, 8)).sum().backward()
    return wire


def loaded(group: dist.ProcessGroup, saved_with: str, loaded_into: str, without: str = "") -> str:
    """What is said when a state is loaded, without an option that it did not have yet; nothing where it is taken."""
    first, second = attached(group, saved_with), attached(group, loaded_into)
    state, said = first.state_dict(), ""
    try:
        second.load_state_dict({**state, "method": state["method"].replace(without, "")})
    except ValueError as error:
        said = str(error)
    first.detach()
    second.detach()
    return said


@pytest.mark.parametrize("now", OLD)
def test_state_of_an_old_default_is_refused_with_the_way_out(cluster: Cluster, now: str) -> None:
    old = OLD[now]
    option = old.partition(":")[2]
    for said in cluster.run(loaded, 2, old, now):
        assert said.startswith(f"the state belongs to method {now}:") and "\n" not in said
        assert said.endswith(f"; to go on from it attach the state's method ({option})")
    assert cluster.run(loaded, 2, old, old) == ["", ""]


def test_ternary_state_from_before_dense_below_meant_everything(cluster: Cluster) -> None:
    for said in cluster.run(loaded, 2, OLD["terngrad"], "terngrad", "dense_below=0,"):
        assert said.endswith("attach the state's method (dense_below=0)")
    assert cluster.run(loaded, 2, OLD["terngrad"], OLD["terngrad"], "dense_below=0,") == ["", ""]
