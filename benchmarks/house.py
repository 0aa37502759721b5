"""Counts the state of the code's house, so that a refactoring can be shown before and after.

    python benchmarks/house.py [--root CHECKOUT] [--json FILE] [--before FILE]

``--before`` names what --json wrote for another commit, and prints both counts side by side.

Everything is found by structure, so any commit can be counted, whatever its modules are called.

- The package is the checkout's folder thinwire/. A room is a folder or a module directly in it.
- The lab is recipes, bench, emulation, report, cli, data and lab, with __main__. The core is the rest.
- A class's methods and attributes include those that it inherits from classes of the package. An attribute is a name
  that is assigned on ``self`` or annotated in the class's body.
- A file names a method where the method's class, a compressor that this class names, or the method's string is an
  identifier or a string of its own, or where its string is a word of another string. Comments, docstrings and the files
  that define these classes do not count. A compressor is a class with a method ``compress``.
- Rooms that import each other, directly or by way of others, are a cycle. Imports inside functions count and are
  listed; those under TYPE_CHECKING are only listed.
- hops.py defines what a hop is.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))

import hops
from comparing import markdown

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "thinwire"
LAB = {"recipes", "bench", "emulation", "report", "cli", "data", "lab", "__main__"}
A_METHOD = ("TernGrad", "terngrad")  # its class, and its name in a string
NATIVE = {".cpp", ".cc", ".cu", ".h", ".hpp"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Import:
    when: str  # at "import", at a "call" or for "typing" alone
    origin: str  # thinwire.codecs.frame
    name: str = ""  # what is taken from it, "" for the module itself
    known_as: str = ""


@dataclass(frozen=True)
class Module:
    name: str  # thinwire.codecs.frame; a folder's __init__ has the folder's name
    path: str  # codecs/frame.py
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        return Path(self.path).parts[0].removesuffix(".py")

    @property
    def in_lab(self) -> bool:
        return self.room in LAB

    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def imports(self) -> Iterator[Import]:
        package = self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]
        for when, node in _import_nodes(self.tree, "import"):
            if isinstance(node, ast.Import):
                yield from (Import(when, alias.name) for alias in node.names)
            else:
                origin = resolve_name("." * node.level + (node.module or ""), package)
                yield from (Import(when, origin, alias.name, alias.asname or alias.name) for alias in node.names)


def _import_nodes(node: ast.AST, when: str) -> Iterator[tuple[str, ast.Import | ast.ImportFrom]]:
    for child in ast.iter_child_nodes(node):
        inside = when
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = "typing"
        elif isinstance(child, FUNCTIONS) and when == "import":
            inside = "call"
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield inside, child
        yield from _import_nodes(child, inside)


Modules = dict[str, Module]  # by name


def load(package: Path) -> Modules:
    found = {}
    for file in sorted(package.rglob("*.py")):
        path, text = file.relative_to(package), file.read_text()
        parts = path.with_suffix("").parts
        name = ".".join([package.name, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        found[name] = Module(name, path.as_posix(), ast.parse(text), len(text.splitlines()))
    return found


# --------------------------------------------------------------------------------------------------------- classes


def definition(modules: Modules, module: str, name: str) -> tuple[Module, ast.ClassDef] | None:
    """The class that a module knows by this name, where it is one of the package's."""
    if module not in modules:
        return None
    if name in modules[module].classes():
        return modules[module], modules[module].classes()[name]
    for taken in modules[module].imports():
        if taken.known_as == name and taken.origin != module:
            return definition(modules, taken.origin, taken.name)
    return None


def method_names(cls: ast.ClassDef) -> set[str]:
    return {node.name for node in cls.body if isinstance(node, FUNCTIONS)}


def members(modules: Modules, module: Module, cls: ast.ClassDef) -> tuple[set[str], set[str]]:
    """The names of a class's methods and of its attributes."""
    methods = method_names(cls)
    attributes = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            attributes.add(node.attr)
    for base in cls.bases:
        found = definition(modules, module.name, ast.unparse(base).partition("[")[0])
        if found is not None:
            inherited = members(modules, *found)
            methods, attributes = methods | inherited[0], attributes | inherited[1]
    return methods, attributes - methods  # what is assigned through a property is a method already


