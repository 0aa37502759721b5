"""Workers killed at random moments, links cut, hosts that come and go: what is lost?

python tests/faults/faults.py kills --kills 100     # kill -9 under torch's elastic agent; final parameters bit for bit
python tests/faults/faults.py kills --launcher torchrun --kills 10
python tests/faults/faults.py cuts --cuts 20        # emulated hosts, cables pulled for less and more than the timeout
python tests/faults/faults.py scale                 # two torchrun agents: one comes, and is killed again
python tests/faults/faults.py slow --methods dgc:density=0.05  # a slow link, a slow host: whom do the statistics name?

A restart under the command torchrun imports torch anew in every worker, which takes longer than everything else. With
--launcher agent (the default) the same elastic agent that torchrun runs starts the workers from a fork server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_links
import torch

from thinwire.lab.bench.rows import commit, hardware, today

ROOT = Path(__file__).resolve().parents[2]
ELASTIC = ROOT / "examples" / "elastic.py"
METHODS = (
    "dgc:density=0.05,dense_below=8,values=fp32,factor_masking=true",
    "gtopk:density=0.05",
    "terngrad:dense_below=0",
    "blocksign:dense_below=1",
    "dropping:density=0.05",
    "signsgd",
    "dense",
)
WORKERS = 2
STEPS, SAVE_EVERY = 400, 5
RUN_TIMEOUT_S = 900.0


# ------------------------------------------------------------------------------------------------- an elastic run


def launch(launcher: str, folder: Path, spec: str, log: Any, workers: int = WORKERS) -> subprocess.Popen[bytes]:
    """Start examples/elastic.py under an elastic agent, in a session of its own."""
    work = ["--folder", str(folder), "--method", spec, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
    if launcher == "torchrun":
        options = ["--standalone", f"--nproc_per_node={workers}", "--max_restarts=100000"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, str(ELASTIC), *work]
    else:
        command = [sys.executable, str(Path(__file__).with_name("fault_agent.py")), str(workers), str(ELASTIC), *work]
    return _start(command, log)


def _start(command: list[str], log: Any) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Else torch 2.13 keeps one store over restarts, and a fast worker meets the addresses of the one before it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def workers_of(launcher: str, pid: int) -> list[int]:
    """The workers' processes: children of torchrun, or of the agent's fork server."""
    return (
        children(pid) if launcher == "torchrun" else [worker for child in children(pid) for worker in children(child)]
    )


def newest_step(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("step-*")), default=0)


def digests(log: Path) -> set[str]:
    """What the workers that came to the end printed about their parameters."""
    return set(re.findall(r"ended: parameters ([0-9a-f]{64})", log.read_text()))


def end_all(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of an agent and of all that came from it, as when a host loses power."""
    family = [process.pid]
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGSTOP)  # so that nothing new is born meanwhile
        family += children(pid)
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


# -------------------------------------------------------------------------------------------------------- kills


def kill_until(kills: int, launcher: str, spec: str, folder: Path, log: Path, dice: random.Random) -> Iterator[dict]:
    """Train to the end, however often that needs a new start; yield what each kill hit. At most ``kills`` kills."""
    done, deadline_s = 0, time.monotonic() + RUN_TIMEOUT_S
    with open(log, "ab") as output:
        process = launch(launcher, folder, spec, output)
        try:
            known: set[int] = set()
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{spec}: the run did not end in {RUN_TIMEOUT_S:g} s")
                workers = set(workers_of(launcher, process.pid))
                if done >= kills or not workers - known:
                    time.sleep(0.02)
                    continue
                known = workers
                before = newest_step(folder)
                early = dice.random() < 0.3
                if not early:  # else while they start: imports, rendezvous, attach, load
                    while process.poll() is None and newest_step(folder) == before and time.monotonic() < deadline_s:
                        time.sleep(0.005)
                time.sleep(dice.uniform(0, 1.0 if early else 0.4))
                alive = [pid for pid in workers_of(launcher, process.pid) if pid in known]
                # A worker that is done waits for the others in an event of multiprocessing. Whoever sets that waits for
                # all sleepers to wake: torch's agent would wait without end for one that was killed in its sleep.
                finished = newest_step(folder) >= STEPS
                if process.poll() is not None or not alive or finished:
                    continue
                writing = bool(list(folder.glob("step-*/*.partial")))
                whole = dice.random() < 0.05
                if whole:
                    end_all(process)
                else:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(dice.choice(alive), signal.SIGKILL)
                done += 1
                moment = "while starting" if newest_step(folder) == before else "while training"
                yield {
                    "what": "agent and workers" if whole else "a worker",
                    "moment": "while a checkpoint was written" if writing else moment,
                    "step": newest_step(folder),
                }
                if whole:
                    known, process = set(), launch(launcher, folder, spec, output)
        finally:
            end_all(process)
    if process.returncode:
        raise RuntimeError(f"{spec}: the run ended with exit code {process.returncode}, see {log}")


