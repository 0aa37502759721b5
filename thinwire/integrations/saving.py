"""What the callbacks save: a model's state as the mean of all ranks, written when these have their own again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from thinwire.edges.wire import Wire

NOTHING_SAVED = "thinwire: the checkpoint holds no state of thinwire, so residuals begin at zero"


def mean_state(wire: Wire, state_of_model: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    """What ``state_of_model`` gives; where the ranks' parameters differ, a copy of it with their mean. Collective."""
    if not wire.attached or not wire.method.replicas_drift or wire.reducer.shows_mean:
        return state_of_model()
    with wire.averaged():
        return _copied(state_of_model())


def _copied(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Tensors that share their memory, as tied weights do, share it in the copy as well; in the type that torch gives a
    model's state, by which Accelerate knows one."""
    copies: dict[Any, Tensor] = {}
    copied: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        if isinstance(value, Tensor):
            place = value.data_ptr(), value.shape, value.stride(), value.dtype
            value = copies.setdefault(place, value.detach().clone())
        copied[name] = value
    return copied