def largest_classes(modules: Modules, top: int = 3) -> dict[str, list[dict[str, Any]]]:
    core = [(m, cls) for m in modules.values() if not m.in_lab for cls in m.classes().values()]
    largest = {}
    for place, kind in enumerate(("methods", "attributes")):
        counts = [(len(members(modules, m, cls)[place]), cls.name, m.path) for m, cls in core]
        counts.sort(key=lambda row: (-row[0], row[1:]))
        largest[kind] = [{"class": name, "file": file, "count": number} for number, name, file in counts[:top]]
    return largest


def naming(modules: Modules, cls: str, name: str) -> tuple[list[str], list[Module]]:
    """What a method is known by, and the modules that name it without defining it."""
    defined = {known: node for m in modules.values() for known, node in m.classes().items()}
    if cls not in defined:
        raise ValueError(f"no module defines a class {cls}; name another with --method")
    inside = {node.id for node in ast.walk(defined[cls]) if isinstance(node, ast.Name)} & set(defined)
    compressors = sorted(other for other in inside if "compress" in method_names(defined[other]))
    known = [cls, *compressors, name]
    return known, [m for m in modules.values() if not m.classes().keys() & set(known) and _names(m.tree, known, name)]


def _names(tree: ast.Module, known: list[str], word: str) -> bool:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if node.value in known or word in re.findall(r"\w+", node.value):
                return True
        elif any(getattr(node, field, None) in known for field in ("id", "attr", "name")):
            return True
    return False


# ----------------------------------------------------------------------------------------------------------- rooms

Edge = tuple[str, str]  # a file, and the other room that it imports


def room_imports(modules: Modules) -> dict[str, set[Edge]]:
    """By when the import happens."""
    edges: dict[str, set[Edge]] = {"import": set(), "call": set(), "typing": set()}
    for module in modules.values():
        for taken in module.imports():
            target = modules.get(f"{taken.origin}.{taken.name}") or modules.get(taken.origin)
            if target is not None and target.room != module.room:
                edges[taken.when].add((module.path, target.room))
    return edges


def cycles(edges: set[Edge]) -> list[list[str]]:
    """Groups of rooms that reach each other."""
    pairs = {(Path(file).parts[0].removesuffix(".py"), target) for file, target in edges}
    reached = {room: {room} for pair in pairs for room in pair}
    while any(not reached[start] >= reached[end] for start, end in pairs):
        for start, end in pairs:
            reached[start] |= reached[end]
    groups = {tuple(sorted(other for other in reached[room] if room in reached[other])) for room in reached}
    return [list(group) for group in sorted(groups) if len(group) > 1]


# ---------------------------------------------------------------------------------------------------- all together


def sizes(modules: Modules, root: Path) -> dict[str, Any]:
    core, lab = ([m for m in modules.values() if m.in_lab is which] for which in (False, True))
    longest = max(core, key=lambda m: m.lines)
    functions = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, m.path, node.name)
        for m in core
        for node in ast.walk(m.tree)
        if isinstance(node, FUNCTIONS)
    ]
    length, file_of, function = max(functions)
    native = [file for folder in ("native", PACKAGE) for file in (root / folder).rglob("*") if file.suffix in NATIVE]
    return {
        "modules": {"core": len(core), "lab": len(lab)},
        "lines": {
            "core": sum(m.lines for m in core),
            "lab": sum(m.lines for m in lab),
            "native": sum(len(file.read_text().splitlines()) for file in native),
        },
        "longest_module": {"file": longest.path, "lines": longest.lines},
        "longest_function": {"file": file_of, "function": function, "lines": length},
    }


