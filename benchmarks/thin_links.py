"""Step times of VGG-16 for CIFAR on emulated hosts that are joined by shaped links, every method in one run.

    python benchmarks/thin_links.py [--hosts 4] [--rates 1gbit,100mbit] [--methods dgc,gtopk] [--steps 14] [--json FILE]

Each host is a network namespace with one process (thinwire.emulation); both ends of its link are shaped. Methods take
turns within one group of processes, `noop` (no communication) first and last, so that a change of the machine's load
shows. `powersgd-1` and `-4` are PyTorch's own hook with one bucket, because on Gloo it aborts with several; `ddp` is
DDP without any hook, `ddp-fp16` its own compression hook (its bf16 hook refuses Gloo; `dense:dtype=bf16` is ours), and
`torch-topk` a top-k hook in plain torch. `cpu ms` is what a step takes of one process's processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire import emulation
from thinwire.bench.rows import commit, hardware, percentiles, today
from thinwire.recipes.models.vgg_cifar import vgg16

METHODS = "noop,dgc,ddp,ddp-fp16,dense:dtype=bf16,torch-topk,powersgd-1,powersgd-4,dgc,gtopk,terngrad,blocksign,noop"
BATCH, WARMUP = 16, 4


class TopKHook:
    """The plain-torch way, as one would write it first: residual, torch.topk, all-gather, on one ordered thread."""

    def __init__(self, density: float = 0.001) -> None:
        self.density, self.residual = density, dict[int, torch.Tensor]()
        self.thread = ThreadPoolExecutor(max_workers=1)  # collectives keep their order
        self.group = dist.new_group()  # and do not meet DDP's own

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.thread.submit(self.exchange, bucket.index(), bucket.buffer(), future)
        return future

    def exchange(self, index: int, buffer: torch.Tensor, future: torch.futures.Future[torch.Tensor]) -> None:
        residual = self.residual.get(index)
        if residual is None or residual.numel() != buffer.numel():  # DDP rebuilds its buckets after the first step
            residual = self.residual[index] = torch.zeros_like(buffer)
        residual.add_(buffer)
        k, size = max(1, round(self.density * buffer.numel())), dist.get_world_size()
        indices = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        all_indices, all_values = (
            [torch.empty_like(indices) for _ in range(size)],
            [values.clone() for _ in range(size)],
        )
        dist.all_gather(all_indices, indices, group=self.group)
        dist.all_gather(all_values, values, group=self.group)
        buffer.zero_()
        for where, what in zip(all_indices, all_values, strict=True):
            buffer.index_add_(0, where, what / size)
        future.set_result(buffer)


def prepare(spec: str) -> tuple[DDP, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    one_bucket = {"bucket_cap_mb": 1000} if spec.startswith("powersgd") else {}
    model = DDP(vgg16(), **one_bucket)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    wire = None
    if spec == "ddp-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif spec == "torch-topk":
        model.register_comm_hook(None, _annotated(TopKHook()))
    elif spec.startswith("powersgd"):
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=int(spec[-1]), start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif spec != "ddp":
        wire = thinwire.attach(model, optimizer, spec)
    return model, optimizer, wire


def _annotated(hook: TopKHook) -> Any:
    """A function with the annotations that DDP checks: real classes, not this module's postponed texts."""

    def call(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    call.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return call


def bytes_on_link() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def worker(specs: list[str], steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    for spec in specs:
        model, optimizer, wire = prepare(spec)
        seconds: list[float] = []
        for step in range(WARMUP + steps):
            if step == WARMUP:
                before, cpu = bytes_on_link(), time.process_time()
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / steps
        dist.barrier()
        row = {
            "method": spec,
            "bytes_per_step": (bytes_on_link() - before) / steps,
            "cpu_ms": 1e3 * cpu,
            "seconds": seconds[WARMUP:],
        }
        if wire is not None:
            stats = wire.stats
            row |= {
                "ratio": stats.ratio,
                "counted_bytes_per_step": stats.bytes_sent / stats.steps,
                "compensating_s": stats.seconds_compensating / stats.steps,
                "compressing_s": stats.seconds_compressing / stats.steps,
                "communicating_s": stats.seconds_communicating / stats.steps,
            }
            wire.detach()
        if rank == 0:
            print("ROW " + json.dumps(row), flush=True)
        del model, optimizer, wire


def summarise(rate: str, hosts: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Percentiles and shares of the no-communication speed, from the median of all noop steps of this run."""
    free = percentiles([s for row in rows if row["method"] == "noop" for s in row["seconds"]])[1]
    table = []
    for row in rows:
        p20, p50, p80 = percentiles(row.pop("seconds"))
        table.append(
            {
                **row,
                "rate": rate,
                "hosts": hosts,
                "p20_ms": p20,
                "p50_ms": p50,
                "p80_ms": p80,
                "share_of_noop": free / p50,
                "commit": commit(),
                "hardware": hardware(torch.device("cpu")),
                "date": today(),
            }
        )
    return table


def show(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{first['hosts']} hosts, {first['rate']}; {first['hardware']}, commit {first['commit']}, {first['date']}")
    print(
        f"{'method':<22}{'p20 ms':>9}{'p50 ms':>9}{'p80 ms':>9}{'cpu ms':>9}{'of noop':>9}{'kB a step':>12}{'ratio':>8}"
    )
    for row in rows:
        ratio = f"{row['ratio']:.0f}x" if row.get("ratio") else ""
        print(
            f"{row['method']:<22}{row['p20_ms']:>9.0f}{row['p50_ms']:>9.0f}{row['p80_ms']:>9.0f}{row['cpu_ms']:>9.0f}"
            f"{row['share_of_noop']:>9.2f}{row['bytes_per_step'] / 1e3:>12,.0f}{ratio:>8}",
            flush=True,
        )


def measure(hosts: int, rate: str, methods: str, steps: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--worker", "--methods", methods, "--steps", str(steps)]
    lines: list[str] = []

    def keep(host: int, line: str) -> None:
        lines.append(line)
        if "ROW " in line:
            print(f"  {rate}: measured {json.loads(line.split('ROW ', 1)[1])['method']}", file=sys.stderr, flush=True)

    with emulation.Cluster(hosts, rate) as cluster:
        result = cluster.run(command, env={"OMP_NUM_THREADS": "1"}, on_line=keep)
    rows = [json.loads(line.split("ROW ", 1)[1]) for line in lines if "ROW " in line]
    if result.exit_code or not rows:
        sys.exit(f"a host failed with exit code {result.exit_code}:\n" + "\n".join(lines[-30:]))
    return summarise(rate, hosts, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", default="1gbit,100mbit")
    parser.add_argument("--methods", default=METHODS, help="separated by commas; options of a method by +")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker([spec.replace("+", ",") for spec in options.methods.split(",")], options.steps)
        return
    why = emulation.why_not()
    if why:
        sys.exit(f"no emulated hosts here: {why}")
    everything: list[dict[str, Any]] = []
    for rate in options.rates.split(","):
        rows = measure(options.hosts, rate, options.methods, options.steps)
        show(rows)
        everything += rows
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
