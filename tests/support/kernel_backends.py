"""The homes of the kernels that can be tested here, one after the other."""

from __future__ import annotations

import pytest

from thinwire.kernels import native, reference
from thinwire.kernels.native import library

BACKENDS = [reference] + ([native] if library.handle() is not None else [])
every_backend = pytest.mark.parametrize("home", BACKENDS, ids=lambda home: home.__name__.split(".")[-1])
