"""`thinwire report`: what is read, what is put into the page, and what is refused with a sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_inputs import METHODS, write_advice, write_cluster, write_run

from thinwire.cli import run
from thinwire.lab import emulation
from thinwire.lab.report import figures
from thinwire.lab.report.gather import MAX_POINTS, gather
from thinwire.lab.report.inputs import Run, read
from thinwire.lab.report.page import page

SPECS = list(METHODS)[:3]


def make(tmp_path: Path, *inputs: Path, out: str = "report.html") -> tuple[str, dict[str, Any]]:
    """The page that the command writes, and the data in it."""
    assert run(["report", *map(str, inputs), "--out", str(tmp_path / out)]) == 0
    text = (tmp_path / out).read_text()
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(blocks) == 1
    return text, json.loads(blocks[0])


def test_report_is_one_file_with_all_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", SPECS)
    text, data = make(tmp_path, folder)
    assert not re.findall(r"""(?:src|href)\s*=\s*["']|@import|url\(\s*["']?(?:http|//)""", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    (section,) = data["sections"]
    assert [series["method"] for series in section["series"]] == data["methods"] == SPECS
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for series in section["series"]:
        for kind, columns in (("epoch", series["epochs"]), ("steps", series["steps"])):
            own = [line for line in lines if line["spec"] == series["spec"] and line["kind"] == kind]
            assert columns["step"] == [line["step"] for line in own]
            assert columns["loss"] == [line["loss"] for line in own]
            assert columns["bytes"] == [line["bytes_sent"] for line in own]
    (source,) = data["sources"]
    assert source["commit"] == "0123abc" and source["date"] == "2026-11-15" and source["status"] == "finished"
    assert source["hardware"] == "a made-up machine, 4 cores, Linux"
    assert source["command"].startswith("thinwire train --recipe digits --method dense --compare ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.html"]  # nothing else is left


def test_report_lets_no_data_become_markup_or_code(tmp_path: Path) -> None:
    evil = "dgc</script><script>window.hacked=1</script><!--\u2028{{script}}&amp;"
    folder = write_run(tmp_path / "a<!-- <script>", [evil], recipe="<img src=x onerror=alert(1)>")
    text, data = make(tmp_path, folder)
    assert data["methods"] == [evil] and data["sources"][0]["name"] == "a<!-- <script>"
    assert text.count("<script") == text.count("</script>") == page({}, "").count("<script")
    assert "<img" not in text and text.count("<!--") == 0


def test_report_reads_folders_without_environment_and_metric(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ["dense"], steps=False)
    config = json.loads((folder / "config.json").read_text())
    del config["environment"], config["metric"], config["device"]
    (folder / "config.json").write_text(json.dumps(config))
    _, data = make(tmp_path, folder)
    assert len(data["sections"][0]["series"][0]["epochs"]["step"]) == 8
    assert data["sections"][0]["metric"]["name"] == "metric" and data["sources"][0]["commit"] == ""


def test_report_shows_a_run_that_is_going_on_as_far_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", SPECS, finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epoch", "spec": "terngrad", "st')  # torn
    _, data = make(tmp_path, folder)
    assert data["sources"][0]["status"] == "still running, or was interrupted"
    last = data["sections"][0]["series"][-1]
    assert last["epochs"]["step"] == [20, 40, 60, 80] and not last["finished"]
    assert last["row"]["steps"] == 80 and last["row"]["ratio"] == METHODS["terngrad"][1]


def test_report_counts_what_a_resumed_run_wrote_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ["dense"], steps=False)
    again = {"kind": "epoch", "spec": "dense", "epoch": 7, "step": 140, "loss": 9.0, "metric": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    found = read(folder)
    assert isinstance(found, Run)
    assert [line["step"] for line in found.epochs["dense"]] == [20, 40, 60, 80, 100, 120, 140]
    assert found.epochs["dense"][-1]["loss"] == 9.0


def test_report_makes_a_mean_and_a_band_of_seeds(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / str(seed), SPECS, seed) for seed in range(3)]
    _, data = make(tmp_path, *folders)
    runs = [read(folder) for folder in folders]
    (section,) = data["sections"]
    assert len(section["series"]) == 3
    for series in section["series"]:
        assert series["seeds"] == ["0", "1", "2"]
        for i in range(8):
            values = [item.epochs[series["spec"]][i]["metric"] or 0.0 for item in runs if isinstance(item, Run)]
            assert series["epochs"]["metric"][i] == pytest.approx(sum(values) / 3)
            assert series["epochs"]["metric_low"][i] == min(values)
            assert series["epochs"]["metric_high"][i] == max(values)
    dense, dgc = section["series"][0]["row"], section["series"][1]["row"]
    assert dgc["to_dense"] == pytest.approx(dgc["metric"] - dense["metric"]) and dense["to_dense"] is None


