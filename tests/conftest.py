"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the core to the other test processes

import pytest
import torch

# Helpers and benchmarks are imported by their plain names. The folder of a test is put there by pytest itself, and
# the processes of cluster.py get it all from multiprocessing, which hands sys.path on.
TESTS = Path(__file__).resolve().parent
FOLDERS = map(str, (TESTS / "support", TESTS, TESTS.parent, TESTS.parent / "benchmarks"))
sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]

import data_folders  # noqa: E402
from cluster import Cluster  # noqa: E402

# Started behind a shell's "&" a process ignores Ctrl-C and hands that on; tests send it to processes of their own.
signal.signal(signal.SIGINT, signal.default_int_handler)

_LONGEST = (
    "test_frozen_bits.py", "test_convergence.py", "test_faults.py", "test_oracles.py", "test_resume.py",
    "test_cluster_emulation.py",
    "test_interruptions.py", "test_triton.py", "test_in_process.py", "test_advise.py", "test_conservation.py",
    "test_ddp_forms.py", "test_loops.py", "test_several_backwards.py", "test_fsdp.py", "test_sharded_states.py",
    "test_framework_examples.py", "test_examples.py", "test_integrations.py", "test_wrapped_optimizers.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, those that wait beside those that compute: no test process is left alone at the end.

    Of the others those with the cluster come one after the other, so that it starts once for all of them.
    """
    _with_cluster.update(item.path for item in items if "cluster" in getattr(item, "fixturenames", ()))
    place = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), item.path not in _with_cluster))


_pool, _with_cluster = Cluster(), set[Path]()  # the files in which a test asks for it


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Five Gloo processes for the whole session; they start with the first cluster.run()."""
    yield _pool
    _pool.stop()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where a file does without them the processes end: the threads of idle groups poll, and take the others' time."""
    if item.path not in _with_cluster:
        _pool.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Cluster]:
    """Four Gloo processes that are the whole world, so that they can make meshes; sharded.py has what they run."""
    pool = Cluster(4)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny data sets in the public formats."""
    return data_folders.write_all(tmp_path_factory.mktemp("data"))
