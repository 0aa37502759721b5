"""Methods are found by name: this package's, registered ones, and those of installed plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import thinwire
from thinwire.advisor.advice import caution, compared, not_compared
from thinwire.lab.bench.cluster import benched
from thinwire.methods import registry

ROOT = Path(__file__).parents[2]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(registry._known)
    yield
    registry._known.clear()
    registry._known.update(before)


def plain(name: str) -> type[thinwire.Method]:
    @thinwire.method(name)
    @dataclass(frozen=True, kw_only=True)
    class Plain(thinwire.Method):
        share: float = 0.5

        def aggregator(self, net: Any, optimizer_is_sgd: bool) -> Any:
            return thinwire.Dense().aggregator(net, optimizer_is_sgd)

    return Plain


@pytest.mark.usefixtures("forgotten")
def test_a_registered_method_is_known_everywhere() -> None:
    kind = plain("plain-1")
    assert kind.name == "plain-1" and thinwire.METHODS["plain-1"] is kind and "plain-1" in thinwire.METHODS
    assert thinwire.parse_method("plain-1:share=0.25") == kind(share=0.25)
    assert str(kind(share=0.25)) == "plain-1:share=0.25" and str(kind()) == "plain-1"
    with pytest.raises(ValueError, match=r"unknown method 'plain-2' \(did you mean 'plain-1'\?\).*plain-1"):
        thinwire.parse_method("plain-2")
    assert "plain-1" in benched() and "plain-1" not in compared(True)
    assert "plain-1 (nobody measured the accuracy)" in not_compared(True)
    assert caution("plain-1").endswith("what it costs in accuracy.")


def test_the_registry_is_a_read_only_view() -> None:
    methods: Any = thinwire.METHODS
    with pytest.raises(TypeError):
        methods["mine"] = thinwire.Dense
    assert list(methods) == sorted(methods) and len(methods) == len(list(methods))
    assert methods["dgc"] is thinwire.DGC and methods.get("nothing") is None
    with pytest.raises(KeyError):
        methods["nothing"]


@pytest.mark.usefixtures("forgotten")
def test_what_cannot_be_registered_is_told_in_one_sentence() -> None:
    class NoMethod:
        pass

    class NoDataclass(thinwire.Method):
        pass

    @dataclass
    class Thawed:
        pass

    @dataclass(frozen=True, kw_only=True)
    class WithoutDefault(thinwire.Method):
        share: float

    cases: list[tuple[Any, Any, str]] = [
        ("mine", NoMethod, "needs a class that extends thinwire.Method"),
        ("mine", thinwire.DGC(), "needs a class that extends thinwire.Method"),
        ("mine", Thawed, "needs a class that extends thinwire.Method"),
        ("mine", NoDataclass, r"put @dataclass\(frozen=True, kw_only=True\) above the class NoDataclass"),
        ("mine", WithoutDefault, "the option 'share' needs a default"),
        ("auto", thinwire.Dense, "choose another one"),
        ("My Method", thinwire.Dense, "small letters"),
        (3, thinwire.Dense, "small letters"),
        ("dgc", thinwire.Dense, "the name is taken by thinwire.methods.dgc.DGC; choose another one"),
    ]
    before = dict(thinwire.METHODS)
    for name, kind, sentence in cases:
        with pytest.raises(ValueError, match=sentence) as caught:
            thinwire.method(name)(kind)
        assert "\n" not in str(caught.value) and str(caught.value).startswith("@thinwire.method(")
    assert dict(thinwire.METHODS) == before


@pytest.mark.usefixtures("forgotten")
def test_a_cell_of_a_notebook_can_be_run_again_and_another_class_cannot_take_its_name() -> None:
    first, second = plain("again"), plain("again")
    assert first is not second and thinwire.METHODS["again"] is second

    @dataclass(frozen=True, kw_only=True)
    class Other(thinwire.Method):
        pass

    with pytest.raises(ValueError, match="the name is taken by"):
        thinwire.method("again")(Other)


def test_traits_replace_lists() -> None:
    local = "sparseloco:every=3,density=0.06,error_decay=1.0"
    assert compared(True) == ("dense", "dense:dtype=bf16", "dgc", "gtopk", local, "blocksign", "terngrad")
    assert compared(False) == ("dense", "dense:dtype=bf16", "dropping:local=partial", "terngrad")
    assert benched() == ("dgc", thinwire.DGC.paper, "gtopk", thinwire.GTopK.paper, "blocksign", "terngrad")
    for kind in thinwire.METHODS.values():
        specs = [*kind.advised.sgd, *kind.advised.other, *(kind.benched or ()), *kind.also_called.values()]
        for spec in [*specs, *([kind.paper] if kind.paper else [])]:
            assert isinstance(thinwire.parse_method(spec), kind), spec
        for is_sgd in (True, False):
            assert kind.advised.settings(is_sgd) or kind.advised.why_not(is_sgd)


# --- plugins ----------------------------------------------------------------------------------------

GOOD = """
from dataclasses import dataclass
import thinwire

