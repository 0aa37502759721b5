"""The counters of benchmarks/house.py: on a package made for them, and on this checkout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import house

MOST_HOPS = 20  # calls from DDP's hook to the first arithmetic on a gradient; 31 before there were rooms
FILES = {
    "__init__.py": "from thinwire.ground import Base\n",
    "ground/__init__.py": "from thinwire.ground.base import Base\n",
    "ground/base.py": """
class Base:
    kept: int

    def __init__(self):
        self.a, self.b = 1, 2

    @property
    def c(self):
        return self.a

    @c.setter
    def c(self, value):
        self.a = value
""",
    "middle.py": """
from typing import TYPE_CHECKING

from thinwire import ground
from thinwire.ground import Base as Renamed

if TYPE_CHECKING:
    from thinwire import top

class Squeeze:
    def compress(self, x):
        return x

class Tern(Renamed):
    def c(self):
        return Squeeze()

    def d(self):
        self.c = self.e = 3
        for self.f in ():
            def inner(self):
                self.a += 1
""",
    "top.py": "from .middle import Squeeze\n\ndef late():\n    import thinwire.side\n",
    "side.py": "from thinwire.top import late\n",
    "words.py": '"""Tern and tern."""\nMETHODS = ("dense", "tern:density=1")  # Tern\n',
    "prose.py": '"""Tern and tern."""\nLATIN = "terns, Tern and Squeeze"\n\ndef f():\n    """tern"""\n',
    "cli/main.py": "from thinwire import middle\n\nmiddle.Tern()\n",
}


@pytest.fixture
def modules(tmp_path: Path) -> house.Modules:
    for name, text in FILES.items():
        file = tmp_path / "thinwire" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return house.load(tmp_path / "thinwire")


def test_members_are_counted_with_what_is_inherited(modules: house.Modules) -> None:
    found = house.definition(modules, "thinwire.middle", "Tern")
    assert found is not None
    methods, attributes = house.members(modules, *found)
    assert methods == {"__init__", "c", "d"}
    assert attributes == {"kept", "a", "b", "e", "f"}
    largest = house.largest_classes(modules, top=2)
    assert [(row["class"], row["count"]) for row in largest["methods"]] == [("Tern", 3), ("Base", 2)]
    assert [(row["class"], row["count"]) for row in largest["attributes"]] == [("Tern", 5), ("Base", 3)]


def test_cycles_of_rooms_are_found(modules: house.Modules) -> None:
    imports = house.room_imports(modules)
    assert house.cycles(imports["import"]) == []
    assert imports["call"] == {("top.py", "side")}
    assert house.cycles(imports["import"] | imports["call"]) == [["side", "top"]]
    assert imports["typing"] == {("middle.py", "top")}
    assert house.cycles({("a.py", "b"), ("b/x.py", "c"), ("c.py", "a"), ("c.py", "d")}) == [["a", "b", "c"]]


def test_files_that_name_a_method_are_found_in_code_alone(modules: house.Modules) -> None:
    known, files = house.naming(modules, "Tern", "tern")
    assert known == ["Tern", "Squeeze", "tern"]
    assert [module.path for module in files] == ["cli/main.py", "top.py", "words.py"]
    with pytest.raises(ValueError, match="no module defines a class Gone; name another with --method"):
        house.naming(modules, "Gone", "gone")


def test_core_and_lab_are_told_apart(modules: house.Modules, tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "a.cpp").write_text("int a;\nint b;\n")
    sizes = house.sizes(modules, tmp_path)
    assert sizes["modules"] == {"core": 8, "lab": 1}
    assert sizes["lines"]["lab"] == 3 and sizes["lines"]["native"] == 2
    assert sizes["longest_function"] == {"file": "middle.py", "function": "d", "lines": 5}


def test_no_two_classes_of_the_package_have_one_name() -> None:
    files: dict[str, list[str]] = {}
    for module in house.load(house.ROOT / "thinwire").values():
        for name in module.classes() if module.room != "integrations" else ():  # a framework's users see their own
            files.setdefault(name, []).append(module.path)
    assert not {name: where for name, where in files.items() if len(where) > 1}


def test_this_checkout_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks train for it: where the path of a gradient leads, and how many calls come before its arithmetic."""
    file = tmp_path / "house.json"
    monkeypatch.setattr(sys, "argv", ["house.py", "--json", str(file)])
    house.main()
    assert capsys.readouterr().out.startswith("| what | count | which |\n")
    found = json.loads(file.read_text())
    assert found["rooms"]["cycles_with_imports_in_functions"] == []
    assert "TernGrad" in found["naming_a_method"]["known_by"]
    path, first = found["hops"]["path"], found["hops"]["first_arithmetic"]
    assert 1 < found["hops"]["to_first_arithmetic"]["calls"] <= MOST_HOPS
    assert MOST_HOPS < found["hops"]["to_end"]["calls"] <= len(path)
    assert first in path and "/kernels/" in f"/{first}"
    assert {step.partition(":")[0] for step in path} == set(found["hops"]["files"])


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["house.py", "--root", str(tmp_path)])
    with pytest.raises(SystemExit, match="is no checkout: it has no folder thinwire"):
        house.main()
