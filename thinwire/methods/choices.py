"""What the options of methods may be, as types: an editor completes them, and the methods' checks read them."""

from __future__ import annotations

from typing import Literal

Values = Literal["fp32", "fp16", "bf16", "int8", "int4", "int2"]
Indices = Literal["int32", "delta16", "rice"]
Residual = Literal["fp32", "bf16"]
DenseType = Literal["fp32", "bf16", "fp16"]
Scope = Literal["balanced", "tensor", "model", "chunk"]
Selection = Literal["exact", "sampled"]
LocalMode = Literal["sum", "partial", "error"]
Topology = Literal["sharded", "server"]
ScalerOf = Literal["tensor", "model"]
