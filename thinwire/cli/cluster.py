"""`thinwire cluster`: run a command on every host of an emulated cluster, and count the bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.cli._complaints import Complaint, Failure, Interrupted
from thinwire.cli._display import console
from thinwire.cli._text import LEFT, counted
from thinwire.lab import emulation
from thinwire.lab.emulation.cluster import check_command
from thinwire.lab.emulation.settings import check_rank

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")

T = TypeVar("T")


def cluster(
    hosts: Annotated[int, typer.Option(help="How many hosts.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND...", help="What to run on every host, after --.", show_default=False),
    ] = None,
    rate: Annotated[str, typer.Option(help="Rate of every link, in both directions: 100mbit, 1Gb/s.")] = "1gbit",
    uplink: Annotated[str | None, typer.Option(help="Another rate for what hosts send.")] = None,
    downlink: Annotated[str | None, typer.Option(help="Another rate for what hosts receive.")] = None,
    latency: Annotated[
        str,
        typer.Option(metavar="TIME", help="From one host to another, one way; a ping takes twice that: 50ms."),
    ] = "0ms",
    jitter: Annotated[
        str, typer.Option(metavar="TIME", help="Each packet takes up to so much more or less; the order stays: 5ms.")
    ] = "0ms",
    loss: Annotated[
        str, typer.Option(metavar="SHARE", help="Packets that never arrive, of those sent to another host: 0.1%.")
    ] = "0%",
    tcp: Annotated[
        str, typer.Option(metavar="NAME", help="Congestion control of the hosts' TCP; cubic is Linux's own default.")
    ] = emulation.CUBIC,
    kill: Annotated[
        list[str] | None, typer.Option(metavar="RANK@SECONDS", help="kill -9 of everything on a host.")
    ] = None,
    cut: Annotated[
        list[str] | None, typer.Option(metavar="RANK@FROM-TO", help="Pull a host's cable, and put it back.")
    ] = None,
    slow: Annotated[list[str] | None, typer.Option(metavar="RANK:RATE", help="Another rate for one host.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="First measure a link, and show that beside what was asked.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write settings, bytes and exit codes to FILE.")
    ] = None,
) -> None:
    """Run a command on every host of an emulated cluster of network namespaces.

    The command finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME
    in its environment, and NODE_RANK and NNODES for torchrun:

    thinwire cluster --hosts 4 --rate 100mbit -- python train.py

    thinwire cluster --hosts 2 -- sh -c 'torchrun --nnodes $NNODES --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR --master_port $MASTER_PORT train.py'
    """
    faults: list[emulation.Fault] = [
        *_parsed("--kill", emulation.Kill.parse, kill),
        *_parsed("--cut", emulation.Cut.parse, cut),
        *_parsed("--slow", emulation.Slow.parse, slow),
    ]
    with _one_sentence():
        there = emulation.Cluster(
            hosts, rate, uplink=uplink, downlink=downlink, latency_ms=latency, jitter_ms=jitter, loss=loss, tcp=tcp
        )
        for fault in faults:
            check_rank(fault, hosts)
        check_command(command or [])
    assert command
    settings = {
        "hosts": hosts,
        "uplink": emulation.rate_text(there.uplink),
        "downlink": emulation.rate_text(there.downlink),
        **dataclasses.asdict(there.distance),
        "tcp": tcp,
        "faults": [{"kind": type(fault).__name__.lower(), **dataclasses.asdict(fault)} for fault in faults],
        "command": command,
    }
    out = console()
    with _ending_on_signals(), _json_file(json_file) as write, _one_sentence():
        try:
            with there:
                if measure and hosts > 1:
                    settings["measured"] = _measured(out, there)
                result = there.run(command, env=_columns(out, hosts), faults=faults, on_line=_printer(out, hosts))
        except emulation.RunInterrupted as stop:
            _report(out, settings, stop.result, write)
            ended = f"all {hosts} hosts have" if hosts > 1 else "the host has"
            raise Interrupted(f"stopped by Ctrl-C; {ended} ended.") from None
        _report(out, settings, result, write)
    if result.failed_rank is not None:
        _fail(result, {fault.rank for fault in faults if isinstance(fault, emulation.Kill)})


def _measured(out: Console, there: emulation.Cluster) -> dict[str, Any]:
    try:
        found = there.check_link()
    except KeyboardInterrupt:
        raise Interrupted("stopped by Ctrl-C before the command was started.") from None
    except emulation.EmulationError as problem:  # a network that is gone ends the run with a sentence of its own
        out.print(f"[bold yellow]{problem}[/]", soft_wrap=True, highlight=False)
        return {"failed": str(problem)}
    out.print(found.text, soft_wrap=True, highlight=False)
    if found.far_off is not None:
        out.print(f"[bold yellow]{found.far_off}[/]", soft_wrap=True, highlight=False)
    return found.as_dict()


def _fail(result: emulation.Result, killed: set[int]) -> NoReturn:
    assert result.failed_rank is not None
    host = result.hosts[result.failed_rank]
    by_order = " by --kill" if host.rank in killed and host.exit_code == 137 else ""
    how = f"was killed{by_order}" if host.exit_code == 137 else f"ended with exit code {host.exit_code}"
    failure = Failure(f"host {host.rank} {how} after {host.seconds:.1f} s.")
    failure.exit_code = host.exit_code
    raise failure


def _parsed(option: str, parse: Callable[[str], T], texts: Sequence[str] | None) -> Iterator[T]:
    for text in texts or ():
        try:
            yield parse(text)
        except ValueError as error:
            raise Complaint(f"{option}: {error}.") from error


def _prefix(rank: int, num_hosts: int) -> str:
    return f"[host {rank:>{len(str(num_hosts - 1))}}] "


def _columns(out: Console, num_hosts: int) -> dict[str, str]:
    """What a terminal leaves for a host's lines behind its name; the hosts themselves see a pipe."""
    columns = str(max(20, out.width - len(_prefix(0, num_hosts))))
    return {"COLUMNS": columns, LEFT: columns} if out.is_terminal else {}


