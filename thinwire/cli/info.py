"""`thinwire info`: what is installed and what it will use."""

from __future__ import annotations

import platform

import torch
import torch.distributed as dist
import typer

import thinwire
from thinwire import kernels


def info() -> None:
    """Versions, communication backends and kernels in use."""
    rows = {
        "thinwire": thinwire.__version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "gloo": "available" if dist.is_available() and dist.is_gloo_available() else "not available",
        "nccl": "available" if dist.is_available() and dist.is_nccl_available() else "not available",
        "kernels": kernels.describe().removeprefix("kernels: "),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<10}{value}")
