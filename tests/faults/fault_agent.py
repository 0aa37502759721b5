"""What torchrun does, with workers from a fork server that has torch imported: fault_agent.py WORKERS SCRIPT ..."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_script(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    # torch._dynamo is what DDP's constructor imports.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch._dynamo", "thinwire"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(sys.argv[1]),
        run_id=f"faults-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=100_000,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    elastic_launch(config, run_script)(sys.argv[2:])


if __name__ == "__main__":
    main()