def test_report_averages_seeds_alone(tmp_path: Path) -> None:
    """The same seed twice, or another number of workers: something else differs, and a mean would hide it."""
    a, b = write_run(tmp_path / "thin", ["dense"]), write_run(tmp_path / "fat", ["dense"])
    _, data = make(tmp_path, a, b)
    assert data["methods"] == ["dense [thin]", "dense [fat]"]
    c = write_run(tmp_path / "eight", ["dense"], seed=1, workers=8)
    _, data = make(tmp_path, a, c)
    assert data["methods"] == ["dense (8 epochs, 4 workers, cpu)", "dense (8 epochs, 8 workers, cpu)"]
    _, data = make(tmp_path, a, a)  # the same folder named twice
    assert data["methods"] == ["dense"]


def test_report_ends_a_mean_where_one_of_the_runs_ends(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "0", ["dense"]), write_run(tmp_path / "1", ["dense"], seed=1, finished=False)]
    _, data = make(tmp_path, *folders)
    (series,) = data["sections"][0]["series"]
    assert series["epochs"]["step"] == [20, 40, 60, 80] and not series["finished"]


def test_report_shows_a_loss_that_diverged_as_a_gap(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ["dense"], steps=False)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(re.sub(r'"loss": [0-9.]+', '"loss": NaN', text, count=1))
    text, data = make(tmp_path, folder)
    assert data["sections"][0]["series"][0]["epochs"]["loss"][0] is None


