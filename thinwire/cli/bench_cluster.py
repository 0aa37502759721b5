"""`thinwire bench cluster`: step times on emulated hosts, beside what the cost model predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from thinwire.cli import _complaints
from thinwire.cli._display import console
from thinwire.cli._job import split_specs
from thinwire.cli._json import checked_json, write_json
from thinwire.lab import emulation
from thinwire.lab.bench.cluster import HostFailed, accuracy, all_methods, benched, check_method, measure_cluster
from thinwire.lab.bench.cluster_worker import BenchJob
from thinwire.lab.bench.models import MODELS
from thinwire.lab.bench.peers import PEERS

SHOWN_MODELS = [name for name in MODELS if name != "tiny"]


def cluster(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, separated by commas.")] = "4,8",
    rate: Annotated[str, typer.Option(help="Rates of all links, separated by commas.")] = "100mbit,1gbit",
    model: Annotated[str, typer.Option(help=f"{', '.join(SHOWN_MODELS)}.")] = "vgg16",
    methods: Annotated[
        str | None,
        typer.Option(
            help=f"Methods beside noop, dense, bf16 and PowerSGD, separated by commas; also {', '.join(PEERS)}, and "
            "METHOD@none or METHOD@all: an exchange per bucket, or one for all of them.",
            show_default="{benched}",
        ),
    ] = None,
    latency: Annotated[
        str, typer.Option(metavar="TIME", help="From one host to another, one way; a ping takes twice that: 50ms.")
    ] = "0ms",
    steps: Annotated[
        int, typer.Option(min=4, help="Timed steps per method (rounds, of local steps), fewer where they are long.")
    ] = 9,
    row_seconds: Annotated[float, typer.Option(min=1, help="Where fewer steps are made: seconds per method.")] = 15.0,
    rounds: Annotated[int, typer.Option(min=1, help="All methods set up so often, a part of the steps each.")] = 2,
    predict: Annotated[bool, typer.Option(help="Also measure what predictions need, before each round.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the rows to FILE, as a JSON list.")
    ] = None,
) -> None:
    """Time the steps of a model with every method on emulated hosts: percentiles, samples per second, share of the
    no-communication speed, bytes by the kernel's counters, and where the time goes.

    All hosts share this machine's cores, with one thread each. "noop" sends nothing. Methods take turns step by step,
    with a step of noop before and after each; a step's share is the mean time of those two over its own, and the table
    has the median of all such pairs, so that a change of the machine's speed is not taken for a method's. What noop's
    own row has there (each of its steps against the ones before and after) is the noise of a pair.

    A method of local steps takes whole rounds instead of steps, and its row says what one step of them takes.
    """
    counts, rates = _counts(hosts), _rates(rate)
    if model not in MODELS:
        raise _complaints.Complaint(_complaints.unknown("model", model, SHOWN_MODELS))
    wanted = split_specs("noop", methods)[1:] if methods is not None else list(benched())
    for method in wanted:
        try:
            check_method(method)
        except ValueError as error:
            raise _complaints.Complaint(f"--methods: {error}.") from error
    checked_json(json_file)
    if (why := emulation.why_not() or emulation.why_no_tcp(emulation.CUBIC)) is not None:
        raise _complaints.Complaint(f"no emulated hosts here: {why}")
    try:
        distance = emulation.Distance(emulation.parse_ms(latency))
    except ValueError as error:
        raise _complaints.Complaint(f"--latency: {error}.") from error
    if distance and (why := emulation.why_no_latency()) is not None:
        raise _complaints.Complaint(f"no emulated hosts here: {why.rstrip('.')}.")
    job = BenchJob(model, all_methods(wanted), steps, row_seconds, predict, rounds)
    rows: list[dict[str, Any]] = []
    for number in counts:
        for speed in rates:
            place = ", ".join([f"{number} hosts, {speed}", *distance.words])
            try:
                found, profiles = measure_cluster(number, speed, job, _teller(place), distance)
            except HostFailed as error:
                raise _complaints.Failure(f"{place}: {error}.") from error
            _show(found, profiles)
            rows += found
            write_json(json_file, rows)  # what is measured is kept when a later combination fails


def _teller(place: str) -> Callable[[str], None]:
    """Says on standard error what was measured: a run takes minutes."""
    return lambda what: typer.echo(f"  {place}: {what}", err=True)


def _show(rows: list[dict[str, Any]], profiles: list[dict[str, Any]]) -> None:
    out, first = console(), rows[0]
    out.print(
        f"\n[bold]{first['model']}, {first['hosts']} hosts, {first['rate']}{_far(first)}[/bold]; {first['hardware']}, "
        f"commit {first['commit']}, {first['date']}"
    )
    out.print(
        "milliseconds per step; noop: share of its speed, median of pairs of neighbouring steps, and p20 to p80; kB a "
        "step and host; cpu: of one process; where time goes"
    )
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False)
    for heading in ("method", "p20", "p50", "p80", "pred.", "off", "samp/s", "noop", "of pairs", "kB", "cpu", "fw+bw",
                    "code", "wire", "wait"):  # fmt: skip
        first_column = heading == "method"
        table.add_column(heading, justify="left" if first_column else "right", no_wrap=not first_column)
    for row in rows:
        predicted, p50 = row["predicted_ms"], row["step_ms_p50"]
        parts = [row["breakdown_ms"][k] for k in ("forward_backward", "compress", "communicate", "wait")]
        table.add_row(
            row["method"].replace(",", ", "), f"{row['step_ms_p20']:,.0f}", f"{p50:,.0f}", f"{row['step_ms_p80']:,.0f}",
            f"{predicted:,.0f}" if predicted else "", f"{100 * (predicted / p50 - 1):+.0f}%" if predicted else "",
            f"{row['samples_per_s']:.1f}", f"{row['share_of_noop']:.2f}",
            f"{row['share_of_noop_p20']:.2f}-{row['share_of_noop_p80']:.2f}", f"{row['bytes_per_step'] / 1e3:,.0f}",
            f"{row['processor_ms']:,.0f}", *("" if part is None else f"{part:,.0f}" for part in parts),
        )  # fmt: skip
    out.print(table)
    for place, profile in enumerate(profiles, 1):
        rate = 8e-6 / profile["beta_s_per_byte"] if profile["beta_s_per_byte"] else 0.0
        out.print(
            f"measured before round {place}: {profile['compute_ms']:,.0f} ms per step without communication, "
            f"{1e3 * profile['alpha_s']:.2g} ms per round, {rate:,.0f} Mb/s, overlap {profile['overlap']:.2f}"
        )
    if profiles:
        out.print(accuracy(rows))


def _far(row: dict[str, Any]) -> str:
    return f", {row['latency_ms']:g} ms" if row["latency_ms"] else ""


def _counts(text: str) -> list[int]:
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise _complaints.Complaint(f"--hosts '{text}' is not a list of numbers such as 4,8.") from None
    if not all(2 <= count <= 64 for count in counts):
        raise _complaints.Complaint(f"--hosts '{text}': each number must lie between 2 and 64.")
    return counts


def _rates(text: str) -> list[str]:
    """Each as the rows name it: "1 Gb/s" is 1gbit."""
    try:
        return [emulation.rate_text(emulation.parse_rate(word.strip())) for word in text.split(",")]
    except ValueError as error:
        raise _complaints.Complaint(f"--rate: {error}.") from error
