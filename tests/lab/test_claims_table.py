"""Runs are kept in small files, and tables of claims come out of them. The runs are made up."""

from __future__ import annotations

import itertools
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import accuracy_page
import claims_figures
import claims_table
import pytest
import report_inputs
from claimed import CLAIMS, Claim, Row
from claims import EARLIER, LATER, LOCAL, NOW, RUNS, STEEPLY, WITHOUT_OPTION, arguments_of, as_it_was, method_of
from comparing import find
from kept_runs import keep, write_folder
from paths import ROOT

from thinwire.lab.peers import parse as parse_peer
from thinwire.lab.report import inputs

DGC = "dgc:density=0.001,warmup=80"
CLAIM = Claim("DGC keeps accuracy", "digits-s*::dense", (Row("DGC 0.1 %", "like dense", "digits-s*::dgc*"),))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for seed in (0, 1):
        folder = report_inputs.write_run(tmp_path / f"digits-s{seed}", [DGC, "dense"], seed, epochs=40)
        kept = keep(folder, tmp_path / "kept")
        assert kept.stat().st_size < 20_000
    return tmp_path / "kept"


def outcome(results: Path, seed: int, spec: str) -> dict[str, float]:
    runs = json.loads((results / f"digits-s{seed}.json").read_text())["summary"]["runs"]
    return next(run for run in runs if run["spec"] == spec)


def test_claims_table_says_what_the_runs_came_to(results: Path) -> None:
    title, _, heads, _, row = claims_table.table(CLAIM, results).strip().split("\n")
    assert title == "### DGC keeps accuracy" and heads.count("|") == row.count("|") == len(claims_table.HEADINGS) + 1
    ours, dense = ([outcome(results, seed, spec)["metric"] for seed in (0, 1)] for spec in (DGC, "dense"))
    label, paper, mean, beside, by, verdict, sent, fewer, runs = row.strip("| ").split(" | ")
    assert (label, paper) == ("DGC 0.1 %", "like dense")
    assert mean == f"{sum(ours) / 2:.2f} ± {abs(ours[0] - ours[1]) / 2:.2f} % (2)"
    seeds = ", ".join(f"{one - other:+.2f}" for one, other in zip(ours, dense, strict=True))
    assert beside.startswith(f"{sum(dense) / 2:.2f} ± ")
    assert by == f"{sum(ours) / 2 - sum(dense) / 2:+.2f} ({seeds}) points"
    times = outcome(results, 0, "dense")["bytes_sent"] / outcome(results, 0, DGC)["bytes_sent"]
    assert fewer == f"{times:.0f}x" and "13.8 kB" in sent and (verdict, runs) == (claims_table.NOTHING, "`digits-s*`")


def test_claims_table_says_whether_a_claim_holds(results: Path) -> None:
    ours, dense = ([outcome(results, seed, spec)["metric"] for seed in (0, 1)] for spec in (DGC, "dense"))
    lost = sum(dense) / 2 - sum(ours) / 2
    most = max(other - one for one, other in zip(ours, dense, strict=True))

    def verdict(**asked: Any) -> str:
        row = Row("", "-", "digits-s*::dgc*", **asked)
        return claims_table.cells(Claim("x", "digits-s*::dense", (row,)), row, results)[5]

    assert verdict(within=most + 0.01) == "yes" and lost < most
    assert verdict(within=(lost + most) / 2) == "on average; not on every seed"
    assert verdict(within=lost - 0.01, why="short") == f"does not hold here: at most {lost - 0.01:g} was asked; short"
    assert verdict(behind=lost - 0.01) == "yes, it is worse"
    noise = f"{lost + 0.01:g} may be noise"
    assert lost > 0 and verdict(behind=lost + 0.01) == f"not decided, {lost:.2f} behind: {noise}"
    better = Row("", "-", "digits-s*::dense", behind=0.1)
    assert claims_table.cells(Claim("x", "digits-s*::dgc*", (better,)), better, results)[5] == (
        "does not hold here, it is not worse"
    )
    alike = verdict(within=most + 0.01, than="digits-s*::dense")
    assert alike == f"yes, {lost:.2f} behind `digits-s*::dense`"


