"""Event files for TensorBoard: scalars, and histograms of gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from thinwire.lab.recipes.base import Metric
from thinwire.lab.recipes.events import Epoch, Event, Histograms, Resumed, Steps

FOLDER = "tensorboard"


class EventFiles:
    """One folder per method in RUN/tensorboard, so that TensorBoard draws them over each other."""

    def __init__(self, run: Path, metric: Metric) -> None:
        self.folder, self.metric = run / FOLDER, metric
        self.writers: dict[str, Any] = {}
        self.purge: dict[str, int] = {}

    def _writer(self, spec: str) -> Any:
        if spec not in self.writers:
            from torch.utils.tensorboard import SummaryWriter

            name = re.sub(r"[^\w.=,+-]", "_", spec)
            self.writers[spec] = SummaryWriter(str(self.folder / name), purge_step=self.purge.get(spec))
        return self.writers[spec]

    def add(self, event: Event) -> None:
        if isinstance(event, Resumed):
            self.purge[event.spec] = event.step + 1  # what was written beyond the checkpoint will be written again
        elif isinstance(event, Steps):
            writer = self._writer(event.spec)
            for tag, value in (
                ("loss/train", event.loss),
                ("megabytes_sent", event.bytes_sent / 1e6),
                ("seconds", event.seconds),
                *((f"step/{name}", value) for name, value in vars(event.breakdown).items()),
            ):
                writer.add_scalar(tag, value, event.step)
        elif isinstance(event, Epoch):
            writer = self._writer(event.spec)
            writer.add_scalar(self.metric.name, event.metric, event.step)
            writer.add_scalar("learning_rate", event.lr, event.step)
            writer.add_scalar("samples_per_s", event.samples_per_s, event.step)
            if event.ratio is not None:
                writer.add_scalar("ratio", event.ratio, event.step)
            writer.flush()
        elif isinstance(event, Histograms):
            for tag, found in event.by_tag.items():
                self._writer(event.spec).add_histogram_raw(
                    f"gradient/{tag}",
                    min=found.edges[0],
                    max=found.edges[-1],
                    num=sum(found.counts),
                    sum=found.total,
                    sum_squares=found.square_total,
                    bucket_limits=found.edges[1:],
                    bucket_counts=found.counts,
                    global_step=event.step,
                )

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()
