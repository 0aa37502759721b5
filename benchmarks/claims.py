"""The papers' claims and the runs that answer them. benchmarks/claims_table.py makes the tables of docs/results.md.

Runs are named RECIPE-SETTING-METHOD-sSEED. What a paper only shows as a curve is named by its figure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line: ``runs`` is a pattern of kept runs' names, "cifar10-dgc-s*" for all seeds.

    Where the runs hold several methods the pattern goes on with "::" and a pattern of the method's string. ``dense``
    names the dense runs of the same setting where they are not the claim's.
    """

    label: str
    paper: str
    runs: str
    dense: str | None = None


@dataclass(frozen=True)
class Claim:
    """A table; ``dense`` is the pattern of the dense runs that its rows are compared with."""

    title: str
    dense: str
    rows: tuple[Row, ...]


def _line(label: str, paper: str, setting: str, method: str) -> Row:
    """A row whose dense runs are those of its own setting."""
    return Row(label, paper, f"{setting}-{method}-s*", f"{setting}-dense-s*")


_LIKE_DENSE = "converges like dense"
CLAIMS = (
    Claim(
        "DGC at 99.9 % keeps accuracy, plain dropping does not",
        "cifar10-resnet20-dense-s*",
        (
            Row("dropping, momentum behind it", "Fig. 3(a): worse than dense", "cifar10-resnet20-dropping-s*"),
            Row("+ momentum correction", "Fig. 3(a): much closer", "cifar10-resnet20-correction-s*"),
            Row("+ masking and warm-up: DGC", "Fig. 3(a): follows dense", "cifar10-resnet20-dgc-s*"),
            _line("DGC, ResNet-110", "Fig. 3(a)", "cifar10-resnet110", "dgc"),
            _line("DGC, PTB", "72.24, dense 72.30 (Table 2)", "ptb", "dgc"),
            _line("DGC, AN4", "Fig. 3(c): follows dense", "an4", "dgc"),
        ),
    ),
    Claim(
        "gTop-k converges like dense",
        "cifar10-resnet20-dense-s*",
        (
            Row("ResNet-20, 4 workers, 0.1 %", f"Fig. 5: {_LIKE_DENSE}", "cifar10-resnet20-gtopk-s*"),
            *(
                Row(f"ResNet-20, density {density}", "Fig. 12", f"cifar10-resnet20-gtopk{density}-s*")
                for density in ("0.1", "0.05", "0.01", "0.001", "0.0005")
            ),
            _line("ResNet-20, 8 workers", f"Fig. 5: {_LIKE_DENSE}", "cifar10-resnet20-w8", "gtopk"),
            _line("VGG-16", f"Fig. 5: {_LIKE_DENSE}", "cifar10-vgg16", "gtopk"),
            _line("LSTM-PTB, 0.5 %", f"Fig. 7: {_LIKE_DENSE}", "ptb", "gtopk"),
        ),
    ),
    Claim(
        "TernGrad: 2 to 64 workers, and what clipping and per-tensor scalers are for",
        "mnist-dense-s*",
        (
            *(
                _line(
                    f"LeNet, {workers} workers, {name}",
                    "Fig. 3: -0.22 to +0.15 points",
                    f"mnist-w{workers}{sgd}",
                    "terngrad",
                )
                for name, sgd in (("momentum", ""), ("plain SGD", "-plain"))
                for workers in (2, 4, 8, 16, 64)
            ),
            _line("CIFAR-10, Adam", "85.64 %, dense 86.56 % (Table 1)", "cifar10-adam", "terngrad"),
            _line("without clipping", "AlexNet 54.63 %, clipped 57.61 % (Table 2)", "cifar10-adam", "terngrad-noclip"),
            _line("one scaler for the model", "worse (section 3.3, no figure)", "cifar10-adam", "terngrad-onescaler"),
        ),
    ),
    Claim(
        "dist-EF-blockSGDM is SGDM; signSGD and Signum are worse (the paper: CIFAR-100, Fig. 2)",
        "cifar10-resnet20-w8-dense-s*",
        tuple(
            _line(f"{label}, {batch} a worker, {name}", claim, f"cifar10-resnet20-w8-b{batch}{sgd}", method)
            for batch in (8, 16, 32)
            for name, sgd in (("momentum", ""), ("no momentum", "-plain"))
            for label, claim, method in (("BlockSign", "like SGD", "blocksign"), ("signSGD", "worse", "signsgd"))
        ),
    ),
    Claim(
        "Local gradients on Multi30k (the paper: Ro-En, test BLEU of Table 1, dense 34.45)",
        "multi30k-gru-dense-s*",
        tuple(
            _line(f"{label}, {name}", paper if model == "gru" else "-", f"multi30k-{model}", method)
            for name, model in (("GRU", "gru"), ("Transformer", "transformer"))
            for label, paper, method in (
                ("dropping", "33.89", "dropping"),
                ("PARTIAL, averaged", "34.45", "partial"),
                ("SUM, averaged", "34.34", "sum"),
                ("ERROR, averaged", "33.80", "error"),
                ("PARTIAL, never averaged", "34.34", "partial-apart"),
                ("SUM, never averaged", "34.15", "sum-apart"),
                ("ERROR, never averaged", "33.33", "error-apart"),
            )
        ),
    ),
    Claim(
        "Ours: fewer bits a value cost no accuracy",
        "cifar10-resnet20-dense-s*",
        tuple(
            _line(f"DGC, {values} values, {name}", "-", setting, f"dgc-{values}")
            for name, setting in (("CIFAR-10", "cifar10-resnet20"), ("PTB", "ptb"))
            for values in ("fp32", "int8", "int4")
        ),
    ),
)
