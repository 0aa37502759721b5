"""Replicas that differ are found and named, and looking costs eight bytes per rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import Run, Training, noise

import thinwire
from thinwire.monitor.replicas import hashes


def flipped(group: dist.ProcessGroup, method: str, options: dict[str, Any]) -> tuple[int, str, int]:
    """One bit of one element is flipped on one rank: the step at which that is found, and what is said."""
    rank = dist.get_rank(group)
    module = workers.Dot()
    module.c.requires_grad_(False)
    module.narrow = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))  # an odd number of 16-bit words
    shapes = {**workers.SHAPES, "narrow": (7,)}
    model = DDP(module, process_group=group)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
    wire = thinwire.attach(model, optimizer, method, check_replicas_every=3, **options)
    found = (-1, "")
    for step in range(8):
        optimizer.zero_grad()
        model(workers.pulls(rank, step, shapes)).backward()
        if step == 3 and rank == 1:
            with torch.no_grad():
                for name, place in (("c", 1234), ("narrow", 6)):
                    module.get_parameter(name).view(-1)[place : place + 1].view(torch.uint8)[0] ^= 1
        try:
            optimizer.step()
        except thinwire.ReplicaError as error:
            found = (step, str(error))
            break
    handed = wire.stats.frame_bytes
    wire.detach()
    return (*found, handed)


@pytest.mark.parametrize("method", ["dgc:density=0.02", "terngrad:dense_below=0", "dense"])
def test_replica_check_finds_a_flipped_bit_on_all_ranks_and_names_it(cluster: Cluster, method: str) -> None:
    answers = cluster.run(flipped, 3, method, {})
    assert len({answer[:2] for answer in answers}) == 1
    step, sentence, _ = answers[0]
    assert step == 5 and "after optimizer step 6 in 2 of 6 parameters" in sentence
    assert "'c' (rank 1 against ranks 0, 2)" in sentence and "'narrow' (rank 1" in sentence and "\n" not in sentence


def unharmed(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """Bytes with and without the check, of runs in which nothing is wrong."""
    found = []
    methods = [("heavy", "dgc:density=0.02"), ("adam", "dropping:density=0.02,local=sum,sync_every=2")]
    for optimizer, method in [*methods, ("nesterov", "blocksign:dense_below=1")]:
        sent = []
        for every in (None, 2):
            training = Training(group, Run(None, optimizer))
            training.wire = thinwire.attach(training.model, training.optimizer, method, check_replicas_every=every)
            for step in range(8):
                training.step(step)
            sent.append(training.wire.stats)
            training.wire.detach()
        assert (sent[0].frame_bytes, sent[0].bytes_sent) == (sent[1].frame_bytes, sent[1].bytes_sent)
        found.append((sent[1].bytes_overhead - sent[0].bytes_overhead, sent[1].steps))
    return found


def test_replica_check_costs_8_bytes_per_rank_and_looks_at_drifting_ones_when_averaged(
    cluster: Cluster,
) -> None:
    for found in cluster.run(unharmed, 3):
        assert found == [(4 * 8 * 2, 8)] * 3  # four checks, 8 bytes to each of the two others


def test_replica_hash_sees_every_bit_of_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensor = noise((5, 3), 0, 0, "x").to(dtype)
        known = {int(hashes([tensor])[0])}
        as_bytes = tensor.view(-1).view(torch.uint8)
        for place in range(as_bytes.numel()):
            for bit in range(8):
                as_bytes[place] ^= 1 << bit
                known.add(int(hashes([tensor])[0]))
                as_bytes[place] ^= 1 << bit
        assert len(known) == 1 + 8 * as_bytes.numel()
