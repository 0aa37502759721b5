"""Payloads to bytes and back."""

from thinwire.codecs.dense import FloatsCodec, LevelsCodec, SignsCodec, TernaryCodec
from thinwire.codecs.sparse import SparseCodec

__all__ = ["FloatsCodec", "LevelsCodec", "SignsCodec", "SparseCodec", "TernaryCodec"]
