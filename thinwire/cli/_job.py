"""What a training command asks for, checked before anything is started."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thinwire.cli._complaints import Complaint, unknown
from thinwire.lab import peers
from thinwire.lab.emulation import Links
from thinwire.lab.recipes import RECIPES
from thinwire.lab.recipes.base import MissingData
from thinwire.lab.recipes.sharing import check_share
from thinwire.methods.spec import split_items

DEVICES = ("auto", "cpu", "cuda")
AUTO = "; auto is for thinwire.attach, and thinwire advise recommends one of these"


@dataclasses.dataclass(frozen=True)
class Job:
    """One recipe and the methods to train it with, one after the other; travels to every worker."""

    recipe: str
    specs: tuple[str, ...]  # as they were asked for: the names under which everything is kept and shown
    methods: tuple[str, ...]  # the same in full: what is trained, whatever the defaults are when the run is resumed
    epochs: int
    seed: int
    device: str = "cpu"
    data: str | None = None
    settings: tuple[str, ...] = ()  # of the recipe: "lr=0.1"
    checkpoint_every: int = 1
    tensorboard: bool = False
    in_process: bool = False  # workers are threads
    cluster: Links | None = None  # the emulated network that it runs on
    timeout_s: float = 300.0
    out: str | None = None
    resume: bool = False

    @classmethod
    def checked(
        cls,
        *,
        recipe: str,
        specs: Sequence[str],
        epochs: int | None,
        seed: int,
        device: str = "auto",
        data: Path | None = None,
        settings: str = "",
        out: Path | None = None,
        **others: Any,
    ) -> Job:
        """A job whose names and options all exist, or a Complaint about the first that does not."""
        if recipe not in RECIPES:
            raise Complaint(unknown("recipe", recipe, RECIPES))
        try:
            methods = tuple(peers.parse(spec).in_full for spec in specs)
        except ValueError as error:
            is_auto = str(error).startswith("unknown method 'auto'")
            raise Complaint(f"{error}{AUTO if is_auto else ''}.") from error
        if RECIPES[recipe].needs_data and data is None:
            raise Complaint(_missing_data(recipe))
        if data is not None and not RECIPES[recipe].needs_data:
            raise Complaint(f"--data '{data}': the recipe '{recipe}' brings its own data; leave --data out.")
        if data is not None and not data.is_dir():
            raise Complaint(f"--data '{data}' is not a folder; {_missing_data(recipe)}")
        if others.get("tensorboard"):
            if out is None:
                raise Complaint("--tensorboard writes into the run folder; name it with --out.")
            check_tensorboard()
        return cls(
            recipe=recipe,
            specs=tuple(specs),
            methods=methods,
            epochs=epochs or RECIPES[recipe].epochs,
            seed=seed,
            device=resolved_device(device),
            data=str(data.resolve()) if data is not None else None,
            settings=_settings(recipe, settings),
            out=str(out.absolute()) if out is not None else None,
            cluster=_network_here(),
            **others,
        )

    def check_workers(self, num_workers: int) -> None:
        """A Complaint where not every worker gets a sample of a batch."""
        given = dict(setting.split("=", 1) for setting in self.settings)
        try:
            check_share(self.recipe, int(given.get("batch_size", RECIPES[self.recipe].batch_size)), num_workers)
        except ValueError as error:
            raise Complaint(f"{error} with --set.") from error

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says of it: all that a resumed run must have in common."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ("out", "resume", "timeout_s")}

    @classmethod
    def resumed(cls, folder: Path, *, timeout_s: float) -> tuple[Job, int]:
        """The job of an interrupted run, and its number of workers."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            other = "is a file" if folder.exists() else "does not exist"
            why = "has no config.json" if folder.is_dir() else other
            raise Complaint(f"--resume takes a run folder made with --out, and '{folder}' {why}.") from error
        except OSError as error:
            raise Complaint(f"'{folder}' cannot be resumed: '{path}' cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise Complaint(f"'{folder}' cannot be resumed: '{path}' is not JSON.") from error
        if (folder / "summary.json").exists():
            raise Complaint(f"the run in '{folder}' is finished; there is nothing to resume.")
        if isinstance(config, dict) and config.get("in_process"):
            raise Complaint(f"'{folder}' cannot be resumed: a run with --in-process keeps no checkpoints.")
        own = {field.name for field in dataclasses.fields(cls)} - {"out", "resume", "timeout_s"}
        if not isinstance(config, dict) or not own | {"workers"} <= {*config}:
            raise Complaint(f"'{folder}' cannot be resumed: '{path}' does not describe a run of this version.")
        config["methods"], config["cluster"] = _methods(config, folder), _same_network(config, folder)
        kept: dict[str, Any] = {name: tuple(v) if isinstance(v := config[name], list) else v for name in own}
        if kept["recipe"] not in RECIPES:
            raise Complaint(unknown("recipe", kept["recipe"], RECIPES, f" in '{path}'"))
        if kept["tensorboard"]:
            check_tensorboard()
        resolved_device(kept["device"])
        job = cls(**kept, out=str(folder.absolute()), resume=True, timeout_s=timeout_s)
        return job, int(config["workers"])

    @property
    def how_to_go_on(self) -> str:
        """What to type to resume it: on the network that it began on."""
        assert self.out is not None
        return f"go on from the checkpoint {_typed(Path(self.out), self.cluster)}"


def _typed(folder: Path, cluster: Links | None) -> str:
    words = ["thinwire", "train", "--resume", os.path.relpath(folder)]
    if cluster is None:
        return f"with: {shlex.join(words)}"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun on every host, in a way that only the user knows
        return f"inside {shlex.join(cluster.command)}, started as it was, with: {shlex.join(words)}"
    return f"with: {shlex.join([*cluster.command, '--', *words])}"


def _network_here() -> Links | None:
    try:
        return Links.here()
    except ValueError as error:
        raise Complaint(f"{error}.") from error


def _same_network(config: dict[str, Any], folder: Path) -> Links | None:
    """The network here, which is the one that the run began on, or a Complaint: its curve would be of two networks."""
    here = _network_here()
    try:
        begun = None if config["cluster"] is None else Links.read(config["cluster"])
    except ValueError as error:
        raise Complaint(f"'{folder}' cannot be resumed: {error}.") from error
    if begun != here:
        names = ["no emulated cluster" if one is None else f"'{shlex.join(one.command)}'" for one in (begun, here)]
        raise Complaint(
            f"the run in '{folder}' began on {names[0]}, and this is {names[1]}: its times would be those of two "
            f"networks; train anew with another --out, or go on {_typed(folder, begun)}"
        )
    return begun


def _methods(config: dict[str, Any], folder: Path) -> list[str]:
    """The run's methods in full, as they were when it began, or a Complaint about what is not known here."""
    specs, methods = config["specs"], config["methods"]
    try:
        if not isinstance(methods, list) or len(methods) != len(specs):
            raise ValueError(f"it names {len(specs)} methods, and not as many in full")
        return [peers.parse(str(method)).in_full for method in methods]
    except ValueError as error:
        raise Complaint(f"'{folder}' cannot be resumed: {error}.") from error


def _missing_data(recipe: str) -> str:
    """What the recipe itself says without a folder: which files it wants, and where they come from."""
    try:
        RECIPES[recipe](None)
    except MissingData as error:
        return f"the recipe '{recipe}' needs data: {str(error).rstrip('.')}."
    raise AssertionError(f"{recipe} needs data, and does without")


def resolved_device(name: str) -> str:
    """ "cpu" or "cuda"; auto takes a GPU where there is one."""
    if name not in DEVICES:
        raise Complaint(unknown("device", name, DEVICES))
    if name == "cuda" and not torch.cuda.is_available():
        raise Complaint("--device cuda: torch sees no GPU here; use --device cpu.")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def check_tensorboard() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise Complaint("--tensorboard needs a package that is not installed: pip install 'thinwire[tensorboard]'.")


def _settings(recipe: str, text: str) -> tuple[str, ...]:
    """ "lr=0.1, batch_size=64" taken apart; the recipe itself checks names and values."""
    settings = []
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (word.strip() for word in piece.partition("="))
        if not equals:
            raise Complaint(f"--set: '{piece}' is not of the form name=value.")
        try:
            RECIPES[recipe].read_setting(name, value)
        except ValueError as error:
            raise Complaint(f"--set: {error}.") from error
        settings.append(f"{name}={value}")
    return tuple(settings)


def split_specs(method: str, compare: str) -> list[str]:
    """The methods to run, in order and without repetition.

    Commas separate methods and options alike: a piece with an "=" and no ":" goes on with the options before
    it, so "dgc:density=0.01,warmup=72,dense" is two methods.
    """
    pieces: list[str] = []
    for piece in split_items(compare):
        if pieces and "=" in piece and ":" not in piece.partition("=")[0] and ":" in pieces[-1]:
            pieces[-1] += f",{piece}"
        else:
            pieces.append(piece)
    return list(dict.fromkeys(spec.rstrip(", ").removesuffix(":") for spec in (method.strip(), *pieces)))
