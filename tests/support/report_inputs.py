"""Run folders, advice and measurements in the formats of train, advise and bench cluster. The numbers are made up."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

METHODS = {
    "dense": (0.55, 1.0),
    "dgc:density=0.001,warmup=80": (0.42, 290.0),
    "terngrad": (0.5, 13.8),
    "noop": (0.3, 1.0),
}
HARDWARE = {"cpu": "a made-up machine", "cores": 4, "gpus": [], "os": "Linux"}
ENVIRONMENT = {"hardware": "a made-up machine, 4 cores", "commit": "0123abc", "date": "2026-11-15"}
METRIC = {"name": "accuracy", "unit": "%", "difference_unit": "points", "higher_is_better": True}


def write_run(
    folder: Path,
    specs: list[str],
    seed: int = 0,
    epochs: int = 8,
    steps: bool = True,
    finished: bool = True,
    **config: Any,
) -> Path:
    """A folder as `thinwire train --out` leaves it; unfinished: the last method has half its epochs and no summary."""
    folder.mkdir(parents=True)
    fixed = {"recipe": "digits", "specs": specs, "epochs": epochs, "seed": seed, "workers": 4, "device": "cpu"}
    fixed |= {
        "versions": {"thinwire": "0.1.0", "torch": "2.13.0"},
        "environment": {**ENVIRONMENT, "hardware": HARDWARE},
        "metric": METRIC,
    }
    (folder / "config.json").write_text(json.dumps({**fixed, **config}))
    lines, outcomes = [], []
    for spec in specs:
        there = epochs if finished or spec != specs[-1] else epochs // 2
        rows = _lines(spec, seed, there, steps)
        lines += rows
        last = [row for row in rows if row["kind"] == "epoch"][-1]
        outcome = {
            key: last[key] for key in ("spec", "metric", "loss", "seconds", "samples_per_s", "bytes_sent", "ratio")
        }
        outcomes.append({**outcome, "steps": last["step"], "bytes_sent_max": last["bytes_sent"],
                         "link_ratio": last["ratio"] and max(1.0, last["ratio"] / 2),
                         "lr_factor": 1.0, "breakdown": _breakdown(spec)})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "summary.json").write_text(json.dumps({"metric": METRIC, "runs": outcomes}))
    return folder


def _breakdown(spec: str) -> dict[str, float]:
    """15 ms of the exchange run beside the backward pass."""
    ratio = METHODS.get(spec, (0.5, 20.0))[1]
    sent = 0.0 if spec == "noop" else 0.3 / ratio
    packing = 0.0 if spec in ("dense", "noop") else 0.012
    wait = max(0.0, sent + packing - 0.015)
    return {"forward_backward_s": 0.04, "compress_s": packing, "communicate_s": sent, "wait_s": wait, "other_s": 0.002}


def _step_s(spec: str) -> float:
    parts = _breakdown(spec)
    return parts["forward_backward_s"] + parts["wait_s"] + parts["other_s"]


def _lines(spec: str, seed: int, epochs: int, steps: bool, per_epoch: int = 20) -> list[dict[str, Any]]:
    speed, ratio = METHODS.get(spec, (0.5, 20.0))
    per_step = 0.0 if spec == "noop" else 4e6 / ratio
    dice = random.Random(f"{spec} {seed}")
    shift, step_s, rows = dice.uniform(-0.6, 0.6), _step_s(spec), []
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * per_epoch + 2, epoch * per_epoch + 1, 2) if steps else ():
            loss = 2.3 * math.exp(-speed * step / per_epoch) + 0.1 + abs(dice.gauss(0, 0.06))
            rows.append({"kind": "steps", "spec": spec, "epoch": epoch, "step": step, "loss": loss,
                         "seconds": step * step_s,
                         "bytes_sent": step * per_step, "breakdown": _breakdown(spec)})  # fmt: skip
        step = epoch * per_epoch
        loss = 2.3 * math.exp(-speed * epoch) + 0.13
        rows.append({"kind": "epoch", "spec": spec, "epoch": epoch, "step": step, "loss": loss, "lr": 0.1,
                     "metric": 98.5 - 45 * math.exp(-speed * epoch) + shift, "seconds": step * step_s,
                     "samples_per_s": 128 / step_s, "bytes_sent": step * per_step,
                     "ratio": ratio if per_step else None})  # fmt: skip
    return rows


def write_advice(file: Path) -> Path:
    """At 1 Gb/s for 14.7 M parameters, up to 256 hosts."""
    hosts = [2**power for power in range(1, 9)]
    step = {
        "noop": lambda p: 820.0,
        "dense": lambda p: 820 + 960 * 2 * (p - 1) / p,
        "dgc:density=0.001": lambda p: 860 + 14 * p,
        "gtopk:density=0.001": lambda p: 850 + 22 * math.log2(p),
        "terngrad": lambda p: 900 + 210.0,
    }
    sent = {"noop": 0, "dense": 88.7e6, "dgc:density=0.001": 0.42e6, "gtopk:density=0.001": 0.23e6, "terngrad": 7.8e6}
    predictions = [
        {"method": method, "hosts": p, "step_ms": of(p), "bytes_per_step": sent[method]}
        for method, of in step.items()
        for p in hosts
    ]
    advice = {"kind": "advice", "params": 14_700_000, "compute_ms": 820.0, "alpha_s": 1e-4, "beta_s_per_byte": 8.4e-9}
    advice |= {
        "predictions": predictions,
        "recommended": "gtopk:density=0.001",
        "reason": "1.9 times faster than dense on 8 hosts",
    }
    file.write_text(json.dumps({**advice, **ENVIRONMENT}))
    return file


def write_cluster(file: Path, advice: Path, rate: str = "1gbit") -> Path:
    """4 and 8 hosts, a few per cent away from the advice."""
    rows = []
    for row in json.loads(advice.read_text())["predictions"]:
        if row["hosts"] in (4, 8):
            dice = random.Random(f"{row['method']} {row['hosts']}")
            p50 = row["step_ms"] * dice.uniform(0.93, 1.08)
            exchange = max(0.0, p50 - 780)
            phases = {"forward_backward": 800.0, "compress": 20.0, "communicate": exchange, "wait": max(0.0, p50 - 800)}
            rows.append({"kind": "cluster", "method": row["method"], "hosts": row["hosts"], "rate": rate,
                         "model": "vgg16",
                         "step_ms_p20": p50 * 0.96, "step_ms_p50": p50, "step_ms_p80": p50 * 1.07,
                         "samples_per_s": 16e3 * row["hosts"] / p50,
                         "share_of_noop": 820 / p50, "bytes_per_step": row["bytes_per_step"], "breakdown_ms": phases,
                         "predicted_ms": row["step_ms"], **ENVIRONMENT})  # fmt: skip
    file.write_text(json.dumps(rows))
    return file
