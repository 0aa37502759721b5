"""Hosts, the bridge between them, and the shaping of every link: what is asked of the kernel, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.lab.emulation import keeper, relay
from thinwire.lab.emulation.settings import CUBIC, NOTHING, Distance

INTERFACE = "eth0"
MAX_HOSTS = 250
SUBNET = ipaddress.ip_network("10.77.0.0/16")  # exists only inside the namespaces

# What a link may send at once after a pause, in seconds of its rate. Small, so that short messages take their time too:
# with 4 ms, which is rate/HZ, a megabyte at 1 Gb/s arrives in 4.6 ms instead of 8.4. Shaping runs on high-resolution
# timers, so 0.5 ms are enough for the full rate, if no packet handed down by TCP is larger (see `_segment_limit`).
BURST_S = 0.0005
MIN_BURST = 8 * 1514
QUEUE_S = 0.05  # what waits in front of a link before packets are dropped
MIN_QUEUE = 128 * 1024
MORE_HELD = 4 * 2**20  # bytes that the relay holds of a link beyond twice what is on its way at the full rate
SEED = 1  # of jitter and losses

_COUNT = itertools.count()


class EmulationError(RuntimeError):
    """This machine cannot, or will not, emulate what was asked; the sentence says what to do."""


@dataclass(frozen=True)
class Counters:
    """What the kernel counted on one interface."""

    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(
            self.bytes_sent - before.bytes_sent,
            self.bytes_received - before.bytes_received,
            self.packets_sent - before.packets_sent,
            self.packets_received - before.packets_received,
        )


class Network:
    """N hosts on one bridge. The bridge is in a namespace of its own; all end with `close`.

    A way from one host to another begins with the `distance`, in netem or, where the kernel has none, in a relay
    between each host and the bridge; `rate` is the largest that its buffers have to hold.
    """

    def __init__(self, num_hosts: int, distance: Distance = NOTHING, tcp: str = CUBIC, rate: int = 10**9) -> None:
        if (reason := why_not()) is not None:
            raise EmulationError(reason)
        if distance and (reason := why_no_latency()) is not None:
            raise EmulationError(reason)
        if (reason := why_no_tcp(tcp)) is not None:
            raise EmulationError(reason)
        self.name = keeper.new_id(next(_COUNT))
        self.distance = distance
        self.tcp = tcp
        self.addresses = [str(SUBNET[rank + 1]) for rank in range(num_hosts)]
        self._rates: dict[tuple[int, str], int] = {}
        self._keeper: subprocess.Popen[str] | None = None
        self._relay: subprocess.Popen[str] | None = None
        self.has_netem = why_no_netem() is None
        keeper.sweep()
        try:
            self._start_keeper()
            if distance and not self.has_netem:
                self._start_relay(rate)
            self._connect()
        except BaseException:
            self.close()
            raise

    def _start_keeper(self) -> None:
        script = [sys.executable, "-I", "-S", keeper.__file__, self.name, *self.addresses]
        self._keeper = subprocess.Popen(
            [*_unshare(), *script],
            env={**os.environ, keeper.MARK: self.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C in the terminal is not for the keeper
        )
        assert self._keeper.stdout is not None and self._keeper.stderr is not None
        answer = self._keeper.stdout.readline()
        if not answer:
            raise EmulationError(f"the hosts' namespaces cannot be made: {_one_line(self._keeper.stderr.read())}.")
        self._hosts: list[int] = json.loads(answer)
        self._inodes = [_network_of(pid) for pid in self._hosts]

    def _start_relay(self, rate: int) -> None:
        ms, far = 10**6, self.distance
        held = MORE_HELD + round(2 * rate / 8 * (far.latency_ms + far.jitter_ms) / 1e3)
        delay, jitter = round(far.latency_ms * ms), round(far.jitter_ms * ms)
        settings = [len(self.addresses), delay, jitter, far.loss, SEED, held]
        self._relay = subprocess.Popen(
            [*self.enter_bridge(), sys.executable, "-I", "-S", relay.__file__, json.dumps(settings)],
            env={**os.environ, keeper.MARK: self.name},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._relay.stdout is not None and self._relay.stderr is not None
        if not self._relay.stdout.readline():
            raise EmulationError(f"the relay that delays packets cannot start: {_one_line(self._relay.stderr.read())}.")

    def await_loss_of_relay(self) -> None:
        """Return when the relay has ended, or at once where there is none."""
        if self._relay is not None:
            self._relay.wait()

    @property
    def has_relay(self) -> bool:
        return self._relay is not None

    def why_gone(self) -> str:
        """Why a link is not there any more, for the end of a sentence."""
        if self._relay is not None and self._relay.poll() is not None:
            return "the relay that delays the cluster's packets was ended"
        return "the process that keeps the cluster's network was ended"

    def _connect(self) -> None:
        ranks = range(len(self._hosts))
        bridge = ["link add bridge0 type bridge mcast_snooping 0", "link set bridge0 addrgenmode none up"]
        for rank in ranks:
            pid = self._hosts[rank]
            port = relay.bridge_end(rank)
            if self._relay is not None:
                bridge.append(f"link set {relay.host_end(rank)} netns {pid} name {INTERFACE}")
            else:
                bridge.append(f"link add {port} type veth peer name {INTERFACE} netns {pid}")
            bridge += [
                f"link set {port} master bridge0 addrgenmode none up",
            ]
        _batch("ip", bridge, self.enter_bridge())
        for rank in ranks:
            here = [
                "link set lo up",
                f"link set {INTERFACE} addrgenmode none up",
                f"addr add {self.addresses[rank]}/{SUBNET.prefixlen} brd + dev {INTERFACE}",
                f"route replace {_route(INTERFACE, self.tcp)} proto kernel scope link src {self.addresses[rank]}",
            ]
            _batch("ip", here, self.enter(rank))

    def shape(self, uplink: Sequence[int], downlink: Sequence[int]) -> None:
        """Set the rates of all hosts, in bits per second: what they send (up) and what is sent to them (down)."""
        at_bridge = []
        for rank, (up, down) in enumerate(zip(uplink, downlink, strict=True)):
            if self._rates.get((rank, "up")) != up:
                verb = "change" if (rank, "up") in self._rates else "add"
                _batch("ip", [self._packets(up)], self.enter(rank))
                delay = self.distance if self.has_netem else NOTHING
                _batch("tc", _shaping(verb, INTERFACE, up, delay), self.enter(rank))
                self._rates[rank, "up"] = up
            if self._rates.get((rank, "down")) != down:
                verb = "change" if (rank, "down") in self._rates else "add"
                at_bridge += _shaping(verb, relay.bridge_end(rank), down, NOTHING)
                self._rates[rank, "down"] = down
        if at_bridge:
            _batch("tc", at_bridge, self.enter_bridge())

    def _packets(self, rate: int) -> str:
        """How large the packets are that TCP hands down; frames, where netem would lose many of them at once."""
        single = " gso_max_segs 1" if self.distance.loss and self.has_netem else ""
        return f"link set {INTERFACE} gso_max_size {_segment_limit(rate)}{single}"

    def plug(self, rank: int, connected: bool) -> None:
        """Pull the cable of a host out of the bridge, or put it back."""
        _batch("ip", [f"link set {relay.bridge_end(rank)} {'up' if connected else 'down'}"], self.enter_bridge())

    def counters(self, rank: int) -> Counters:
        """The counters of the host's interface since the network was made."""
        lines: list[str] = []
        with contextlib.suppress(OSError), open(f"/proc/{self._hosts[rank]}/net/dev", encoding="ascii") as file:
            lines = [line for line in file if line.strip().startswith(f"{INTERFACE}:")]
        if not lines:
            raise EmulationError(f"the link of host {rank} is gone, because {self.why_gone()}; run the command again.")
        line = lines[0]
        numbers = [int(number) for number in line.partition(":")[2].split()]
        return Counters(numbers[8], numbers[0], numbers[9], numbers[1])

    def add_switch_address(self, address: str) -> None:
        """Let the bridge be talked to, so that one link can be measured alone."""
        _batch("ip", [f"addr add {address}/{SUBNET.prefixlen} brd + dev bridge0"], self.enter_bridge())

    def remove_switch_address(self, address: str) -> None:
        """And as if nobody had: a neighbour that is remembered is asked for again, and that would be counted."""
        with contextlib.suppress(EmulationError):  # a network that is gone needs no tidying
            _batch("ip", [f"addr del {address}/{SUBNET.prefixlen} dev bridge0", "neigh flush all"], self.enter_bridge())
            for rank in range(min(2, len(self.addresses))):
                _batch("ip", ["neigh flush all"], self.enter(rank))

    def packets_at_switch(self) -> int:
        """Packets that came to the bridge's own address."""
        assert self._keeper is not None
        with open(f"/proc/{self._keeper.pid}/net/dev", encoding="ascii") as file:
            line = next(line for line in file if line.strip().startswith("bridge0:"))
        return int(line.partition(":")[2].split()[1])

    def enter(self, rank: int) -> list[str]:
        """What to put in front of a command to run it on a host."""
        return [*_nsenter(self._hosts[rank]), "--mount", "--uts", "--"]

    def processes(self, rank: int) -> Iterator[int]:
        """All processes on a host, but the one that keeps it."""
        for pid in keeper.all_pids():
            if pid != self._hosts[rank] and _network_of(pid) == self._inodes[rank]:
                yield pid

    def close(self) -> None:
        """End every process of the cluster, and its namespaces with them."""
        if self._keeper is None:
            return
        for process in (self._relay, self._keeper):
            if process is not None:
                with contextlib.suppress(OSError):
                    process.communicate()  # closes its input, which ends it
        keeper.kill_all(lambda: keeper.members(lambda name: name == self.name))
        self._keeper = self._relay = None

    def enter_bridge(self) -> list[str]:
        """What to put in front of a command to run it where the bridge is."""
        assert self._keeper is not None
        return [*_nsenter(self._keeper.pid), "--"]


