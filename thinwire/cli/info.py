"""`thinwire info`: what is installed and what it will use."""

from __future__ import annotations

import importlib.util
import platform

import torch
import torch.distributed as dist
import typer

import thinwire
from thinwire import METHODS, kernels
from thinwire.cli._environment import cpu_name, num_cores, os_name
from thinwire.cli._text import counted, room, wrapped
from thinwire.lab import emulation
from thinwire.lab.bench.rows import commit

EXTRAS = {  # package: the extra that brings it, and what it is for
    "matplotlib": ("figures", "thinwire report --figures"),
    "sacrebleu": ("lab", "BLEU in the translation recipes"),
    "tensorboard": ("tensorboard", "thinwire train --tensorboard"),
}


def info() -> None:
    """Versions, kernels in use and why, GPUs, Gloo and NCCL, and whether clusters can be emulated here."""
    for name, value in rows():
        typer.echo(wrapped(f"{name:<12}{value}", room(), indent=12))


def rows() -> list[tuple[str, str]]:
    return [
        ("thinwire", f"{thinwire.__version__} (commit {commit()})"),
        ("torch", torch.__version__),
        ("python", f"{platform.python_version()} ({os_name()})"),
        ("cpu", f"{cpu_name()}, {counted(num_cores(), 'core')} for this process"),
        ("gpu", _gpus()),
        ("kernels", kernels.describe().removeprefix("kernels: ")),
        ("methods", ", ".join(METHODS)),
        ("gloo", _backend(dist.is_available() and dist.is_gloo_available())),
        ("nccl", _backend(dist.is_available() and dist.is_nccl_available())),
        ("clusters", _clusters()),
        *(("extra", _extra(package, *row)) for package, row in EXTRAS.items()),
    ]


def _backend(there: bool) -> str:
    return "available" if there else "not available in this torch"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch sees" + ("" if torch.version.cuda else " (this torch is built without CUDA)")
    names = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        names.append(f"{found.name} ({found.total_memory / 2**30:.0f} GiB)")
    return "; ".join(names)


def _clusters() -> str:
    why = emulation.why_not()
    if why is not None:
        return f"cannot be emulated here: {why}"
    latency = emulation.why_no_latency()
    return "can be emulated here (thinwire cluster)" + (f"; but {latency}" if latency else "")


def _extra(package: str, extra: str, use: str) -> str:
    if importlib.util.find_spec(package) is not None:
        return f"{package} is there, for {use}"
    return f"{package} is not installed (for {use}: pip install 'thinwire[{extra}]')"
