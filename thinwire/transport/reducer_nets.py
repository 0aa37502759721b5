"""The nets of one reducer: all ranks, those of this machine, and those that compress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ExchangeError, NonFiniteError
from thinwire.torch_private import timeout_of
from thinwire.transport.failures import FailureDetector, failure_detector_of
from thinwire.transport.groups import acquire_group, release_group
from thinwire.transport.processes import TorchNet

MachineGroups = tuple[tuple[int, ...], ...]  # the ranks of every machine


class Nets:
    """``own`` has all ranks, ``inside`` those of this machine (None without a hierarchy), and ``between`` those that
    compress: the machines' leaders, or all."""

    failure_detector: FailureDetector | None = None

    def __init__(self, own: Any, inside: Any = None, between: Any = None, groups: MachineGroups | None = None) -> None:
        self.own, self.inside, self.groups = own, inside, groups
        self.between = between if between is not None else own

    @property
    def all(self) -> list[Any]:
        """Each net once."""
        return list({id(net): net for net in (self.own, self.inside, self.between) if net is not None}.values())

    @property
    def alive(self) -> bool:
        """Whether the process group still exists; ranks that are threads always do."""
        return getattr(self.own, "alive", True)

    @property
    def compute_device(self) -> torch.device:
        return getattr(self.own, "compute_device", self.own.device)

    @property
    def waits_on_host(self) -> bool:
        """Whether a call returns when it is done, so that the host can time it."""
        return self.own.device.type == "cpu"

    @property
    def seconds(self) -> float:
        """Seconds inside collectives of exchanges."""
        nets = (self.between, self.inside)
        return sum(getattr(net, "seconds", net.traffic.seconds) for net in nets if net is not None)

    @property
    def bytes_overhead(self) -> int:
        """Bytes sent besides gradients."""
        return sum(net.traffic.overhead for net in {id(net): net for net in (self.own, self.between)}.values())

    def report(self, error: Exception) -> None:
        """Tell the other ranks, who would wait for this one, about an error of its own."""
        if self.failure_detector is not None and not isinstance(error, (ExchangeError, NonFiniteError)):
            self.failure_detector.report(error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report what is raised inside the block, in which the others may wait for this rank already."""
        try:
            yield
        except Exception as error:
            self.report(error)
            raise

    @property
    def step(self) -> int:
        """The step of the exchange that is under way, for the errors that name it."""
        return self.failure_detector.step if self.failure_detector is not None else -1

    @step.setter
    def step(self, step: int) -> None:
        if self.failure_detector is not None:
            self.failure_detector.step = step

    def close(self) -> None:
        if self.failure_detector is not None:
            self.failure_detector.close()

    def release(self) -> None:
        """Keep the groups, with nothing under way on them, for the next reducer."""


class GroupNets(Nets):
    """Nets of a process group, made for one reducer alone; a collective call."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, machines: MachineGroups | None) -> None:
        self._parent = TorchNet(group, device)
        own = acquire_group(self._parent)
        self._machine_nets: list[tuple[TorchNet, Sequence[int]]] = []
        inside = between = None
        if machines is not None:
            leaders = tuple(ranks[0] for ranks in machines)
            self._machine_nets = [(acquire_group(own, ranks), ranks) for ranks in (*machines, leaders)]
            inside = next(net for net, ranks in self._machine_nets if own.rank in ranks)
            between = self._machine_nets[-1][0]
        super().__init__(own, inside, between, machines)
        timeout = timeout_of(group, own.device)
        seconds = timeout.total_seconds() if timeout is not None else None
        self.failure_detector = failure_detector_of(own.group, own.device, seconds)
        for net in self.all:
            net.failure_detector = self.failure_detector

    def release(self) -> None:
        for net, ranks in self._machine_nets:
            release_group(self.own, net, ranks)
        release_group(self._parent, self.own)
