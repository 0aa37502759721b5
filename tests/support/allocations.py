"""Counts the memory that torch's operators take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operators of this thread make: how many live at once at most, the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                nbytes = tensor.untyped_storage().nbytes()
                self.live += nbytes
                self.peak, self.largest = max(self.peak, self.live), max(self.largest, nbytes)
                weakref.finalize(tensor, self._gone, nbytes)
        return result

    def _gone(self, nbytes: int) -> None:
        self.live -= nbytes
