"""The homes of the kernels that can be tested here, one after the other."""

from __future__ import annotations

import pytest

from thinwire.kernels import cpu, native, reference

HOMES = [reference] + ([cpu] if native.library() is not None else [])
every_home = pytest.mark.parametrize("home", HOMES, ids=lambda home: home.__name__.split(".")[-1])
