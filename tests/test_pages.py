"""What the pages name is there: tests, files and the targets of links."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import reading

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


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {text.replace(" ", "-") for text in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sections_that_a_page_links_are_there(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
        to = page.parent / target if target else page
        assert anchor in anchors(to), f"{target}#{anchor}"


def test_readme_is_one_screen_and_a_few_tables() -> None:
    text = (ROOT / "README.md").read_text()
    assert reading.reading(text).words <= 900
    screen = reading.reading(reading.first_screen(text))
    assert screen.prose <= 150 and screen.numbers <= 6
    assert all(word in text for word in ("make train", "make test", "thinwire advise", "pip install"))


def test_reading_counts_prose_alone() -> None:
    page = "# 1\n\nTwo words. VGG-16 has 3.5 `code` here!\n\n| 5 | 6 |\n|---|---|\n\n```\n7 8\n```\n- 9 [ten](11.md)\n"
    found = reading.reading(page)
    assert (found.prose, found.numbers, found.blocks, found.rows) == (9, 2, 1, 1)
    assert found.sentence == (2 + 5 + 2) / 3
