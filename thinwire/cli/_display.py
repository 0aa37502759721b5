"""What the user sees: a live line per method in a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from thinwire.cli._job import Job
from thinwire.cli._text import counted, in_lines, room, wrapped
from thinwire.lab import peers
from thinwire.lab.comparable import why_not_comparable
from thinwire.lab.recipes import RECIPES
from thinwire.lab.recipes.base import Metric
from thinwire.lab.recipes.events import Epoch, Event, Outcome, ProgressEvent, Resumed, Started

# Columns of a live line apart from the method: bar, time, gaps and numbers at their longest, without and with their
# names. The metric's own name comes on top of the latter.
NARROW, WIDE = 70, 96
QUIET_S = 10.0  # so long nothing was printed: a line that says that the run goes on
SHORT = 90  # columns below which a table's headings have several lines
PLAIN_WIDTH = 120  # for files and pipes, where no terminal says how wide it is


class Display(Protocol):
    """Shows events as they come; `close` leaves the terminal as it was."""

    def show(self, event: Event) -> None: ...

    def saving(self) -> None:
        """Ctrl-C was pressed, and a checkpoint is being made."""
        ...

    def close(self) -> None: ...


def console() -> Console:
    """Standard output, as wide as the terminal, what COLUMNS says, or PLAIN_WIDTH."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=room() or PLAIN_WIDTH)


def display_for(job: Job) -> Display:
    """The live display in a terminal, the plain one elsewhere."""
    out = console()
    return Live(job, out) if out.is_terminal and not out.is_dumb_terminal else Plain(job)


class Plain:
    """One line when the workers have met, one per epoch, and one now and then where epochs are long."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.metric = RECIPES[job.recipe].metric
        self.said_s = time.monotonic()

    def show(self, event: Event) -> None:
        if isinstance(event, Started) and not self.job.resume:  # else Resumed comes next, and says more
            where = f"{len(event.hosts)} hosts" if len(event.hosts) > 1 else event.hosts[0]
            self._say(f"{self.job.recipe}: the workers have met on {where} ({event.backend}), training begins")
        elif isinstance(event, ProgressEvent) and time.monotonic() - self.said_s >= QUIET_S:
            self._say(
                f"{event.spec}  step {event.step}/{event.num_steps}  loss {event.loss:.4f}  "
                f"{event.samples_per_s:,.0f} samples/s  sent {megabytes(event.bytes_sent)}"
            )
        elif isinstance(event, Epoch):
            self._say(
                f"{event.spec}  epoch {event.epoch}/{self.job.epochs}  loss {event.loss:.4f}  "
                f"{self.metric.name} {value_of(self.metric, event.metric)}  "
                f"{event.samples_per_s:,.0f} samples/s  "
                f"sent {megabytes(event.bytes_sent)}  ratio {times(event.ratio)}"
            )
        elif isinstance(event, Resumed):
            self._say(f"{event.spec}  goes on after step {event.step}")

    def saving(self) -> None:
        self._say("saving a checkpoint; Ctrl-C again to end without")

    def _say(self, line: str) -> None:
        self.said_s = time.monotonic()
        print(wrapped(line, room(), indent=2), flush=True)

    def close(self) -> None:
        pass


class _TimeLeft(ProgressColumn):
    """Time left while a run is going; the time it took when it is done."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished else task.time_remaining
        text = "-:--" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        return Text(f"took {text}" if task.finished else f"{text} left", style="cyan")


@dataclass(frozen=True)
class _Narrow:
    """A renderable that leaves room at the right: a ^C typed there must not begin a new line."""

    inner: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.inner, options.update_width(max(1, options.max_width - 3)))


