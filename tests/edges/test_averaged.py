"""wire.averaged(): the mean of all ranks for the time of a block."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from workers import Run, Training, close, digest, flat, sentence_of

import thinwire


def evaluate(training: Training) -> None:
    training.model.eval()
    with torch.no_grad():
        training.loss(0)
    training.model.train()


def averages_for_a_block(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(thinwire.GradientDropping(density=0.1, local="partial", sync_every=500), "adam"))
    for step in range(3):
        training.step(step)
    wire, own = training.wire, flat(training.module)
    everybody = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, own, group=group)
    assert not torch.equal(everybody[0], everybody[1]), "local gradients let ranks drift apart"
    sent = wire.stats.bytes_sent
    with pytest.warns(RuntimeWarning, match=r"wire\.averaged\(\)") as told:
        evaluate(training)
    assert told[0].filename == workers.__file__, "the line that calls the model, and none of torch's"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(training)  # said once
        with wire.averaged():
            evaluate(training)
    with wire.averaged():
        close(flat(training.module), torch.stack(everybody).mean(0), "the mean of all ranks")
        shared = digest(flat(training.module))
    assert torch.equal(flat(training.module), own) and wire.stats.bytes_sent == sent
    digests = [None] * len(everybody)
    dist.all_gather_object(digests, shared, group=group)
    assert len(set(digests)) == 1
    try:
        with wire.averaged():
            raise KeyError("an evaluation that fails")
    except KeyError:
        assert torch.equal(flat(training.module), own)
    wire.switch("dense")
    own, overhead = flat(training.module), wire.stats.bytes_overhead
    with wire.averaged():
        assert torch.equal(flat(training.module), own)
    assert wire.stats.bytes_overhead == overhead, "ranks that are equal need no exchange"
    wire.detach()
    assert "detached" in sentence_of(thinwire.DetachedError, wire.averaged().__enter__)


def test_averaged_gives_the_mean_of_all_ranks_and_takes_it_back(cluster: Cluster) -> None:
    cluster.run(averages_for_a_block, 3)
