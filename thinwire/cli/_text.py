"""How wide the output is, and sentences that break between words."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

LEFT = "THINWIRE_COLUMNS"
COMMAND = re.compile(r" with: (thinwire .*)$")  # at the end of a sentence: to be copied in one piece


def room(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal, or those that `thinwire cluster` left of its own; None for files and pipes, which have
    no edge. COLUMNS alone says nothing about what a pipe leads to: many programs set it."""
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        return shutil.get_terminal_size().columns
    columns = os.environ.get(LEFT, "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def wrapped(text: str, width: int | None, indent: int = 0) -> str:
    """The line broken between words to this width, later lines indented; a command at its end stays in one piece."""
    if width is None or len(text) <= width:
        return text
    command = COMMAND.search(text)
    if command is not None:
        return f"{wrapped(text[: command.start()] + ' with:', width, indent)}\n{' ' * indent}{command[1]}"
    return textwrap.fill(
        text,
        max(width, indent + 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )


def counted(number: int, noun: str) -> str:
    """ "1 epoch", "2 epochs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_lines(spec: str, width: int) -> str:
    """A method with its options in lines of this width, where it has commas to break at."""
    lines = textwrap.wrap(spec.replace(",", ", "), max(1, width), break_long_words=False, break_on_hyphens=False)
    return "\n".join(line.replace(", ", ",") for line in lines)
