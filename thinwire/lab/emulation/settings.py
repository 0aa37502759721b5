"""What a user may ask for, as text and as values: rates, faults, and the network that they make."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_NUMBER = r"\d+(?:\.\d+)?"
_RATE = re.compile(rf"({_NUMBER})\s*((?i:[kmgt]?))(?:((?i:bits?|bytes?)|[bB])(?i:/s|/sec|ps)?)?", re.ASCII)
HOW_TO_WRITE_A_RATE = "write bits as 100mbit or 1Gb/s, and bytes as 125MB/s"
MIN_RATE = 10_000  # below, a single packet of 1500 bytes takes more than a second
MAX_RATE = 100 * 10**9
MAX_LATENCY_MS = 10_000.0


def parse_rate(text: str | int) -> int:
    """Bits per second: "100mbit", "1 Gb/s", "1Gbps", "125MB/s"; a whole number is taken as it is.

    Case matters between b (bits) and B (bytes) alone; prefixes are powers of 1000.
    """
    rate = text
    if isinstance(text, str):
        match = _RATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"the rate '{text}' is not understood; {HOW_TO_WRITE_A_RATE}")
        number, prefix, unit = match.groups()
        if unit is None:
            raise ValueError(f"the rate '{text}' has no unit; {HOW_TO_WRITE_A_RATE}")
        bits = 8 if unit == "B" or unit.lower().startswith("byte") else 1
        rate = round(float(number) * 1000 ** " kmgt".index(prefix.lower() or " ") * bits)
    if not MIN_RATE <= int(rate) <= MAX_RATE:
        raise ValueError(f"the rate '{text}' is not between {rate_text(MIN_RATE)} and {rate_text(MAX_RATE)}")
    return int(rate)


def rate_text(rate: int) -> str:
    """A rate as `parse_rate` reads it: "1gbit"."""
    unit, size = max(((u, s) for u, s in _UNITS.items() if s <= max(1, rate)), key=lambda pair: pair[1])
    return f"{rate / size:.12g}{unit}"


def parse_ms(text: str | float) -> float:
    """Milliseconds: "50ms", "0.05s" or "50"; a number is taken as it is."""
    if not isinstance(text, str):
        return float(text)
    match = re.fullmatch(rf"(-?{_NUMBER})\s*(ms|s|us|)", text.strip().lower())
    if match is None:
        raise ValueError(f"the time '{text}' is not understood; write milliseconds such as 50ms")
    return float(match[1]) * {"s": 1e3, "us": 1e-3}.get(match[2], 1.0)


def parse_share(text: str | float) -> float:
    """A share of 1: "0.1%" is 0.001; a number is taken as it is."""
    if not isinstance(text, str):
        return float(text)
    match = re.fullmatch(rf"({_NUMBER})\s*%", text.strip())
    if match is None:
        raise ValueError(f"the loss '{text}' is not understood; write per cent of the packets, such as 0.1%")
    return float(match[1]) / 100


@dataclass(frozen=True)
class Distance:
    """What happens to packets on the way from one host to another, in one direction.

    Each takes the latency, plus or minus up to the jitter, in the order in which they were sent; a share is lost.
    """

    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_ms <= MAX_LATENCY_MS:
            raise ValueError(f"a latency of {self.latency_ms:g} ms is not possible")
        if not 0 <= self.jitter_ms <= self.latency_ms:
            raise ValueError(
                f"a jitter of {self.jitter_ms:g} ms does not lie between 0 and the latency, {self.latency_ms:g} ms"
            )
        if not 0 <= self.loss < 1:
            raise ValueError(f"a loss of {100 * self.loss:g} % is not possible")

    def __bool__(self) -> bool:
        """Whether anything happens at all."""
        return self != Distance()

    @property
    def words(self) -> list[str]:
        """["50 ms", "jitter 5 ms", "loss 0.1 %"], what there is of it."""
        jitter = [f"jitter {self.jitter_ms:g} ms"] if self.jitter_ms else []
        loss = [f"loss {100 * self.loss:g} %"] if self.loss else []
        return [*([f"{self.latency_ms:g} ms"] if self.latency_ms else []), *jitter, *loss]


NOTHING = Distance()


@dataclass(frozen=True)
class Kill:
    """kill -9 of everything on a host, so many seconds after the start."""

    rank: int
    at_s: float

    @classmethod
    def parse(cls, text: str) -> Kill:
        match = re.fullmatch(rf"(\d+)@({_NUMBER})", text.strip())
        if match is None:
            raise ValueError(f"the fault '{text}' is not understood; write RANK@SECONDS: 1@2.5")
        return cls(int(match[1]), float(match[2]))


@dataclass(frozen=True)
class Cut:
    """The cable of a host is pulled and, later, put back."""

    rank: int
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        if self.to_s <= self.from_s:
            raise ValueError(f"the cut of host {self.rank} ends ({self.to_s:g} s) before it begins ({self.from_s:g} s)")

    @classmethod
    def parse(cls, text: str) -> Cut:
        match = re.fullmatch(rf"(\d+)@({_NUMBER})-({_NUMBER})", text.strip())
        if match is None:
            raise ValueError(f"the fault '{text}' is not understood; write RANK@FROM-TO in seconds: 1@2-5")
        return cls(int(match[1]), float(match[2]), float(match[3]))


@dataclass(frozen=True)
class Slow:
    """A host whose link has another rate, in both directions."""

    rank: int
    rate: int

    @classmethod
    def parse(cls, text: str) -> Slow:
        rank, colon, rate = text.strip().partition(":")
        if not (colon and rank.isdecimal()):
            raise ValueError(f"the fault '{text}' is not understood; write RANK:RATE: 1:10mbit")
        return cls(int(rank), parse_rate(rate))


Fault = Kill | Cut | Slow

CUBIC = "cubic"  # what Linux takes if not told otherwise, and so most users' machines


def check_tcp(name: str) -> str:
    """The name of a congestion control, or a ValueError."""
    if not re.fullmatch(r"[a-z0-9_-]{1,15}", name):
        raise ValueError(f"a congestion control has a name such as cubic, reno or bbr, not '{name}'")
    return name


def check_rank(fault: Fault, num_hosts: int) -> None:
    """A ValueError when the fault names a host that is not there."""
    if not 0 <= fault.rank < num_hosts:
        known = "the only rank is 0" if num_hosts == 1 else f"ranks go from 0 to {num_hosts - 1}"
        raise ValueError(f"a fault names host {fault.rank}, but {known}")


@dataclass(frozen=True)
class Links:
    """The network of a cluster: what its commands find in the environment, and runs keep to be gone on with on it.

    Kills and cuts are not in it: they happen once, and are no part of the network.
    """

    hosts: int
    uplink: str  # "100mbit"
    downlink: str
    latency_ms: float = 0.0
    slow: tuple[str, ...] = ()  # "1:10mbit": hosts with another rate
    tcp: str = CUBIC  # the congestion control of the hosts' TCP
    jitter_ms: float = 0.0
    loss: float = 0.0

    VARIABLE: ClassVar[str] = "THINWIRE_LINKS"
    _KINDS: ClassVar[dict[str, Any]] = {
        "hosts": int, "uplink": str, "downlink": str, "latency_ms": (int, float), "slow": (list, tuple), "tcp": str,
        "jitter_ms": (int, float), "loss": (int, float),
    }  # fmt: skip

    @classmethod
    def here(cls) -> Links | None:
        """The network that this process runs on; None outside emulated clusters, a ValueError for another text."""
        text = os.environ.get(cls.VARIABLE)
        try:
            return cls.read(json.loads(text)) if text else None
        except ValueError:
            raise ValueError(
                f"{cls.VARIABLE} is {text!r}, which is not what thinwire cluster sets; run: unset {cls.VARIABLE}"
            ) from None

    @classmethod
    def read(cls, value: Any) -> Links:
        """From what `as_dict` gave, or a ValueError."""
        names = {field.name for field in dataclasses.fields(cls)}
        optional = {"jitter_ms", "loss"}  # runs that were kept before links had them go on
        whole = isinstance(value, Mapping) and names - optional <= set(value) <= names
        if not whole or not all(isinstance(value[name], cls._KINDS[name]) for name in value):
            raise ValueError(f"a cluster is described by {', '.join(sorted(names))}")
        return cls(**{**value, "slow": tuple(value["slow"]), "tcp": check_tcp(str(value["tcp"]))})

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def command(self) -> list[str]:
        """The words that make this network: thinwire cluster --hosts 4 --rate 100mbit."""
        same = self.uplink == self.downlink
        rates = ["--rate", self.uplink] if same else ["--uplink", self.uplink, "--downlink", self.downlink]
        latency = ["--latency", f"{self.latency_ms:g}"] if self.latency_ms else []
        latency += ["--jitter", f"{self.jitter_ms:g}"] if self.jitter_ms else []
        latency += ["--loss", f"{100 * self.loss:g}%"] if self.loss else []
        tcp = ["--tcp", self.tcp] if self.tcp != CUBIC else []
        slow = [word for one in self.slow for word in ("--slow", one)]
        return ["thinwire", "cluster", "--hosts", str(self.hosts), *rates, *latency, *tcp, *slow]

    @property
    def rates(self) -> str:
        """ "100mbit", or "1gbit up, 100mbit down, 5 ms, host 1 10mbit"."""
        words = [self.uplink if self.uplink == self.downlink else f"{self.uplink} up, {self.downlink} down"]
        words += Distance(self.latency_ms, self.jitter_ms, self.loss).words
        words += [f"TCP {self.tcp}"] if self.tcp != CUBIC else []
        return ", ".join([*words, *("host " + one.replace(":", " ") for one in self.slow)])