class _Lines(Progress):
    """A progress display of narrow lines."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.line(self.tasks)

    def line(self, tasks: Sequence[Task]) -> RenderableType:
        return _Narrow(self.make_tasks_table(tasks))


class Live:
    """One line that changes while a method trains, and stays as it is when the next one begins."""

    def __init__(self, job: Job, out: Console) -> None:
        self.progress = _Lines(
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            _TimeLeft(table_column=Column(no_wrap=True)),
            console=out,
            expand=True,
        )
        self.metric = RECIPES[job.recipe].metric
        self.spec: str | None = None
        self.task = self.progress.add_task("starting workers", total=None, numbers="")
        self.wide = False
        self.last: ProgressEvent | None = None
        self.progress.start()

    def show(self, event: Event) -> None:
        if isinstance(event, ProgressEvent):
            if event.spec != self.spec:
                self._keep_line()
                self.spec = event.spec
                self.task = self.progress.add_task(escape(self._title()), total=event.num_steps, numbers="")
            self.last = event
            self.progress.update(self.task, completed=event.step, numbers=self._numbers(event, event.metric))
        elif isinstance(event, Epoch) and self.last is not None:
            self.progress.update(self.task, numbers=self._numbers(self.last, event.metric))

    def _title(self) -> str:
        """The method with its options where they fit into the line; else its name, the whole in a line above."""
        assert self.spec is not None
        out = self.progress.console
        if NARROW + len(self.spec) <= out.width:
            title = self.spec
        else:
            title = self.spec.partition(":")[0]
            out.print(escape(self.spec), style="dim")
        self.wide = WIDE + len(self.metric.name) + len(title) <= out.width
        return title

    def _numbers(self, event: ProgressEvent, metric: float | None) -> str:
        """Epoch, loss, the metric of the last epoch, samples per second, bytes and ratio: what fits the width."""
        value = "-" if metric is None else value_of(self.metric, metric)
        wide = self.wide
        words = [
            f"{event.epoch:>{len(str(event.epochs))}}/{event.epochs}",
            f"loss {event.loss:.3f}",
            f"{self.metric.name} {value:>6}" if wide else f"{value:>6}",
            f"{event.samples_per_s:>6,.0f} samples/s" if wide else f"{short(event.samples_per_s):>5}/s",
            f"sent {megabytes(event.bytes_sent):>7}" if wide else f"{megabytes(event.bytes_sent):>7}",
            f"ratio {times(event.ratio):>5}" if wide else f"{times(event.ratio):>5}",
        ]
        return ("  " if wide else " ").join(words)

    def saving(self) -> None:
        self.progress.console.print("saving a checkpoint; Ctrl-C again to end without", style="yellow")

    def close(self) -> None:
        self._keep_line()
        self.progress.stop()

    def _keep_line(self) -> None:
        # Printed above the live display, which hides its last line when it has more than the terminal.
        task = self.progress.tasks[0]
        self.progress.remove_task(task.id)
        if self.spec is not None:
            self.progress.console.print(self.progress.line([task]))


def show_table(job: Job, outcomes: Sequence[Outcome], num_workers: int) -> None:
    """Method, metric, difference to dense, bytes, ratio, seconds; and what was not the same for all."""
    metric = RECIPES[job.recipe].metric
    dense = next((outcome for outcome in outcomes if outcome.spec in ("dense", "dense:dtype=fp32")), None)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, show_edge=False)
    table.add_column("method", overflow="fold")
    out = console()
    compute_s = {outcome.spec: outcome.breakdown.forward_backward_s for outcome in outcomes}
    compress_s = {outcome.spec: outcome.breakdown.compress_s for outcome in outcomes}
    uneven = "" if job.in_process else why_not_comparable(compute_s, compress_s)
    seconds = "seconds*" if uneven else "seconds"
    for heading in (metric.name, "to dense", "ratio", "sent/worker", "link ratio", seconds):
        if out.width < SHORT:  # words below each other leave room for the method
            heading = heading.replace(" ", "\n").replace("/", "/\n")
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            escape(in_lines(outcome.spec, out.width - 52) if out.width < SHORT else outcome.spec),
            value_of(metric, outcome.metric),
            difference(outcome, dense),
            times(outcome.ratio),
            megabytes(outcome.bytes_sent),
            times(outcome.link_ratio),
            f"{outcome.seconds:.1f}",
        )
    size = f"{counted(job.epochs, 'epoch')}, {counted(num_workers, 'worker')}"
    out.print(f"\n[bold]{job.recipe}[/bold]: test {metric.name}, {size}, seed {job.seed}")
    out.print(table)
    out.print(
        "ratio: dense fp32 gradients / frames handed over.  link ratio: dense ring all-reduce / bytes over a link.",
        style="dim",
    )
    if uneven:
        out.print(f"* {escape(uneven)}", style="yellow")
    if job.in_process:
        out.print("Workers were threads: accuracy and bytes are those of real workers, seconds are not.", style="dim")
    factors = {o.method.partition(":")[0]: o.lr_factor for o in outcomes if o.lr_factor != 1}
    for name, factor in factors.items():
        out.print(f"{name} ran with {factor:g} times the recipe's learning rate.")
    for outcome in outcomes:
        asked = str(peers.parse(job.methods[job.specs.index(outcome.spec)]))
        if outcome.method != asked:
            out.print(f"{escape(outcome.spec)} ran as {escape(outcome.method)}: the recipe clips gradients.")


def difference(outcome: Outcome, dense: Outcome | None) -> str:
    """The signed distance to dense; a dash for dense itself and where dense did not run."""
    return "-" if dense is None or outcome is dense else f"{outcome.metric - dense.metric:+.2f}"


def value_of(metric: Metric, value: float) -> str:
    """A metric with its unit."""
    unit = metric.unit if metric.unit in ("", "%") else f" {metric.unit}"
    return f"{value:.2f}{unit}"


def short(number: float) -> str:
    """12,345 -> "12.3k"."""
    return f"{number:,.0f}" if number < 10_000 else f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.1f}M"


def megabytes(nbytes: float) -> str:
    """Bytes in MB (10**6), with three digits that mean something."""
    value = nbytes / 1e6
    return f"{value:,.0f} MB" if value >= 100 else f"{value:.1f} MB" if value >= 10 else f"{value:.2f} MB"


def times(ratio: float | None) -> str:
    """A compression ratio: "1.00x", "43.1x", "512x"; a dash where nothing was sent."""
    if ratio is None:
        return "-"
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"
