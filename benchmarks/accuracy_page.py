"""The table of docs/accuracy.md: which kept runs it shows, and how its lines read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from claimed import LITTLE
from comparing import ROUNDING, difference, find, markdown, mean, number, of_the_same_seeds, times_fewer

HEADINGS = ("", "method", "epochs, seeds", "result", "dense", "difference (of each seed)", "bytes of a worker")


@dataclass(frozen=True)
class Line:
    """Runs of a method on a task, beside dense; bold where these are further behind than ``within``."""

    task: str
    method: str
    runs: str
    dense: str
    within: float = LITTLE


R20, R20X8, VGG = "CIFAR-10, ResNet-20, accuracy", "ResNet-20, 8 workers", "VGG-16"
PTB = "Penn Treebank, LSTM, perplexity (less is better)"
TRANSFORMER = "Multi30k, Transformer, Adam, BLEU"
PARTIAL = '`GradientDropping(local="partial", warmup=339)`'
POWERSGD = "PyTorch's PowerSGD hook, rank 4 (with error feedback and warm start; rank 1: 75.5 %)"

SLOWLY = "a learning rate that rises for four epochs"

LINES = (
    Line(R20, "`DGC(density=0.006, warmup=388)`", "r20f-balanced-s*", "r20f-dense-s*"),
    Line(R20, "the same", "r20l-balanced-s*", "r20l-dense-s*"),
    Line(R20, "the same", "r20-short-balanced-s*", "r20-short-dense-s*"),
    Line(R20, "`DGC(warmup=388)`", "r20-short-0.02-s*", "r20-short-dense-s*"),
    Line(R20, "the DGC paper's own setting (fp32 values, also in the warm-up)", "r20f-dgc-s*", "r20f-dense-s*"),
    Line(R20, "`GTopK(warmup=388)`", "r20-gtopk-0.03-corrected-s*", "r20-short-dense-s*"),
    Line(R20, "the gTop-k paper's own setting", "r20f-gtopk-s*", "r20f-dense-s*"),
    Line(R20, "`TernGrad`", "r20-terngrad-ours-s*", "r20-dense-s*", 1.0),
    Line(R20, '`"dense:dtype=bf16"`', "r20f-bf16-s*", "r20f-dense-s*"),
    Line(R20X8, "`DGC(density=0.006, warmup=388)`", "r20x8-balanced-s*", "r20x8-short-dense-s*"),
    Line(R20X8, "`GTopK(warmup=388)`", "r20x8-gtopk-0.03-s*", "r20x8-short-dense-s*"),
    Line(R20X8, "`BlockSign`", "r20x8l-ours-s*", "r20x8l-dense-s*"),
    Line(
        "ResNet-110",
        f"`DGC(density=0.006, warmup=388)`, {SLOWLY}",
        "r110-balanced-s*",
        "r110-warm-dense-s*",
    ),
    Line(VGG, f"`DGC(warmup=388)`, {SLOWLY}", "vgg-warm-0.02-s*", "vgg-warm-dense-s*"),
    Line(VGG, "the same, a rate that rises for 83 steps", "vgg-0.02-s*", "vgg-dense-s*"),
    Line(VGG, f"`DGC(density=0.006, warmup=388)`, {SLOWLY}", "vgg-warm-s*", "vgg-warm-dense-s*"),
    Line(VGG, "the same, a rate that rises for 83 steps", "vgg-balanced-s*", "vgg-dense-s*"),
    Line(VGG, "`GTopK(warmup=388)`", "vgg-gtopk-0.03-s*", "vgg-dense-s*"),
    Line(VGG, POWERSGD, "vgg-powersgd-4-s*", "vgg-dense-s*"),
    Line("a CifarNet, Adam", "`TernGrad`", "cnn-terngrad-s*", "cnn-dense-s*", 1.0),
    Line(PTB, "`DGC(density=0.006, warmup=265)`", "ptb-balanced-s*", "ptb-dense-s*", 1.0),
    Line(PTB, "`GTopK(warmup=265)`", "ptb-gtopk-0.03-s*", "ptb-dense-s*", 1.0),
    Line(
        "AN4, GRU with CTC, words wrong (less is better)",
        "`DGC(density=0.006, warmup=116)`",
        "an4-balanced-s*",
        "an4-dense-s*",
        1.0,
    ),
    Line(TRANSFORMER, PARTIAL, "m30k-int8-s*", "m30k-dense-s*", 0.5),
    Line(TRANSFORMER, 'the same with `values="fp32"`', "m30k-partial-0.03-s*", "m30k-dense-s*", 0.5),
    Line(TRANSFORMER, "its paper's 1 % with fp32 values", "m30k-partial-s*", "m30k-dense-s*", 0.5),
    Line("Multi30k, GRU, Adam, BLEU", PARTIAL, "m30k-gru-long-int8-s*", "m30k-gru-long-dense-s*", 0.5),
)


def _cells(line: Line, results: Path) -> list[str]:
    runs = find(line.runs, results)
    dense = of_the_same_seeds(runs, find(line.dense, results))
    found = difference(runs, dense)
    if found is None:
        raise ValueError(f"the table of docs/accuracy.md lacks '{line.runs}' or '{line.dense}'")
    if runs[0].setting != dense[0].setting or {run.seed for run in runs} != {run.seed for run in dense}:
        raise ValueError(f"'{line.runs}' and '{line.dense}' differ in their seeds or in {runs[0].differs(dense[0])}")
    unit = f" {runs[0].config['metric']['unit']}".rstrip()
    ours, theirs = (f"{number(mean([run.outcome['metric'] for run in group]))}{unit}" for group in (runs, dense))
    return [
        line.method,
        f"{runs[0].config['epochs']}, {len(runs)}",
        f"**{ours}**" if found.lost > line.within + ROUNDING else ours,
        theirs,
        str(found).removesuffix(" points"),
        f"{times_fewer(runs, dense):.0f}",
    ]


def accuracy_table(results: Path) -> str:
    """The table; a task is named in the first of its lines."""
    lines = [list(HEADINGS)]
    for task, group in groupby(LINES, lambda line: line.task):
        lines += [[task if place == 0 else "", *_cells(line, results)] for place, line in enumerate(group)]
    lines[1][-1] += " times fewer"
    return markdown(lines)
