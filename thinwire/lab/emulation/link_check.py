"""What the links of a cluster really give, measured beside what was asked."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.lab.emulation import keeper, probe
from thinwire.lab.emulation.network import BURST_S, INTERFACE, SUBNET, EmulationError, Network
from thinwire.lab.emulation.settings import Distance, rate_text

FAR_OFF = 0.15  # what is said in a sentence of its own
PINGS = 20
WAKING_MS = 0.3  # what two programs need to wake up and answer
SWITCH = str(SUBNET[-2])  # the address that the bridge has for the time of a measurement
TRIES = 3  # of a rate: a machine that was busy for a moment is no slow link
SKIP_S = 0.05  # of a flood: a shaper lets a burst pass
FLOOD_S = 0.3
FRAMES = 20  # that a flood has at least
LONGEST_S = 3.0
QUIET_S = 0.05  # without a packet, beyond the latency: all have arrived
UNASKED_LOSS = 1e-3  # the share of packets that may be lost by chance


@dataclass(frozen=True)
class LinkCheck:
    """The ping from host 1 to host 0, and host 0's link in both directions, in bits per second with headers."""

    uplink: int  # asked
    downlink: int
    distance: Distance
    ping_ms: float | None  # the median; None where nothing came back
    ping_ms_min: float | None
    ping_ms_max: float | None
    uplink_rate: float
    downlink_rate: float
    packets: int  # that were sent over the link
    lost: int

    @property
    def text(self) -> str:
        """One line: what there is, and what was asked."""
        asked = 2 * self.distance.latency_ms
        ping = "no answer to a ping" if self.ping_ms is None else f"ping {self.ping_ms:.3g} ms"
        if self.ping_ms is not None and self.distance.jitter_ms:
            ping += f" ({self.ping_ms_min:.3g} to {self.ping_ms_max:.3g})"
        parts = [f"{ping} (asked {asked:g})"]
        parts.append(f"uplink {_rate(self.uplink_rate)} (asked {rate_text(self.uplink)})")
        parts.append(f"downlink {_rate(self.downlink_rate)} (asked {rate_text(self.downlink)})")
        if self.distance.loss or self.lost > self.by_chance:
            parts.append(f"lost {self.lost:,} of {self.packets:,} packets (asked {100 * self.distance.loss:g} %)")
        return f"measured: {', '.join(parts)}"

    @property
    def by_chance(self) -> float:
        """Packets that may be missing without a loss: some are the neighbours' own."""
        return 2 + UNASKED_LOSS * self.packets

    @property
    def far_off(self) -> str | None:
        """A sentence about what is more than 15 % off, and None where nothing is."""
        wrong = []
        asked_ms, expected = 2 * self.distance.latency_ms, self.packets * self.distance.loss
        # Packets that keep their order wait for one that is late, so jitter makes most of them late.
        spare_ms = FAR_OFF * asked_ms + WAKING_MS + self.distance.jitter_ms
        if asked_ms and (self.ping_ms is None or abs(self.ping_ms - asked_ms) > spare_ms):
            wrong.append("the ping")
        for name, found, asked in (
            ("the uplink", self.uplink_rate, self.uplink),
            ("the downlink", self.downlink_rate, self.downlink),
        ):
            if _off(found, asked):
                wrong.append(name)
        # So few packets say little about a rare loss: three standard deviations are chance.
        if abs(self.lost - expected) > FAR_OFF * expected + 3 * math.sqrt(expected) + self.by_chance:
            wrong.append("the loss")
        if not wrong:
            return None
        which = wrong[0] if len(wrong) == 1 else f"{', '.join(wrong[:-1])} and {wrong[-1]}"
        verb = "is" if len(wrong) == 1 else "are"
        return (
            f"{which} {verb} more than {100 * FAR_OFF:.0f} % off what was asked: this machine is too busy or too slow "
            "for these links; let it rest, or ask for thinner links."
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "far_off": self.far_off}


