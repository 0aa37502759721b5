"""How the command line looks: lines, tables and the live display."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from thinwire.cli._display import QUIET_S, Live, Plain, megabytes, short, show_table, times
from thinwire.cli._job import Job
from thinwire.cli._text import in_lines, wrapped
from thinwire.cli.cluster import _columns
from thinwire.lab.recipes.events import Breakdown, Outcome, ProgressEvent, Started


def test_counts_are_shown_short() -> None:
    assert [short(n) for n in (999.6, 9_999, 12_345, 2_345_678)] == ["1,000", "9,999", "12.3k", "2.3M"]


def test_megabytes_and_ratios_are_shown_short() -> None:
    assert [megabytes(n) for n in (0, 1_234_000, 12_340_000, 1_234_000_000)] == [
        "0.00 MB",
        "1.23 MB",
        "12.3 MB",
        "1,234 MB",
    ]
    assert [times(r) for r in (None, 1.0, 31.44, 512.3)] == ["-", "1.00x", "31.4x", "512x"]


def test_lines_break_between_words_and_leave_a_command_whole() -> None:
    sentence = "thinwire: unknown recipe 'cifar': did you mean 'cifar10-vgg16'? Known: cifar10-resnet20, an4-gru."
    assert wrapped(sentence, None) == sentence
    lines = wrapped(sentence, 40).splitlines()
    assert max(map(len, lines)) <= 40 and " ".join(lines) == sentence
    assert all(line.startswith("  ") for line in wrapped(sentence, 40, indent=2).splitlines()[1:])
    assert in_lines("dgc:density=0.02,warmup=172,values=fp32", 30) == "dgc:density=0.02,warmup=172,\nvalues=fp32"
    command = "thinwire cluster --hosts 4 --rate 100mbit -- thinwire train --resume runs/thin"
    assert wrapped(f"stopped at step 7 of 90; go on with: {command}", 40).splitlines()[-1] == command


@pytest.mark.parametrize("width", [80, 100, 110, 130, 160])
@pytest.mark.parametrize("recipe", ["digits", "shakespeare"])
def test_live_line_shows_method_and_numbers_in_full(width: int, recipe: str) -> None:
    spec = "dgc:density=0.02,warmup=172,values=fp32"
    job = Job.checked(recipe=recipe, specs=[spec, "blocksign"], epochs=12, seed=0)
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    live = Live(job, out)
    for name in (spec, "blocksign"):
        event = {"epoch": 12, "epochs": 12, "step": 99, "num_steps": 100, "loss": 2.345, "metric": 98.76}
        live.show(ProgressEvent(name, **event, samples_per_s=12_345.0, bytes_sent=123.4e6, ratio=43.1))
    live.close()
    assert isinstance(out.file, io.StringIO)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out.file.getvalue()).splitlines()]
    shown = "\n".join(lines)
    assert spec in shown and "…" not in shown and "98.76" in shown and "43.1x" in shown and "took" not in shown
    assert any(re.match(r"(dgc|dgc:\S+fp32) ", line) for line in lines)
    assert any(line.startswith("blocksign ") and "left" in line for line in lines)


def test_hosts_leave_room_for_their_names_in_a_terminal() -> None:
    assert _columns(Console(file=io.StringIO(), width=110, force_terminal=True), 4)["COLUMNS"] == "101"
    assert _columns(Console(file=io.StringIO(), width=110, force_terminal=True), 12)["THINWIRE_COLUMNS"] == "100"
    assert _columns(Console(file=io.StringIO(), width=110), 4) == {}


def test_plain_run_says_that_it_began_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Plain(Job.checked(recipe="shakespeare", specs=["dgc"], epochs=3, seed=0))
    plain.show(Started(["host0", "host1"], "cpu", "gloo", {}))
    step = ProgressEvent("dgc", 1, 3, 7, 516, 2.5, None, 1000.0, 2e6, 43.0)
    plain.show(step)
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + QUIET_S)
    plain.show(step)
    assert capsys.readouterr().out.splitlines() == [
        "shakespeare: the workers have met on 2 hosts (gloo), training begins",
        "dgc  step 7/516  loss 2.5000  1,000 samples/s  sent 2.00 MB",
    ]


def test_table_of_one_epoch_and_one_worker_has_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(Job.checked(recipe="digits", specs=["dgc"], epochs=1, seed=0), [], num_workers=1)
    assert "test accuracy, 1 epoch, 1 worker, seed 0" in capsys.readouterr().out


def outcome(spec: str, forward_backward_s: float) -> Outcome:
    parts = Breakdown(forward_backward_s, 0.0, 0.002, 0.001, 0.001)
    return Outcome(spec, 97.0, 0.1, 72, 2.0, 900.0, 1e6, 1e6, 1.0, 1.0, 1.0, spec, parts)


def test_table_says_where_a_busy_machine_makes_seconds_incomparable(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job.checked(recipe="digits", specs=["dense", "local:every=3"], epochs=3, seed=0)
    show_table(job, [outcome("dense", 0.010), outcome("local:every=3", 0.013)], num_workers=2)
    shown = capsys.readouterr().out
    assert "seconds*" in shown and "* Seconds do not compare: " in shown and "30 % more with local:every=3" in shown
    show_table(job, [outcome("dense", 0.010), outcome("local:every=3", 0.0115)], num_workers=2)
    assert "*" not in capsys.readouterr().out
    threads = Job.checked(recipe="digits", specs=["dense", "terngrad"], epochs=3, seed=0, in_process=True)
    show_table(threads, [outcome("dense", 0.010), outcome("terngrad", 0.013)], num_workers=2)
    shown = capsys.readouterr().out
    assert "*" not in shown and "seconds are not" in shown  # that they are no workers' seconds is said already