def run_kills(launcher: str, kills: int, methods: list[str], seed: int, folder: Path) -> list[dict[str, Any]]:
    dice, rows = random.Random(seed), []
    for place, spec in enumerate(methods):
        target = kills // len(methods) + (place < kills % len(methods))
        log = folder / f"method-{place}.log"
        list(kill_until(0, launcher, spec, folder / f"{place}-reference", log, dice))
        (reference,) = digests(log)
        hits: list[dict[str, Any]] = []
        runs = equal = 0
        while len(hits) < target:
            run_log = folder / f"method-{place}-run-{runs}.log"
            for hit in kill_until(target - len(hits), launcher, spec, folder / f"{place}-run-{runs}", run_log, dice):
                hits.append(hit)
                print(f"{spec}: kill {len(hits)} of {target}, {hit}", flush=True)
            runs += 1
            equal += digests(run_log) == {reference}
        row = {
            "fault": f"kill -9 under {'torchrun' if launcher == 'torchrun' else 'the elastic agent'}",
            "method": spec,
            "tried": len(hits),
            "runs": runs,
            "runs_bit_equal": equal,
            "moments": dict(Counter(hit["moment"] for hit in hits)),
            "killed": dict(Counter(hit["what"] for hit in hits)),
            "parameters": reference,
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------------- hosts come and go


def run_scale(methods: list[str], folder: Path) -> list[dict[str, Any]]:
    """One agent with 2 workers; a second one joins with 1; it is killed; the first goes on and ends."""
    rows = []
    for place, spec in enumerate(methods):
        port = 29_600 + os.getpid() % 300 + place
        run = folder / f"scale-{place}"
        log = folder / f"scale-{place}.log"
        work = ["--folder", str(run), "--method", spec, "--steps", "1000000", "--save-every", "5"]
        with open(log, "ab") as output:
            agents = [_scale_agent(port, 2, work, output)]
            try:
                sizes = [_wait_for_world(run, {2}, agents)]
                agents.append(_scale_agent(port, 1, work, output))
                sizes.append(_wait_for_world(run, {3}, agents))
                end_all(agents.pop())
                sizes.append(_wait_for_world(run, {2}, agents))
            finally:
                for process in agents:
                    end_all(process)
        changes = [
            json.loads(line.split("CONSERVED ")[1]) for line in log.read_text().splitlines() if "CONSERVED " in line
        ]
        changes = [change for change in changes if change["before"] != change["after"]]
        row = {"fault": "torchrun scaled up and down", "method": spec, "worlds": sizes, "resumes": changes}
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def _scale_agent(port: int, workers: int, work: list[str], log: Any) -> subprocess.Popen[bytes]:
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=scale"]
    rendezvous += ["--rdzv_conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"]
    options = ["--nnodes=1:2", f"--nproc_per_node={workers}", "--max_restarts=100", *rendezvous]
    script = Path(__file__).with_name("fault_resume.py")
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(ELASTIC), *work]
    return _start(command, log)


def _wait_for_world(run: Path, wanted: set[int], agents: list[subprocess.Popen[bytes]]) -> int:
    """Until a whole set of that many workers was saved by workers that started after this call."""
    before, deadline_s = {path.name.split("-")[2] for path in run.glob("step-*")}, time.monotonic() + 240
    while time.monotonic() < deadline_s:
        for path in run.glob("step-*"):
            names = [file.name for file in path.glob("rank-*.pt")]
            sizes = {int(name.split("-")[3].split(".")[0]) for name in names}
            if path.name.split("-")[2] not in before and sizes <= wanted and sizes and len(names) == max(sizes):
                return max(sizes)
        if all(process.poll() is not None for process in agents):
            raise RuntimeError("all agents ended early")
        time.sleep(0.1)
    raise TimeoutError(f"no checkpoint of {wanted} workers in 240 s")


# ---------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kills", "cuts", "scale", "slow"))
    parser.add_argument("--kills", type=int, default=100, help="kill -9 in total, shared by all methods")
    parser.add_argument("--cuts", type=int, default=20, help="cables pulled in total, a quarter of them for too long")
    parser.add_argument("--launcher", choices=("agent", "torchrun"), default="agent")
    parser.add_argument("--methods", help="separated by commas, options of a method by +; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where runs leave their checkpoints and output; kept")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    methods = [m.replace("+", ",") for m in options.methods.split(",")] if options.methods else list(METHODS)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="thinwire-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"runs are kept in {folder}", flush=True)
    at, start_s = {"commit": commit(), "hardware": hardware(torch.device("cpu")), "date": today()}, time.monotonic()
    if options.what == "kills":
        rows = run_kills(options.launcher, options.kills, methods, options.seed, folder)
    elif options.what == "cuts":
        rows = fault_links.run_cuts(options.cuts, methods, options.seed)
    elif options.what == "slow":
        rows = fault_links.run_slow(methods)
    else:
        rows = run_scale(methods, folder)
    seconds, command = round(time.monotonic() - start_s), " ".join(["python", "tests/faults/faults.py", *sys.argv[1:]])
    print(f"{options.what}: {seconds} s", flush=True)
    if options.json:
        result = {"command": command, **at, "seconds": seconds, "seed": options.seed, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
