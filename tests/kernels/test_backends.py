"""The kernels' table: one name and one list of parameters in every backend, and the reference for all that is left."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import backend_only, dispatch, native, reference
from thinwire.kernels.dispatch import CHOSEN, TABLE
from thinwire.kernels.native import library

CPU = torch.device("cpu")
WITHOUT_TWIN = {"listing_entries", "device_topk", "encode_rice_frame", "encode_ternary_frame"}
GPU = Path(kernels.__file__).parent / "gpu"


def defined_in(path: Path) -> dict[str, ast.stmt]:
    """The public functions, classes and constants that a module defines itself, by name."""
    names: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.Assign):
            found = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            names |= dict.fromkeys(found, node)
    return {name: node for name, node in names.items() if not name.startswith("_")}


def operations_of(folder: Path) -> list[str]:
    """``__all__`` of a package that may not be there to import."""
    (listed,) = [
        node.value
        for node in ast.parse((folder / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    return list(ast.literal_eval(listed))


def specification(name: str) -> list[str]:
    twin = getattr(backend_only if name in WITHOUT_TWIN else reference, name)
    return list(inspect.signature(twin).parameters)


def test_an_operation_without_a_twin_is_one_of_few() -> None:
    assert {name for name in TABLE if not hasattr(reference, name)} == WITHOUT_TWIN
    assert set(defined_in(Path(str(backend_only.__file__)))) == WITHOUT_TWIN


def test_what_a_backend_has_is_in_the_table() -> None:
    for names in (native.__all__, operations_of(GPU)):
        assert set(names) <= set(TABLE)
    assert set(TABLE) - set(native.__all__) == {
        "watch", "frame_heads", "launch_rice_indices", "device_topk", "encode_rice_frame", "encode_ternary_frame",
    }  # fmt: skip


@pytest.mark.parametrize("name", native.__all__)
def test_a_native_kernel_has_its_twins_parameters(name: str) -> None:
    assert list(inspect.signature(getattr(native, name)).parameters) == specification(name)


@pytest.mark.parametrize("name", operations_of(GPU))
def test_a_triton_kernel_has_its_twins_parameters(name: str) -> None:
    (found,) = [node for file in GPU.glob("[!_]*.py") for own, node in defined_in(file).items() if own == name]
    assert isinstance(found, ast.FunctionDef)
    assert [argument.arg for argument in found.args.args] == specification(name)


def test_callers_see_the_specification() -> None:
    for name in TABLE:
        public, twin = getattr(kernels, name), getattr(backend_only if name in WITHOUT_TWIN else reference, name)
        assert public.__name__ == name and public.__doc__ == twin.__doc__ and public.__doc__
        assert inspect.signature(public) == inspect.signature(twin)


def test_the_specification_is_whole_whichever_module_holds_a_part() -> None:
    parts = [
        importlib.import_module(f"{reference.__name__}.{one.name}") for one in pkgutil.iter_modules(reference.__path__)
    ]
    defined = [name for part in parts for name in defined_in(Path(str(part.__file__)))]
    assert len(parts) > 3 and len(defined) == len(set(defined))
    assert sorted(defined) == sorted(reference.__all__)


class Fast:
    """A backend that has two operations, and says what it is asked for."""

    def __init__(self, name: str) -> None:
        self.__name__, self.__all__ = name, ["zero_at", "scatter_add"]
        self.asked: list[str] = []

    def zero_at(self, x: Tensor, indices: Tensor) -> None:
        self.asked.append("zero_at")

    def scatter_add(self, parts: list[Tensor], starts: list[int], lists: list[object], scale: float) -> None:
        self.asked.append("scatter_add")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Fast]:
    """The host's backend is one of ours, under the name of one that is known."""
    found = Fast(request.param)
    right, folder = dispatch.import_module, f"thinwire.kernels.{dispatch._FOLDERS[request.param]}"
    monkeypatch.setattr(dispatch, "import_module", lambda name: found if name == folder else right(name))
    monkeypatch.setitem(CHOSEN, CPU, request.param)
    for row in TABLE.values():
        for backend in list(row):
            monkeypatch.delitem(row, backend)
    yield found
    for row in TABLE.values():
        row.clear()


@pytest.mark.parametrize("fast", ["native", "triton"], indirect=True)
def test_what_a_backend_lacks_the_reference_does(fast: Fast) -> None:
    x = torch.ones(4)
    kernels.zero_at(indices=torch.tensor([1]), x=x)
    assert fast.asked == ["zero_at"] and x.tolist() == [1.0] * 4
    kernels.subtract_at(x, torch.tensor([2]), torch.ones(1))
    assert fast.asked == ["zero_at"] and x.tolist() == [1.0, 1.0, 0.0, 1.0]
    kernels.scatter_add([], [], [], 1.0)  # nothing is on no device
    assert fast.asked == ["zero_at"]


@pytest.mark.parametrize("fast", ["native", "triton"], indirect=True)
def test_triton_counts_with_32_bits(fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_TRITON_COUNTS", 8)
    limited, parts = fast.__name__ == "triton", [torch.zeros(5), torch.zeros(3)]
    for numel, all_parts in ((7, parts[:1]), (8, parts)):
        before = list(fast.asked)
        kernels.zero_at(torch.ones(numel), torch.tensor([1]))
        kernels.scatter_add(all_parts, [0, 5][: len(all_parts)], [(torch.tensor([2]), torch.ones(1))], 1.0)
        new = fast.asked[len(before) :]
        assert new == ([] if limited and numel == 8 else ["zero_at", "scatter_add"])
    assert kernels.on_gpu(CPU, 7) is limited and kernels.on_gpu(CPU, 8) is False


def test_a_device_gets_its_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CHOSEN, CPU, raising=False)
    expected = "native" if library.handle() is not None else "reference"
    assert kernels.backend_name(CPU) == expected == CHOSEN[CPU]
    assert kernels.backend_name(torch.device("meta")) == "reference"


def test_a_name_that_only_a_gpu_has_is_not_done_elsewhere() -> None:
    with pytest.raises(AssertionError, match="has no twin"):
        TABLE["device_topk"]["native"]


def test_twins_of_what_a_gpu_does_without_waiting() -> None:
    frames = [torch.arange(48, dtype=torch.uint8), torch.arange(1, 49, dtype=torch.uint8)]
    for head, frame in zip(kernels.frame_heads(frames), frames, strict=True):
        words = frame.view(torch.int32)
        assert torch.equal(head[:9], words[:9])
        assert int(head[9]) & 0xFFFFFFFF == int(kernels.checksum_around(words, 8))
    gaps = [torch.tensor([0, 3, 1]), torch.tensor([5])]
    streams = []
    for own in gaps:
        low, unary = reference.rice_encode(own, 1)
        filled = torch.nn.functional.pad(unary, (0, -unary.numel() % 4))
        streams.append(reference.RiceStream(low, filled, own.numel(), 1))
    rows, faults = kernels.launch_rice_indices(streams, 100)
    assert faults.tolist() == [0, 0] and rows[0].tolist() == [0, 4, 6] and rows[1, 0] == 5
    assert kernels.launch_rice_indices(streams, 4)[1].bool().tolist() == [True, True]
