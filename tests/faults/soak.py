"""A long run of everything that changes mid-run: does memory, the number of threads or of open files grow?

python tests/faults/soak.py --steps 20000 --json benchmarks/results/soak.json

Four workers train a small model. The method changes every 100 steps and goes through all of them; every 500 steps the
state is saved, loaded with weights_only and put back; every 5,000 steps the wire is detached and attached again; every
seventh step accumulates two micro-batches under no_sync; another thread evaluates the model and reads the wire's
statistics all the time.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.lab.bench.rows import commit, hardware, today

METHODS = (
    "dgc:density=0.02,dense_below=8,values=fp32,factor_masking=true",
    "gtopk:density=0.02",
    "terngrad:dense_below=0",
    "blocksign:dense_below=1",
    "dropping:density=0.02",
    "signsgd",
    "dense",
    "dgc:density=0.02,values=int8,factor_masking=true",
    "gtopk:density=0.02,momentum_correction=true",
    "blocksign:dense_below=1,block=50,topology=server",
    "dense:dtype=bf16",
)
SWITCH_EVERY, SAVE_EVERY, ATTACH_EVERY, ACCUMULATE_EVERY = 100, 500, 5000, 7
ALLOWED_RSS_GROWTH = 4 << 20  # bytes, between the second and the last quarter; allocators are not exact


def usage() -> dict[str, int]:
    """This process now: resident bytes, threads, open files."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss = int(fields["VmRSS"].split()[0]) * 1024
    return {"rss": rss, "threads": int(fields["Threads"]), "files": len(os.listdir("/proc/self/fd"))}


class Evaluation(threading.Thread):
    """Looks at the model and the wire while they train."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(name="evaluation")
        self.module, self.wire, self.rounds = module, None, 0
        self.error: Exception | None = None
        self._stop_now = threading.Event()

    def run(self) -> None:
        x = torch.ones(16, 20)
        try:
            while not self._stop_now.wait(0.1):
                with torch.no_grad():
                    assert bool(torch.isfinite(self.module(x)).all())
                wire = self.wire
                if wire is not None:
                    assert wire.stats.steps >= 0
                self.rounds += 1
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self._stop_now.set()
        self.join()


def train(rank: int, size: int, store: str, steps: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 80), nn.Tanh(), nn.Linear(80, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    wire = thinwire.attach(model, optimizer, METHODS[0])
    evaluation = Evaluation(model.module)
    evaluation.wire = wire
    evaluation.start()
    samples, switches, saves = [], 0, 0
    generator = torch.Generator().manual_seed(rank)
    start_s = time.monotonic()
    for step in range(steps):
        if step and step % ATTACH_EVERY == 0:
            evaluation.wire = None
            wire.detach()
            wire = thinwire.attach(model, optimizer, wire.method)
            evaluation.wire = wire
        if step and step % SWITCH_EVERY == 0:
            switches += 1
            wire.switch(METHODS[switches % len(METHODS)])
        if step and step % SAVE_EVERY == 0:
            saves += 1
            path = Path(folder, f"rank-{rank}.pt")
            torch.save(wire.state_dict(), path)
            wire.load_state_dict(torch.load(path, weights_only=True))
        optimizer.zero_grad()
        if step % ACCUMULATE_EVERY == 0:
            with model.no_sync():
                loss(model, generator).backward()
        loss(model, generator).backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 40) == 0:
            samples.append({"step": step + 1, **usage()})
            if rank == 0:
                print(f"step {step + 1}, {time.monotonic() - start_s:.0f} s: {samples[-1]}", flush=True)
    evaluation.end()
    wire.detach()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    dist.destroy_process_group()
    return {
        "rank": rank,
        "parameters": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "finite": bool(torch.isfinite(flat).all()),
        "switches": switches,
        "saves": saves,
        "evaluations": evaluation.rounds,
        "evaluation_error": repr(evaluation.error) if evaluation.error else None,
        "seconds": round(time.monotonic() - start_s),
        "samples": samples,
    }


def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(8, 20, generator=generator)
    return nn.functional.mse_loss(model(x), x[:, :4].sin())


def _worker(rank: int, size: int, store: str, steps: int, folder: str, results: Any) -> None:
    results.put(train(rank, size, store, steps, folder))


def judge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What grew between the second and the last quarter of the run, on the worst rank."""

    def growth(rank: dict[str, Any], what: str) -> float:
        values = [sample[what] for sample in rank["samples"]]
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])

    worst = {what: max(growth(rank, what) for rank in ranks) for what in ("rss", "threads", "files")}
    equal = len({rank["parameters"] for rank in ranks}) == 1 and all(rank["finite"] for rank in ranks)
    clean = all(rank["evaluation_error"] is None for rank in ranks)
    ok = equal and clean and worst["rss"] <= ALLOWED_RSS_GROWTH and worst["threads"] <= 0 and worst["files"] <= 0
    return {"growth": worst, "replicas_equal": equal, "evaluation_clean": clean, "passed": ok}


def soak(steps: int, workers: int) -> dict[str, Any]:
    """Run it in processes of its own and return what each rank saw, and the verdict."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])  # imported once, not in every worker
    with tempfile.TemporaryDirectory(prefix="thinwire-soak-") as folder:
        results = context.Queue()
        arguments = [(rank, workers, f"file://{folder}/store", steps, folder, results) for rank in range(workers)]
        processes = [context.Process(target=_worker, args=one, daemon=True) for one in arguments]
        for process in processes:
            process.start()
        ranks: list[dict[str, Any]] = []
        while len(ranks) < workers:
            try:
                ranks.append(results.get(timeout=5))
            except Exception:
                if any(process.exitcode for process in processes):
                    raise RuntimeError("a worker failed; its error stands above") from None
        for process in processes:
            process.join()
    ranks.sort(key=lambda rank: rank["rank"])
    return {"steps": steps, "workers": workers, **judge(ranks), "ranks": ranks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    at = {"commit": commit(), "hardware": hardware(torch.device("cpu")), "date": today()}
    result = {"command": " ".join(["python", "tests/faults/soak.py", *sys.argv[1:]]), **at}
    result |= soak(options.steps, options.workers)
    print(json.dumps({key: value for key, value in result.items() if key != "ranks"}))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["passed"]:
        sys.exit("the soak found something that grew, differed or failed")


if __name__ == "__main__":
    main()
