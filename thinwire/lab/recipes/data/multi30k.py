"""Multi30k: descriptions of pictures, a sentence a line, English and German files in step."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.recipes.data.files import Source, wrong_content

SOURCE = Source(
    title="Multi30k (raw text)",
    folder="multi30k",
    origin="the files of https://github.com/multi30k/dataset/tree/master/data/task1/raw, unpacked",
)


def read(data: Path | None, part: str) -> tuple[list[str], list[str]]:
    """The English and the German sentences of a part: "train", "val", "test_2016_flickr" ..."""
    paths = [SOURCE.file(data, f"{part}.{language}") for language in ("en", "de")]
    english, german = (path.read_text(encoding="utf-8").strip("\n").split("\n") for path in paths)
    if len(english) != len(german):
        raise wrong_content(paths[1], f"has {len(german):,} lines where the English file has {len(english):,}")
    return english, german
