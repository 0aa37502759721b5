"""`thinwire report`: one page with curves, bars and tables from training runs, advice and measurements."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

import thinwire
from thinwire.cli._complaints import Complaint, Failure
from thinwire.cli._watch import watch_runs
from thinwire.lab.report import figures as paper_figures
from thinwire.lab.report.gather import gather
from thinwire.lab.report.inputs import read
from thinwire.lab.report.page import GENERATOR, page


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Run folders (train --out DIR), and files of advise --json and bench cluster --json, in any order.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The page to write; an older report there is replaced.")
    ] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page; the recipes' names unless told.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page again while a run goes on; Ctrl-C ends that.")
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write every chart as SVG, PDF and PNG for papers; needs matplotlib."),
    ] = None,
) -> None:
    """Make one web page that opens offline from training runs: curves over steps, time and bytes, bars, tables.

    Example: thinwire report runs/dgc runs/terngrad advice.json --out report.html

    Runs that differ in the seed alone are shown as mean and range. Of a run that is still going, what is there is
    shown; with --watch the page is written again while it goes on. Buttons on the page save each chart as SVG or PNG
    and each table as CSV.
    """
    _check_target(out)
    if watch and figures is not None:
        raise Complaint("--watch writes the page alone; leave --figures out until the run has ended.")
    paths = list(dict.fromkeys(inputs))
    if watch:
        watch_runs(paths, lambda live: _write(out, _page_of(paths, title, live)[1]), out)
        return
    data, text = _page_of(paths, title)
    if figures is not None:
        written = _write_figures(data, figures)
    _write(out, text)
    typer.echo(f"Written to {out} ({len(text.encode()) / 1000:,.0f} kB); open it in any browser.")
    if figures is not None:
        typer.echo(f"{written} figures written to {figures}.")


def _page_of(paths: list[Path], title: str, live: int = 0) -> tuple[dict[str, Any], str]:
    """What the page shows, and the page; a live one loads itself again every so many seconds."""
    try:
        data = gather([read(path) for path in paths])
    except ValueError as error:
        raise Complaint(f"{str(error).rstrip('.')}.") from error
    names = dict.fromkeys([section["recipe"] for section in data["sections"]] or ["scaling"])
    clock = "%Y-%m-%d %H:%M:%S UTC" if live else "%Y-%m-%d %H:%M UTC"
    data["made"] = {"version": thinwire.__version__, "date": datetime.now(timezone.utc).strftime(clock)}
    data["live"] = live
    return data, page(data, title or f"thinwire report: {', '.join(names)}")


def _check_target(out: Path) -> None:
    """Before anything is read: the page must not take the place of something else."""
    if out.is_dir():
        raise Complaint(f"--out '{out}' is a folder; name a file in it, such as {out / 'report.html'}.")
    if not out.parent.is_dir():
        raise Complaint(f"--out '{out}': the folder '{out.parent}' does not exist.")
    try:
        if out.exists() and GENERATOR.encode() not in out.read_bytes()[:4000]:
            raise Complaint(f"--out '{out}' exists and is not a report; name another file.")
    except OSError as error:
        raise Complaint(f"--out '{out}' cannot be written: {error.strerror}.") from error


def _write(path: Path, text: str) -> None:
    """Under another name first, then moved: nobody sees half a page."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise Failure(f"'{path}' cannot be written: {error.strerror}.") from error


def _write_figures(data: dict[str, object], folder: Path) -> int:
    try:
        return paper_figures.write(data, folder)
    except ImportError as error:
        raise Complaint("--figures needs matplotlib: pip install 'thinwire[figures]'.") from error
    except OSError as error:
        raise Failure(f"the figures cannot be written to '{folder}': {error.strerror}.") from error
