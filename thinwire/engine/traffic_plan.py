"""What an exchange puts on the wire, known before it is made: each part states it beside the code that does it.

The collectives behind the plans are those of torch's Gloo backend: the all-gather is a ring of P - 1 rounds (each frame
goes in two halves, so that one half travels while the other is waited for), the all-reduce a ring of 2 (P - 1) rounds,
and the all-to-all posts all its messages at once. Rings use a link best; how much longer than its plan a method's
exchanges take is measured (thinwire/advisor/profile.py).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Protocol

from thinwire.engine.payloads import Spread


class NoPlan(ValueError):
    """A part that does not state what it puts on the wire."""


class Speed(Protocol):
    """A link whose speed is known."""

    def seconds(self, nbytes: float, rounds: float = 1) -> float: ...


@dataclass(frozen=True)
class Budget:
    """What a compressor's payloads of an exchange hold at most, the same on every rank.

    entries  of a sparse payload
    spread   how the entries are divided between tensors, where that is not evenly
    scales   numbers beside the elements
    agreed   numbers that all ranks agree on before they compress
    """

    entries: int = 0
    spread: Spread = ()
    scales: int = 0
    agreed: int = 0


@dataclass(frozen=True)
class Plan:
    """What an exchange, or several, take.

    rounds  latencies of the link, one after the other
    nbytes  over the busiest link, one way
    frames  that a rank decodes
    waits   how often all ranks wait for each other, one time after the other: one for every collective
    """

    rounds: float = 0.0
    nbytes: float = 0.0
    frames: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Plan) -> Plan:
        return Plan(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def seconds(self, link: Speed) -> float:
        """What this takes on a link where nothing else happens."""
        return link.seconds(self.nbytes, self.rounds)


def all_gather(nbytes: float, size: int) -> Plan:
    """Everybody's frame of so many bytes to everybody."""
    return Plan(size - 1, (size - 1) * nbytes, size, 1)


def all_reduce(nbytes: float, size: int) -> Plan:
    return Plan(2 * (size - 1), 2 * (size - 1) / size * nbytes, 0, 1)


def all_to_all(nbytes: float, size: int, frames: int = 0) -> Plan:
    """So many bytes to each other rank."""
    return Plan(1, (size - 1) * nbytes, frames, 1)


def share(count: int, servers: int) -> int:
    """The largest of the servers' shares."""
    return -(-count // servers)