@thinwire.method("plugged")
@dataclass(frozen=True, kw_only=True)
class Plugged(thinwire.Method):
    share: float = 0.5
    def aggregator(self, net, optimizer_is_sgd):
        return thinwire.Dense().aggregator(net, optimizer_is_sgd)
"""


def installed(folder: Path, package: str, source: str, points: str) -> None:
    """A distribution as pip leaves it behind: a module, and a dist-info folder with entry points."""
    (folder / f"{package}.py").write_text(source)
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[thinwire.methods]\n{points}\n")


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_an_installed_plugin_is_found_when_its_name_is_asked_for(tmp_path: Path) -> None:
    installed(tmp_path, "goodplug", GOOD, "plugged = goodplug:Plugged")
    done = run(tmp_path, """
import sys, thinwire
assert "goodplug" not in sys.modules
assert thinwire.parse_method("dgc").name == "dgc" and "goodplug" not in sys.modules
print(thinwire.parse_method("plugged:share=0.25"), *thinwire.METHODS)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["plugged:share=0.25", *sorted(thinwire.METHODS), "plugged"] and not done.stderr


def test_a_broken_plugin_is_told_with_its_package_and_does_not_break_the_others(tmp_path: Path) -> None:
    installed(tmp_path, "goodplug", GOOD, "plugged = goodplug:Plugged")
    installed(tmp_path, "badplug", "import no_such_module", "bad = badplug:Bad")
    installed(tmp_path, "thief", GOOD.replace("plugged", "dgc"), "stolen = thief:Plugged")
    installed(tmp_path, "shy", "class Shy: pass", "shy = shy:Shy")
    done = run(tmp_path, """
import thinwire
for name in ("bad", "stolen", "shy"):
    try:
        thinwire.parse_method(name)
    except ValueError as error:
        print(error)
print(*thinwire.METHODS, *thinwire.METHODS)
""")  # fmt: skip
    assert done.returncode == 0, done.stderr
    bad, stolen, shy, names = done.stdout.splitlines()
    assert "the method 'bad' of the installed package badplug 1.2 cannot be used (ModuleNotFoundError" in bad
    assert "thief 1.2" in stolen and "the name is taken by thinwire.methods.dgc.DGC" in stolen
    assert "shy:Shy is not registered with @thinwire.method('shy')" in shy
    assert names.split() == [*sorted(thinwire.METHODS), "plugged"] * 2
    assert done.stderr.count("cannot be used") == 3 and "Traceback" not in done.stderr, "each is told once"


def test_importing_thinwire_reads_no_plugin(tmp_path: Path) -> None:
    installed(tmp_path, "loud", "print('imported')", "loud = loud:Loud")
    assert run(tmp_path, "import thinwire; thinwire.DGC(); thinwire.parse_method('dgc')").stdout == ""