def test_claims_table_compares_a_run_with_dense_of_its_own_seed(results: Path) -> None:
    row = Row("", "-", "digits-s1::dgc*", within=100.0)
    cells = claims_table.cells(Claim("x", "digits-s*::dense", (row,)), row, results)
    ours, dense = (outcome(results, 1, spec)["metric"] for spec in (DGC, "dense"))
    assert cells[3] == f"{dense:.2f} % (1)" and cells[4] == f"{ours - dense:+.2f} points"


def test_claims_table_judges_what_was_taken_out_against_the_whole(results: Path) -> None:
    lost = outcome(results, 0, "dense")["metric"] - outcome(results, 0, DGC)["metric"]
    for least, word, noise in (
        (lost - 0.01, "yes", ""),
        (lost + 0.01, "not decided", f": {lost + 0.01:g} may be noise"),
    ):
        row = Row("", "-", "digits-s0::dgc*", behind=least, than="digits-s*::dense")
        cells = claims_table.cells(Claim("x", "digits-s*::dgc*", (row,)), row, results)
        assert cells[5] == f"{word}, {lost:.2f} behind `digits-s*::dense`{noise}"


def test_claims_table_takes_dense_bytes_of_as_many_workers(results: Path, tmp_path: Path) -> None:
    """A ring all-reduce of the same gradient: 2 (N - 1) / N of it over every link."""
    run = json.loads((results / "digits-s0.json").read_text())
    workers = run["config"]["workers"]
    (tmp_path / "ours-s0.json").write_text(json.dumps(run))
    run["config"]["workers"] = 2 * workers
    (tmp_path / "dense-s0.json").write_text(json.dumps(run))
    row = Row("", "-", "ours-s*::dgc*")
    fewer = claims_table.cells(Claim("x", "dense-s*::dense", (row,)), row, tmp_path)[7]
    times = outcome(results, 0, "dense")["bytes_sent"] / outcome(results, 0, DGC)["bytes_sent"]
    times *= (1 - 1 / workers) / (1 - 1 / (2 * workers))
    assert fewer == f"{times:.{0 if times >= 100 else 1}f}x"


def test_kept_runs_were_made_by_the_commands_of_the_list() -> None:
    typed = {**EARLIER, **LATER, **NOW, **LOCAL}  # with the defaults of the time
    for path in sorted(claims_table.RESULTS.glob("*.json")):
        config = json.loads(path.read_text())["config"]
        words = arguments_of(path.stem, Path("data"), Path("out"))
        given = dict(itertools.pairwise(words))
        settings = given.get("--set", "")
        if path.stem in EARLIER:  # it could not be set then
            settings = settings.replace(f",{STEEPLY}", "")
        (spec,) = config["specs"]
        # As it was typed when defaults were others or, where it was run later, as the list writes it out.
        assert any(f"--method {spec} " in f"{command} " for command in (typed[path.stem], RUNS[path.stem])), path.name
        assert config["recipe"] == given["--recipe"], path.name
        for in_full in config.get("methods", []):  # what was run, whatever the defaults were
            _, run = as_it_was(f"--method {in_full}", WITHOUT_OPTION).split()
            assert parse_peer(given["--method"]).in_full == parse_peer(run).in_full, path.name
        assert config["workers"] == int(given["--workers"]) and config["seed"] == int(given.get("--seed", 0)), path.name
        assert config["epochs"] == int(given["--epochs"]), path.name
        assert ",".join(config.get("settings") or []) == settings, path.name


def test_kept_runs_are_thinned_and_still_make_a_report(results: Path, tmp_path: Path) -> None:
    run = json.loads((results / "digits-s0.json").read_text())
    assert set(run) == {"config", "summary", "metrics"} and list(run["metrics"]) == [DGC, "dense"]
    curves = run["metrics"][DGC]
    assert len(curves["epoch"]["metric"]) == 40 and 50 < len(curves["steps"]["loss"]) <= 100
    read = inputs.read(write_folder(results / "digits-s0.json", tmp_path / "again"))
    assert isinstance(read, inputs.Run) and read.finished and len(read.epochs[DGC]) == 40
    assert read.epochs[DGC][-1]["metric"] == pytest.approx(outcome(results, 0, DGC)["metric"])


