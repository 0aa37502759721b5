"""What the papers claim, and which runs of benchmarks/claims.py answer it: the tables of claims_table.py.

What a paper only shows as a curve is named by its figure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line: ``runs`` is a pattern of kept runs' names, "r20-dgc-s*" for all seeds.

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


CLAIMS = (
    Claim(
        "DGC at 99.9 % keeps accuracy, plain dropping does not",
        "r20-dense-s*",
        (
            Row("ResNet-20: dropping, momentum behind it", "Fig. 3(a): worse than dense", "r20-dropping-s*"),
            Row("+ momentum correction", "Fig. 3(a): much closer", "r20-corrected-s*"),
            Row("+ warm-up", "-", "r20-unmasked-s*"),
            Row("+ masking: DGC", "Fig. 3(a): follows dense", "r20-dgc-s*"),
            Row("ours: 0.24 % in the paper's bytes", "-", "r20-ours-s*"),
            Row("DGC, ResNet-110", "Fig. 3(a): follows dense", "r110-dgc-s*", "r110-dense-s*"),
            Row("DGC, VGG-16", "-", "vgg-dgc-s*", "vgg-dense-s*"),
            Row("DGC, PTB", "72.24, dense 72.30 (Table 2)", "ptb-dgc-s*", "ptb-dense-s*"),
            Row("DGC, AN4", "Fig. 3(c): follows dense", "an4-dgc-s*", "an4-dense-s*"),
        ),
    ),
    Claim(
        "gTop-k converges like dense",
        "r20-dense-s*",
        (
            Row("ResNet-20, 0.1 %", "Fig. 5: like dense", "r20-gtopk-s*"),
            Row("with momentum correction", "-", "r20-gtopk-corrected-s*"),
            Row("8 workers", "-", "r20x8-gtopk-s*", "r20-short-dense-s*"),
            Row("VGG-16, 0.1 %", "Fig. 5: like dense", "vgg-gtopk-s*", "vgg-dense-s*"),
            Row("LSTM-PTB, 0.5 %", "Fig. 7: close to dense", "ptb-gtopk-s*", "ptb-dense-s*"),
            *(
                Row(f"ResNet-20, density {density}", "Fig. 12", f"r20-gtopk-{density}-s*", "r20-short-dense-s*")
                for density in ("0.1", "0.05", "0.01", "0.001", "0.0005")
            ),
        ),
    ),
    Claim(
        "TernGrad: 2 to 64 workers, and what clipping and per-tensor scalers are for",
        "r20-short-dense-s*",
        (
            *(
                Row(f"LeNet, {n} workers", "Fig. 3: -0.22 to +0.15", f"mnist-{n}-terngrad-s*", "mnist-4-dense-s*")
                for n in (2, 4, 8, 16, 64)
            ),
            Row("CIFAR-10, Adam", "85.64 %, dense 86.56 % (Table 1)", "r20-adam-terngrad-s*", "r20-adam-dense-s*"),
            Row("CIFAR-10, momentum", "-", "r20-terngrad-s*"),
            Row("without clipping", "AlexNet 54.63 %, clipped 57.61 % (Table 2)", "r20-terngrad-noclip-s*"),
            Row("one scaler for the model", "worse (section 3.3, no figure)", "r20-terngrad-onescaler-s*"),
        ),
    ),
    Claim(
        "dist-EF-blockSGDM is SGDM, Signum is worse (the paper: CIFAR-100)",
        "r20x8-dense-s*",
        (
            Row("BlockSign, 8 workers of 32", "Fig. 2(c): like SGDM", "r20x8-blocksign-s*"),
            Row("Signum, 8 workers of 32", "Fig. 2(c): worse", "r20x8-signum-s*"),
        ),
    ),
    Claim(
        "Local gradients on Multi30k, BLEU (the paper: an LSTM on Ro-En, test BLEU of Table 1, dense 34.45)",
        "m30k-dense-s*",
        (
            Row("Transformer: dropping", "33.89", "m30k-dropping-s*"),
            Row("PARTIAL, averaged", "34.45", "m30k-partial-s*"),
            Row("SUM, averaged", "34.34", "m30k-sum-s*"),
            Row("ERROR, averaged", "33.80", "m30k-error-s*"),
            Row("PARTIAL, never averaged", "34.34", "m30k-partial-never-s*"),
            Row("GRU: dropping", "33.89", "m30k-gru-dropping-s*", "m30k-gru-dense-s*"),
            Row("GRU: PARTIAL, averaged", "34.45", "m30k-gru-partial-s*", "m30k-gru-dense-s*"),
        ),
    ),
    Claim(
        "Ours: fewer bits a value cost no accuracy (DGC at 0.1 %)",
        "r20-dense-s*",
        (
            Row("ResNet-20, fp32 values", "-", "r20-dgc-s*"),
            Row("int8 values", "-", "r20-int8-s*"),
            Row("int4 values", "-", "r20-int4-s*"),
            Row("PTB, fp32 values", "-", "ptb-dgc-s*", "ptb-dense-s*"),
            Row("int8 values", "-", "ptb-int8-s*", "ptb-dense-s*"),
        ),
    ),
)