def why_not() -> str | None:
    """One sentence that says why no cluster can be emulated here and what to do; None if one can."""
    if sys.platform != "linux":
        return "clusters are emulated with Linux network namespaces; run this on Linux, or in a Linux virtual machine."
    for tool, package in {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}.items():
        if shutil.which(tool, path=_path()) is None:
            return f"the command '{tool}' is missing; install the package {package} (apt install {package})."
    if _unshare_options() is None:
        return (
            "this system lets you make no network namespace; run it as root (sudo), or allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
            "in a container: docker run --privileged)."
        )
    if (error := _try_qdisc("tbf rate 1mbit burst 10kb limit 10kb")) is not None:
        return f"this kernel cannot shape links with tc tbf ({error}); load the module sch_tbf (modprobe sch_tbf)."
    return None


def why_no_latency() -> str | None:
    """One sentence that says why latency, jitter and losses cannot be added here; None if they can."""
    if (error := why_no_netem()) is None:
        return None
    why = None if relay.LIBRARY.exists() else "thinwire was installed without its native part"
    why = why or _why_no_tap()
    if why is None:
        return None
    return (
        f"this machine cannot add latency: the kernel has no netem ({error}), and the relay that would stand in for it "
        f"cannot run ({why}); load sch_netem (modprobe sch_netem), or leave out latency, jitter and loss."
    )


