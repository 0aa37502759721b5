"""All verbs as one command line, and what becomes of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

import thinwire
from thinwire import ctrl_c, kernels
from thinwire.cli import _complaints, advise, bench, cluster, complain, info, report, train
from thinwire.cli._help import Command, Group

app = typer.Typer(
    name="thinwire",
    cls=Group,
    help="Data-parallel PyTorch training over thin wires.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("train", cls=Command)(train.train)
app.command("cluster", cls=Command, context_settings={"allow_interspersed_args": False})(cluster.cluster)
app.command("report", cls=Command)(report.report)
app.command("advise", cls=Command)(advise.advise)
app.command("info", cls=Command)(info.info)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {thinwire.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end."),
    ] = False,
) -> None:
    try:
        kernels.describe()
    except (ValueError, RuntimeError) as error:
        raise _complaints.Complaint(f"{error}.") from error


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; mistakes are answered with one sentence."""
    try:
        result: Any = app(list(arguments), prog_name="thinwire", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except _complaints.Complaint as complaint:
        return complain(str(complaint), complaint.exit_code)
    except _complaints.CLICK_ERROR as error:
        sentence = _complaints.sentence_of(error)
        return complain(sentence, 2) if sentence else 2
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return complain(ctrl_c.CTRL_C, 130)
