"""Run a command on every host of an emulated cluster, with faults on demand, and count its bytes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType

from thinwire.lab.emulation import keeper
from thinwire.lab.emulation.link_check import LinkCheck, check_link
from thinwire.lab.emulation.network import INTERFACE, MAX_HOSTS, Counters, EmulationError, Network
from thinwire.lab.emulation.settings import (
    CUBIC,
    Cut,
    Distance,
    Fault,
    Kill,
    Links,
    Slow,
    check_rank,
    check_tcp,
    parse_ms,
    parse_rate,
    parse_share,
    rate_text,
)

MASTER_PORT = 29500  # always free: every cluster has a network of its own
TAIL_LINES = 1000
END_S = 3.0  # what a command may take to end after SIGTERM


@dataclasses.dataclass(frozen=True)
class HostResult:
    """How one host's command ended, and what the kernel counted on the host's interface meanwhile."""

    rank: int
    exit_code: int  # as a shell has it: 128 + n after signal n
    seconds: float
    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int
    output: str = dataclasses.field(repr=False)  # the last TAIL_LINES lines


@dataclasses.dataclass(frozen=True)
class Result:
    """All hosts, in rank order."""

    hosts: tuple[HostResult, ...]
    seconds: float
    failed_rank: int | None  # the first in time; None if every command succeeded

    @property
    def exit_code(self) -> int:
        """0 if every command succeeded, else that of the host that failed first."""
        return 0 if self.failed_rank is None else self.hosts[self.failed_rank].exit_code


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C while a command ran; all hosts have ended, and `result` has what was counted until then."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


class Cluster:
    """Emulated hosts for the time of a `with` block; `run` may be called several times.

    Rates are texts such as "100mbit" or bits per second. The latency is one way, from any host to any other, so a ping
    takes twice as long; each packet takes up to the jitter more or less, none overtakes another, and the loss is the
    share of packets that never arrive ("0.1%", or 0.001). `tcp` is the congestion control of the hosts' TCP, whatever
    this machine's own is: what a link carries depends on it. When a host fails, the others have `grace_s` seconds to
    end by themselves.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | int = "1gbit",
        *,
        uplink: str | int | None = None,
        downlink: str | int | None = None,
        latency_ms: str | float = 0.0,
        jitter_ms: str | float = 0.0,
        loss: str | float = 0.0,
        tcp: str = CUBIC,
        grace_s: float = 5.0,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"a cluster has 1 to {MAX_HOSTS} hosts, not {hosts}")
        both = parse_rate(rate)
        self.num_hosts = hosts
        self.uplink = both if uplink is None else parse_rate(uplink)
        self.downlink = both if downlink is None else parse_rate(downlink)
        self.distance = Distance(parse_ms(latency_ms), parse_ms(jitter_ms), parse_share(loss))
        self.tcp = check_tcp(tcp)
        self.grace_s = grace_s
        self._network: Network | None = None

    def __enter__(self) -> Cluster:
        self._network = Network(self.num_hosts, self.distance, self.tcp, self.uplink)
        try:
            self._shape(())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End whatever runs on the hosts and remove them."""
        network, self._network = self._network, None
        if network is not None:
            with _undisturbed():
                network.close()

    @property
    def network(self) -> Network:
        """The hosts' network; only inside the `with` block."""
        if self._network is None:
            raise RuntimeError("this cluster is not running; use it as: with Cluster(...) as cluster")
        return self._network

    @property
    def addresses(self) -> list[str]:
        """The hosts' addresses, in rank order."""
        return self.network.addresses

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that tell a command where it runs; those of torchrun, and a few more."""
        cores = len(os.sched_getaffinity(0))
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // self.num_hosts)))  # hosts share the cores
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_RANK": str(rank),
            "NNODES": str(self.num_hosts),
            "HOST_ADDR": self.addresses[rank],
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"),
            keeper.MARK: self.network.name,
        }

    def check_link(self) -> LinkCheck:
        """Measure a ping and a link of this network, in a second or two; not while a command runs."""
        return check_link(self.network, self.uplink, self.downlink)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        faults: Iterable[Fault] = (),
        timeout_s: float | None = None,
        on_line: Callable[[int, str], None] | None = None,
    ) -> Result:
        """Start the command on every host, wait for all of them, and tell how each ended.

        It finds `environment` in its own, and the network that it runs on (`Links.here`).

        `on_line(rank, line)` gets every line of output (from threads, one at a time). A host that fails ends the
        others after the grace time; one that a `Kill` ended does not, so that the others can show what they do then.
        After `timeout_s` all are ended, with exit code 124.
        """
        faults = tuple(faults)
        for fault in faults:
            check_rank(fault, self.num_hosts)
        check_command(command)
        self._shape(faults)
        links = json.dumps(self.links(faults).as_dict())
        run = _RunningCommand(self, command, {Links.VARIABLE: links, **(env or {})}, on_line)
        try:
            run.start()
            run.wait(faults, timeout_s)
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: no more patience
                run.signal(signal.SIGINT)
                run.wait_until(time.monotonic() + self.grace_s)
            with _undisturbed():
                raise RunInterrupted(run.finish()) from None
        except BaseException:
            with _undisturbed():
                run.finish()
            raise
        return run.finish()

    def links(self, faults: Iterable[Fault] = ()) -> Links:
        """The network as it is with these faults."""
        slow = {fault.rank: rate_text(fault.rate) for fault in faults if isinstance(fault, Slow)}
        others = tuple(f"{rank}:{slow[rank]}" for rank in sorted(slow))
        up, down = rate_text(self.uplink), rate_text(self.downlink)
        far = self.distance
        return Links(self.num_hosts, up, down, far.latency_ms, others, self.tcp, far.jitter_ms, far.loss)

    def kill(self, rank: int) -> None:
        """kill -9 of everything that runs on a host."""
        network = self.network
        keeper.kill_all(lambda: network.processes(rank))

    def _shape(self, faults: Iterable[Fault]) -> None:
        slow = {fault.rank: fault.rate for fault in faults if isinstance(fault, Slow)}
        ranks = range(self.num_hosts)
        self.network.shape([slow.get(r, self.uplink) for r in ranks], [slow.get(r, self.downlink) for r in ranks])


def check_command(command: Sequence[str]) -> None:
    """A ValueError when there is no command or when it cannot be started."""
    if not command:
        raise ValueError("the command to run on every host is missing; write it after --")
    if shutil.which(command[0]) is None:
        there = os.path.exists(command[0])
        raise ValueError(f"the command '{command[0]}' {'cannot be executed' if there else 'was not found'}")


class _RunningCommand:
    """One command on all hosts."""

    def __init__(
        self,
        cluster: Cluster,
        command: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[int, str], None] | None,
    ) -> None:
        self.cluster, self.network, self.command, self.env = cluster, cluster.network, command, env
        self.on_line = on_line
        self.processes: list[subprocess.Popen[str]] = []
        self.readers: list[threading.Thread] = []
        self.tails = [collections.deque[str](maxlen=TAIL_LINES) for _ in range(cluster.num_hosts)]
        self.ended: dict[int, tuple[int, float]] = {}  # rank: exit code, when; in the order of ending
        self.endings: queue.SimpleQueue[tuple[int, int, float] | None] = queue.SimpleQueue()
        self.trouble: Exception | None = None
        self.one_line = threading.Lock()
        self.killed: set[int] = set()
        self.late: set[int] = set()
        self.unplugged: set[int] = set()
        self.before: list[Counters] = [self.network.counters(rank) for rank in range(cluster.num_hosts)]
        self.started_s = time.monotonic()

    def start(self) -> None:
        for rank in range(self.cluster.num_hosts):
            # Joining a mount namespace leads to its root folder: go back to where the user is.
            here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *self.command]
            process = subprocess.Popen(
                [*self.network.enter(rank), *here],
                env={**os.environ, **self.cluster.environment(rank), **self.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C in the terminal reaches this process, which decides
            )
            self.processes.append(process)
            self.readers.append(threading.Thread(target=self._read, args=(rank, process), daemon=True))
            self.readers[-1].start()
            threading.Thread(target=self._await, args=(rank, process), daemon=True).start()
        if self.network.has_relay:
            threading.Thread(target=self._await_relay, daemon=True).start()

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.one_line:
                self.tails[rank].append(line)
                if self.on_line is None or self.trouble is not None:
                    continue  # read on: a command must not wait for a full pipe
                try:
                    self.on_line(rank, line.rstrip("\n"))
                except Exception as error:  # such as a closed terminal; told where all are waited for
                    self.trouble = error
                    self.endings.put(None)

    def _await(self, rank: int, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        self.endings.put((rank, 128 - code if code < 0 else code, time.monotonic()))

    def _await_relay(self) -> None:
        """Without it no packet arrives any more: the hosts are told so at once."""
        self.network.await_loss_of_relay()
        self.trouble = EmulationError(
            f"the hosts' links are gone, because {self.network.why_gone()}; run the command again."
        )
        self.endings.put(None)

    def wait(self, faults: Sequence[Fault], timeout_s: float | None) -> None:
        """Until all have ended; faults happen meanwhile."""
        agenda = sorted(self._agenda(faults), key=lambda item: item[0])
        end_s = None if timeout_s is None else self.started_s + timeout_s
        grace_end_s: float | None = None
        while len(self.ended) < self.cluster.num_hosts:
            if self.trouble is not None:
                raise self.trouble
            now_s = time.monotonic()
            if end_s is not None and now_s >= end_s:
                self.late = set(range(self.cluster.num_hosts)) - set(self.ended)
                return
            if grace_end_s is not None and now_s >= grace_end_s:
                return
            if agenda and now_s >= agenda[0][0]:
                agenda.pop(0)[1]()
                continue
            nexts = [agenda[0][0] if agenda else None, end_s, grace_end_s]
            self._wait_once(min((t for t in nexts if t is not None), default=None))
            if grace_end_s is None and any(code and rank not in self.killed for rank, (code, _) in self.ended.items()):
                grace_end_s = time.monotonic() + self.cluster.grace_s

    def _agenda(self, faults: Sequence[Fault]) -> Iterator[tuple[float, Callable[[], None]]]:
        for fault in faults:
            rank = fault.rank
            if isinstance(fault, Kill):
                yield self.started_s + fault.at_s, lambda rank=rank: self._kill(rank)  # type: ignore[misc]
            elif isinstance(fault, Cut):
                yield self.started_s + fault.from_s, lambda rank=rank: self._plug(rank, False)  # type: ignore[misc]
                yield self.started_s + fault.to_s, lambda rank=rank: self._plug(rank, True)  # type: ignore[misc]

    def _kill(self, rank: int) -> None:
        if rank not in self.ended:
            self.killed.add(rank)
        self.cluster.kill(rank)

    def _plug(self, rank: int, connected: bool) -> None:
        self.network.plug(rank, connected)
        (self.unplugged.discard if connected else self.unplugged.add)(rank)

    def _wait_once(self, until_s: float | None) -> bool:
        try:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            ending = self.endings.get(timeout=left_s)
        except queue.Empty:
            return False
        if ending is not None:
            rank, code, at_s = ending
            self.ended[rank] = (code, at_s)
        return True

    def wait_until(self, until_s: float) -> None:
        """Until all have ended, or the time has come."""
        while len(self.ended) < len(self.processes) and self._wait_once(until_s):
            pass

    def signal(self, number: signal.Signals) -> None:
        """Send a signal as a terminal would: to the process group of every command that still runs."""
        for rank, process in enumerate(self.processes):
            if rank not in self.ended:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, number)

    def finish(self) -> Result:
        """End what still runs, put the cables back, and count."""
        if len(self.ended) < len(self.processes):
            self.signal(signal.SIGTERM)
            self.wait_until(time.monotonic() + END_S)
        for rank in range(len(self.processes)):
            self.cluster.kill(rank)
        self.wait_until(time.monotonic() + END_S)
        for rank in list(self.unplugged):
            self._plug(rank, True)
        for reader in self.readers:
            reader.join(END_S)
        hosts = tuple(self._host(rank) for rank in range(len(self.processes)))
        failures = [(host.seconds, host.rank) for host in hosts if host.exit_code]
        failed = min(failures)[1] if failures else None
        return Result(hosts, max((host.seconds for host in hosts), default=0.0), failed)

    def _host(self, rank: int) -> HostResult:
        code, at_s = self.ended.get(rank, (137, time.monotonic()))
        counted = self.network.counters(rank) - self.before[rank]
        return HostResult(
            rank=rank,
            exit_code=124 if rank in self.late else code,
            seconds=round(at_s - self.started_s, 3),
            **dataclasses.asdict(counted),
            output="".join(self.tails[rank]),
        )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C for the time of the block: nothing may be left half removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