def why_no_netem() -> str | None:
    """What the kernel says where it has no netem; None if it has."""
    return _try_qdisc("netem delay 1ms")


@functools.cache
def _why_no_tap() -> str | None:
    """Why no TAP device can be made here; None if one can."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import relay; relay.open_tap('probe', True)"
    command = [*_unshare(), sys.executable, "-I", "-S", "-c", script, str(Path(relay.__file__).parent)]
    answer = subprocess.run(command, capture_output=True, text=True)
    said = _one_line(answer.stderr.strip().rpartition("\n")[2])
    return None if answer.returncode == 0 else f"no TAP device can be made: {said}"


@functools.cache
def why_no_tcp(name: str) -> str | None:
    """One sentence that says why hosts cannot have this congestion control; None if they can."""
    lines = f"link set lo up\nroute add {_route('lo', name)}\n"
    answer = subprocess.run([*_unshare(), _tool("ip"), "-batch", "-"], input=lines, capture_output=True, text=True)
    if answer.returncode == 0:
        return None
    known: list[str] = []
    with contextlib.suppress(OSError):
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split()
    if known and name not in known:
        there = ", ".join(known)
        return f"the congestion control '{name}' is not there, take one of {there}, or load it (modprobe tcp_{name})."
    error = _one_line(answer.stderr.partition("\n")[0])
    return f"the congestion control '{name}' cannot be chosen ({error}); that takes Linux and iproute2 4.0 or newer."


def _route(interface: str, tcp: str) -> str:
    """To all hosts. A route may name any congestion control, a namespace only what the machine's owner has allowed."""
    return f"{SUBNET} dev {interface} congctl {tcp}"


