"""What the pages name is there: tests, files and the targets of links."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]


@cache
def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        assert (ROOT / file).is_file() and name in functions_of(ROOT / file), f"{file}::{name}"
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
