"""What a training run tells while it goes on; only rank 0 tells it, most of it as means over all workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Breakdown:
    """Where the time of a step went, in seconds per step.

    ``forward_backward_s + wait_s + other_s`` is the step. ``wait_s`` is what the exchange added to it: the time from
    the last gradient of the backward pass to the end of the exchange. ``other_s`` is the rest: making the batch, the
    optimizer, this loop. ``compress_s`` and ``communicate_s`` are what the exchange itself took; a part of it ran
    beside the backward pass, so they add up to more than ``wait_s`` where there is any overlap.
    """

    forward_backward_s: float
    compress_s: float
    communicate_s: float
    wait_s: float
    other_s: float


@dataclass(frozen=True)
class Started:
    """All workers have met."""

    hosts: list[str]  # host names, in rank order and without repetition
    device: str  # "cpu", or the GPU's name
    backend: str
    settings: dict[str, Any]  # of the recipe, as they are


@dataclass(frozen=True)
class ProgressEvent:
    """Where a run stands."""

    spec: str
    epoch: int  # from 1
    epochs: int
    step: int  # finished optimizer steps
    num_steps: int
    loss: float  # mean over this epoch so far
    metric: float | None  # of the last epoch; None in the first
    samples_per_s: float  # all workers together, evaluation not counted
    bytes_sent: float
    ratio: float | None


@dataclass(frozen=True)
class Steps:
    """A "steps" line of metrics.jsonl: means since the line before, ``seconds`` and ``bytes_sent`` since the start."""

    spec: str
    epoch: int
    step: int
    loss: float
    seconds: float
    bytes_sent: float
    breakdown: Breakdown


@dataclass(frozen=True)
class Epoch:
    """An "epoch" line of metrics.jsonl."""

    spec: str
    epoch: int
    step: int
    loss: float
    metric: float
    lr: float
    seconds: float  # training alone, without evaluation
    samples_per_s: float
    bytes_sent: float
    ratio: float | None


@dataclass(frozen=True)
class Histogram:
    """Counts between rising edges; there is one edge more than counts."""

    edges: list[float]
    counts: list[float]
    total: float  # of the values
    square_total: float


@dataclass(frozen=True)
class Histograms:
    """Gradient histograms of rank 0 after one step, by tag."""

    spec: str
    step: int
    by_tag: dict[str, Histogram]


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to."""

    spec: str
    metric: float
    loss: float
    steps: int
    seconds: float  # training alone, without evaluation
    samples_per_s: float
    bytes_sent: float  # over a worker's link, mean
    bytes_sent_max: float  # over the busiest worker's link
    ratio: float | None  # dense fp32 bytes / bytes of frames handed to the transport
    link_ratio: float | None  # bytes of a dense fp32 ring all-reduce / bytes over the link
    lr_factor: float
    method: str  # the spec as the recipe ran it
    breakdown: Breakdown  # means over the run


@dataclass(frozen=True)
class Halted:
    """The run was stopped between two steps, and can go on there."""

    spec: str
    epoch: int
    step: int
    num_steps: int


@dataclass(frozen=True)
class Resumed:
    """A run goes on where a checkpoint left it; the outcomes of the methods before are told again after this."""

    index: int  # of the method in the run
    spec: str
    step: int


Event = Started | Resumed | ProgressEvent | Steps | Epoch | Histograms | Outcome | Halted
Report = Callable[[Event], None]
