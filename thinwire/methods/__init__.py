"""The methods: frozen, validated descriptions that are assembled from the engine's parts.

Every option is keyword-only and checked when the object is made; ``parse_method`` reads the same from one string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.methods.base import Method
from thinwire.methods.plain import Dense, Noop
from thinwire.methods.quantized import BlockSign, SignSGD, TernGrad
from thinwire.methods.sparse import DGC, GradientDropping, GTopK, Warmup
from thinwire.methods.strings import read_method

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (DGC, GTopK, TernGrad, BlockSign, GradientDropping, SignSGD, Dense, Noop)
}


def parse_method(spec: str, methods: Mapping[str, type[Method]] = METHODS, others: Sequence[str] = ()) -> Method:
    """Return the method that a string such as ``dgc:density=0.01,values=fp32`` describes.

    Several patterns of one option are joined with ``+``. Anything unknown is a ValueError that names what is known:
    ``methods``, and the names in ``others``, which the caller knows itself.
    """
    return read_method(spec, methods, others)


__all__ = [
    "DGC",
    "METHODS",
    "BlockSign",
    "Dense",
    "GTopK",
    "GradientDropping",
    "Method",
    "Noop",
    "SignSGD",
    "TernGrad",
    "Warmup",
    "parse_method",
]
