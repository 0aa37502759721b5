"""Counts how a page reads: words, numbers in prose, the mean sentence, blocks of code.

    python benchmarks/reading.py [PAGE...] [--before COMMIT]    # README.md and docs/**/*.md unless told

Words are all of a page, as `wc -w` counts them. Prose is what is left without code, tables, headings, pictures and
quoted messages. Numbers in prose stand alone: VGG-16 and int8 are names. ``--before`` adds a row per page as it was at
a commit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from comparing import markdown

ROOT = Path(__file__).resolve().parents[1]
HEADINGS = ("page", "words", "words of prose", "numbers in prose", "words per sentence", "code blocks", "table rows")


@dataclass(frozen=True)
class Reading:
    words: int
    prose: int
    numbers: int
    sentence: float
    blocks: int
    rows: int


def prose_of(text: str) -> str:
    """Paragraphs and points of a list, an empty line between them."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:\|.*\||#+ .*|> .*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^ *(?:[-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)


def reading(text: str) -> Reading:
    prose = prose_of(text)
    plain = re.sub(r"`[^`]*`", "code", prose)
    sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", plain) if re.search(r"\w", part)]
    lengths = [len(part.split()) for part in sentences]
    return Reading(
        words=len(text.split()),
        prose=len(prose.split()),
        numbers=len(re.findall(r"(?<![\w.,-])[+-]?\d[\d.,]*(?![\w-])", plain)),
        sentence=sum(lengths) / max(1, len(lengths)),
        blocks=len(re.findall(r"^ *```", text, re.MULTILINE)) // 2,
        rows=len(re.findall(r"^\|(?![\s:|-]+$)", text, re.MULTILINE)),
    )


def first_screen(text: str) -> str:
    """What stands in front of the second heading."""
    return text.partition("\n## ")[0]


def row(name: str, text: str) -> list[str]:
    found = reading(text)
    counts = [f"{found.words:,}", f"{found.prose:,}", str(found.numbers), f"{found.sentence:.0f}"]
    return [name, *counts, str(found.blocks), str(found.rows)]


def at(commit: str, page: Path) -> str | None:
    """A page as it was at a commit, if it was there."""
    shown = ["git", "-C", str(ROOT), "show", f"{commit}:{page.resolve().relative_to(ROOT)}"]
    done = subprocess.run(shown, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE")
    parser.add_argument("--before", metavar="COMMIT")
    given = parser.parse_args(arguments)
    rows = [HEADINGS]
    for page in given.pages or [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        name = str(page.resolve().relative_to(ROOT))
        if given.before and (old := at(given.before, page)) is not None:
            rows.append(row(f"{name}, {given.before}", old))
        rows.append(row(name, page.read_text()))
        if name == "README.md":
            rows.append(row("its first screen", first_screen(page.read_text())))
    print(markdown(rows), end="")


if __name__ == "__main__":
    main()
