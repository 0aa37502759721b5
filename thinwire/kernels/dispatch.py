"""Which backend does an operation; the table of operations is thinwire/kernels/__init__.py.

Three backends: ``reference`` is plain torch, runs on every device and is the specification; ``native`` is a small C++
library for tensors on the host; ``triton`` is for CUDA tensors. What a backend lacks the reference does.

THINWIRE_KERNELS chooses: ``auto`` (default) takes the fast backend of each device where there is one, ``reference``
never does, ``cpu`` and ``gpu`` insist on theirs and fail loudly when it is not there. With TRITON_INTERPRET=1, ``gpu``
takes host tensors too: slow, and good for tests.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import shutil
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from thinwire.kernels.native import library

log = logging.getLogger("thinwire")

P = ParamSpec("P")
R = TypeVar("R")
Function = Callable[..., Any]

REFERENCE, NATIVE, TRITON = "reference", "native", "triton"
_FOLDERS = {REFERENCE: "reference", NATIVE: "native", TRITON: "gpu"}
_CHOICES = ("auto", "reference", "cpu", "gpu")  # of THINWIRE_KERNELS
_TRITON_COUNTS = 1 << 31  # its kernels count elements with 32 bits


class _Chosen(dict[torch.device, str]):
    """The backend of each device, chosen when its first tensor comes. By the device, whose type costs more to ask for
    than all else that a call does here."""

    def __missing__(self, device: torch.device) -> str:
        self[device] = _choose(device.type)
        return self[device]


@lru_cache
def _choose(device_type: str) -> str:
    choice = _choice()
    log.info("thinwire: %s", describe())
    if choice == "reference":
        return REFERENCE
    interpreted = choice == "gpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted or (device_type == "cuda" and _why_no_gpu() is None):
        return TRITON
    return NATIVE if device_type == "cpu" and library.handle() is not None else REFERENCE


class _Operation(dict[str, Function]):
    """One operation's functions by backend; a backend is imported when it is first used, Triton's takes a second."""

    def __init__(self, name: str, parameter: str = "", place: int | None = None) -> None:
        super().__init__()
        self.name, self.parameter, self.place = name, parameter, place  # of the argument that decides; None: no twin

    def __missing__(self, backend: str) -> Function:
        module = import_module(f"thinwire.kernels.{_FOLDERS[backend]}")
        if self.name not in module.__all__:
            assert self.place is not None, f"{self.name} has no twin, and {backend} does not have it"
            function = self[REFERENCE]
        else:
            function = getattr(module, self.name)
            if backend == TRITON and self.place is not None:
                function = self._counted(function, self[REFERENCE], self.place, self.parameter)
        self[backend] = function
        return function

    @staticmethod
    def _counted(fast: Function, plain: Function, place: int, parameter: str) -> Function:
        """A Triton function for as many elements as it can count, the reference's for more."""

        @wraps(fast)
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args[place] if place < len(args) else kwargs[parameter]
            numel = given.numel() if isinstance(given, Tensor) else sum(one.numel() for one in given)
            return (fast if numel < _TRITON_COUNTS else plain)(*args, **kwargs)

        return counted


CHOSEN = _Chosen()
TABLE: dict[str, _Operation] = {}


def operation(twin: Callable[P, R], on: str | None = None, *, first_of: str | None = None) -> Callable[P, R]:
    """What callers import: the reference's function by name, signature and docstring, done by the backend of a tensor.

    That tensor is the argument ``on``, or the first of the list ``first_of``; of an empty list the reference makes what
    it makes of nothing.
    """
    parameter = on or first_of
    assert parameter is not None
    place = list(inspect.signature(twin).parameters).index(parameter)
    row = TABLE[twin.__name__] = _Operation(twin.__name__, parameter, place)
    chosen = CHOSEN

    @wraps(twin)
    def of_tensor(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor: Any = args[place] if place < len(args) else kwargs[parameter]
        return row[chosen[tensor.device]](*args, **kwargs)

    @wraps(twin)
    def of_list(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors: Any = args[place] if place < len(args) else kwargs[parameter]
        return row[chosen[tensors[0].device] if tensors else REFERENCE](*args, **kwargs)

    return of_tensor if on is not None else of_list


def only(backend: str, declared: Callable[P, R]) -> Callable[P, R]:
    """An operation that this backend alone has, without a twin; callers ask for the backend of the device first."""
    row = TABLE[declared.__name__] = _Operation(declared.__name__)

    @wraps(declared)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return row[backend](*args, **kwargs)

    return call


def backend_name(device: torch.device) -> str:
    """The backend of tensors on this device: native, triton or reference."""
    return CHOSEN[device]


def on_gpu(device: torch.device, numel: int = 0) -> bool:
    """Whether vectors of so many elements on this device go to the Triton kernels, which never wait for the device."""
    return CHOSEN[device] == TRITON and numel < _TRITON_COUNTS


def describe() -> str:
    """Return one line that says which kernels are in use and why; raise where THINWIRE_KERNELS asks the impossible."""
    if _choice() == "reference":
        return "kernels: reference (plain torch), because THINWIRE_KERNELS=reference"
    host = f"reference (plain torch), because {library.why_not()}"
    if library.handle() is not None:
        host = f"native ({library.vectors()} loops)"
    no_gpu = _why_no_gpu()
    device = "Triton" if no_gpu is None else f"reference (plain torch), because {no_gpu}"
    return f"kernels: on the CPU {host}; on a GPU {device}"


def _choice() -> str:
    choice = os.environ.get("THINWIRE_KERNELS", "auto")
    if choice not in _CHOICES:
        raise ValueError(f"THINWIRE_KERNELS must be one of {', '.join(_CHOICES)}, not {choice!r}")
    if choice == "cpu" and library.handle() is None:
        raise RuntimeError(
            f"THINWIRE_KERNELS=cpu, but {library.why_not()}; reinstall thinwire where there is a C++ compiler"
        )
    if choice == "gpu" and _why_no_gpu() is not None:
        raise RuntimeError(f"THINWIRE_KERNELS=gpu, but {_why_no_gpu()}; unset it to use what is there")
    return choice


def _why_no_gpu() -> str | None:
    """Why the Triton kernels cannot be used; None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "gcc"), "clang", "cc")):
        return "Triton needs a C compiler, such as gcc"
    return None
