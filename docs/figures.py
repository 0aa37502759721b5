"""Redraws gTop-k's Figure 9, TernGrad's Figure 5 and DGC's Figure 4 from thinwire.advisor.cost, beside our own methods.
README's picture is drawn from what benchmarks/results keeps.

    python docs/figures.py [FOLDER [--png]]        # needs matplotlib (the dev extra); writes SVGs into docs/figures

docs/cost.md says where every number comes from, docs/speed.md those of README's picture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import time_to_accuracy

import thinwire
from thinwire.advisor import cost
from thinwire.advisor.cost.papers import GTOPK_ALPHA_S, GTOPK_BETA_S
from thinwire.advisor.link import Link

PAPER_DGC, PAPER_GTOPK = thinwire.DGC.paper, thinwire.GTopK.paper
MB = 1e6
WORKERS = [2, 4, 8, 16, 32, 64, 128]
COLOURS = {"dense": "#555555", "top-k": "#c2571a", "gTop-k": "#1f77b4", "ours": "#2a8a4a", "DGC": "#7b3fa0"}

# TernGrad's Figure 5: gradient bytes in fp32, batch a GPU (the caption), forward FLOPs an image (the models' papers).
MODELS = {
    "AlexNet": (4 * 61.1e6, 128, 0.72e9),
    "GoogLeNet": (4 * 7.0e6, 64, 1.5e9),
    "VggNet-A": (4 * 132.9e6, 32, 7.6e9),
}
ETHERNET = cost.PaperCluster(gpu_rate=10e9, cpu_rate=10e9, net_rate=0.125e9, latency_s=5e-5)
INFINIBAND = cost.PaperCluster(gpu_rate=20e9, cpu_rate=10e9, net_rate=12.5e9, latency_s=2e-6)


def exchanged(method: str, params: int, hosts: int) -> cost.Plan:
    """What our collectives do for a model of one tensor a million parameters."""
    chosen = thinwire.parse_method(method)
    work = cost.Workload.of_size(params, 1.0)
    total = cost.Plan()
    for layout in cost.bucket_layouts(chosen, [bucket.rows for bucket in work.buckets]):
        total = total + cost.plan_exchange(chosen, layout, hosts)
    return total


def ours_s(method: str, params: int, hosts: int, link: Link) -> float:
    return exchanged(method, params, hosts).seconds(link)


def gtopk_figure_9() -> Any:
    """Time of the all-reduces, by workers at 100 MB and by message size on 32 workers; density 0.001."""
    link = Link(GTOPK_ALPHA_S, GTOPK_BETA_S)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    sizes = [10, 25, 50, 100, 200, 300, 400, 500]
    lines: list[tuple[str, str, str, Callable[[int, float], float]]] = [
        ("DenseAllReduce (paper)", "dense", "v-", lambda p, m: cost.gtopk_dense_s(p, m)),
        ("TopKAllReduce (paper)", "top-k", "o-", lambda p, m: cost.gtopk_topk_s(p, m, 0.001)),
        ("gTopKAllReduce (paper)", "gTop-k", "s-", lambda p, m: cost.gtopk_gtopk_s(p, m, 0.001)),
        ("thinwire DGC", "DGC", "^--", lambda p, m: ours_s(PAPER_DGC, round(m / 4), p, link)),
        ("thinwire GTopK", "ours", "D--", lambda p, m: ours_s(PAPER_GTOPK, round(m / 4), p, link)),
    ]
    for label, colour, mark, seconds in lines:
        left.plot(WORKERS, [1e3 * seconds(p, 100 * MB) for p in WORKERS], mark, label=label, color=COLOURS[colour])
        right.plot(sizes, [1e3 * seconds(32, m * MB) for m in sizes], mark, label=label, color=COLOURS[colour])
    left.set_xscale("log", base=2)
    left.set_xticks(WORKERS, [str(p) for p in WORKERS])
    left.set(xlabel="workers", ylabel="ms", title="100 MB, density 0.001")
    right.set(xlabel="message size (MB)", ylabel="ms", title="32 workers, density 0.001")
    for panel in (left, right):
        panel.set_yscale("log")
    left.legend(fontsize=8, loc=(0.02, 0.52))
    return figure


def compute_s(model: str, per_image: float) -> float:
    """Seconds of one GPU's batch, by FLOPs: ``per_image`` is AlexNet's time a sample."""
    _, batch, flops = MODELS[model]
    return per_image * batch * flops / MODELS["AlexNet"][2]


def alexnet_second(cluster: cost.PaperCluster, gain: float, machines: int, model: str = "AlexNet") -> float:
    """AlexNet's seconds a sample for which TernGrad's printed gain comes out: T(1, 1, K, |g|) is not printed."""
    low, high = 1e-6, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(cluster, model, machines, middle) > gain else (low, middle)
    return low


def speedup(cluster: cost.PaperCluster, model: str, machines: int, per_image: float) -> float:
    nbytes, _, _ = MODELS[model]
    one = compute_s(model, per_image)
    dense = cost.weak_scaling_s(cluster, 4, machines, one, nbytes)
    return dense / cost.weak_scaling_s(cluster, 4, machines, one, nbytes, nbytes / 16)


def terngrad_figure_5() -> Any:
    """Training throughput on up to 512 GPUs, four a machine, fp32 and ternary, and our sharded TernGrad."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2))
    places = (
        (ETHERNET, alexnet_second(ETHERNET, 3.04, 2), "1 Gb/s Ethernet, PCI switch"),
        (INFINIBAND, alexnet_second(INFINIBAND, 2.0, 128, "VggNet-A"), "100 Gb/s InfiniBand, NVLink"),
    )
    machines = [1, 2, 4, 8, 16, 32, 64, 128]
    for panel, (cluster, per_image, title) in zip(panels, places, strict=True):
        for place, (model, (nbytes, batch, _)) in enumerate(MODELS.items()):
            one, colour = compute_s(model, per_image), ("#1f77b4", "#2a8a4a", "#c2571a")[place]
            gpus = [4 * j for j in machines]
            dense = [cost.weak_throughput(cluster, 4, j, one, nbytes, batch) for j in machines]
            ternary = [cost.weak_throughput(cluster, 4, j, one, nbytes, batch, nbytes / 16) for j in machines]
            own = [ours_throughput(cluster, j, one, nbytes, batch) for j in machines]
            panel.plot(gpus, dense, "-", color=colour, label=f"{model} fp32")
            panel.plot(gpus, ternary, "o-", color=colour, label=f"{model} TernGrad", markersize=3)
            panel.plot(gpus, own, "x:", color=colour, label=f"{model} thinwire TernGrad", markersize=7)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks([4 * j for j in machines], [str(4 * j) for j in machines])
        panel.set(xlabel="GPUs, 4 a machine", ylabel="samples/s", title=title)
    panels[0].legend(fontsize=6.5)
    return figure