def _printer(out: Console, num_hosts: int) -> Callable[[int, str], None]:
    """Print a host's line behind its name, in the host's colour where there are colours."""

    def show(rank: int, line: str) -> None:
        prefix = _prefix(rank, num_hosts)
        if out.is_terminal:
            text = Text.assemble((prefix, f"bold {COLOURS[rank % len(COLOURS)]}"), Text.from_ansi(line))
            out.print(text, soft_wrap=True)
        else:
            print(f"{prefix}{line}", flush=True)

    return show


def _report(
    out: Console, settings: dict[str, Any], result: emulation.Result, write: Callable[[dict[str, Any]], None]
) -> None:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False)
    for heading in ("host", "exit code", "seconds", "sent", "received", "packets sent", "packets received"):
        table.add_column(heading, justify="right", no_wrap=True)
    for host in result.hosts:
        table.add_row(
            str(host.rank),
            str(host.exit_code) if host.exit_code == 0 else f"[bold red]{host.exit_code}[/]",
            f"{host.seconds:.1f}",
            _size(host.bytes_sent),
            _size(host.bytes_received),
            f"{host.packets_sent:,}",
            f"{host.packets_received:,}",
        )
    up, down = settings["uplink"], settings["downlink"]
    rate = up if up == down else f"{up} up, {down} down"
    words = emulation.Distance(settings["latency_ms"], settings["jitter_ms"], settings["loss"]).words
    latency = "".join(f", {word}" for word in words)
    tcp = f", TCP {settings['tcp']}" if settings["tcp"] != emulation.CUBIC else ""
    count = counted(len(result.hosts), "host")
    out.print(f"\n[bold]{count}[/bold], {rate}{latency}{tcp}: bytes by the kernel's interface counters")
    out.print(table)
    hosts = [{k: v for k, v in dataclasses.asdict(host).items() if k != "output"} for host in result.hosts]
    write({"settings": settings, "seconds": result.seconds, "exit_code": result.exit_code, "hosts": hosts})


def _size(nbytes: int) -> str:
    """Bytes with the unit (powers of 1000) that leaves three digits or four."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}" if nbytes < 100 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} B"


@contextlib.contextmanager
def _json_file(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes the file; that it can be written is known before anything runs, and nobody sees half."""
    if path is None:
        yield lambda value: None
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        partial.touch()
    except OSError as error:
        raise Complaint(f"'{path}' cannot be written: {error.strerror}.") from error

    def write(value: dict[str, Any]) -> None:
        try:
            partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise Failure(f"'{path}' cannot be written: {error.strerror}.") from error

    try:
        yield write
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_sentence() -> Iterator[None]:
    """What the user did wrong, or what the machine does not allow, as one sentence."""
    try:
        yield
    except (ValueError, emulation.EmulationError) as error:
        raise Complaint(f"{str(error).rstrip('.')}.") from error
    except BrokenPipeError:  # nobody reads the output any more, as in: thinwire cluster ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that hosts are ended and removed."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
