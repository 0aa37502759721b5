"""Sentences for mistakes: what was not understood, what is known, and what was probably meant."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import typing
from collections.abc import Iterable
from typing import Any

import typer

# typer once depended on click and now carries a copy of it; either way this is the base of its usage errors.
CLICK_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Complaint(Exception):
    """A mistake of the user: shown as one sentence, without a traceback."""

    exit_code = 2


class Failure(Complaint):
    """Something that went wrong while running; not the command line's fault."""

    exit_code = 1


class Interrupted(Complaint):
    """The user pressed Ctrl-C."""

    exit_code = 130


def unknown(kind: str, word: str, known: Iterable[str], where: str = "") -> str:
    """One sentence: "unknown recipe 'digit': did you mean 'digits'? Known: digits, shakespeare."."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    meant = f": did you mean '{near[0]}'? Known" if near else "; known"
    return f"unknown {kind} '{word}'{where}{meant}: {', '.join(names) or 'none'}."


def network_sentence(text: str) -> str | None:
    """What torch.distributed says when hosts do not find each other or lose each other; None for anything else."""
    master = f"{os.environ.get('MASTER_ADDR', 'this host')}:{os.environ.get('MASTER_PORT', '?')}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"the port of {master} is occupied; choose another MASTER_PORT (torchrun: --master_port)"
    if joined := re.search(r"(\d+)/(\d+) clients joined", text):
        return (
            f"only {joined[1]} of {joined[2]} workers came in time; is a host down, or can it not reach {master} "
            "(MASTER_ADDR:MASTER_PORT)?"
        )
    if "trying to connect to" in text or "getaddrinfo" in text or "Name or service not known" in text:
        return f"{master} (MASTER_ADDR:MASTER_PORT) cannot be reached; is the first host up, and is its name right?"
    lost = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
        "recvValue failed",
    )
    if any(words in text for words in (*lost, "Connection was likely closed", "operation timeout", "Socket Timeout")):
        return "the connection to another worker was lost: a worker or its host has died, or the network is cut"
    return None


def _number_taken(context: Any, parameter: Any) -> str:
    """ "a whole number of at least 1", as the command declares it; nothing for what is not a number."""
    declared = inspect.signature(context.command.callback, eval_str=True).parameters.get(parameter.name)
    kind, option = (*typing.get_args(declared.annotation if declared else None), None, None)[:2]
    kinds = typing.get_args(kind) or (kind,)
    if option is None or (int not in kinds and float not in kinds):
        return ""
    least, most = option.min, option.max
    bounds = "" if least is None else f" of at least {least}" if most is None else f" from {least} to {most}"
    return f"a {'whole ' if int in kinds else ''}number{bounds}"


def sentence_of(error: Any) -> str:
    """One sentence for an error that the command-line parser found; none where it has shown the help instead."""
    context: Any = getattr(error, "ctx", None)
    option = getattr(error, "option_name", None)
    if option is not None and context is not None:
        names = [name for param in context.command.params for name in param.opts if name.startswith("--")]
        return unknown("option", option, [*names, "--help"], f" of '{context.command_path}'")
    if type(error).__name__ == "BadParameter" and error.param and (taken := _number_taken(context, error.param)):
        return f"{error.param.opts[0]} takes {taken}."
    if type(error).__name__ == "MissingParameter" and error.param.param_type_name == "argument":
        told = error.param.help or ""
        what = f"{told[:1].lower()}{told[1:].removesuffix('.')}"
        example = re.search(r"Example: (.+)", context.command.help or "")
        return f"missing argument {error.param.metavar}: {what}{f', such as {example[1]}' if example else ''}."
    message: str = " ".join(error.format_message().split())
    if not message:
        return ""
    commands = getattr(getattr(context, "command", None), "commands", None)
    if commands and message.startswith("No such command"):
        return unknown("command", message.split("'")[1], commands)
    return message[:1].lower() + message[1:].removesuffix(".") + "."
