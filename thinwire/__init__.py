"""Data-parallel PyTorch training over thin networks: compressed gradients as one line in a training script."""

# ruff: noqa: E402

from thinwire import starting

starting.expect_ctrl_c()  # the command's alone, and before the seconds that torch takes

from thinwire.advisor.advice import Advice, advise
from thinwire.attach import attach
from thinwire.edges.wire import Wire
from thinwire.engine.schedules import DropRatioWarmup, ExponentialWarmup, ListedWarmup
from thinwire.errors import DetachedError, ExchangeError, FrameError, ReplicaError
from thinwire.methods import (
    DGC,
    METHODS,
    BlockSign,
    Dense,
    GradientDropping,
    GTopK,
    Method,
    Noop,
    SignSGD,
    TernGrad,
    parse_method,
)
from thinwire.reducer import Reducer
from thinwire.stats import Stats

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "METHODS",
    "Advice",
    "BlockSign",
    "Dense",
    "DetachedError",
    "DropRatioWarmup",
    "ExchangeError",
    "ExponentialWarmup",
    "FrameError",
    "GTopK",
    "GradientDropping",
    "ListedWarmup",
    "Method",
    "Noop",
    "Reducer",
    "ReplicaError",
    "SignSGD",
    "Stats",
    "TernGrad",
    "Wire",
    "advise",
    "attach",
    "parse_method",
]
