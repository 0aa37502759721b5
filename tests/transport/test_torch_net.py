"""Collectives over real Gloo processes: frames that are long go round by round, and say the same as short ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.methods import parse_method
from thinwire.transport import Net, ThreadWorld, TorchNet
from thinwire.transport.processes import PAIRWISE_FROM


def exchanged(group: dist.ProcessGroup, longest: int, only_first: bool) -> list[tuple[int, int]]:
    """Every frame says who made it and for whom; with ``only_first`` all goes to rank 0, as to a server."""
    net = TorchNet(group, torch.device("cpu"))
    lengths = [longest - 7 * to if not only_first or to == 0 else 0 for to in range(net.size)]
    frames = [torch.full((length,), 16 * net.rank + to, dtype=torch.uint8) for to, length in enumerate(lengths)]
    got = net.all_to_all(frames, [lengths[net.rank]] * net.size)
    assert all(frame.numel() == lengths[net.rank] and bool((frame == frame[:1]).all()) for frame in got)
    assert net.traffic.sent == sum(lengths) - lengths[net.rank]
    return [divmod(int(frame[0]), 16) for frame in got if frame.numel()]


def gathered(group: dist.ProcessGroup, nbytes: int, with_room: bool) -> tuple[list[tuple[int, int]], int]:
    net = TorchNet(group, torch.device("cpu"))
    frame = torch.full((nbytes,), 16 + net.rank, dtype=torch.uint8)
    room = torch.zeros(nbytes + 8, dtype=torch.uint8) if with_room else None
    got = []
    for rank, other in net.gather_each(frame, room):  # one may be gone when the next one comes
        assert other.numel() == nbytes and bool((other == other[0]).all())
        got.append((rank, int(other[0])))
    return got, net.traffic.sent


@pytest.mark.parametrize("nbytes", [100, PAIRWISE_FROM + 100])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_gather_each_gives_frames_one_after_the_other(cluster: Any, ranks: int, nbytes: int) -> None:
    for with_room in (True, False):
        for got, sent in cluster.run(gathered, ranks, nbytes, with_room):
            assert sorted(got) == [(rank, 16 + rank) for rank in range(ranks)]
            assert sent == (ranks - 1) * nbytes


def gathered_at_once(group: dist.ProcessGroup, nbytes: int, with_room: bool) -> tuple[list[int], int, int]:
    net = TorchNet(group, torch.device("cpu"))
    frame = torch.arange(nbytes, dtype=torch.int64).remainder(251).to(torch.uint8) + net.rank
    room = torch.zeros(net.size * nbytes, dtype=torch.uint8) if with_room else None
    done: list[int] = []
    got = net.all_gather(frame, room, pairwise=True, overlap_with=lambda: done.append(1))
    assert net.size == 1 or room is None or got[0].data_ptr() == room.data_ptr()
    assert all(torch.equal(other, frame - net.rank + rank) for rank, other in enumerate(got))
    assert len(got) == net.size
    return done, net.traffic.sent, net.traffic.received


@pytest.mark.parametrize("nbytes", [100, PAIRWISE_FROM + 100])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_gather_gives_all_frames_and_uses_the_meantime_once(cluster: Any, ranks: int, nbytes: int) -> None:
    for with_room in (True, False):
        for done, sent, received in cluster.run(gathered_at_once, ranks, nbytes, with_room):
            assert done == [1] and sent == received == (ranks - 1) * nbytes


@pytest.mark.parametrize("longest", [100, PAIRWISE_FROM + 100])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_to_all_gives_every_rank_what_is_meant_for_it(cluster: Any, ranks: int, longest: int) -> None:
    for rank, got in enumerate(cluster.run(exchanged, ranks, longest, False)):
        assert got == [(sender, rank) for sender in range(ranks)]
    first, *others = cluster.run(exchanged, ranks, longest, True)
    assert first == [(sender, 0) for sender in range(ranks)] and not any(others)


ROWS = [("a", 0, 1_300_003, True), ("b", 1, 17, True), ("c", 2, 900_001, True), ("d", 3, 3, False)]


def averaged(net: Net, spec: str, steps: int) -> list[bytes]:
    """What some steps of a method make of random gradients, rank by rank others."""
    aggregator = parse_method(spec).aggregator(net, True)
    layout = Layout.of(ROWS)
    generator = torch.Generator().manual_seed(net.rank)
    found = []
    for step in range(steps):
        parts = [torch.randn(segment.numel, generator=generator) for segment in layout.segments]
        context = ExchangeContext(
            layout, step, (Hyper(lr=0.1, momentum=0.9),) * len(ROWS), tuple(map(torch.zeros_like, parts))
        )
        aggregator.reduce(context, parts)
        found += [part.numpy().tobytes() for part in parts]
    return found


def averaged_by_processes(group: dist.ProcessGroup, spec: str, steps: int) -> list[bytes]:
    return averaged(TorchNet(group, torch.device("cpu")), spec, steps)


@pytest.mark.parametrize("spec", ["terngrad", "blocksign", "terngrad:topology=server", "signsgd"])
def test_exchange_of_long_frames_gives_the_bits_of_frames_in_one_piece(cluster: Any, spec: str) -> None:
    """Frames above the limit come in rounds into memory that is used again, and answers go straight to the gradient."""
    by_processes = cluster.run(averaged_by_processes, 3, spec, 2)
    by_threads = ThreadWorld(3).run(lambda net: averaged(net, spec, 2))
    assert by_processes == by_threads
    assert by_processes[0] == by_processes[1] == by_processes[2]


def posted(group: dist.ProcessGroup) -> list[bool]:
    """Of every pair of messages, whether the receive was posted before the send."""
    net, order, post = TorchNet(group, torch.device("cpu")), [], dist.batch_isend_irecv

    def noted(operations: list[Any]) -> Any:
        order.append([operation.op for operation in operations] == [dist.irecv, dist.isend])
        return post(operations)

    dist.batch_isend_irecv = noted
    try:
        net.swap(1 - net.rank, torch.zeros(9, dtype=torch.uint8))
        net.all_gather(torch.zeros(PAIRWISE_FROM, dtype=torch.uint8), pairwise=True)
    finally:
        dist.batch_isend_irecv = post
    return order


def test_torch_net_posts_receives_before_sends(cluster: Any) -> None:
    assert cluster.run(posted, 2) == [[True, True]] * 2
