"""Data-parallel PyTorch training over thin networks: compressed gradients as one line in a training script.

Importing this does no work: the first use of a public name imports the module that defines it, and torch with it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; _MODULES says the same at run time
    from thinwire.advisor.advice import Advice, advise
    from thinwire.attach import attach
    from thinwire.edges.wire import Wire
    from thinwire.engine.schedules import DropRatioWarmup, ExponentialWarmup, ListedWarmup
    from thinwire.errors import DetachedError, ExchangeError, FrameError, ReplicaError
    from thinwire.methods import (
        DGC,
        METHODS,
        Advised,
        BlockSign,
        Dense,
        DiLoCo,
        GradientDropping,
        GTopK,
        LocalSteps,
        Method,
        Noop,
        PerLayer,
        SignSGD,
        SparseLoCo,
        TernGrad,
        method,
        parse_method,
    )
    from thinwire.reducer import Reducer
    from thinwire.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "METHODS",
    "Advice",
    "Advised",
    "BlockSign",
    "Dense",
    "DetachedError",
    "DiLoCo",
    "DropRatioWarmup",
    "ExchangeError",
    "ExponentialWarmup",
    "FrameError",
    "GTopK",
    "GradientDropping",
    "ListedWarmup",
    "LocalSteps",
    "Method",
    "Noop",
    "PerLayer",
    "Reducer",
    "ReplicaError",
    "SignSGD",
    "SparseLoCo",
    "Stats",
    "TernGrad",
    "Wire",
    "advise",
    "attach",
    "method",
    "parse_method",
]

_MODULES = {  # where each public name is defined
    "Advice": "thinwire.advisor.advice",
    "Advised": "thinwire.methods",
    "BlockSign": "thinwire.methods",
    "DGC": "thinwire.methods",
    "Dense": "thinwire.methods",
    "DetachedError": "thinwire.errors",
    "DiLoCo": "thinwire.methods",
    "DropRatioWarmup": "thinwire.engine.schedules",
    "ExchangeError": "thinwire.errors",
    "ExponentialWarmup": "thinwire.engine.schedules",
    "FrameError": "thinwire.errors",
    "GTopK": "thinwire.methods",
    "GradientDropping": "thinwire.methods",
    "ListedWarmup": "thinwire.engine.schedules",
    "LocalSteps": "thinwire.methods",
    "METHODS": "thinwire.methods",
    "Method": "thinwire.methods",
    "Noop": "thinwire.methods",
    "PerLayer": "thinwire.methods",
    "Reducer": "thinwire.reducer",
    "ReplicaError": "thinwire.errors",
    "SignSGD": "thinwire.methods",
    "SparseLoCo": "thinwire.methods",
    "Stats": "thinwire.stats",
    "TernGrad": "thinwire.methods",
    "Wire": "thinwire.edges.wire",
    "advise": "thinwire.advisor.advice",
    "attach": "thinwire.attach",
    "method": "thinwire.methods",
    "parse_method": "thinwire.methods",
}


def _load(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value  # from now on without a detour
    return value


if not TYPE_CHECKING:  # hidden from type checkers, for which any misspelt name would exist otherwise
    __getattr__ = _load


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Keeps ``thinwire.attach`` the function, although a module has the same name.

    Whoever imports that module makes Python set it as the package's attribute.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in _MODULES and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
