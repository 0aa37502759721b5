"""Does it matter on Gloo whether a receive or a send is posted first? Frames that all ranks exchange, both ways.

    thinwire cluster --hosts 4 --rate 100mbit -- python benchmarks/gloo_order.py --rate 100e6 [--nbytes 250000]

Gloo sends a message when its receiver has said that it is ready, and that word goes through the queue of what the
receiver sends to the same rank. Posted behind a send, it comes after all of that send's bytes: two ranks that swap
frames then send one after the other, and half of a link that could carry both at once is idle. Ways take turns; their
medians are printed as a share of the link's rate, beside Gloo's own collectives.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

Way = Callable[[], object]


def posted(sends: tuple[Tensor, int], receives: tuple[Tensor, int], receive_first: bool) -> None:
    """Send one tensor to a rank and receive another from a rank, and wait for both."""
    both = [dist.P2POp(dist.isend, *sends), dist.P2POp(dist.irecv, *receives)]
    for work in dist.batch_isend_irecv(both[::-1] if receive_first else both):
        work.wait()


def ways(nbytes: int) -> dict[str, Way]:
    """Each lets every rank have every rank's frame of so many bytes; the all-reduce carries as much over each link."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.zeros(nbytes, dtype=torch.uint8)
    others = [torch.zeros_like(own) for _ in range(size)]
    joined = torch.zeros(size * nbytes, dtype=torch.uint8)
    half = torch.zeros(size * nbytes // 4, dtype=torch.float16)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def rounds(receive_first: bool) -> None:
        for distance in range(1, size):
            source = (rank - distance) % size
            posted((own, (rank + distance) % size), (others[source], source), receive_first)

    def swaps(receive_first: bool) -> None:
        for bits in range(1, size):
            posted((own, rank ^ bits), (others[rank ^ bits], rank ^ bits), receive_first)

    found: dict[str, Way] = {
        "rounds, send first": lambda: rounds(False),
        "rounds, receive first": lambda: rounds(True),
        "Gloo's all-gather": lambda: gather(joined, own),
        "Gloo's all-to-all": lambda: dist.all_to_all_single(joined, joined.clone()),
        "Gloo's all-reduce, fp16": lambda: dist.all_reduce(half),
    }
    if size & (size - 1) == 0:
        found |= {"swaps, send first": lambda: swaps(False), "swaps, receive first": lambda: swaps(True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, required=True, help="of a link, in bits per second")
    parser.add_argument("--nbytes", type=int, default=1_500_000, help="of a frame")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seconds: dict[str, list[float]] = {}
    for _ in range(1 + options.repeats):  # the first makes connections
        for name, way in ways(options.nbytes).items():
            times = []
            for act in (dist.barrier, way, dist.barrier):
                times.append(time.perf_counter())
                act()
            times.append(time.perf_counter())
            seconds.setdefault(name, []).append(sum(b - a for a, b in pairwise(times[1:])))
    if dist.get_rank() == 0:
        ideal = 8 * (dist.get_world_size() - 1) * options.nbytes / options.rate
        for name, measured in seconds.items():
            typical = statistics.median(measured[1:])
            print(f"{name:26} {1e3 * typical:8.1f} ms  {ideal / typical:.2f} of the rate")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
