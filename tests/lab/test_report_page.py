"""The report in a real browser: charts carry the data; pointer, legend, themes, phone, print and export work."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import Browser, DoesNotStart, browser, find_browser
from report_inputs import METHODS, write_advice, write_cluster, write_run

from thinwire.cli import run
from thinwire.lab.report.gather import gather
from thinwire.lab.report.inputs import read
from thinwire.lab.report.page import page

pytestmark = pytest.mark.skipif(
    find_browser() is None,
    reason="no Chromium or Chrome on the PATH (apt-get install chromium, or set THINWIRE_BROWSER)",
)
SPECS = list(METHODS)  # noop among them, which sends nothing and is not on a log axis of bytes
LARGE = ["digits-metric-seconds", "digits-metric-bytes"]
CURVES = [*LARGE, "digits-metric-step", *(f"digits-loss-{x}" for x in ("step", "seconds", "bytes"))]
FOLDS = ["table", "target", "curves", "bars"]


@pytest.fixture(scope="module")
def web() -> Iterator[Browser]:
    try:
        with browser() as one:
            yield one
    except DoesNotStart as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods with two seeds, advice and measurements."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / str(seed), SPECS, seed) for seed in range(2)]
    advice = write_advice(folder / "advice.json")
    inputs = [*runs, advice, write_cluster(folder / "cluster.json", advice)]
    assert run(["report", *map(str, inputs), "--out", str(folder / "report.html")]) == 0
    return folder / "report.html"


def unfold(web: Browser) -> None:
    web.js("folds().forEach((fold) => { fold.open = true; })")
    web.settle()
    web.settle()  # what had no width is drawn again


def pixels(web: Browser, figure: str, method: str, kind: str = "curve") -> list[tuple[float, float]]:
    """The corners of a drawn path."""
    selector = json.dumps(f"#{figure} g[data-method='{method}'] path.{kind}")
    path = web.js(f"document.querySelector({selector}).getAttribute('d')")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+),([-\d.]+)", path)]


def assert_straight(drawn: list[float], data: list[float]) -> None:
    """Pixels are the data, moved and stretched."""
    assert len(drawn) == len(data)
    stretch = (drawn[-1] - drawn[0]) / (data[-1] - data[0])
    for place, value in zip(drawn, data, strict=True):
        assert place == pytest.approx(drawn[0] + stretch * (value - data[0]), abs=0.02)


def colour(web: Browser, selector: str = "body", name: str = "backgroundColor") -> int:
    """The brightness, 0 to 255."""
    text = web.js(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{name}")
    return sum(map(int, re.findall(r"\d+", text)[:3])) // 3


def test_page_charts_carry_the_data_and_nothing_complains(web: Browser, report: Path) -> None:
    web.open(report)
    assert web.errors == [] and web.requests == [report.as_uri()]
    unfold(web)
    data = web.js("data")
    figures = [*CURVES, "digits-breakdown", "digits-ratio", "scaling-1", "scaling-1-breakdown"]
    assert web.js("figures.map((figure) => figure.id)") == figures
    assert web.js("figures.every((figure) => figure.drawn)")
    for series in data["sections"][0]["series"]:
        for x in ("step", "seconds"):
            points = pixels(web, f"digits-metric-{x}", series["method"])
            assert_straight([px for px, _ in points], series["epochs"][x])
            assert_straight([py for _, py in points], series["epochs"]["metric"])
            raw = pixels(web, f"digits-loss-{x}", series["method"], "raw")
            assert_straight([px for px, _ in raw], series["steps"][x])
            assert_straight([py for _, py in raw], series["steps"]["loss"])
            assert len(pixels(web, f"digits-loss-{x}", series["method"])) == len(raw)
        assert web.js("document.querySelectorAll('#digits-metric-bytes path.band').length") == 4
    assert "(log scale)" in web.js("document.querySelector('#digits-metric-bytes svg').textContent")
    bars = web.js(
        "[...document.querySelectorAll('#digits-breakdown g[data-method=dense] rect')].map((r) => +r.dataset.value)"
    )
    assert bars == [value for value in data["sections"][0]["series"][0]["breakdown_ms"].values() if value]
    assert web.js("document.querySelectorAll('#scaling-1 path.curve').length") == 5
    assert web.js("document.querySelectorAll('#scaling-1 path.point').length") == 10
    assert "0123abc" in web.js("document.getElementById('sources').innerText")
    assert "-0" not in web.js("[...document.querySelectorAll('figure text')].map((t) => t.textContent)")


def test_page_begins_with_a_headline_and_two_charts_with_labelled_lines(web: Browser, report: Path) -> None:
    web.open(report)
    told = web.js("data.sections[0].headline")
    shown = web.js("document.querySelector('.headline').innerText")
    assert told["sentence"] in shown and all(one["value"] in shown and one["label"] in shown for one in told["numbers"])
    assert len(told["numbers"]) == 3 and "sooner than dense" in shown and "fewer bytes than dense" in shown
    assert web.js("[...document.querySelectorAll('.large figure')].map((figure) => figure.id)") == LARGE
    for figure in LARGE:
        labels = web.js(f"[...document.querySelectorAll('#{figure} .label text')].map((t) => t.textContent)")
        drawn = web.js(f"document.querySelectorAll('#{figure} path.curve[d^=M]').length")  # noop sends nothing
        assert set(labels) <= {"dense", "dgc", "terngrad", "noop"} and len(labels) == drawn >= 3
    boxes = web.js("""[...document.querySelectorAll('#digits-metric-seconds .label text')].map((t) => t.getBBox())
        .map(({x, y, width, height}) => [x, y, x + width, y + height])""")
    for i, one in enumerate(boxes):  # no name lies on another
        for other in boxes[:i]:
            assert one[2] < other[0] or other[2] < one[0] or one[3] <= other[1] + 4 or other[3] <= one[1] + 4
    assert web.js("document.querySelectorAll('#digits-metric-step .label').length") == 0


def test_page_folds_the_rest_and_opens_it_on_paper(web: Browser, report: Path) -> None:
    web.open(report)
    folds = web.js("folds().map((fold) => fold.id)")
    assert folds == [*(f"digits-fold-{name}" for name in FOLDS), "scaling-1-fold", "fold-sources"]
    assert not web.js("folds().some((fold) => fold.open)")
    web.click("#digits-fold-curves summary")
    web.settle()
    assert web.box("#digits-loss-step svg")[2] > 200
    web.js("dispatchEvent(new Event('beforeprint'))")
    assert web.js("folds().every((fold) => fold.open)")
    web.js("dispatchEvent(new Event('afterprint'))")
    assert web.js("folds().filter((fold) => fold.open).map((fold) => fold.id)") == ["digits-fold-curves"]


def test_page_axes_have_labels_that_differ(web: Browser, report: Path) -> None:
    web.open(report)
    assert web.js("tickLabels({kind: 'number'}, [97.2, 97.25, 97.3])") == ["97.20", "97.25", "97.30"]
    assert web.js("tickLabels({kind: 'number'}, [96, 97, 98])") == ["96", "97", "98"]
    assert web.js("tickLabels({kind: 'number'}, [-0.5, 0, 0.5])") == ["-0.5", "0.0", "0.5"]
    assert web.js("[0.884, 1, 1.13, 2.6, 21.4].map((ratio) => against(ratio, 'sooner', 'later'))") == [
        "1.13\u00d7 later", "the same", "1.13\u00d7 sooner", "2.6\u00d7 sooner", "21\u00d7 sooner",
    ]  # fmt: skip
    for figure in LARGE:
        ends = web.js(f"[...document.querySelectorAll('#{figure} text[text-anchor=end]')].map((t) => t.textContent)")
        assert len(set(ends)) == len(ends) >= 4


def test_page_that_is_live_loads_itself_again_and_keeps_what_was_chosen(web: Browser, tmp_path: Path) -> None:
    run_folder = write_run(tmp_path / "run", SPECS, finished=False)
    data = {**gather([read(run_folder)]), "live": 1}
    target = tmp_path / "r.html"
    target.write_text(page(data, "first"))
    web.open(target, 1000, 700)
    assert "not finished" in web.js("document.getElementById('notices').innerText")
    target.write_text(page(data, "second"))
    web.js("""(() => { document.getElementById('digits-fold-target').open = true;
        const slider = document.querySelector('#digits-target input'); slider.value = 90; slider.oninput();
        figures.find((one) => one.id === 'digits-metric-bytes').options.log.set(false);
        hidden.add('terngrad'); redraw(); setTheme('dark'); scrollTo(0, 300); })()""")
    end = time.monotonic() + 30
    while web.js("document.title") != "second" and time.monotonic() < end:
        time.sleep(0.2)
    web.js("document.readyState === 'complete' || new Promise((done) => addEventListener('load', () => done(1)))")
    assert web.js("document.title") == "second"
    assert web.js("folds().filter((fold) => fold.open).map((fold) => fold.id)") == ["digits-fold-target"]
    assert web.js("[...hidden]") == ["terngrad"] and web.js("document.documentElement.dataset.theme") == "dark"
    assert web.js("figures.find((one) => one.id === 'digits-metric-bytes').options.log.on") is False
    assert web.js("document.querySelector('#digits-target input').value") == "90" and web.js("scrollY") == 300
    target.write_text(page({**data, "live": 0}, "last"))
    while web.js("document.title") != "last" and time.monotonic() < end:
        time.sleep(0.2)
    assert web.js("document.title") == "last" and web.errors == []
    web.open(target)  # a reader who opens it finds it as it was made
    assert not web.js("folds().some((fold) => fold.open)") and web.js("hidden.size") == 0


def test_page_draws_no_conclusions_from_seconds_that_do_not_compare(web: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ["dense", "terngrad"], steps=False)
    summary = json.loads((folder / "summary.json").read_text())
    summary["runs"][1]["breakdown"] |= {"forward_backward_s": 0.06, "compress_s": 0.001}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert run(["report", str(folder), "--out", str(tmp_path / "r.html")]) == 0
    web.open(tmp_path / "r.html")
    unfold(web)
    assert "Seconds do not compare" in web.js("document.querySelector('main .notice').innerText")
    assert "sooner" not in web.js("document.querySelector('main').innerText")
    assert web.js("document.querySelector('.large figure').id") == "digits-metric-step"
    heads = web.js("[...document.querySelectorAll('#digits-table th')].map((head) => head.textContent)")
    assert "time*" in heads and "samples/s*" in heads and web.errors == []


def test_page_smoothing_shows_what_was_logged_and_can_be_turned_off(web: Browser, report: Path) -> None:
    web.open(report)
    unfold(web)
    raw = pixels(web, "digits-loss-step", "dense", "raw")
    assert pixels(web, "digits-loss-step", "dense") != raw
    assert "as logged" in web.js("document.querySelector('#digits-loss-step figcaption').textContent")
    web.click("#digits-loss-step .option:nth-child(3)")
    series = web.js("data.sections[0].series[0].steps.loss")
    assert_straight([py for _, py in pixels(web, "digits-loss-step", "dense")], series)
    assert web.js("document.querySelector('#digits-loss-step path.raw')") is None


def test_page_pointer_shows_values(web: Browser, report: Path) -> None:
    web.open(report)
    unfold(web)
    web.js("document.getElementById('digits-metric-step').scrollIntoView({block: 'center'})")
    web.settle()  # scrolling hides what is shown
    box = web.box("#digits-metric-step svg")
    px, py = pixels(web, "digits-metric-step", "dense")[3]
    web.move(box[0] + px + 2, box[1] + py)
    web.settle()
    shown = web.js("tooltip.innerText")
    value = web.js("data.sections[0].series[0].epochs.metric[3]")
    assert shown.startswith("step: 80") and f"{value:.2f} %" in shown and all(spec in shown for spec in SPECS)
    assert web.js("document.querySelectorAll('.crosshair').length") == 1
    web.move(2, 2)
    web.settle()
    assert web.js("tooltip.hidden") and web.js("document.querySelectorAll('.crosshair').length") == 0
    web.js("document.getElementById('digits-metric-step').focus()")  # and the keyboard
    for _ in range(2):
        web.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
    assert web.js("tooltip.innerText").startswith("step: 40")
    web.js("document.getElementById('digits-breakdown').scrollIntoView({block: 'center'})")
    left, top, *_ = web.box("#digits-breakdown rect")
    web.move(left + 3, top + 3)
    web.settle()
    assert "communicate" in web.js("tooltip.innerText") and "300 ms" in web.js("tooltip.innerText")
    assert web.errors == []


def test_page_legend_toggles_a_method_everywhere(web: Browser, report: Path) -> None:
    web.open(report)
    unfold(web)
    own = "figure g[data-method=terngrad], tr[data-method=terngrad]:not([hidden])"
    counted = f"document.querySelectorAll('{own}').length"
    before = web.js(counted)
    web.click("#legend [data-method=terngrad]")
    assert before > 10 and web.js(counted) == 0
    assert web.js("document.querySelector('#legend [data-method=terngrad]').ariaPressed") == "false"
    assert web.js("document.querySelectorAll('#digits-metric-step path.curve').length") == 3
    web.click("#legend .all")
    assert web.js(counted) == before
    web.js("document.querySelector('#legend [data-method=terngrad]').dispatchEvent(new MouseEvent('dblclick'))")
    assert web.js("[...hidden]") == [method for method in web.js("data.methods") if method != "terngrad"]
    web.click("#legend [data-method=terngrad]")
    assert "Nothing to show" in web.js("document.getElementById('digits-metric-step').innerText")
    assert web.errors == []


def test_page_has_light_and_dark_colours(web: Browser, report: Path) -> None:
    web.open(report)
    assert colour(web) > 230 and colour(web, "body", "color") < 60
    web.click("#theme")
    assert colour(web) < 60 and colour(web, "body", "color") > 200
    web.open(report, dark=True)
    assert colour(web) < 60 and colour(web, "#digits-metric-step g[data-method=dense] path.curve", "stroke") > 180
    web.click("#theme")
    web.click("#theme")
    assert colour(web) > 230
    web.open(report, dark=True, media="print")
    assert colour(web) > 230 and colour(web, "body", "color") < 60


@pytest.mark.parametrize("width", [320, 360, 768, 1600])
def test_page_of_no_width_scrolls_sideways(web: Browser, report: Path, width: int) -> None:
    web.open(report, width, 780)
    assert web.js("document.documentElement.scrollWidth") == width
    unfold(web)
    assert web.js("document.documentElement.scrollWidth") == width
    outside = """[...document.querySelectorAll('main *')]
        .filter((node) => node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML)"""
    assert web.js(outside) == []
    smallest = web.js("""Math.min(...[...document.querySelectorAll('figure svg')]
        .map((node) => node.getBoundingClientRect().width / node.viewBox.baseVal.width))""")
    assert smallest > 0.95  # text in charts keeps its size


def test_page_prints_without_buttons(web: Browser, report: Path) -> None:
    web.open(report, 794, 1100, media="print")
    assert (
        web.js(
            "[...document.querySelectorAll('button')].filter((b) => b.offsetParent && !b.closest('#legend, th')).length"
        )
        == 0
    )
    assert web.js("document.documentElement.scrollWidth") == 794
    web.open(report)
    assert web.pdf().startswith(b"%PDF") and web.errors == []


def test_page_charts_can_be_saved_for_papers(web: Browser, report: Path) -> None:
    web.open(report, dark=True)
    unfold(web)
    for figure in web.js("figures.map((figure) => figure.id)"):
        text = web.js(f"figures.find((figure) => figure.id === '{figure}').export().text")
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "var(" not in text and "undefined" not in text
        assert len(list(root.iter("{http://www.w3.org/2000/svg}text"))) > 5
    saved: Any = web.js("""new Promise((done) => {
        save = async (name, blob) => done([name, [...new Uint8Array(await blob.arrayBuffer())].slice(0, 24)]);
        document.querySelector('#digits-metric-bytes .buttons button:last-child').click();
    })""")
    name, head = saved[0], bytes(saved[1])
    assert name == "digits-metric-bytes.png" and head.startswith(b"\x89PNG")
    assert (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")) == (1920, 1260)
    csv = web.js("""new Promise((done) => {
        save = async (name, blob) => done(await blob.text());
        document.querySelector('#digits-table .buttons button').click();
    })""")
    assert csv.startswith("method,seeds,accuracy,") and '"dgc:density=0.001,warmup=80",2,' in csv
    assert web.errors == []


def test_page_tables_sort(web: Browser, report: Path) -> None:
    web.open(report)
    unfold(web)
    order = "[...document.querySelectorAll('#digits-table tbody tr')].map((row) => row.dataset.method)"
    heads = web.js("[...document.querySelectorAll('#digits-table th')].map((head) => head.textContent)")
    index = heads.index("sent by a worker")
    web.click(f"#digits-table th:nth-child({index + 1}) button")
    assert web.js(order) == ["noop", SPECS[1], "terngrad", "dense"]
    web.click(f"#digits-table th:nth-child({index + 1}) button")
    assert web.js(order) == ["dense", "terngrad", SPECS[1], "noop"]


def test_page_says_what_it_takes_to_reach_a_value(web: Browser, report: Path) -> None:
    web.open(report)
    unfold(web)
    epochs = {one["method"]: one["epochs"] for one in web.js("data.sections[0].series")}
    cells = (
        "[...document.querySelectorAll('#digits-target tbody tr')].map((row) => [...row.cells].map((c) => c.innerText))"
    )
    assert all(row[1] != "not reached" for row in web.js(cells))  # it starts at a value that all have reached
    web.js("(() => { const s = document.querySelector('#digits-target input'); s.value = 97; s.oninput(); })()")
    for name, steps, *_ in web.js(cells):
        method = epochs[name.strip()]
        reached = [step for step, value in zip(method["step"], method["metric"], strict=True) if value >= 97]
        assert steps == (str(reached[0]) if reached else "not reached")
    assert "97 % accuracy" in web.js("document.querySelector('#digits-target').innerText")


def test_page_keeps_hostile_names_as_text(web: Browser, tmp_path: Path) -> None:
    evil = "dgc</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>'\"\\"
    folder = write_run(tmp_path / "<b>run", [evil, "dense"], recipe="<i>x")
    assert (
        run(["report", str(folder), "--out", str(tmp_path / "r.html"), "--title", "<script>window.hacked=1</script>"])
        == 0
    )
    web.open(tmp_path / "r.html")
    assert web.errors == [] and web.js("window.hacked") is None
    assert web.js("document.querySelector('#legend button').textContent") == evil
    assert web.js("document.querySelectorAll('main img, h2 i, td b b, script:not(#data, :last-of-type)').length") == 0


def test_page_draws_many_methods_and_odd_runs(web: Browser, tmp_path: Path) -> None:
    specs = [f"dgc:density={2.0**-i}" for i in range(20)]
    folder = write_run(tmp_path / "a", specs, epochs=2, steps=False, finished=False)
    assert run(["report", str(folder), "--out", str(tmp_path / "r.html")]) == 0
    web.open(tmp_path / "r.html", 360, 780)
    looks = web.js("[...styles.values()].map((style) => style.color + style.dash + style.marker)")
    assert len(set(looks)) == len(looks) and web.errors == []
    assert web.js("document.documentElement.scrollWidth") == 360
    assert web.js("document.getElementById('notices').innerText").count("was interrupted") == 1
