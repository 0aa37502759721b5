"""Tables of step times come from what `bench cluster` wrote, and both pages show what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cluster_table
import pytest
from paths import ROOT

import thinwire


def row(method: str, rate: str = "1gbit", **changed: Any) -> dict[str, Any]:
    """Made up."""
    measured: dict[str, Any] = {"method": method, "hosts": 4, "rate": rate, "commit": "abc1234", "date": "2026-01-01"}
    measured |= {"step_ms_p20": 990.4, "step_ms_p50": 1000.0, "step_ms_p80": 1234.5, "processor_ms": 300.2}
    measured |= {"share_of_noop": 0.5, "share_of_noop_p20": 0.45, "share_of_noop_p80": 0.55, "tcp": "cubic"}
    return measured | {"bytes_per_step": 1_865_643.9, "predicted_ms": 1100.0} | changed


def test_cluster_table_has_steps_shares_bytes_and_how_far_off_the_prediction_was() -> None:
    (table,) = cluster_table.tables([row("blocksign")])
    head, line = table.splitlines()[0], table.splitlines()[-1]
    assert head == "4 hosts, 1 Gb/s, TCP cubic (commit abc1234, 2026-01-01):"
    expected = "blocksign | 990 | 1,000 | 1,234 | 0.50 | 0.45 to 0.55 | 1,866 | 300 | 1,100 | +10 %"
    assert line == f"| {expected} |"


def test_cluster_table_leaves_empty_what_was_not_measured() -> None:
    old = row("powersgd-1", predicted_ms=None)
    del old["share_of_noop_p20"], old["share_of_noop_p80"], old["tcp"]
    (table,) = cluster_table.tables([old])
    assert "TCP not recorded" in table
    assert table.endswith("| PowerSGD hook, rank 1 | 990 | 1,000 | 1,234 | 0.50 |  | 1,866 | 300 |  |  |\n")


def test_cluster_table_is_one_per_number_of_hosts_and_rate() -> None:
    rows = [row("noop"), row("noop", "100mbit"), row("noop", "100mbit", hosts=8), row("dgc")]
    first, second, third = cluster_table.tables(rows)
    assert first.count("\n| ") == 4 and "4 hosts, 100 Mb/s" in second and third.startswith("8 hosts, 100 Mb/s")


def test_cluster_table_labels_name_the_defaults_of_today() -> None:
    (table,) = cluster_table.tables([row("dgc"), row("gtopk")])
    assert f"dgc (default: {100 * thinwire.DGC().density:g} %, int8)" in table
    assert f"gtopk (default: {100 * thinwire.GTopK().density:g} %)" in table


def kept(folder: Path, name: str, seed: int, metric: float) -> None:
    """A run as small as `find` reads it."""
    unit = {"name": "accuracy", "unit": "%", "difference_unit": "points", "higher_is_better": True}
    config = {"recipe": "r", "epochs": 2, "workers": 4, "settings": [], "seed": seed, "metric": unit}
    outcome = {"spec": "x", "metric": metric, "bytes_sent": 10.0, "steps": 2}
    run = {
        "config": config,
        "summary": {"runs": [outcome]},
        "metrics": {"x": {"epoch": {"bytes_sent": [10.0], "step": [2]}}},
    }
    (folder / f"{name}-s{seed}.json").write_text(json.dumps(run))


def test_cluster_table_of_the_speed_page_shows_what_was_lost_beside_the_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [cluster_table.Shown("noop", "nothing"), cluster_table.Shown("dgc", "DGC", "vgg-a-s*", "vgg-b-s*")]
    monkeypatch.setattr(cluster_table, "SPEED_ROWS", shown)
    rows = [row(one.method, rate) for one in shown for rate in cluster_table.RATES]
    with pytest.raises(ValueError, match=r"the table of docs/speed\.md lacks 'vgg-a-s"):
        cluster_table.speed_table(rows, tmp_path)
    for name, metrics in {
        "vgg-dense": (90, 91),
        "vgg-a": (89.5, 90.25),
        "vgg-warm-dense": (90,),
        "vgg-b": (90.5,),
    }.items():
        for seed, metric in enumerate(metrics):
            kept(tmp_path, name, seed, metric)
    lines = cluster_table.speed_table(rows, tmp_path).splitlines()[2:]
    lost = "0.62 (2 seeds); with a slow rise none (1 seed)"
    assert lines == ["| nothing | 1 | 1 | 1.00 s |  |  |", f"| DGC | 0.50 | 0.50 | 1.00 s | 1.87 MB | {lost} |"]
    for wrong, number in ((rows[:-1], 0), ([*rows, rows[-1]], 2)):
        with pytest.raises(ValueError, match=f"one row of 'dgc' on 4 hosts at 100mbit, and there are {number}"):
            cluster_table.speed_table(wrong, tmp_path)


def test_cluster_table_of_the_docs_is_what_the_kept_rows_make() -> None:
    rows = json.loads(cluster_table.CLUSTER.read_text())
    shown = (ROOT / "docs" / "results.md").read_text()
    for table in cluster_table.tables(rows):
        assert table in shown, table.splitlines()[0]
    assert shown.count(f"| {' | '.join(cluster_table.HEADINGS)} |") == len(cluster_table.tables(rows)), "older ones"
    assert cluster_table.speed_table(rows) in (ROOT / "docs" / "speed.md").read_text()
