"""The homes of the kernels hold the same names: what the dispatch point asks of one is there in the others."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from thinwire import kernels
from thinwire.kernels import cpu, reference

ONLY_ON_A_GPU = {"frame_heads", "launch_rice_indices", "encode_rice_frame", "encode_ternary_frame"}  # what never waits


def asked_of_a_home() -> set[str]:
    """The names that the dispatch point takes from whichever home it chose: ``_home(x).name``."""
    tree = ast.parse(Path(kernels.__file__).read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "_home"
    }


def defined_in(module: ModuleType) -> set[str]:
    """The public functions, classes and constants that a module defines itself."""
    names = set()
    for node in ast.parse(Path(str(module.__file__)).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def test_dispatched_kernels_are_in_the_reference_and_in_the_native_home() -> None:
    asked = asked_of_a_home()
    assert {"accumulate", "ternarize_packed", "rice_indices", "checksum"} <= asked
    for home in (reference, cpu):
        assert {name for name in asked if not callable(getattr(home, name, None))} == ONLY_ON_A_GPU


def test_reference_exports_all_that_its_modules_define() -> None:
    parts = [
        importlib.import_module(f"{reference.__name__}.{one.name}") for one in pkgutil.iter_modules(reference.__path__)
    ]
    defined = [name for part in parts for name in defined_in(part)]
    assert len(parts) > 3 and len(defined) == len(set(defined))
    assert sorted(defined) == sorted(reference.__all__)
