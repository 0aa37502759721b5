"""Small tables that are copied to a device once: they seldom change, and an upload at every step would cost more.

Every thread has its own: it copies on its own stream, and another thread's stream would not wait for that. What a
thread made goes with the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch
from torch import Tensor

Make = TypeVar("Make", bound=Callable[..., object])


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def once_a_thread(most: int) -> Callable[[Make], Make]:
    """Let a function of hashable arguments, the device among them, work once for each of them in each thread.

    The ``most`` results that a thread used last are kept.
    """

    def decorate(make: Make) -> Make:
        local = threading.local()

        @wraps(make)
        def look_up(*arguments: object) -> object:
            if not hasattr(local, "kept"):
                local.kept = lru_cache(maxsize=most)(make)
            return local.kept(*arguments)

        return look_up  # type: ignore[return-value]

    return decorate
