"""The training loop on five Gloo processes: a model with dropout, batch statistics and a state of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

from thinwire.lab.recipes.checkpoints import CheckpointError, Checkpoints, world_net
from thinwire.lab.recipes.events import Epoch, Event, Steps
from thinwire.lab.recipes.language import LanguageRecipe
from thinwire.lab.recipes.loop import Stopped, Training, TrainingPlan

CPU = torch.device("cpu")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(11, 16), nn.LSTM(16, 24, batch_first=True)
        self.norm, self.drop, self.out = nn.BatchNorm1d(24), nn.Dropout(0.3), nn.Linear(24, 11)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:  # (B, T) -> (B, T, 11)
        x, state = self.recurrent(self.embed(tokens), state)
        return self.out(self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))), state


class TinyText(LanguageRecipe):
    """Random tokens; 12 steps an epoch on five workers."""

    name, summary, epochs = "tiny", "random tokens", 2
    batch_size, window = 10, 6

    def __init__(self, data: Path | None = None, device: torch.device | None = None) -> None:
        super().__init__(data, device)
        tokens = torch.randint(0, 11, (750,), generator=torch.Generator().manual_seed(5))
        self.keep(tokens, tokens[:200])

    def model(self) -> nn.Module:
        return Tiny()

    def optimizer(self, parameters: Iterable[nn.Parameter], lr_factor: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.2 * lr_factor, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRScheduler:
        return StepLR(optimizer, 5, 0.8)


def told(events: list[Event]) -> list[tuple[Any, ...]]:
    return [
        (type(e).__name__, e.epoch, e.step, e.loss, getattr(e, "metric", None))
        for e in events
        if isinstance(e, (Epoch, Steps))
    ]


def interrupted(group: Any, folder: str, spec: str, stop_at: int) -> None:
    """Once in one piece; once stopped by one rank, and taken up by new objects."""
    net, plan = world_net(CPU), TrainingPlan(epochs=2, seed=3)
    checkpoints = Checkpoints(Path(folder) / "checkpoint", net)
    with pytest.raises(CheckpointError, match="no checkpoint of all 5 workers"):
        checkpoints.load(CPU)

    events: list[Event] = []
    whole = Training(TinyText(), spec, plan, net, events.append)
    assert whole.num_batches == 12
    outcome = whole.run(None, 0, [], lambda: False)
    expected = whole.model.module.state_dict()
    statistics = expected["norm.running_mean"].clone()
    torch.distributed.broadcast(statistics, 0)
    assert torch.equal(statistics, expected["norm.running_mean"])  # judged by the same statistics on every rank

    parts: list[Event] = []
    first = Training(TinyText(), spec, plan, net, parts.append)
    with pytest.raises(Stopped) as stopped:
        first.run(checkpoints, 1, [outcome], lambda: net.rank == 3 and first.step >= stop_at)
    halted = stopped.value.halted
    assert stop_at <= halted.step <= stop_at + 10 and (halted.num_steps, halted.spec) == (24, spec)
    first.wire.detach()
    torch.manual_seed(99)

    second = Training(TinyText(), spec, plan, net, parts.append)
    place, state = checkpoints.load(CPU)
    assert place == (1, halted.step) and state["outcomes"][0]["metric"] == outcome.metric
    second.load_state_dict(state)
    again = second.run(checkpoints, 1, [outcome], lambda: False)
    for name, tensor in second.model.module.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert told(parts) == told(events)
    assert (again.metric, again.loss) == (outcome.metric, outcome.loss)
    # Which buckets travel together is decided by measured times, so a few headers more or less are sent.
    assert again.bytes_sent == pytest.approx(outcome.bytes_sent, rel=0.2)
    torch.distributed.barrier()
    checkpoints.clear()
    torch.distributed.barrier()
    assert not checkpoints.folder.exists()


@pytest.mark.parametrize(
    ("spec", "stop_at"),
    [("dgc:density=0.1,warmup=3", 7), ("dropping:local=sum,sync_every=5", 12), ("dgc:warmup=0.5 epochs", 7)],
)
def test_stopped_run_goes_on_as_if_it_had_not_stopped(
    cluster: Cluster, tmp_path: Path, spec: str, stop_at: int
) -> None:
    cluster.run(interrupted, 5, str(tmp_path), spec, stop_at)


def half_written(group: Any, folder: str) -> None:
    """One rank's disk is full: no rank keeps the new checkpoint, every rank keeps the old one."""
    net = world_net(CPU)
    checkpoints = Checkpoints(Path(folder), net)
    checkpoints.save((0, 1), lambda: {"x": torch.ones(3)})
    mine = checkpoints
    if net.rank == 2:  # a file where the folder should be: what can be had without a small disk
        Path(folder, "file").write_text("")
        mine = Checkpoints(Path(folder, "file"), net)
    with pytest.raises(
        CheckpointError, match=r"file/0-2.rank2of5.pt' cannot be written: (File exists|Not a directory)"
    ):
        mine.save((0, 2), lambda: {"x": torch.ones(3)})
    torch.distributed.barrier()
    assert {p.name for p in Path(folder).glob("*.pt")} == {f"0-1.rank{rank}of5.pt" for rank in range(5)}
    assert not list(Path(folder).glob(".*"))
    place, state = checkpoints.load(CPU)
    assert place == (0, 1) and torch.equal(state["x"], torch.ones(3))
    torch.distributed.barrier()
    if net.rank == 1:
        Path(folder, "0-1.rank1of5.pt").rename(Path(folder, "0-5.rank1of5.pt"))
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="no checkpoint of all 5 workers"):
        checkpoints.load(CPU)


def test_checkpoint_is_written_by_all_ranks_or_by_none(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(half_written, 5, str(tmp_path))
