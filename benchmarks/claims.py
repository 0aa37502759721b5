"""The runs behind the claims in docs/results.md: every one is a `thinwire train` command with a fixed seed.

    python benchmarks/claims.py --list
    python benchmarks/claims.py --data DIR --out RUNS [--only 'r20-*'] [--jobs 16] [--seconds 3000]

Runs go side by side, as threads of one process each; a run that is there already is left
alone. DIR holds the data sets in their public formats. On a GPU with many runs, start NVIDIA's MPS first.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import thinwire

R20 = "--recipe cifar10-resnet20 --set precision=bf16"
R20X8 = "--recipe cifar10-resnet20 --workers 8 --set precision=bf16"
VGG = "--recipe cifar10-vgg16 --set precision=bf16"
CNN = "--recipe cifar10-cifarnet --set precision=bf16"
R110 = "--recipe cifar10-resnet110 --set precision=bf16"
WARM = "warmup=388"  # four epochs of 97 steps
DENSITY, _, VALUES, MASKING = thinwire.DGC.paper.removeprefix("dgc:").split(",")
PAPER = f"{DENSITY},{MASKING}"  # the kept runs have their warm-up behind these
DGC = f"dgc:{PAPER},{WARM},{VALUES}"
OURS_SAME = f"dgc:density=0.0024,{WARM},values=int8,factor_masking=false"
OURS = f"dgc:density=0.006,{WARM},values=int8,factor_masking=false"
SIGNS = f"blocksign:topology=server,{thinwire.BlockSign.paper.removeprefix('blocksign:')}"
TERN = f"{thinwire.TernGrad.paper},exclude=14.*,topology=server"
MNIST_TERN = f"{thinwire.TernGrad.paper},topology=server"
# One-dimensional tensors and the output layer stay dense; by default now the first convolution (432 elements) as well.
OUR_SIGNS = "blocksign:dense_below=1,exclude=14.*,topology=server"
OUR_TERN = "terngrad:dense_below=1,exclude=14.*,topology=server"
OUR_SETTING = "density=0.006,factor_masking=false"  # DGC as it was by default then, beside the values
RESCALED = "density=0.006,values=int8,factor_masking=false,lr_rescaling=true"
MASKED = "density=0.006,values=int8,factor_masking=true"
UNMASKED = MASKED.replace("true", "false")
GLOBAL = "density=0.006,values=int8,scope=model,factor_masking=true"  # the whole model's largest, and masked
MODEL = "density=0.006,values=int8,scope=model,factor_masking=false"
MORE_GTOPK = "gtopk:density=0.03,momentum_correction=true"
UNCORRECTED = f"{WARM},momentum_correction=false"  # as in gTop-k's paper
PTB = "--recipe ptb-lstm --epochs 12"
M30K = "--recipe multi30k-transformer --epochs 20"
M30K_GRU = "--recipe multi30k-gru --epochs 15"
M30K_GRU_LONG = "--recipe multi30k-gru --epochs 30"
AN4 = "--recipe an4-gru --epochs 30"
DROP = "density=0.01,warmup=339"
FP32_DROP = f"{DROP},values=fp32"
NEVER = "sync_every=1000000"  # and averaged to be judged
ALONE = "sync_every=none"  # every worker's own model is judged, on its part of the test set
PARTIAL = "warmup=339,local=partial,sync_every=500"
SLOWLY, STEEPLY = "lr_warmup=0.1333", "lr_warmup=0.0286"
WAITING = "direct_decay=false"
BALANCED = "density=0.006,values=int8,scope=balanced,factor_masking=false"
MORE = BALANCED.replace("0.006", "0.02")
BALANCED_DROP = "values=int8,scope=balanced,dense_below=1024"
MNIST = "--recipe mnist-lenet --epochs 5"


def seeds(name: str, command: str, number: int = 3) -> dict[str, str]:
    return {f"{name}-s{seed}": f"{command} --seed {seed}" for seed in range(number)}


# As they were typed when defaults were others: `as_it_was` adds what they meant.
EARLIER: dict[str, str] = {
    # DGC: accuracy at 99.9 % over 100 epochs (Figure 3, Tables 1 and 2).
    **seeds("r20l-dgc", f"{R20} --epochs 100 --method {DGC}"),
    **seeds("r20l-ours", f"{R20} --epochs 100 --method {OURS}"),
    **seeds("r20l-dense", f"{R20} --epochs 100 --method dense"),
    **seeds("r20l-fp32", f"{R20} --epochs 100 --method dgc:{OUR_SETTING},{WARM},values=fp32"),
    **seeds("r20l-int4", f"{R20} --epochs 100 --method dgc:{OUR_SETTING},{WARM},values=int4"),
    "r20l-cold-s0": f"{R20} --epochs 100 --method dgc:{OUR_SETTING},values=int8",
    "r20l-gtopk-s0": f"{R20} --epochs 100 --method gtopk:density=0.01,{WARM},momentum_correction=true",
    "an4-dgc-s0": f"{AN4} --method dgc:{PAPER},warmup=116,{VALUES}",
    "an4-ours-s0": f"{AN4} --method dgc:{OUR_SETTING},warmup=116,values=int8",
    **seeds("an4-dense", f"{AN4} --method dense"),
    "ptb-dgc-s0": f"{PTB} --method dgc:{PAPER},warmup=265,{VALUES}",
    **seeds("ptb-ours", f"{PTB} --method dgc:density=0.006,warmup=265,values=int8,factor_masking=false"),
    **seeds("ptb-fp32", f"{PTB} --method dgc:{OUR_SETTING},warmup=265,values=fp32"),
    **seeds("ptb-int4", f"{PTB} --method dgc:{OUR_SETTING},warmup=265,values=int4"),
    "ptb-gtopk-s0": f"{PTB} --method gtopk:density=0.005,warmup=265,momentum_correction=true",
    "ptb-gtopk-plain-s0": f"{PTB} --method gtopk:density=0.005,warmup=265,momentum_correction=false",
    "ptb-gtopk-ours-s0": f"{PTB} --method gtopk:density=0.01,warmup=265,momentum_correction=true",
    **seeds("ptb-gtopk-0.03", f"{PTB} --method {MORE_GTOPK},warmup=265", 2),
    **seeds("ptb-dense", f"{PTB} --method dense"),
    # The largest elements of the whole model; masking; what waited keeps the learning rates of its own steps.
    "r110-model-s0": f"{R110} --epochs 30 --method dgc:{MODEL},{WARM}",
    "r110-global-s0": f"{R110} --epochs 30 --method dgc:{GLOBAL},{WARM}",
    "vgg-model-s0": f"{VGG} --epochs 30 --method dgc:{MODEL},{WARM}",
    "vgg-global-s0": f"{VGG} --epochs 30 --method dgc:{GLOBAL},{WARM}",
    "vgg-masked-s0": f"{VGG} --epochs 30 --method dgc:{MASKED},{WARM}",
    "vgg-rescaled-s0": f"{VGG} --epochs 30 --method dgc:{RESCALED},{WARM}",
    **seeds("r20-short-model", f"{R20} --epochs 30 --method dgc:{MODEL},{WARM}"),
    **seeds("r20-short-model-rescaled", f"{R20} --epochs 30 --method dgc:{MODEL},lr_rescaling=true,{WARM}"),
    "ptb-model-s0": f"{PTB} --method dgc:{MODEL},warmup=265",
    "ptb-global-s0": f"{PTB} --method dgc:{GLOBAL},warmup=265",
    "ptb-rescaled-s0": f"{PTB} --method dgc:{RESCALED},warmup=265",
    "an4-model-s0": f"{AN4} --method dgc:{MODEL},warmup=116",
    "an4-model-rescaled-s0": f"{AN4} --method dgc:{MODEL},lr_rescaling=true,warmup=116",
    "an4-global-s0": f"{AN4} --method dgc:{GLOBAL},warmup=116",
    "an4-rescaled-s0": f"{AN4} --method dgc:{RESCALED},warmup=116",
    # ResNet-110 with half the learning rate: at 0.2 dense itself begins with losses above that of guessing.
    "r110-half-dense-s0": f"{R110},lr=0.1 --epochs 30 --method dense",
    "r110-half-ours-s0": f"{R110},lr=0.1 --epochs 30 --method dgc:{UNMASKED},{WARM}",
    "r110-half-masked-s0": f"{R110},lr=0.1 --epochs 30 --method dgc:{MASKED},{WARM}",
    # dist-EF-blockSGDM: 8 workers of 32 images, with and without momentum (Figure 2).
    "r20x8-signum-s0": f"{R20X8},batch_size=256,lr=0.1 --epochs 20 --method signsgd:topology=server",
    "r20x8-blocksign-s0": f"{R20X8},batch_size=256,lr=0.1 --epochs 20 --method {SIGNS}",
    "r20x8-ours-s0": f"{R20X8},batch_size=256,lr=0.1 --epochs 20 --method {OUR_SIGNS}",
    "r20x8-dense-s0": f"{R20X8},batch_size=256,lr=0.1 --epochs 20 --method dense",
    **seeds("r20x8l-ours", f"{R20X8},batch_size=256,lr=0.1 --epochs 60 --method {OUR_SIGNS}", 2),
    **seeds("r20x8l-dense", f"{R20X8},batch_size=256,lr=0.1 --epochs 60 --method dense", 2),
    "r20x8-still-signsgd-s0": f"{R20X8},batch_size=256,lr=0.5,momentum=0 --epochs 20 --method signsgd:topology=server",
    "r20x8-still-blocksign-s0": f"{R20X8},batch_size=256,lr=0.5,momentum=0 --epochs 20 --method {SIGNS}",
    # 4 workers of 64 images for 40 epochs: a setting of which figures of plain torch exist.
    "r20q-blocksign-s0": f"{R20},batch_size=256,lr=0.1 --epochs 40 --method blocksign:dense_below=1,topology=server",
    "r20q-terngrad-s0": f"{R20},batch_size=256,lr=0.1 --epochs 40 --method {OUR_TERN}",
    "r20q-dense-s0": f"{R20},batch_size=256,lr=0.1 --epochs 40 --method dense",
    "r20x8-still-dense-s0": f"{R20X8},batch_size=256,lr=0.5,momentum=0 --epochs 20 --method dense",
    # Local gradients (Tables 1 and 2, Figures 1 to 3).
    **seeds("m30k-dropping", f"{M30K} --method dropping:{DROP}", 2),
    **seeds("m30k-partial", f"{M30K} --method dropping:density=0.01,{PARTIAL}", 2),
    "m30k-partial-often-s0": f"{M30K} --method dropping:{DROP},local=partial,sync_every=100",
    **seeds("m30k-sum", f"{M30K} --method dropping:{DROP},local=sum,sync_every=500", 2),
    **seeds("m30k-error", f"{M30K} --method dropping:{DROP},local=error,sync_every=500", 2),
    "m30k-partial-never-s0": f"{M30K} --method dropping:{DROP},local=partial,{NEVER}",
    **seeds("m30k-dense", f"{M30K} --method dense", 3),
    # Values of 8 bits, and what each part of DGC is worth, over 60 epochs.
    **seeds("r20-int8", f"{R20} --epochs 60 --method dgc:{PAPER},{WARM},values=int8"),
    **seeds("r20-unmasked", f"{R20} --epochs 60 --method dgc:{DENSITY},{WARM},{VALUES},factor_masking=false"),
    **seeds("r20-dense", f"{R20} --epochs 60 --method dense"),
    **seeds("r20-dgc", f"{R20} --epochs 60 --method {DGC}"),
    **seeds("r20-ours", f"{R20} --epochs 60 --method {OURS_SAME}"),
    **seeds("r20-dropping", f"{R20} --epochs 60 --method dgc:{DENSITY},{VALUES},momentum_correction=false"),
    **seeds("r20-corrected", f"{R20} --epochs 60 --method dgc:{DENSITY},{VALUES},factor_masking=false"),
    # gTop-k: the density, the model with many parameters, more workers (Figures 5, 7 and 12).
    "r20-gtopk-s0": f"{R20} --epochs 60 --method {thinwire.GTopK.paper},{WARM}",
    **{
        f"r20-gtopk-{density}-s0": f"{R20} --epochs 30 --method gtopk:density={density},{UNCORRECTED}"
        for density in ("0.1", "0.05", "0.01", "0.001", "0.0005")
    },
    **seeds("r20-short-dense", f"{R20} --epochs 30 --method dense"),
    "vgg-gtopk-s0": f"{VGG} --epochs 30 --method {thinwire.GTopK.paper},{WARM}",
    "vgg-gtopk-ours-s0": f"{VGG} --epochs 30 --method gtopk:density=0.01,{WARM},momentum_correction=true",
    "vgg-ours-s0": f"{VGG} --epochs 30 --method {OURS}",
    "vgg-dgc-s0": f"{VGG} --epochs 30 --method {DGC}",
    **seeds("vgg-dense", f"{VGG} --epochs 30 --method dense", 2),
    # What a thin link feels most of DGC is its warm-up: one epoch of it instead of four; and what PowerSGD really does.
    "vgg-dgc-brief-s0": f"{VGG} --epochs 30 --method dgc:{PAPER},warmup=97,{VALUES}",
    "vgg-powersgd-s0": f"{VGG} --epochs 30 --method powersgd:rank=1",
    "vgg-powersgd-warm-s0": f"{VGG} --epochs 30 --method powersgd:rank=1,{WARM}",
    "vgg-powersgd-4-s0": f"{VGG} --epochs 30 --method powersgd:rank=4",
    # TernGrad: momentum and Adam, and without its two parts (Table 1, section 3.2).
    "r20-terngrad-s0": f"{R20} --epochs 30 --method {TERN}",
    "r20-terngrad-noclip-s0": f"{R20} --epochs 30 --method {TERN},clip_sigma=none",
    "r20-terngrad-onescaler-s0": f"{R20} --epochs 30 --method {TERN},scaler=model",
    **seeds("r20-terngrad-ours", f"{R20} --epochs 60 --method {OUR_TERN}"),
    "r20-adam60-terngrad-s0": f"{R20},solver=adam,lr=0.002,weight_decay=0 --epochs 60 --method {OUR_TERN}",
    "r20-adam60-dense-s0": f"{R20},solver=adam,lr=0.002,weight_decay=0 --epochs 60 --method dense",
    "r20-adam-terngrad-s0": f"{R20},solver=adam,lr=0.002,weight_decay=0 --epochs 30 --method {TERN}",
    "r20-adam-dense-s0": f"{R20},solver=adam,lr=0.002,weight_decay=0 --epochs 30 --method dense",
    **seeds("cnn-terngrad", f"{CNN} --epochs 100 --method terngrad:dense_below=1,exclude=13.*,topology=server", 2),
    **seeds("cnn-paper", f"{CNN} --epochs 100 --method {thinwire.TernGrad.paper},topology=server", 2),
    **seeds("cnn-dense", f"{CNN} --epochs 100 --method dense", 2),
    # TernGrad on MNIST, 64 images per step; 64 workers have 256 (Figure 3).
    **seeds("mnist-64-terngrad", f"{MNIST} --set batch_size=256,lr=0.02 --workers 64 --method {MNIST_TERN}", 2),
    **{
        name: command
        for n in (16, 8, 4, 2)
        for name, command in seeds(f"mnist-{n}-terngrad", f"{MNIST} --workers {n} --method {MNIST_TERN}").items()
    },
    **seeds("mnist-plain-terngrad", f"{MNIST} --set momentum=0,lr=0.1 --method {MNIST_TERN}"),
    **seeds("mnist-4-dense", f"{MNIST} --method dense"),
    **seeds("mnist-wide-dense", f"{MNIST} --set batch_size=256,lr=0.02 --method dense", 2),
    **seeds("mnist-plain-dense", f"{MNIST} --set momentum=0,lr=0.1 --method dense"),
    "r110-dgc-s0": f"{R110} --epochs 30 --method {DGC}",
    "r110-ours-s0": f"{R110} --epochs 30 --method {OURS}",
    "r110-dense-s0": f"{R110} --epochs 30 --method dense",
    **seeds("m30k-gru-dropping", f"{M30K_GRU} --method dropping:{DROP}", 2),
    **seeds("m30k-gru-partial", f"{M30K_GRU} --method dropping:density=0.01,{PARTIAL}", 2),
    **seeds("m30k-gru-dense", f"{M30K_GRU} --method dense", 2),
    "r20x8-gtopk-s0": f"{R20} --workers 8 --epochs 30 --method {thinwire.GTopK.paper},{WARM}",
    "r20-gtopk-ours-s0": f"{R20} --epochs 60 --method gtopk:density=0.006,{WARM},momentum_correction=true,values=int8",
    **seeds("r20-gtopk-corrected", f"{R20} --epochs 30 --method gtopk:density=0.01,{WARM},momentum_correction=true"),
    **seeds("r20-gtopk-0.03-corrected", f"{R20} --epochs 30 --method {MORE_GTOPK},{WARM}"),
    "r110-gtopk-0.03-s0": f"{R110} --epochs 30 --method {MORE_GTOPK},{WARM}",
    **seeds("vgg-gtopk-0.03", f"{VGG} --epochs 30 --method {MORE_GTOPK},{WARM}", 2),
    **seeds("r20-short-ours", f"{R20} --epochs 30 --method {OURS}"),
    # Fewer images per worker.
    **seeds("r20x8-16-blocksign", f"{R20X8},batch_size=128,lr=0.05 --epochs 10 --method {OUR_SIGNS}", 2),
    **seeds("r20x8-16-dense", f"{R20X8},batch_size=128,lr=0.05 --epochs 10 --method dense", 2),
    "r20x8-8-blocksign-s0": f"{R20X8},batch_size=64,lr=0.025 --epochs 5 --method {OUR_SIGNS}",
    "r20x8-8-dense-s0": f"{R20X8},batch_size=64,lr=0.025 --epochs 5 --method dense",
}


# With weight decay applied directly, and every tensor sending the same share where nothing else is said.
LATER: dict[str, str] = {
    # DGC as its authors run it and with what were our defaults then.
    **seeds("r20-direct-dgc", f"{R20} --epochs 60 --method {DGC}"),
    **seeds("r20-direct", f"{R20} --epochs 60 --method {OURS}"),
    **seeds("r20-short-direct", f"{R20} --epochs 30 --method {OURS}"),
    **seeds("r20-short-direct-masked", f"{R20} --epochs 30 --method dgc:{MASKED},{WARM}"),
    **seeds("r20l-direct-dgc", f"{R20} --epochs 100 --method {DGC}"),
    **seeds("r20l-direct", f"{R20} --epochs 100 --method {OURS}"),
    **seeds("vgg-direct", f"{VGG} --epochs 30 --method {OURS}", 2),
    **seeds("vgg-direct-model", f"{VGG} --epochs 30 --method dgc:{MODEL},{WARM}", 2),
    "vgg-direct-masked-s0": f"{VGG} --epochs 30 --method dgc:{MASKED},{WARM}",
    # ResNet-110: the learning rate rises for four epochs, as it does in 140, and not for one.
    **seeds("r110-warm-dense", f"{R110},{SLOWLY} --epochs 30 --method dense", 2),
    **seeds("r110-warm", f"{R110},{SLOWLY} --epochs 30 --method {OURS}", 2),
    "r110-warm-masked-s0": f"{R110},{SLOWLY} --epochs 30 --method dgc:{MASKED},{WARM}",
    "r110-warm-dgc-s0": f"{R110},{SLOWLY} --epochs 30 --method {DGC}",
    "r110-warm-model-s0": f"{R110},{SLOWLY} --epochs 30 --method dgc:{MODEL},{WARM}",
    "r110-warm-waiting-s0": f"{R110},{SLOWLY} --epochs 30 --method {OURS},{WAITING}",
    "r110-warm-gtopk-s0": f"{R110},{SLOWLY} --epochs 30 --method {MORE_GTOPK},{WARM}",
    # Global top-k with 8 workers; local gradients with three times the entries.
    "r20x8-direct-gtopk-0.03-s0": f"{R20} --workers 8 --epochs 30 --method {MORE_GTOPK},{WARM}",
    **seeds("m30k-partial-0.03", f"{M30K} --method dropping:density=0.03,{PARTIAL}", 3),
    **seeds("m30k-partial-0.05", f"{M30K} --method dropping:density=0.05,{PARTIAL}", 2),
    "vgg-direct-gtopk-0.03-s0": f"{VGG} --epochs 30 --method {MORE_GTOPK},{WARM}",
    **seeds("r20-short-direct-gtopk-0.03", f"{R20} --epochs 30 --method {MORE_GTOPK},{WARM}"),
}


# Other options than those named are today's defaults.
NOW: dict[str, str] = {
    # As many entries as the square roots of the tensors' sizes say.
    **seeds("vgg-balanced", f"{VGG} --epochs 30 --method dgc:{BALANCED},{WARM}", 2),
    # What VGG-16 may lack: a learning rate that rises for four epochs, an output layer that travels dense.
    **seeds("vgg-warm-dense", f"{VGG},{SLOWLY} --epochs 30 --method dense", 2),
    **seeds("vgg-warm", f"{VGG},{SLOWLY} --epochs 30 --method dgc:{BALANCED},{WARM}", 2),
    **seeds("vgg-head", f"{VGG} --epochs 30 --method dgc:{BALANCED},{WARM},exclude=45.*", 2),
    **seeds("vgg-both", f"{VGG},{SLOWLY} --epochs 30 --method dgc:{BALANCED},{WARM},exclude=45.*", 2),
    # And more entries, with either rate.
    **seeds("vgg-0.02", f"{VGG} --epochs 30 --method dgc:{MORE},{WARM}", 2),
    **seeds("vgg-warm-0.02", f"{VGG},{SLOWLY} --epochs 30 --method dgc:{MORE},{WARM}", 2),
    # As long as the recipe is by itself; dense in 16 bits beside it.
    **seeds("r20f-dense", f"{R20} --epochs 140 --method dense"),
    **seeds("r20f-bf16", f"{R20} --epochs 140 --method dense:dtype=bf16", 2),
    **seeds("r20f-balanced", f"{R20} --epochs 140 --method dgc:{BALANCED},{WARM}"),
    **seeds("r20f-dgc", f"{R20} --epochs 140 --method {thinwire.DGC.paper},{WARM}"),
    **seeds("r20f-gtopk-0.03", f"{R20} --epochs 140 --method {MORE_GTOPK},{WARM}", 2),
    "r20f-gtopk-s0": f"{R20} --epochs 140 --method {thinwire.GTopK.paper},{WARM}",
    "vgg-bf16-s0": f"{VGG} --epochs 30 --method dense:dtype=bf16",
    **seeds("r20-short-balanced", f"{R20} --epochs 30 --method dgc:{BALANCED},{WARM}"),
    **seeds("r20-short-0.02", f"{R20} --epochs 30 --method dgc:{MORE},{WARM}"),
    **seeds("r20-balanced", f"{R20} --epochs 60 --method dgc:{BALANCED},{WARM}"),
    **seeds("r20l-balanced", f"{R20} --epochs 100 --method dgc:{BALANCED},{WARM}"),
    **seeds("r110-balanced", f"{R110},{SLOWLY} --epochs 30 --method dgc:{BALANCED},{WARM}", 2),
    **seeds("ptb-balanced", f"{PTB} --method dgc:{BALANCED},warmup=265"),
    **seeds("an4-balanced", f"{AN4} --method dgc:{BALANCED},warmup=116"),
    **seeds("ptb-0.02", f"{PTB} --method dgc:{MORE},warmup=265"),
    **seeds("an4-0.02", f"{AN4} --method dgc:{MORE},warmup=116"),
    # Every way to use local gradients without averaging, and those of the GRU.
    **seeds("m30k-partial-alone", f"{M30K} --method dropping:{FP32_DROP},local=partial,{ALONE}", 2),
    **seeds("m30k-sum-alone", f"{M30K} --method dropping:{FP32_DROP},local=sum,{ALONE}", 2),
    "m30k-error-alone-s0": f"{M30K} --method dropping:{FP32_DROP},local=error,{ALONE}",
    **seeds("m30k-gru-sum", f"{M30K_GRU} --method dropping:{FP32_DROP},local=sum,sync_every=500", 2),
    **seeds("m30k-gru-error", f"{M30K_GRU} --method dropping:{FP32_DROP},local=error,sync_every=500", 2),
    **seeds("m30k-gru-partial-alone", f"{M30K_GRU} --method dropping:{FP32_DROP},local=partial,{ALONE}", 2),
    "m30k-gru-sum-alone-s0": f"{M30K_GRU} --method dropping:{FP32_DROP},local=sum,{ALONE}",
    "m30k-gru-error-alone-s0": f"{M30K_GRU} --method dropping:{FP32_DROP},local=error,{ALONE}",
    **seeds("m30k-balanced", f"{M30K} --method dropping:density=0.03,{BALANCED_DROP},{PARTIAL}"),
    "m30k-balanced-0.01-s0": f"{M30K} --method dropping:density=0.01,{BALANCED_DROP},{PARTIAL}",
    **seeds("m30k-int8", f"{M30K} --method dropping:density=0.03,values=int8,{PARTIAL}"),
    "m30k-gru-balanced-s0": f"{M30K_GRU} --method dropping:density=0.03,{BALANCED_DROP},{PARTIAL}",
    **seeds("m30k-gru-int8", f"{M30K_GRU} --method dropping:density=0.03,values=int8,{PARTIAL}", 2),
    "m30k-gru-int8-0.1-s0": f"{M30K_GRU} --method dropping:density=0.1,values=int8,{PARTIAL}",
    # As long as the recipe is by itself.
    **seeds("m30k-gru-long-dense", f"{M30K_GRU_LONG} --method dense", 2),
    **seeds("m30k-gru-long-int8", f"{M30K_GRU_LONG} --method dropping:density=0.03,values=int8,{PARTIAL}", 2),
    # BlockSign with 8 images per worker for more than five epochs; on a processor as well.
    **seeds("r20x8-8-long-blocksign", f"{R20X8},batch_size=64,lr=0.025 --epochs 12 --method {OUR_SIGNS}", 2),
    **seeds("r20x8-8-long-dense", f"{R20X8},batch_size=64,lr=0.025 --epochs 12 --method dense", 2),
    # And without momentum, with fewer images per worker.
    "r20x8-16-still-blocksign-s0": f"{R20X8},batch_size=128,lr=0.25,momentum=0 --epochs 10 --method {OUR_SIGNS}",
    "r20x8-16-still-dense-s0": f"{R20X8},batch_size=128,lr=0.25,momentum=0 --epochs 10 --method dense",
    "r20x8-8-still-blocksign-s0": f"{R20X8},batch_size=64,lr=0.125,momentum=0 --epochs 5 --method {OUR_SIGNS}",
    "r20x8-8-still-dense-s0": f"{R20X8},batch_size=64,lr=0.125,momentum=0 --epochs 5 --method dense",
    # With 8 workers, whose batches are normalised by halves: dense, DGC, and global top-k with decay that waits, at 3 %
    # and with more entries in 8 bits.
    **seeds("r20x8-short-dense", f"{R20} --workers 8 --epochs 30 --method dense", 2),
    **seeds("r20x8-balanced", f"{R20} --workers 8 --epochs 30 --method dgc:{BALANCED},{WARM}", 2),
    **seeds("r20x8-gtopk-0.03", f"{R20} --workers 8 --epochs 30 --method {MORE_GTOPK},{WARM}", 2),
    **seeds("r20x8-gtopk-0.06", f"{R20} --workers 8 --epochs 30 --method gtopk:density=0.06,values=int8,{WARM}", 2),
    "r20x8-gtopk-0.1-s0": f"{R20} --workers 8 --epochs 30 --method gtopk:density=0.1,values=int8,{WARM}",
}


def steps(every: int, density: float, more: str = "") -> str:
    """Local steps whose differences travel as the largest of every 4,096 elements, in 2 bits."""
    return f"--method local:every={every},method=(dropping:density={density},scope=chunk,values=int2){more}"


WT2 = "--recipe wikitext2-transformer --epochs 10 --set precision=bf16"
DECAYED = ",error_decay=0.95"

# Local steps beside dense, each with learning rates of its own.
LOCAL: dict[str, str] = {
    **{f"ls-wt2-dense-{lr}-s0": f"{WT2},lr={lr} --method dense" for lr in (0.001, 0.002, 0.004, 0.008)},
    **{f"ls-wt2-5-0.1-{lr}-s0": f"{WT2},lr={lr} {steps(5, 0.1, DECAYED)}" for lr in (0.002, 0.004)},
    **{f"ls-wt2-3-0.06-{lr}-s0": f"{WT2},lr={lr} {steps(3, 0.06, DECAYED)}" for lr in (0.002, 0.004)},
    "ls-wt2-5-dense-0.004-s0": f"{WT2},lr=0.004 --method local:every=5",
    **seeds("ls-vgg-dense-0.2", f"{VGG},lr=0.2 --epochs 30 --method dense", 2),
    **seeds("ls-vgg-3-0.06-0.2", f"{VGG},lr=0.2 --epochs 30 {steps(3, 0.06)}", 2),
    **seeds("ls-vgg-3-0.12-0.2", f"{VGG},lr=0.2 --epochs 30 {steps(3, 0.12)}", 2),
    "ls-vgg-5-0.1-0.1-s0": f"{VGG},lr=0.1 --epochs 30 {steps(5, 0.1)}",
    **seeds("ls-vgg-5-0.1-0.2", f"{VGG},lr=0.2 --epochs 30 {steps(5, 0.1)}", 2),
    "ls-vgg-5-0.1-0.4-s0": f"{VGG},lr=0.4 --epochs 30 {steps(5, 0.1)}",
    "ls-vgg-5-0.2-0.1-s0": f"{VGG},lr=0.1 --epochs 30 {steps(5, 0.2)}",
    **{f"ls-r20-dense-{lr}-s0": f"{R20},lr={lr} --epochs 30 --method dense" for lr in (0.1, 0.8)},
    **{f"ls-r20-3-0.06-{lr}-s0": f"{R20},lr={lr} --epochs 30 {steps(3, 0.06)}" for lr in (0.2, 0.8)},
    **seeds("ls-r20-dense-0.4", f"{R20},lr=0.4 --epochs 30 --method dense", 3),
    **seeds("ls-r20-3-0.06-0.4", f"{R20},lr=0.4 --epochs 30 {steps(3, 0.06)}", 3),
    **seeds("ls-r20-5-0.1-0.4", f"{R20},lr=0.4 --epochs 30 {steps(5, 0.1)}", 2),
    **{f"ls-r20-5-0.1-{lr}-s0": f"{R20},lr={lr} --epochs 30 {steps(5, 0.1)}" for lr in (0.1, 0.2, 0.8)},
    **{f"ls-r20-5-0.2-{lr}-s0": f"{R20},lr={lr} --epochs 30 {steps(5, 0.2)}" for lr in (0.2, 0.4)},
    "ls-r20-dgc-0.4-s0": f"{R20},lr=0.4 --epochs 30 --method dgc:{WARM}",
    "ls-r20-sparseloco-0.4-s0": f"{R20},lr=0.4 --epochs 30 --method sparseloco",
    "ls-vgg-10-0.1-0.2-s0": f"{VGG},lr=0.2 --epochs 30 {steps(10, 0.1)}",
    "ls-r20-10-0.1-0.4-s0": f"{R20},lr=0.4 --epochs 30 {steps(10, 0.1)}",
    "ls-r20-5-dense-0.2-s0": f"{R20},lr=0.2 --epochs 30 --method local:every=5",
    "ls-r20-5-0.1-0.95-0.2-s0": f"{R20},lr=0.2 --epochs 30 {steps(5, 0.1, DECAYED)}",
    **{f"ls-r20-10-{density}-0.2-s0": f"{R20},lr=0.2 --epochs 30 {steps(10, density)}" for density in (0.1, 0.4)},
    "ls-r20-15-0.05-0.2-s0": f"{R20},lr=0.2 --epochs 30 {steps(15, 0.05)}",
    "ls-r20-10-dense-0.2-s0": f"{R20},lr=0.2 --epochs 30 --method local:every=10",
}


# What the methods did by default at that time and do not do any more.
THEN_EARLIER = {"dgc": {"scope": "tensor", "direct_decay": "false"}, "dropping": {"values": "fp32"}}
THEN_LATER = {"dgc": {"scope": "tensor"}, "gtopk": {"direct_decay": "true"}, "dropping": {"values": "fp32"}}
# What they did when there was no option for it, so that a method in full does not name it.
WITHOUT_OPTION = {
    "dgc": {"scope": "tensor", "direct_decay": "false"},
    "dropping": {"values": "fp32"},
    "terngrad": {"dense_below": "0"},
}


def as_it_was(command: str, defaults: Mapping[str, Mapping[str, str]]) -> str:
    """The command that does today what this one did with other defaults."""

    def written_out(match: re.Match[str]) -> str:
        name, _, options = match[1].partition(":")
        absent = [f"{key}={value}" for key, value in defaults.get(name, {}).items() if f"{key}=" not in options]
        return f"--method {','.join([match[1], *absent])}"

    return re.sub(r"--method (\S+)", written_out, command)


def as_steep(command: str) -> str:
    """ResNet-110's learning rate rose for 4 of 140 epochs before it could be set."""
    return command.replace("resnet110 --set precision=bf16", f"resnet110 --set precision=bf16,{STEEPLY}")


RUNS = {
    **{name: as_it_was(as_steep(command), THEN_EARLIER) for name, command in EARLIER.items()},
    **{name: as_it_was(command, THEN_LATER) for name, command in LATER.items()},
    **NOW,
    **LOCAL,
}


def method_of(name: str) -> str:
    """The string that means today what was run."""
    words = shlex.split(RUNS[name])
    return words[words.index("--method") + 1]


def arguments_of(name: str, data: Path, out: Path) -> list[str]:
    words = shlex.split(RUNS[name])
    workers = [] if "--workers" in words else ["--workers", "4"]
    return [*words, *workers, "--in-process", "--data", str(data), "--out", str(out / name)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands and do nothing")
    parser.add_argument("--only", default="*", help="names to run, as patterns separated by commas, in this order")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="end what still runs after so long")
    options = parser.parse_args()
    patterns = options.only.split(",")
    names = list(dict.fromkeys(name for pattern in patterns for name in RUNS if fnmatchcase(name, pattern)))
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
