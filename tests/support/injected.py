"""Failing calls: the k-th of a list of functions raises, as on a full disk or without memory."""

from __future__ import annotations

import errno
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

DISK_FULL = OSError(errno.ENOSPC, "No space left on device")
NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
MEMORY = ("torch.empty", "torch.zeros", "torch.cat", "torch.stack", "torch.frombuffer", "torch.save", "torch.load",
          "torch.Tensor.clone", "torch.Tensor.to", "torch.Tensor.copy_", "torch.Tensor.cpu")  # fmt: skip


class Injected:
    """Counts calls; the ``fails_at``-th raises ``error``, once."""

    def __init__(self, error: Exception, fails_at: int | None) -> None:
        self.error, self.fails_at, self.calls = error, fails_at, 0

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise self.error

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.count()
            return function(*args, **options)

        return counted


@contextmanager
def failing(names: Sequence[str], error: Exception, fails_at: int | None) -> Iterator[Injected]:
    """Within the block the calls of all these functions are counted, and the ``fails_at``-th raises."""
    injected = Injected(error, fails_at)
    with ExitStack() as stack:
        for name in names:
            owner, _, attribute = name.rpartition(".")
            target = pkgutil.resolve_name(owner)
            function = getattr(target, attribute)
            stack.enter_context(mock.patch(name, injected.around(function)))
        yield injected


def each_call(names: Sequence[str], error: Exception, work: Callable[[], Any], most: int = 400) -> Iterator[Exception]:
    """Do the work again and again, with its first, second, ... call failing; yield what it raised."""
    for place in range(1, most):
        with failing(names, error, place) as injected:
            raised: Exception | None = None
            try:
                work()
            except Exception as problem:
                raised = problem
        if injected.calls < place:
            return  # all have failed once
        if raised is not None:
            yield raised
    raise AssertionError(f"more than {most} calls")
