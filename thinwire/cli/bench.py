"""`thinwire bench kernels`, `thinwire bench wire` and `thinwire bench cluster`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from thinwire.cli import _complaints, bench_cluster
from thinwire.cli._display import console
from thinwire.cli._help import Command, Group
from thinwire.cli._json import checked_json, write_json
from thinwire.codecs.values import VALUE_CODES
from thinwire.lab.bench.kernels import DEFAULTS, SIZES, SMALLEST, Bench
from thinwire.lab.bench.wire import wire_rows
from thinwire.methods import DGC, Method

app = typer.Typer(cls=Group, no_args_is_help=True, help="Measure kernels, codings and step times on this machine.")
app.command("cluster", cls=Command)(bench_cluster.cluster)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the rows to this file, as a JSON list.")]


# Honest rows go down to two thirds of their floor: torch's copy is not the fastest way through memory.
TOO_FAST = 0.5


@app.command("kernels", cls=Command)
def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    sizes: Annotated[str, typer.Option(help=f"Comma separated: {', '.join(SIZES)}, or numbers.")] = ",".join(SIZES),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    repeats: Annotated[int, typer.Option(min=3, help="Timed calls of each work.")] = 15,
    density: Annotated[
        float | None, typer.Option(help="DGC also with this share of elements; its default values unless --values.")
    ] = None,
    values: Annotated[str | None, typer.Option(help=f"DGC also with these values: {', '.join(VALUE_CODES)}.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Time what a rank computes in an exchange with DGC, GTopK, TernGrad and BlockSign at their defaults: from the
    gradient to the frame, and from the frames of 8 ranks to the mean and what is kept. The memory floor and plain torch
    are beside it, in one run, and no byte is sent."""
    chosen = _device(device)
    methods = _methods(density, values)
    numels = [_size(text.strip()) for text in sizes.split(",")]
    checked_json(json_file)
    torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    out = console()
    for numel in numels:
        bench = Bench(numel, chosen, repeats, methods)
        table = Table(title=f"{numel:,} elements on {device}, milliseconds", title_justify="left", box=None)
        for heading in ("work", "kernels", "p20", "p50", "p80", "floor", "x floor", "x torch"):
            left = heading in ("work", "kernels")
            table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "work")
        measured = list(bench.rows())
        for row in measured:
            rows.append(row.as_dict())
            times = [f"{value:.3g}" for value in (row.p20_ms, row.p50_ms, row.p80_ms)]
            optional = [f"{v:.3g}" if v is not None else "" for v in (row.floor_ms, row.x_floor)]
            table.add_row(row.name, row.kernels, *times, *optional, f"{row.x_torch:.1f}x" if row.x_torch else "")
        out.print(table)
        if any(row.x_floor is not None and row.x_floor < TOO_FAST for row in measured):
            out.print("The machine was busy while the memory copy was timed; repeat this on a quiet one.")
    out.print(f"{rows[0]['hardware']}, commit {rows[0]['commit']}, {rows[0]['date']}")
    write_json(json_file, rows)


@app.command("wire", cls=Command)
def wire(
    numel: Annotated[int, typer.Option(min=1, help="Elements of the gradient.")] = SIZES["resnet50"],
    densities: Annotated[str, typer.Option(help="Comma separated shares of elements that are sent.")] = "0.001,0.01",
    json_file: JsonFile = None,
) -> None:
    """Show bits a value for every value and index coding, beside the entropy bound."""
    try:
        shares = [float(text) for text in densities.split(",")]
    except ValueError:
        raise _complaints.Complaint(f"--densities '{densities}' is not a list of numbers such as 0.001,0.01.") from None
    if not all(0 < share <= 1 for share in shares):
        raise _complaints.Complaint(f"--densities '{densities}' must lie in (0, 1].")
    checked_json(json_file)
    title = f"{numel:,} elements; bits a value that is sent; the checksum's share of encoding and decoding"
    table = Table(title=title, title_justify="left", box=None)
    for heading in (
        "density",
        "values",
        "indices",
        "frame bytes",
        "ratio",
        "bits",
        "index bits",
        "entropy",
        "error",
        "checksum",
    ):
        table.add_column(heading, justify="right" if heading not in ("values", "indices") else "left", no_wrap=True)
    rows = wire_rows(numel, shares)
    for row in rows:
        table.add_row(
            f"{row.density:.3g}", row.values, row.indices, f"{row.frame_bytes:,}", f"{row.ratio:.0f}x",
            f"{row.bits:.2f}", f"{row.index_bits:.2f}", f"{row.entropy_bits:.2f}",
            f"{row.error:.2g}", "" if row.checksum_share is None else f"{row.checksum_share:.0%}",
        )  # fmt: skip
    console().print(table)
    write_json(json_file, [row.as_dict() for row in rows])


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise _complaints.Complaint(_complaints.unknown("device", name, ["cpu", "cuda"]))
    if name == "cuda" and not torch.cuda.is_available():
        raise _complaints.Complaint("--device cuda: torch sees no GPU here; use --device cpu.")
    return torch.device(name)


def _size(text: str) -> int:
    if text in SIZES:
        return SIZES[text]
    if text.isdigit() and int(text) >= SMALLEST:
        return int(text)
    raise _complaints.Complaint(_complaints.unknown("size", text, [*SIZES, f"a number of at least {SMALLEST}"]))


def _methods(density: float | None, values: str | None) -> list[Method]:
    """The defaults, and DGC once more where other options are asked for."""
    options: dict[str, Any] = {"density": density, "values": values}
    asked = {name: value for name, value in options.items() if value is not None}
    try:
        return list(dict.fromkeys([DEFAULTS[0], DGC(**asked), *DEFAULTS[1:]]))
    except ValueError as problem:
        raise _complaints.Complaint(f"{problem}.") from None
