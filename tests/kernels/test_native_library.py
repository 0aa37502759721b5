"""The native library: whether it loads, and why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire import kernels
from thinwire.kernels.native import library

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(library.handle() is None, reason=f"no native library: {library.why_not()}")


def test_native_library_that_does_not_load_says_why(tmp_path: Path) -> None:
    assert "was not built" in str(library.load(tmp_path / "_native.so"))
    (tmp_path / "_native.so").write_bytes(b"no library")
    reason = library.load(tmp_path / "_native.so")
    assert isinstance(reason, str) and "could not be loaded" in reason and "_native.so" in reason


@needs_native
def test_native_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(library.load(library._PATH), str)
    monkeypatch.setattr(library, "_ABI", library._ABI + 1)
    why = library.load(library._PATH)
    assert isinstance(why, str) and why.endswith("_native.so was built from other sources; reinstall thinwire")


@needs_native
def test_native_library_says_which_loops_run() -> None:
    assert library.vectors() in ("AVX-512", "AVX2", "portable")
    if kernels.backend_name(CPU) == "native":
        assert library.vectors() in kernels.describe()
