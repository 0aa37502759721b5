"""The methods: frozen, validated descriptions that are assembled from the engine's parts, one file per method.

Every option is keyword-only and checked when the object is made; ``parse_method`` reads the same from one string.
"""

from __future__ import annotations

from thinwire.methods.adviser_traits import Advised
from thinwire.methods.base import Method
from thinwire.methods.blocksign import BlockSign
from thinwire.methods.dense import Dense
from thinwire.methods.dgc import DGC
from thinwire.methods.diloco import DiLoCo
from thinwire.methods.dropping import GradientDropping
from thinwire.methods.gtopk import GTopK
from thinwire.methods.local import LocalSteps
from thinwire.methods.noop import Noop
from thinwire.methods.options import Warmup
from thinwire.methods.perlayer import PerLayer
from thinwire.methods.registry import METHODS, method, parse_method
from thinwire.methods.signsgd import SignSGD
from thinwire.methods.sparseloco import SparseLoCo
from thinwire.methods.terngrad import TernGrad

__all__ = [
    "DGC",
    "METHODS",
    "Advised",
    "BlockSign",
    "Dense",
    "DiLoCo",
    "GTopK",
    "GradientDropping",
    "LocalSteps",
    "Method",
    "Noop",
    "PerLayer",
    "SignSGD",
    "SparseLoCo",
    "TernGrad",
    "Warmup",
    "method",
    "parse_method",
]