def _shaping(verb: str, interface: str, rate: int, distance: Distance) -> list[str]:
    burst = _burst(rate)
    limit = burst + max(MIN_QUEUE, round(rate / 8 * QUEUE_S))
    tbf = f"tbf rate {rate}bit burst {burst} limit {limit}"
    if not distance:
        return [f"qdisc {verb} dev {interface} root handle 1: {tbf}"]
    netem = f"qdisc {verb} dev {interface} root handle 2: netem delay {distance.latency_ms:g}ms"
    # With a rate, however high, netem keeps the order that its jitter would change.
    netem += f" {distance.jitter_ms:g}ms rate 100gbit" if distance.jitter_ms else ""
    netem += f" loss {100 * distance.loss:g}%" if distance.loss else ""
    netem += " limit 100000"
    return [netem, f"qdisc {verb} dev {interface} parent 2:1 handle 1: {tbf}"]


def _burst(rate: int) -> int:
    return max(MIN_BURST, round(rate / 8 * BURST_S))


def _segment_limit(rate: int) -> int:
    """The largest packet (later cut into frames) that TCP may hand down: what does not fit the burst is cut early."""
    return min(65536, _burst(rate) * 4 // 5)


@functools.cache
def _unshare_options() -> tuple[str, ...] | None:
    """How namespaces are made here: as root directly, else in a user namespace; None if neither is allowed."""
    direct, through_user = ("--net", "--mount"), ("--user", "--map-root-user", "--net", "--mount")
    for options in (direct, through_user) if os.geteuid() == 0 else (through_user,):
        if subprocess.run([_tool("unshare"), *options, "true"], capture_output=True).returncode == 0:
            return options
    return None


def _unshare() -> list[str]:
    options = _unshare_options()
    assert options is not None
    return [_tool("unshare"), *options]


def _nsenter(pid: int) -> list[str]:
    user = ["--user", "--preserve-credentials"] if "--user" in _unshare() else []
    return [_tool("nsenter"), f"--target={pid}", *user, "--net"]


@functools.cache
def _try_qdisc(qdisc: str) -> str | None:
    """What the kernel answers to a kind of shaping, on a loopback interface of a namespace made for it."""
    command = [*_unshare(), _tool("tc"), "qdisc", "add", "dev", "lo", "root", *qdisc.split()]
    answer = subprocess.run(command, capture_output=True, text=True)
    return None if answer.returncode == 0 else _one_line(answer.stderr).removeprefix("Error: ").rstrip(".")


def _batch(tool: str, lines: Sequence[str], prefix: Sequence[str]) -> None:
    """Several `ip` or `tc` commands at once."""
    command = [*prefix, _tool(tool), "-batch", "-"]
    answer = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
    if answer.returncode != 0:
        raise EmulationError(f"'{tool} {lines[0]}' ... failed: {_one_line(answer.stderr)}.")


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _path() -> str:
    """Where to look for commands: also where distributions keep ip and tc, which is not in everybody's PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _tool(name: str) -> str:
    return shutil.which(name, path=_path()) or name


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")