def test_report_weighs_the_breakdowns_lines_by_their_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", ["dense"])
    phases = {"forward_backward_s": 0.001, "compress_s": 0, "communicate_s": 0.004, "wait_s": 0, "other_s": 0}
    base = {"kind": "steps", "spec": "dense", "epoch": 1, "loss": 1.0, "seconds": 1.0, "bytes_sent": 1.0}
    rows = [
        {**base, "step": 10, "breakdown": phases},
        {**base, "step": 40, "breakdown": {**phases, "communicate_s": 0.008}},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, data = make(tmp_path, folder)
    breakdown = data["sections"][0]["series"][0]["breakdown_ms"]
    assert breakdown["communicate"] == pytest.approx((10 * 4 + 30 * 8) / 40)
    assert breakdown["forward_backward"] == pytest.approx(1.0)
    (folder / "metrics.jsonl").write_text("")  # without step lines: what the summary says
    _, data = make(tmp_path, folder)
    assert data["sections"][0]["series"][0]["breakdown_ms"]["communicate"] == pytest.approx(300.0)


def test_report_thins_long_logs_by_averaging() -> None:
    lines = [{"step": float(i), "seconds": i / 10, "bytes_sent": i * 5.0, "loss": float(i % 3)} for i in range(1, 3001)]
    data = gather([Run("a", {"specs": ["dense"]}, steps={"dense": lines})])
    series = data["sections"][0]["series"][0]
    assert len(series["steps"]["step"]) == MAX_POINTS and series["averaged"] == 3
    assert series["steps"]["step"][:2] == [3, 6] and set(series["steps"]["loss"]) == {1.0}


def test_report_puts_measured_points_on_the_advice_they_belong_to(tmp_path: Path) -> None:
    advice = write_advice(tmp_path / "advice.json")
    same = write_cluster(tmp_path / "same.json", advice)
    other = write_cluster(tmp_path / "other.json", advice, rate="100mbit")
    _, data = make(tmp_path, same, advice)  # in any order
    (chart,) = data["scaling"]
    assert len(chart["predicted"]) == 5 and len(chart["measured"]) == 10 and chart["title"] == "vgg16, 1gbit"
    assert chart["recommended"] == "gtopk:density=0.001" and chart["sources"] == ["advice.json", "same.json"]
    assert chart["predicted"][1]["method"] == "dense" and chart["predicted"][1]["hosts"][-1] == 256
    _, data = make(tmp_path, advice, other)  # another link: a chart of its own, with the rows' own predictions
    first, second = data["scaling"]
    assert not first["measured"] and len(second["measured"]) == 10 and second["predicted"][0]["hosts"] == [4, 8]
    rows = json.loads(same.read_text())
    same.write_text(json.dumps([{**row, "predicted_ms": 2 * row["predicted_ms"]} for row in rows]))  # another model
    _, data = make(tmp_path, advice, same)
    assert len(data["scaling"]) == 2


EPOCH = '"kind": "epoch"'


@pytest.mark.parametrize("name, content, sentence", [
    ("a.json", "{", "is not JSON"),
    ("train.py", "import torch", r"is not JSON; a report is made from run folders \(thinwire train --out DIR\)"),
    ("a.json", "[]", "holds neither advice"),
    ("a.json", '{"kind": "advice", "predictions": 3}', "predictions in .* must be a JSON list, not a number"),
    ("a.json", '{"kind": "advice", "predictions": [{"method": "x", "hosts": "4"}]}', "hosts in .* must be a number"),
    ("a.json", '[{"kind": "cluster", "method": 7}]', "method in row 1 of .* must be a string, not a number"),
    ("a.json", b"\xff\xfe\x00", "is not JSON"),
    ("run/config.json", "[1]", "must be a JSON object, not a list"),
    ("run/config.json", '{"specs": "dense"}', "specs in .* must be a JSON list, not text"),
    ("run/config.json", '{"specs": [1]}', "must be method strings"),
    ("run/config.json", '{"metric": "accuracy"}', "metric in .* must be a JSON object"),
    ("run/config.json", "{}", None),
    ("run/metrics.jsonl", "nonsense\n{}\n", "line 1 of .* is not JSON"),
    ("run/metrics.jsonl", "[]\n", "line 1 of .* must be a JSON object"),
    ("run/metrics.jsonl", f'{{{EPOCH}, "spec": "dense", "step": true}}\n', "step in line 1 of .* number, not true or"),
    ("run/metrics.jsonl", f'{{{EPOCH}, "spec": "dense", "loss": 1}}\n', "line 1 of .* has no step"),
    ("run/metrics.jsonl", f'{{{EPOCH}, "step": 1}}\n', "spec in line 1 of .* must be a string, not nothing"),
    ("run/metrics.jsonl", f'{{{EPOCH}, "spec": "dense", "step": 1, "breakdown": 3}}\n', "breakdown in line 1"),
    ("run/metrics.jsonl", '{"spec": "dense", "step": 1}\n', "kind in line 1 of .* must be a string, not nothing"),
    ("run/metrics.jsonl", '{"kind": "year"}\n', "kind in line 1 of .* must be epoch or steps, not 'year'"),
    ("run/summary.json", '{"runs": {}}', "runs in .* must be a JSON list, not an object"),
    ("run/summary.json", '{"runs": [{"spec": "dense", "seconds": "long"}]}', "seconds in .* number, not text"),
])  # fmt: skip
def test_report_answers_broken_files_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | bytes, sentence: str | None
) -> None:
    write_run(tmp_path / "run", ["dense"])
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = file.parent if file.parent.name == "run" else file
    code = run(["report", str(source), "--out", str(tmp_path / "report.html")])
    error = capsys.readouterr().err
    if sentence is None:  # nothing but the numbers is needed
        assert code == 0 and not error
        return
    assert code == 2 and re.search(sentence, error) and error.count("\n") == 1, error
    assert not list(tmp_path.glob("*.html")) and not list(tmp_path.glob(".*"))


def test_report_answers_what_is_not_a_run_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    write_run(tmp_path / "runs" / "one", ["dense"])
    (write_run(tmp_path / "young", ["dense"], finished=False) / "metrics.jsonl").unlink()
    for name, sentence in {
        "empty": "'.*empty' is empty; thinwire train --out DIR writes one",
        "other": "is not a run folder",
        "runs": "is not a run folder .*, but holds some: name them, such as .*runs/one",
        "young": "has no numbers yet",
        "nowhere": "does not exist",
    }.items():
        assert run(["report", str(tmp_path / name), "--out", str(tmp_path / "r.html")]) == 2
        assert re.search(sentence, capsys.readouterr().err), name
    assert run(["report"]) == 2
    assert re.search(
        r"missing argument RUN: run folders \(train --out DIR\), .*, such as thinwire report runs/dgc .*\.\n",
        capsys.readouterr().err,
    )
    assert not (tmp_path / "r.html").exists()


