"""The runs behind the claims in docs/results.md: every one is a `thinwire train` command with a fixed seed.

    python benchmarks/claims.py --list
    python benchmarks/claims.py --data DIR --out RUNS [--only 'r20-*'] [--jobs 16] [--seconds 3000]

Runs go side by side in the order of the list, as threads of one process each; a run that is there already is left
alone. DIR holds the data sets in their public formats. On a GPU with many runs, start NVIDIA's MPS first.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

R20 = "--recipe cifar10-resnet20 --set precision=bf16"
R20_SMALL = "--recipe cifar10-resnet20 --set precision=bf16,batch_size=256,lr=0.1 --workers 8"
WARM = "warmup=388"  # four epochs of 97 steps
DGC = f"dgc:density=0.001,{WARM}"
OURS = f"dgc:density=0.0024,{WARM},values=int8,factor_masking=false"
GTOPK_PTB = "gtopk:density=0.005,warmup=265,momentum_correction=true"
M30K = "--recipe multi30k-transformer --epochs 20"
M30K_GRU = "--recipe multi30k-gru --epochs 20"
DROP = "density=0.01,warmup=339"


def seeds(name: str, command: str, number: int = 3) -> dict[str, str]:
    return {f"{name}-s{seed}": f"{command} --seed {seed}" for seed in range(number)}


RUNS: dict[str, str] = {
    # dist-EF-blockSGDM: 8 workers of 32 images (Figure 2).
    "r20x8-dense-s0": f"{R20_SMALL} --epochs 20 --method dense",
    "r20x8-blocksign-s0": f"{R20_SMALL} --epochs 20 --method blocksign:topology=server",
    "r20x8-signum-s0": f"{R20_SMALL} --epochs 20 --method signsgd",
    # DGC: accuracy at 99.9 %, and what each of its parts is worth (Figure 3, Tables 1 and 2).
    **seeds("r20-dense", f"{R20} --epochs 60 --method dense"),
    **seeds("r20-dgc", f"{R20} --epochs 60 --method {DGC}"),
    **seeds("r20-ours", f"{R20} --epochs 60 --method {OURS}"),
    **seeds("r20-gtopk", f"{R20} --epochs 60 --method gtopk:density=0.001,{WARM}"),
    "ptb-dense-s0": "--recipe ptb-lstm --epochs 12 --method dense",
    "ptb-dgc-s0": "--recipe ptb-lstm --epochs 12 --method dgc:density=0.001,warmup=265",
    "m30k-dense-s0": f"{M30K} --method dense",
    "m30k-dropping-s0": f"{M30K} --method dropping:{DROP}",
    "m30k-partial-s0": f"{M30K} --method dropping:{DROP},local=partial,sync_every=500",
    "r20-dropping-s0": f"{R20} --epochs 60 --method dgc:density=0.001,momentum_correction=false",
    "r20-corrected-s0": f"{R20} --epochs 60 --method dgc:density=0.001,factor_masking=false",
    "r20-unmasked-s0": f"{R20} --epochs 60 --method {DGC},factor_masking=false",
    "r20-int8-s0": f"{R20} --epochs 60 --method {DGC},values=int8",
    "r20-int4-s0": f"{R20} --epochs 60 --method {DGC},values=int4",
    "an4-dense-s0": "--recipe an4-gru --method dense",
    "an4-dgc-s0": "--recipe an4-gru --method dgc:density=0.001,warmup=116",
    # gTop-k: the model with many parameters, and the density (Figures 5, 7 and 12).
    "vgg-dense-s0": "--recipe cifar10-vgg16 --set precision=bf16 --epochs 30 --method dense",
    "vgg-dgc-s0": f"--recipe cifar10-vgg16 --set precision=bf16 --epochs 30 --method {DGC}",
    "vgg-gtopk-s0": f"--recipe cifar10-vgg16 --set precision=bf16 --epochs 30 --method gtopk:density=0.001,{WARM}",
    "ptb-int8-s0": "--recipe ptb-lstm --epochs 12 --method dgc:density=0.001,warmup=265,values=int8",
    "ptb-gtopk-s0": f"--recipe ptb-lstm --epochs 12 --method {GTOPK_PTB}",
    # TernGrad: momentum and Adam, and without its two parts (Table 1, section 3.2).
    "r20-terngrad-s0": f"{R20} --epochs 30 --method terngrad:exclude=14.*,topology=server",
    "r20-short-dense-s0": f"{R20} --epochs 30 --method dense",
    "r20-terngrad-noclip-s0": f"{R20} --epochs 30 --method terngrad:exclude=14.*,topology=server,clip_sigma=none",
    "r20-terngrad-onescaler-s0": f"{R20} --epochs 30 --method terngrad:exclude=14.*,topology=server,scaler=model",
    "r20-adam-dense-s0": f"{R20},solver=adam,lr=0.002,weight_decay=0 --epochs 30 --method dense",
    "r20-adam-terngrad-s0": f"{R20},solver=adam,lr=0.002,weight_decay=0 --epochs 30"
    " --method terngrad:exclude=14.*,topology=server",
    # Local gradients (Tables 1 and 2, Figures 1 to 3).
    "m30k-sum-s0": f"{M30K} --method dropping:{DROP},local=sum,sync_every=500",
    "m30k-error-s0": f"{M30K} --method dropping:{DROP},local=error,sync_every=500",
    "m30k-partial-never-s0": f"{M30K} --method dropping:{DROP},local=partial,sync_every=1000000",
    "m30k-gru-dense-s0": f"{M30K_GRU} --method dense",
    "m30k-gru-dropping-s0": f"{M30K_GRU} --method dropping:{DROP}",
    "m30k-gru-partial-s0": f"{M30K_GRU} --method dropping:{DROP},local=partial,sync_every=500",
    **{
        f"r20-gtopk-{density}-s0": f"{R20} --epochs 30 --method gtopk:density={density},{WARM}"
        for density in ("0.1", "0.05", "0.01", "0.001", "0.0005")
    },
    "r20-gtopk-corrected-s0": f"{R20} --epochs 60 --method gtopk:density=0.001,{WARM},momentum_correction=true",
    "r20x8-gtopk-s0": f"{R20} --workers 8 --epochs 30 --method gtopk:density=0.001,{WARM}",
    "r110-dense-s0": "--recipe cifar10-resnet110 --set precision=bf16 --epochs 30 --method dense",
    "r110-dgc-s0": f"--recipe cifar10-resnet110 --set precision=bf16 --epochs 30 --method {DGC}",
    # TernGrad on MNIST (Figure 3).
    **{
        f"mnist-{n}-{name}-s0": f"--recipe mnist-lenet --workers {n} --epochs 5 --method {method}"
        for n in (2, 4, 8, 16, 64)
        for name, method in (("terngrad", "terngrad:topology=server"), ("dense", "dense"))
        if name == "terngrad" or n == 4
    },
}


def arguments_of(name: str, data: Path, out: Path) -> list[str]:
    words = shlex.split(RUNS[name])
    workers = [] if "--workers" in words else ["--workers", "4"]
    return [*words, *workers, "--in-process", "--data", str(data), "--out", str(out / name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands and do nothing")
    parser.add_argument("--only", default="*", help="names to run, as patterns separated by commas")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="end what still runs after so long")
    options = parser.parse_args()
    patterns = options.only.split(",")
    names = [name for name in RUNS if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if options.list:
        for name in names:
            print(f"{name}: thinwire train {shlex.join(arguments_of(name, options.data, options.out))}")
        return
    deadline = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    waiting = [name for name in names if not (options.out / name).exists()]
    again = set(waiting)  # what fails is tried once more: with MPS a fault in one process ends its neighbours
    running: dict[str, subprocess.Popen[bytes]] = {}
    while (waiting or running) and time.monotonic() < deadline:
        if waiting and len(running) < options.jobs:
            name = waiting.pop(0)
            with (options.out / f"{name}.log").open("wb") as log:
                command = [sys.executable, "-m", "thinwire", "train", *arguments_of(name, options.data, options.out)]
                running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
        for name, process in list(running.items()):
            if process.poll() is not None:
                print(f"{name}: {'done' if process.returncode == 0 else 'failed, see its log'}", flush=True)
                del running[name]
                if process.returncode and name in again:
                    again.remove(name)
                    if (options.out / name).exists():
                        (options.out / name).rename(options.out / f"{name}.failed")
                    waiting.append(name)
        time.sleep(0.5)
    for process in running.values():
        process.kill()


if __name__ == "__main__":
    main()