def ours_throughput(cluster: cost.PaperCluster, machines: int, one_gpu_s: float, nbytes: float, batch: int) -> float:
    """The same machines with our ring and servers between them instead of log2 j full gradients."""
    inside_s = cost.weak_scaling_s(cluster, 4, 1, one_gpu_s, nbytes)
    link = Link(cluster.latency_s, 1 / cluster.net_rate)
    between_s = ours_s("terngrad", round(nbytes / 4), machines, link)
    return 4 * machines * batch / (inside_s + between_s)


def dgc_figure_4() -> Any:
    """Speedup over one node of AlexNet and ResNet-50 on 1 and 10 Gb/s, dense and DGC, and ours."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4))
    nodes = [1, 2, 4, 8, 16, 32, 64]
    alexnet, resnet = 61_100_000, 25_557_032
    alexnet_s = 4 * alexnet / 1.25e9 * 6 / (64 / 30 - 1)  # a node's step, from "about 30x with 10 Gb/s"
    compute = {"AlexNet": (alexnet, alexnet_s), "ResNet-50": (resnet, 2 * alexnet_s)}
    for panel, (rate, title) in zip(panels, ((0.125e9, "1 Gb/s"), (1.25e9, "10 Gb/s")), strict=True):
        panel.plot(nodes, nodes, color="#bbbbbb", label="linear")
        for (model, (params, one_s)), marker in zip(compute.items(), "os", strict=True):
            link = Link(5e-5, 1 / rate)
            curves: Sequence[tuple[str, str, list[float]]] = (
                ("dense", "dense", [cost.speedup_over_one_node(j, one_s, 4 * params, rate) for j in nodes]),
                ("DGC (paper)", "DGC", [cost.speedup_over_one_node(j, one_s, 4 * params, rate, 0.001) for j in nodes]),
                (
                    "thinwire DGC",
                    "top-k",
                    [j * one_s / (one_s + ours_s(PAPER_DGC, params, j, link)) for j in nodes],
                ),
                (
                    "thinwire GTopK",
                    "ours",
                    [j * one_s / (one_s + ours_s(PAPER_GTOPK, params, j, link)) for j in nodes],
                ),
            )
            for label, colour, values in curves:
                style = "-" if model == "AlexNet" else "--"
                panel.plot(nodes, values, marker + style, label=f"{model} {label}", color=COLOURS[colour], markersize=4)
        panel.set(xlabel="nodes", ylabel="speedup over one node", title=title, xlim=(0, 66), ylim=(0, 66))
    panels[0].legend(fontsize=7)
    return figure


# A row of the emulated cluster, the kept curve, its name in the picture, and its colour.
FOUR_LINES = (
    ("dgc", "vgg-warm-0.02-s0", "thinwire DGC", "#c2571a"),
    ("powersgd-4", "vgg-powersgd-4-s0", "PowerSGD, rank 4", "#7b3fa0"),
    ("dense:dtype=bf16", "vgg-bf16-s0", "bf16", "#1f77b4"),
    ("dense", "vgg-warm-dense-s0", "DDP, fp32", "#555555"),
)


def time_to_accuracy_100mbit() -> Any:
    """Accuracy of VGG-16 over the time that its steps take on four emulated hosts with 100 Mb/s links."""
    figure, panel = plt.subplots(figsize=(8, 3.4))
    rows = json.loads((time_to_accuracy.RESULTS / "cluster.json").read_text())
    for method, name, label, colour in FOUR_LINES:
        keys = (method, 4, "100mbit")
        row = next(row for row in rows if (row["method"], row["hosts"], row["rate"]) == keys)
        columns = time_to_accuracy.curve(name)
        warms_up = method != "dense"
        places = range(len(columns["step"]))
        minutes = [time_to_accuracy.seconds_at(place, columns, row, warms_up) / 60 for place in places]
        panel.plot(minutes, columns["metric"], color=colour, linewidth=2)
        # Behind the line's end, and a little apart where two end side by side.
        shift = {"dgc": (-4, 7, "right"), "powersgd-4": (5, -3, "left")}.get(method, (-10, 7, "right"))
        panel.annotate(
            label, (minutes[-1], columns["metric"][-1]), shift[:2], textcoords="offset points",
            ha=shift[2], color=colour, fontsize=10,
        )  # fmt: skip
    panel.set_xscale("log")
    ticks = (2, 5, 10, 20, 50, 100, 200, 400)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set(xlabel="minutes, four emulated hosts on 100 Mb/s links", ylabel="test accuracy (%)")
    panel.set(xlim=(0.9, 460), ylim=(30, 97))
    return figure


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "thinwire", "axes.grid": True, "grid.alpha": 0.3, "font.size": 9})
    for name, draw in {
        "gtopk-figure-9": gtopk_figure_9,
        "terngrad-figure-5": terngrad_figure_5,
        "dgc-figure-4": dgc_figure_4,
        "time-to-accuracy": time_to_accuracy_100mbit,
    }.items():
        figure = draw()
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        if "--png" in sys.argv:
            figure.savefig(folder / f"{name}.png", dpi=110)
        plt.close(figure)
        print(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