def count(root: Path, method: tuple[str, str] = A_METHOD) -> dict[str, Any]:
    """Everything that is counted without running the code."""
    modules = load(root / PACKAGE)
    known, files = naming(modules, *method)
    imports = room_imports(modules)
    is_folder = {m.room: "/" in m.path for m in modules.values()}
    return {
        "top_level": {
            "modules": sorted(room for room in is_folder if not is_folder[room] and not room.startswith("__")),
            "folders": sorted(room for room in is_folder if is_folder[room]),
        },
        **sizes(modules, root),
        "largest_classes": largest_classes(modules),
        "naming_a_method": {
            "known_by": known,
            "core": [m.path for m in files if not m.in_lab],
            "lab": [m.path for m in files if m.in_lab],
        },
        "rooms": {
            "cycles_at_import": cycles(imports["import"]),
            "cycles_with_imports_in_functions": cycles(imports["import"] | imports["call"]),
            "imports_in_functions": [f"{file} imports {room}" for file, room in sorted(imports["call"])],
            "imports_for_typing": [f"{file} imports {room}" for file, room in sorted(imports["typing"])],
        },
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    """The table, its heading first."""
    top, rooms, method, traced = (found[key] for key in ("top_level", "rooms", "naming_a_method", "hops"))
    longest, function, known = found["longest_module"], found["longest_function"], ", ".join(method["known_by"])
    table: list[list[Any]] = [
        ["what", "count", "which"],
        ["modules at the top level, `__init__` and `__main__` apart", len(top["modules"]), ""],
        ["folders at the top level", len(top["folders"]), ", ".join(top["folders"])],
    ]
    for what in ("modules", "lines"):
        table += [[f"{what}, {part}", number, ""] for part, number in found[what].items()]
    table.append(["longest module of the core", longest["lines"], longest["file"]])
    table.append(["longest function of the core", function["lines"], f"{function['file']}: {function['function']}"])
    for kind, classes in found["largest_classes"].items():
        which = ", ".join(f"{row['class']} {row['count']}" for row in classes)
        table.append([f"{kind} of the core's largest class", classes[0]["count"], which])
    for part in ("core", "lab"):
        table.append([f"files of the {part} that name {known}", len(method[part]), ", ".join(method[part])])
    for key, value in rooms.items():
        listed = [", ".join(item) if isinstance(item, list) else item for item in value]
        table.append(["rooms: " + key.replace("_", " "), len(value), "; ".join(listed)])
    for key, end in (("to_first_arithmetic", traced["first_arithmetic"]), ("to_end", "the end of the exchange")):
        which = "{distinct_functions} distinct functions; {properties} properties apart".format(**traced[key])
        table.append([f"hops from DDP's hook to {end}", traced[key]["calls"], which])
    kernels = "native" if traced["native_kernels"] else "reference"
    table.append(["files on that way", len(traced["files"]), f"with {kernels} kernels"])
    return [[str(cell) for cell in row] for row in table]


def beside(before: Path, found: dict[str, Any]) -> list[list[str]]:
    """The counts of two commits in one table."""
    other = json.loads(before.read_text())
    both = list(zip(rows(other), rows(found), strict=True))[1:]
    table = [["what", f"before ({other['commit']})", f"after ({found['commit']})"]]
    return table + [[what, earlier, count] for (_, earlier, _), (what, count, _) in both]


def stamp(root: Path) -> dict[str, str]:
    """What was counted, when and with what."""
    command = ["git", "describe", "--always", "--dirty=+"]
    commit = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip() or "unknown"
    today = datetime.now(timezone.utc).date().isoformat()
    return {"commit": commit, "date": today, "python": platform.python_version(), "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count; default: this one")
    parser.add_argument("--method", nargs=2, metavar=("CLASS", "NAME"), default=A_METHOD, help="that files may name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path, help="counts of another commit, to be printed beside these")
    options = parser.parse_args()
    root = options.root.resolve()
    if not (root / PACKAGE).is_dir():
        sys.exit(f"{root} is no checkout: it has no folder {PACKAGE}")
    try:
        found = {**stamp(root), **count(root, tuple(options.method)), "hops": hops.count(root)}
    except (ValueError, RuntimeError) as problem:
        sys.exit(str(problem))
    print(markdown(beside(options.before, found) if options.before else rows(found)), end="")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
