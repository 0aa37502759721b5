"""The guide: its blocks run, its commands parse, and the messages it quotes are those of the source."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import guide_rank
import pytest
import typer
from cluster import Cluster
from command import environment
from torch.distributed.run import get_args_parser

from thinwire import cli

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
FRAMEWORKS = "frameworks.md"  # its libraries are optional
SECONDS = ("info", "advise --params")  # commands that end soon


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for spoken, text in found if spoken == language]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of every line of a shell block that is a command, without its comment."""
    pages = [*PAGES, ROOT / "README.md"]
    for page in pages:
        for line in "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].partition("=")[0].isupper() and "=" in words[0]:
                words = words[1:]
            if words and words[0] in KNOWN:
                yield page.name, words


KNOWN = ("thinwire", "torchrun", "pip", "sbatch", "make", "python")


def complete(block: str) -> bool:
    """Whether it is a whole script, which a command of its page runs."""
    return block.startswith("# train.py")


def parse_thinwire(words: list[str]) -> None:
    """A usage error where the command does not know an option or a value is missing."""
    command: Any = typer.main.get_command(_app())
    words = list(words)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    inside = words[words.index("--") + 1 :] if "--" in words else []
    command.make_context(command.name, words).close()
    if inside:
        parse(inside)


def _app() -> typer.Typer:
    from thinwire.cli import _verbs

    return _verbs.app


def parse(words: list[str]) -> None:
    if words[0] == "thinwire":
        parse_thinwire(words[1:])
    elif words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        if given.module:
            assert given.training_script == "thinwire"
            parse_thinwire(given.training_script_args)
        else:
            assert given.training_script == "train.py" or (ROOT / given.training_script).is_file(), words
    elif words[0] == "sbatch":
        assert (ROOT / words[1]).is_file()
        parse_thinwire(["train", *words[2:]])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    else:
        assert words[0] in ("pip", "python"), words


def test_commands_of_the_guide_have_the_options_that_they_give() -> None:
    found = list(commands())
    assert len(found) > 15
    for page, words in found:
        try:
            parse(words)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{page}: {shlex.join(words)}: {error}") from error
    for wrong in (["thinwire", "advise", "--no-such"], ["torchrun", "--no-such", "train.py"], ["make", "no-such"]):
        with pytest.raises((Exception, SystemExit)):
            parse(wrong)


@pytest.mark.parametrize(
    "words",
    [words[1:] for _, words in commands() if words[0] == "thinwire" and " ".join(words[1:]).startswith(SECONDS)],
    ids=shlex.join,
)
def test_short_commands_of_the_guide_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 0
    assert capsys.readouterr().out


def test_first_script_of_the_guide_runs_under_its_command(tmp_path: Path) -> None:
    (script,) = filter(complete, blocks(GUIDE / "install.md", "python"))
    (tmp_path / "train.py").write_text(script)
    (launch,) = [words for page, words in commands() if page == "install.md" and words[0] == "torchrun"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *launch[1:]],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "60 steps" in done.stdout and "less" in done.stdout


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    pool = Cluster(2)
    yield pool
    pool.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page_run_on_two_ranks(two: Cluster, page: Path, tmp_path: Path) -> None:
    found = [block for block in blocks(page, "python") if not complete(block)]
    if page.name == FRAMEWORKS:
        found = [block for block in found if importlib.util.find_spec(library_of(block)) is not None]
    if found:
        ended = two.run(guide_rank.run, 2, found, str(tmp_path))
        assert ended == [len(found)] * 2


def library_of(block: str) -> str:
    """The framework that a block imports first."""
    return re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)[0]


def text_of(node: ast.expr) -> str | None:
    """The text of a string, where numbers and names are put in as a gap."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[^}]*\}|%[.\d]*[a-z]", "\0", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "\0" for part in node.values)
    return None


@cache
def sentences() -> list[str]:
    """Every string of the package."""
    found = []
    for path in (ROOT / "thinwire").rglob("*.py"):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr)]
        found += [text for node in nodes if (text := text_of(node)) and len(text) > 20]
    return found


def test_messages_of_the_guide_are_those_of_the_source() -> None:
    page = (GUIDE / "when-it-goes-wrong.md").read_text()
    quoted = re.findall(r"^> `(.+)`$", page, re.MULTILINE)
    assert len(quoted) >= 10 and page.count("\n> ") == len(quoted)
    for message in quoted:
        pattern = re.compile("\0".join(map(re.escape, message.split("..."))).replace("\0", "[^\\w]*\0[^\\w]*"))
        assert any(pattern.search(text) for text in sentences()), message
    (said,) = re.findall(r"the error says\s`(.+?)`", page)
    assert any(said in text for text in sentences())


def test_every_page_of_the_guide_is_in_its_list() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (GUIDE / "README.md").read_text())
    assert sorted(listed) == sorted(page.name for page in PAGES if page.name != "README.md")