def check_link(network: Network, uplink: int, downlink: int) -> LinkCheck:
    """Measure for a second or two; nothing else may run on the hosts."""
    distance = network.distance
    pings = sorted(1e3 * seconds for seconds in _pings(network)) if len(network.addresses) > 1 else []
    network.add_switch_address(SWITCH)
    try:
        before = network.counters(0).packets_sent, network.packets_at_switch()
        up = _best(network, uplink, network.enter(0), SWITCH, network.enter_bridge(), "bridge0")
        _drain(network)
        sent = network.counters(0).packets_sent - before[0]
        lost = sent - (network.packets_at_switch() - before[1])
        down = _best(network, downlink, network.enter_bridge(), network.addresses[0], network.enter(0), INTERFACE)
        _drain(network)
    finally:
        network.remove_switch_address(SWITCH)
    return LinkCheck(
        uplink, downlink, distance,
        statistics.median(pings) if pings else None, pings[0] if pings else None, pings[-1] if pings else None,
        up, down, sent, max(0, lost),
    )  # fmt: skip


def _drain(network: Network) -> None:
    """Wait for what still is in queues, which a command would find in its way, and in its counters."""
    end_s = time.monotonic() + LONGEST_S
    quiet_s = QUIET_S + (network.distance.latency_ms + network.distance.jitter_ms) / 1e3
    before, since_s = None, time.monotonic()
    while (now_s := time.monotonic()) < min(end_s, since_s + quiet_s):
        counted = network.counters(0), network.packets_at_switch()
        if counted != before:
            before, since_s = counted, now_s
        time.sleep(0.005)


def _pings(network: Network) -> list[float]:
    wait_s = 0.5 + 3 * (network.distance.latency_ms + network.distance.jitter_ms) / 1e3
    with _running([*network.enter(0), *_probe(network, "echo")]):
        ping = [*network.enter(1), *_probe(network, "ping", network.addresses[0], str(PINGS), f"{wait_s:g}")]
        return list(json.loads(_output(ping)))


def _best(network: Network, asked: int, sender: Sequence[str], to: str, receiver: Sequence[str], where: str) -> float:
    """The rate of the try that comes closest."""
    found: list[float] = []
    while len(found) < TRIES and (not found or _off(found[-1], asked)):
        found.append(_flood(network, asked, sender, to, receiver, where))
    return min(found, key=lambda rate: abs(rate - asked))


def _flood(network: Network, asked: int, sender: Sequence[str], to: str, receiver: Sequence[str], where: str) -> float:
    frame_bits = 8 * (probe.PAYLOAD + probe.HEADERS)
    seconds = min(LONGEST_S, max(FLOOD_S, FRAMES * frame_bits / asked))
    segments = max(1, min(40, round(asked * BURST_S / frame_bits)))
    with _running([*receiver, *_probe(network, "watch", where, f"{SKIP_S:g}", f"{seconds:g}")]) as watching:
        _output([*sender, *_probe(network, "flood", to, str(segments), f"{seconds + SKIP_S + 0.05:g}", str(asked))])
        assert watching.stdout is not None
        return float(watching.stdout.readline() or 0.0)


@contextlib.contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A probe that is ready; its standard input ends with the block."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.readline().strip() != "ready":
            said = process.stderr.read().strip().rpartition("\n")[2]
            raise EmulationError(f"the links cannot be measured: {said or 'a probe ended early'}.")
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(LONGEST_S)
        except BaseException as error:
            process.kill()
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):  # then what went wrong in the block is what counts
                raise
        finally:
            process.stdout.close()
            process.stderr.close()


def _output(command: Sequence[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)
    except subprocess.TimeoutExpired:
        raise EmulationError("the links cannot be measured: a probe took more than a minute.") from None
    if answer.returncode:
        raise EmulationError(f"the links cannot be measured: {answer.stderr.strip().rpartition(chr(10))[2]}.")
    return answer.stdout


def _probe(network: Network, *arguments: str) -> list[str]:
    """With the cluster's mark, by which the keeper finds what it has to end."""
    return ["env", f"{keeper.MARK}={network.name}", sys.executable, "-I", "-S", probe.__file__, *arguments]


def _off(found: float, asked: float) -> bool:
    return abs(found - asked) > FAR_OFF * asked


def _rate(bits: float) -> str:
    return rate_text(int(float(f"{bits:.3g}")))