def test_report_takes_the_place_of_nothing_but_an_older_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a", ["dense"])
    for out, sentence in {
        str(folder / "config.json"): "exists and is not a report",
        str(folder): "is a folder",
        str(tmp_path / "no" / "r.html"): "the folder '.*no' does not exist",
        "/proc/thinwire.html": "cannot be written",
    }.items():
        before = (folder / "config.json").read_bytes()
        assert run(["report", str(folder), "--out", out]) in (1, 2)
        error = capsys.readouterr().err
        assert re.search(sentence, error) and error.count("\n") == 1, error
        assert (folder / "config.json").read_bytes() == before
    make(tmp_path, folder)
    make(tmp_path, folder)


def test_report_on_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", SPECS)
    text, _ = make(tmp_path, folder)
    code = (  # no file of this process may grow beyond 20,000 bytes: the write fails as on a full disk
        "import resource, sys; from thinwire.cli import run; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        f"sys.exit(run(['report', {str(folder)!r}, '--out', {str(tmp_path / 'report.html')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "cannot be written: File too large." in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "report.html").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.html"]


def test_report_draws_figures_for_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'thinwire[figures]')")
    runs = [write_run(tmp_path / str(seed), SPECS, seed) for seed in range(2)]
    advice = write_advice(tmp_path / "advice.json")
    inputs = [*runs, advice, write_cluster(tmp_path / "cluster.json", advice)]
    out = tmp_path / "figures"
    command = ["report", *map(str, inputs), "--out", str(tmp_path / "r.html"), "--figures", str(out)]
    assert run(command) == 0, capsys.readouterr().err
    names = [f"digits-{y}-{x}" for y in ("metric", "loss") for x in ("step", "seconds", "bytes")]
    names += ["digits-breakdown", "digits-ratio", "scaling-1"]
    assert {path.name for path in out.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("svg", "pdf", "png")
    }
    for name in names:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    again = tmp_path / "again"
    assert run([*command[:-1], str(again)]) == 0, capsys.readouterr().err
    assert all((again / path.name).read_bytes() == path.read_bytes() for path in out.iterdir())
    assert "dgc:density=0.001,warmup=80" in (out / "digits-metric-bytes.svg").read_text()  # text stays text


def test_report_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    folder = write_run(tmp_path / "a", ["dense"])
    command = ["report", str(folder), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "f")]
    assert run(command) == 2
    assert "pip install 'thinwire[figures]'" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists() and not (tmp_path / "f").exists()


@pytest.mark.parametrize("method", ["dense", "dgc:density=0.006,warmup=388,values=int8,factor_masking=false", "x" * 50])
@pytest.mark.parametrize("width", [figures.LABEL_WIDTH, figures.LEGEND_WIDTH])
def test_report_breaks_long_methods_into_lines(method: str, width: int) -> None:
    lines = figures._broken(method, width).split("\n")
    assert "".join(lines) == method
    assert all(len(line) <= width or not re.search("[,:].", line) for line in lines)


THIN = emulation.Links(4, "100mbit", "100mbit")


def test_report_keeps_runs_of_two_networks_apart(tmp_path: Path) -> None:
    wide = emulation.Links(4, "1gbit", "1gbit")
    runs = [
        write_run(tmp_path / f"run{seed}", ["dense", "terngrad"], seed=seed, cluster=links.as_dict())
        for seed, links in enumerate((THIN, wide))
    ]
    labels = [one["method"] for one in gather([read(run) for run in runs])["sections"][0]["series"]]
    assert labels == [f"{m} (8 epochs, 4 workers, cpu, links of {r})" for r in ("100mbit", "1gbit")
                      for m in ("dense", "terngrad")]  # fmt: skip


def test_report_compares_an_unfinished_method_with_dense_at_the_same_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ["dgc", "dense"], finished=False)  # dense: half the epochs
    inputs = read(run)
    dgc, dense = gather([inputs])["sections"][0]["series"]
    assert dense["row"]["steps"] == 80 and dgc["row"]["to_dense_step"] == 80
    at_80 = [dict(zip(one["epochs"]["step"], one["epochs"]["metric"], strict=True))[80] for one in (dgc, dense)]
    assert dgc["row"]["to_dense"] == at_80[0] - at_80[1] != dgc["row"]["metric"] - dense["row"]["metric"]
    (run / "metrics.jsonl").write_text(
        "".join(
            line + "\n"
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if '"spec": "dgc"' in line or json.loads(line)["kind"] == "steps"  # dense before its first epoch's end
        )
    )
    dgc, dense = gather([read(run)])["sections"][0]["series"]
    assert dgc["row"]["to_dense"] is None and dgc["row"]["to_dense_step"] is None
