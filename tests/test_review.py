"""Faults that a review found, one test each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from thinwire.engine.context import ExchangeContext, Hyper
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import own_part

import thinwire
from thinwire import cli
from thinwire.checkpoint.reshard import reshard
from thinwire.codecs import SparseCodec
from thinwire.collectives import AllGather
from thinwire.compressors import TopK
from thinwire.engine.exchange import DenseMean, Exchange
from thinwire.engine.hierarchy import Hierarchy
from thinwire.engine.layout import Layout
from thinwire.engine.named_state import NamedState
from thinwire.errors import NonFiniteError
from thinwire.memory import ErrorFeedback
from thinwire.transport import ThreadNet, ThreadWorld
from thinwire.transport.groups import check_agreement

CPU = torch.device("cpu")


def _turn(numel: int, step: int = 0) -> ExchangeContext:
    return ExchangeContext(Layout.of([("w", 0, numel, True)]), step, (Hyper(0.1),))


class _Failing:
    """An aggregator whose exchange fails."""

    whole_model, clock = False, None

    def mean(self, context: ExchangeContext, grad: torch.Tensor) -> torch.Tensor:
        raise thinwire.FrameError("bad frame from rank 1: for this test")


@pytest.mark.parametrize("case", ["nan", "failure"])
def test_all_ranks_of_a_machine_end_alike(case: str) -> None:
    """Dense looks at no gradient: its first rank went on with a nan where the others stopped; and a first rank that
    failed left the others waiting."""

    def work(net: ThreadNet) -> str:
        inner: Any = DenseMean(ThreadNet(ThreadWorld(1), 0), torch.float32) if case == "nan" else _Failing()
        grad = torch.tensor([1.0, float("nan") if case == "nan" and net.rank == 1 else 2.0])
        with pytest.raises(Exception) as caught:
            Hierarchy(inner, net, 2).mean(_turn(2), grad)
        return type(caught.value).__name__

    expected = [NonFiniteError.__name__] * 3 if case == "nan" else ["FrameError", "ExchangeError", "ExchangeError"]
    assert ThreadWorld(3, timeout_s=10).run(work) == expected


def test_ranks_whose_parameters_have_another_order_do_not_agree() -> None:
    shapes = [("a", "[2] float32"), ("b", "[2] float32")]

    def work(net: ThreadNet) -> str:
        with pytest.raises(ValueError) as caught:
            check_agreement(net, {"parameters": dict(shapes if net.rank == 0 else shapes[::-1])}, None)
        return str(caught.value)

    first, second = ThreadWorld(2).run(work)
    assert first == second and "order" in first and "rank 1" in first


def test_parameters_that_fall_out_of_use_one_by_one_do_not_keep_whole_vectors() -> None:
    rows = [(f"p{i}", i, 1000, True) for i in range(20)]
    state = NamedState("residual")
    for first in range(20):
        layout = Layout.of(rows[first:])
        state.flat("residual", layout, CPU).add_(1.0)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.named["residual"].values()}
    assert sum(storages.values()) == 20 * 4000
    for i in range(20):
        assert torch.equal(state.named["residual"][f"p{i}"], torch.full((1000,), i + 1.0))
    whole = state.flat("residual", Layout.of(rows), CPU)
    assert torch.equal(whole.view(20, 1000)[:, 0], torch.arange(1.0, 21.0))


def test_followers_of_a_machine_do_not_count_when_a_checkpoint_changes_its_group() -> None:
    """A follower that got a velocity when momentum was handed over was taken for a rank with an empty residual."""
    common = {"hierarchy": ((0, 1), (2, 3)), "pending": {}, "world_size": 4}
    ones, none = {"w": torch.ones(4)}, dict[str, torch.Tensor]()
    states = [
        {**common, "rank": rank, "aggregator": {"memory": {"velocity": ones, "residual": none if rank % 2 else ones}}}
        for rank in range(4)
    ]
    memory = reshard(states, {"w": 4}, None, 0, 3)["aggregator"]["memory"]
    assert torch.equal(memory["residual"]["w"], torch.ones(4)) and torch.equal(memory["velocity"]["w"], torch.ones(4))


def followers_hold_nothing(group: dist.ProcessGroup) -> list[str]:
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wire = thinwire.attach(model, optimizer, "dgc", hierarchy=2)
    held = [kind for kind, vectors in own_part(wire.state_dict())["aggregator"]["memory"].items() if vectors]
    wire.detach()
    return held


def test_only_first_ranks_get_the_velocity(cluster: Cluster) -> None:
    assert cluster.run(followers_hold_nothing, 4) == [["velocity", "residual"], [], ["velocity", "residual"], []]


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


def test_a_static_graph_declared_after_attach_is_still_exchanged(cluster: Cluster) -> None:
    """Every parameter counted as unused, and nothing was sent at all."""
    assert cluster.run(late_static_graph, 2) == [2 * 4 * 15] * 2


def failed_exchange(group: dist.ProcessGroup) -> bool:
    """Rank 0 alone fails; what it does then must not wait for the others."""
    model = DDP(torch.nn.Linear(4, 3), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = thinwire.attach(model, optimizer, "dgc")
    if dist.get_rank(group) == 0:
        wire._exchange = _fail  # type: ignore[method-assign]
        with pytest.raises(OSError):
            model(torch.ones(2, 4)).sum().backward()
        assert wire.detach() == {}
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        with pytest.raises(thinwire.DetachedError):
            wire.state_dict()
    return True


def _fail(*_: Any) -> None:
    raise OSError("for this test")


def test_leaving_after_a_failed_exchange_waits_for_nobody(cluster: Cluster) -> None:
    assert cluster.run(failed_exchange, 2, timeout_s=30) == [True, True]


def refused(group: dist.ProcessGroup, dtype: torch.dtype) -> str:
    module = torch.nn.Linear(2, 2)
    module.phase = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    model = DDP(module, process_group=group, find_unused_parameters=dist.get_rank(group) == 1)
    with pytest.raises(ValueError) as caught:
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dgc")
    return str(caught.value)


def test_complex_parameters_and_ranks_that_differ_in_unused_parameters_are_refused(cluster: Cluster) -> None:
    assert "'phase' is complex64" in cluster.run(refused, 1, torch.complex64)[0]
    for sentence in cluster.run(refused, 2, torch.float32):
        assert "ranks differ in find_unused_parameters" in sentence


def skipped_closure(group: dist.ProcessGroup, optimizer_name: str) -> torch.Tensor:
    """A bad step by step(closure) leaves everything as it was; the good one after it moves."""
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 3)
    model = DDP(module, process_group=group)
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.1)
    wire = thinwire.attach(model, optimizer, "dropping", on_nonfinite="skip")
    factor, calls = float("nan"), []

    def closure() -> torch.Tensor:
        calls.append(factor)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * (factor if dist.get_rank(group) == 0 else 1.0)
        loss.backward()
        return loss

    before = module.weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(module.weight, before) and calls
    factor = 1.0
    optimizer.step(closure=closure)
    assert not torch.equal(module.weight, before) and bool(module.weight.isfinite().all())
    wire.detach()
    return module.weight.detach().clone()


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_skip_passes_over_a_bad_step_of_a_closure(cluster: Cluster, optimizer: str) -> None:
    """The gradients were dropped before the closure made them, and the infinities were applied."""
    first, second = cluster.run(skipped_closure, 2, optimizer)
    assert torch.equal(first, second)


@pytest.mark.parametrize("verb", [["info"], ["bench", "wire", "--numel", "100"]])
def test_an_unknown_choice_of_kernels_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    monkeypatch.setenv("THINWIRE_KERNELS", "bogus")
    assert cli.run(verb) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and "THINWIRE_KERNELS must be one of" in captured.err


def test_a_folder_is_no_json_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["bench", "wire", "--numel", "100", "--json", str(tmp_path)]) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_a_length_or_a_text_from_a_peer_is_not_trusted() -> None:
    """A peer that announced a terabyte made every rank allocate it."""

    class Liar(ThreadNet):
        def all_gather(
            self, frame: torch.Tensor, room: torch.Tensor | None = None, pairwise: bool = False
        ) -> list[torch.Tensor]:
            frames = super().all_gather(frame)
            if frame.numel() == 8:
                frames[1] = torch.tensor([self.lie], dtype=torch.int64).view(torch.uint8)
            elif self.lie > 0:
                frames[1] = torch.full_like(frames[1], 0xFF)
            return frames

    def work(net: ThreadNet, lie: int) -> str:
        liar = Liar(net.world, net.rank)
        liar.lie = lie
        with pytest.raises(thinwire.FrameError) as caught:
            check_agreement(liar, {"method": "dgc"}, None)
        return str(caught.value)

    for lie, word in ((1 << 40, "text of"), (-5, "text of"), (0, "text of"), (3, "UTF-8")):
        for sentence in ThreadWorld(2).run(lambda net, lie=lie: work(net, lie)):
            assert "bad frame from rank 1" in sentence and word in sentence


def test_what_was_accepted_of_a_dense_tail_stays_when_the_residual_is_cleared() -> None:
    """It was a view of the residual, zero once the memory had kept the rest: "partial" subtracts it after that."""
    layout = Layout.of([("w", 0, 10, True), ("b", 1, 3, False)])

    def work(net: ThreadNet) -> torch.Tensor:
        exchange = Exchange(ErrorFeedback(), TopK(1.0), AllGather(SparseCodec()), net, local="partial")
        return exchange.mean(ExchangeContext(layout, 0, (Hyper(),) * 2), torch.arange(13.0) + net.rank)

    for mean in ThreadWorld(2).run(work):  # all of it was sent: G - S + L is G, in both parts
        assert torch.equal(mean, torch.arange(13.0) + 0.5)
