"""The commands of examples/, as they are written there; some on emulated hosts with real network stacks."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command import environment
from paths import ROOT

from thinwire.lab import emulation

REASON = emulation.why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no emulated hosts here: {REASON}")


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder for PATH with this interpreter's torchrun and thinwire, installed or not."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("torchrun", "torch.distributed.run"), ("thinwire", "thinwire")):
        script(folder / name, f'exec "{sys.executable}" -m {module} "$@"\n')
    return folder


def script(path: Path, text: str) -> None:
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def on_path(commands: Path, **more: str) -> dict[str, str]:
    return {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def on_hosts(lines: list[str], env: dict[str, str]) -> emulation.Result:
    """Run line n on host n."""
    cases = "".join(f"{rank}) {line};; " for rank, line in enumerate(lines))
    with emulation.Cluster(len(lines), "1gbit") as cluster:
        result = cluster.run(["sh", "-c", f'cd "{ROOT}" && case $RANK in {cases}esac'], env=env, timeout_s=170)
    assert result.exit_code == 0, "\n".join(host.output for host in result.hosts)
    return result


@needs_hosts
def test_two_commands_of_the_multi_machine_page(commands: Path) -> None:
    text = (ROOT / "examples" / "multi_machine.md").read_text()
    blocks = re.findall(r"```sh\n(.+?)\n```", text, re.DOTALL)
    lines = [block for block in blocks if block.startswith("torchrun") and "ddp_digits.py" in block]
    assert len(lines) == 2 and lines[1] == lines[0].replace("--node_rank 0", "--node_rank 1")
    result = on_hosts(lines, on_path(commands, EPOCHS="2"))
    assert "44 steps" in result.hosts[0].output and "test accuracy" in result.hosts[0].output
    dense = 2 * 22 * 4 * 118_186  # two hosts in a ring: as many bytes as the gradients have
    assert 100_000 < result.hosts[1].bytes_sent < dense / 2


@needs_hosts
def test_slurm_script(commands: Path, tmp_path: Path) -> None:
    """Slurm runs the script on the first node and srun starts a task on each; here every host starts its own task,
    with the variables that Slurm gives it."""
    script(commands / "scontrol", '[ "$*" = "show hostnames host[0-1]" ] && printf "host0\\nhost1\\n"\n')
    script(commands / "srun", 'SLURM_PROCID=$NODE_RANK SLURM_LOCALID=0 exec env -u RANK -u WORLD_SIZE "$@"\n')
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    env = on_path(commands, **slurm, SLURM_NTASKS_PER_NODE="1", RUN=str(tmp_path / "run"))
    result = on_hosts(["bash examples/slurm.sh --epochs 1"] * 2, env)
    assert "digits: test accuracy, 1 epoch, 2 workers" in result.hosts[0].output
    assert "epoch" not in result.hosts[1].output  # rank 0 speaks for all
    assert (tmp_path / "run" / "summary.json").exists()
    hosts = re.search(r'"hosts": \[\s*"host0",\s*"host1"\s*\]', (tmp_path / "run" / "config.json").read_text())
    assert hosts is not None


def under_torchrun(script: str, ranks: int) -> str:
    """What a script prints that trains the digits for eight epochs, to more than 90 %."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [*launcher, script], capture_output=True, text=True, timeout=170, cwd=ROOT, env=environment(EPOCHS="8")
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.partition("test accuracy ")[2].partition("%")[0])
    assert accuracy > 90
    assert "176 steps" in done.stdout
    return done.stdout


def test_ddp_script_under_torchrun() -> None:
    under_torchrun("examples/ddp_digits.py", 2)


def test_fully_sharded_script_under_torchrun() -> None:
    assert "epoch 8 of 8: loss" in under_torchrun("examples/fsdp_hsdp.py", 4)
