"""The process that delays packets where the kernel has no netem.

Run as a script (standard library only) in the namespace of the bridge: it makes two TAP devices per host, one for the
host's end of its link and one for the bridge's, prints "ready", and lets native/relay.cpp carry the packets between
them. It ends when its standard input does, and the devices with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import struct
import sys
from pathlib import Path

LIBRARY = Path(__file__).with_name("_relay.so")

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CSUM_AND_TSO, _USO = 0x01 | 0x02 | 0x04 | 0x08, 0x20 | 0x40  # USO: Linux 6.2 and newer
_PR_SET_TIMERSLACK = 29


def host_end(rank: int) -> str:
    """The host's device, until it is moved to the host and renamed."""
    return f"end{rank}"


def bridge_end(rank: int) -> str:
    return f"host{rank}"


def open_tap(name: str, large: bool) -> int:
    """A TAP device that lives as long as the descriptor; `large`: TCP's large packets cross it uncut."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    if large:
        try:
            fcntl.ioctl(device, _TUNSETOFFLOAD, _CSUM_AND_TSO | _USO)
        except OSError:
            fcntl.ioctl(device, _TUNSETOFFLOAD, _CSUM_AND_TSO)
    return device


def _main(count: int, delay_ns: int, jitter_ns: int, loss: float, seed: int, capacity: int) -> int:
    library = ctypes.CDLL(str(LIBRARY))
    # A large packet that is lost is many frames lost at once: with losses every frame crosses by itself.
    hosts = [open_tap(host_end(rank), loss == 0) for rank in range(count)]
    ports = [open_tap(bridge_end(rank), True) for rank in range(count)]
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):  # as the kernel's own queues, it goes before the work of the hosts
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    integers = ctypes.c_int * count
    wait = library.tw_relay
    wait.argtypes = [ctypes.c_int, integers, integers, ctypes.c_int64, ctypes.c_int64, ctypes.c_double,
                     ctypes.c_uint64, ctypes.c_int64, ctypes.c_int]  # fmt: skip
    error = wait(count, integers(*hosts), integers(*ports), delay_ns, jitter_ns, loss, seed, capacity, 0)
    if error:
        print(os.strerror(error), file=sys.stderr, flush=True)
    return 1 if error else 0


if __name__ == "__main__":
    try:
        sys.exit(_main(*json.loads(sys.argv[1])))
    except OSError as problem:
        sys.exit(f"{problem.strerror or problem}" + (f": {problem.filename}" if problem.filename else ""))
