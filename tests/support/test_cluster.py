"""The five processes: groups of n, errors and hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, ClusterError, group_of_same_ranks


def total_of_ranks(group: dist.ProcessGroup, factor: int) -> tuple[int, int, int]:
    value = torch.tensor([factor * (dist.get_rank(group) + 1)])
    dist.all_reduce(value, group=group)
    return int(value), dist.get_world_size(group), os.getpid()


def fail_on(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> str:
    if dist.get_rank(group) in ranks:
        raise ValueError(f"rank {dist.get_rank(group)} says no")
    return "fine"


def meet_in_another_group(group: dist.ProcessGroup) -> int:
    if dist.get_rank(group) == 0:  # from now on it knows more groups than the others
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    value = torch.ones(1)
    dist.all_reduce(value, group=group_of_same_ranks(group, timeout_s=30))
    return int(value)


def hang(group: dist.ProcessGroup) -> None:
    time.sleep(3600)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_cluster_runs_on_a_group_of_n(cluster: Cluster, n: int, last: bool) -> None:
    results = cluster.run(total_of_ranks, n, 10, last=last)
    assert [r[:2] for r in results] == [(10 * n * (n + 1) // 2, n)] * n
    assert len({r[2] for r in results}) == n


def test_cluster_reports_errors(cluster: Cluster) -> None:
    before = cluster.run(total_of_ranks, 3, 1)
    answers = cluster.run("test_cluster:fail_on", 3, (0, 2), expect_errors=True)
    assert [getattr(a, "type", a) for a in answers] == ["ValueError", "fine", "ValueError"]
    assert answers[2].message == "rank 2 says no"
    assert cluster.run(total_of_ranks, 3, 1) == before  # the same processes


def test_ranks_that_know_unequal_numbers_of_groups_meet(cluster: Cluster) -> None:
    assert cluster.run(meet_in_another_group, 3) == [3, 3, 3]


def test_cluster_survives_errors_and_hangs() -> None:
    pool = Cluster(1)
    try:
        with pytest.raises(ClusterError, match=r"(?s)failed on 1 of 1 ranks.*rank 0 says no.*in fail_on"):
            pool.run(fail_on, 1, (0,))
        (first,) = pool.run(total_of_ranks, 1, 1)
        with pytest.raises(ClusterError, match=r"(?s)not every rank answered.*rank 0: no answer"):
            pool.run(hang, 1, timeout_s=0.5)
        (second,) = pool.run(total_of_ranks, 1, 1)
        assert first[:2] == second[:2] == (1, 1) and first[2] != second[2]  # new processes each time
    finally:
        pool.stop()
