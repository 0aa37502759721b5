"""Who belongs to a cluster, and the process that keeps its namespaces.

A cluster is known by "PIDNS-PID-START-COUNT": its owner's PID namespace, process id and start time, and a count. Every
process of the cluster has it in its environment, so what a dead owner left can be told from what lives.

Run as a script (standard library only, a small process), this file makes the hosts' namespaces, prints the ids of the
processes that keep them, and waits for its standard input to end, which it does when the owner closes it or dies in
any way, kill -9 included. Then it ends all processes of the cluster; the kernel removes the namespaces with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

MARK = "THINWIRE_CLUSTER"

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE, _MNT_DETACH = 4096, 16384, 1 << 19, 2


def start_time(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def new_id(count: int) -> str:
    """The name of a cluster that this process owns."""
    return f"{_pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{count}"


def is_dead(cluster: str) -> bool:
    """Whether the owner is gone; False for names from another PID namespace, which cannot be judged from here."""
    namespace, pid, start, _ = (int(part) for part in cluster.split("-"))
    return namespace == _pid_namespace() and start_time(pid) != start


def members(wanted: Callable[[str], bool]) -> Iterator[int]:
    """The processes, other than this one, whose cluster is wanted."""
    mark = f"{MARK}=".encode()
    for pid in all_pids():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable.startswith(mark) and wanted(variable[len(mark) :].decode("ascii")):
                    yield pid


def all_pids() -> list[int]:
    """All processes but this one."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def kill_all(find: Callable[[], Iterator[int]], within_s: float = 5.0) -> None:
    """kill -9 whatever `find` finds, until it finds nothing more."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        found = False
        for pid in find():
            found = True
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def sweep() -> None:
    """End what dead clusters left."""
    kill_all(lambda: members(is_dead))


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _main(cluster: str, addresses: list[str]) -> None:
    _be_silent()
    keepers = [_fork_host(rank, addresses) for rank in range(len(addresses))]
    print(json.dumps(keepers), flush=True)
    with contextlib.suppress(OSError):
        os.read(0, 1)
    kill_all(lambda: members(lambda name: name == cluster))


def _fork_host(rank: int, addresses: list[str]) -> int:
    """A process in namespaces of its own: network, mounts and host name. Returns when they are ready."""
    ready, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        if os.read(ready, 1) != b"y":
            sys.exit(1)  # the child has said why
        os.close(ready)
        return pid
    try:
        _make_host(rank, addresses)
        os.write(theirs, b"y")
        os.closerange(0, 16)
        while True:
            signal.pause()
    except OSError as error:
        print(f"{error.strerror}: {error.filename}" if error.filename else error.strerror, file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _make_host(rank: int, addresses: list[str]) -> None:
    _call("unshare", _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWUTS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)  # what is mounted below stays here
    socket.sethostname(f"host{rank}")
    names = "".join(f"{address} host{r}\n" for r, address in enumerate(addresses))
    # torch's store listens on IPv6 and sees an IPv4 address as ::ffff:10.77.0.1, for which it wants a name, too, and
    # warns where there is none. Another name than host0, so that host0 itself stays an IPv4 address.
    names += "".join(f"::ffff:{address} host{r}.cluster\n" for r, address in enumerate(addresses))
    with tempfile.NamedTemporaryFile("w", prefix="thinwire-hosts-") as hosts:
        hosts.write(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        hosts.flush()
        os.fchmod(hosts.fileno(), 0o644)
        _call("mount", hosts.name.encode(), b"/etc/hosts", None, _MS_BIND, None)
    _be_silent()
    with contextlib.suppress(OSError):  # containers may forbid it; only scripts that read /sys/class/net would miss it
        _show_own_interfaces()


def _be_silent() -> None:
    """No IPv6 on interfaces to come: it sends packets by itself, which would be counted."""
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv6/conf/default/disable_ipv6", "w") as file:
        file.write("1")


def _show_own_interfaces() -> None:
    """Let /sys/class/net be this host's; the rest of /sys stays the machine's (GPUs, control groups)."""
    with tempfile.TemporaryDirectory(prefix="thinwire-sys-") as folder:
        _call("mount", b"sysfs", folder.encode(), b"sysfs", 0, None)
        try:
            for path in ("devices/virtual/net", "class/net"):
                _call("mount", f"{folder}/{path}".encode(), f"/sys/{path}".encode(), None, _MS_BIND, None)
        finally:
            _call("umount2", folder.encode(), _MNT_DETACH)


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