def test_kept_runs_name_methods_as_they_are_called_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture made of them would otherwise show a string that means something else by now."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "r20-dgc-s0.json").write_text((claims_table.RESULTS / "r20-dgc-s0.json").read_text())
    claims_table.main(["folders", str(tmp_path / "runs"), "--results", str(kept)])
    read = inputs.read(Path(capsys.readouterr().out.strip()))
    assert isinstance(read, inputs.Run) and list(read.epochs) == [method_of("r20-dgc-s0")]
    assert "scope=tensor" in method_of("r20-dgc-s0")


def test_claims_table_says_what_is_not_there_and_what_diverged(results: Path) -> None:
    path = results / "digits-s1.json"
    run = json.loads(path.read_text())
    run["summary"]["runs"][0]["metric"] = None
    path.write_text(json.dumps(run))
    (row,) = claims_table.table(CLAIM, results).strip().split("\n")[4:]
    assert "(1), 1 of 2 diverged" in row and row.split(" | ")[4] == claims_table.NOTHING
    other = Claim("x", "digits-s*::dense", (Row("later", "-", "later-s*"),))
    assert claims_table.table(other, results).endswith("\nNot run to the end yet: `later-s*`.\n")
    other = Claim("x", "later-s*", CLAIM.rows)
    assert claims_table.table(other, results).split(" | ")[-6:-4] == ["not run", claims_table.NOTHING]
    run["config"]["workers"] = 9
    path.write_text(json.dumps(run))
    with pytest.raises(ValueError, match="differ in workers"):
        claims_table.table(CLAIM, results)
    with pytest.raises(ValueError, match="add ::METHOD"):
        find("digits-s0", results)
    with pytest.raises(ValueError, match=r"no summary\.json"):
        keep(report_inputs.write_run(results / "going", ["dense"], finished=False), results)


def test_claims_name_runs_that_are_planned() -> None:
    for claim in CLAIMS:
        for row in claim.rows:
            for pattern in (row.runs, row.dense or claim.dense):
                assert any(fnmatchcase(name, pattern) for name in RUNS), pattern


def test_claims_can_be_printed_before_anything_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims_table.main(["table", "--results", str(tmp_path)])
    out = capsys.readouterr().out
    assert out.count("### ") == len(CLAIMS) == out.count("Not run to the end yet")
    assert all(f"`{row.runs}`" in out for claim in CLAIMS for row in claim.rows)


def test_claims_tables_of_the_docs_are_what_the_kept_runs_make() -> None:
    shown = (ROOT / "docs" / "results.md").read_text()
    for claim in CLAIMS:
        assert claims_table.table(claim, claims_table.RESULTS) in shown, claim.title
    assert accuracy_page.accuracy_table(claims_table.RESULTS) in (ROOT / "docs" / "accuracy.md").read_text()


def test_claims_pictures_of_the_docs_are_drawn_from_kept_runs() -> None:
    shown = (ROOT / "docs" / "results.md").read_text()
    for name, _, runs in claims_figures.PICTURES:
        assert all(claims_figures.kept(run) for run in runs)
        assert f"(figures/claims-{name}.svg)" in shown and (ROOT / f"docs/figures/claims-{name}.svg").is_file()
    assert shown.count("(figures/claims-") == len(claims_figures.PICTURES)


def test_claims_table_of_the_accuracy_page_marks_what_is_further_behind_than_asked(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, dense = ([outcome(results, seed, spec)["metric"] for seed in (0, 1)] for spec in (DGC, "dense"))
    lost = sum(dense) / 2 - sum(ours) / 2
    lines = [
        accuracy_page.Line("digits", method, "digits-s*::dgc*", "digits-s*::dense", within)
        for method, within in (("strict", lost - 0.01), ("patient", lost + 0.01))
    ]
    monkeypatch.setattr(accuracy_page, "LINES", lines)
    strict, patient = accuracy_page.accuracy_table(results).splitlines()[2:]
    mean = f"{sum(ours) / 2:.2f} %"
    assert strict.startswith(f"| digits | strict | 40, 2 | **{mean}** | {sum(dense) / 2:.2f} % | {-lost:+.2f} (")
    assert strict.endswith(" times fewer |") and patient.startswith(f"|  | patient | 40, 2 | {mean} | ")
    with pytest.raises(ValueError, match="lacks 'digits-s"):
        monkeypatch.setattr(accuracy_page, "LINES", [accuracy_page.Line("digits", "", "digits-s*::dgc*", "later-s*")])
        accuracy_page.accuracy_table(results)
