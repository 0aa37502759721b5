"""Latency, jitter, losses and unequal directions, on real links: in netem, or through the relay where there is none."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cluster_emulation import eventually, owned_by, started, transfer

from thinwire import cli
from thinwire.lab import emulation
from thinwire.lab.emulation import network, relay
from thinwire.lab.emulation.link_check import LinkCheck

REASON = emulation.why_not() or emulation.why_no_latency()
needs_delay = pytest.mark.skipif(REASON is not None, reason=f"no delayed links here: {REASON}")
needs_relay = pytest.mark.skipif(
    REASON is not None or network.why_no_netem() is None, reason="no relay here: netem delays the packets"
)

# Host 1 sends numbered packets to host 0, which prints in which order they came.
NUMBERED = """
import os, select, socket, sys, time
count, here = int(sys.argv[1]), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    here.bind(("", 5000))
    here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    wait_s, came = 20, []
    while select.select([here], [], [], wait_s)[0]:
        came.append(int(here.recv(2000)))
        wait_s = 1
    print(*came)
else:
    time.sleep(1)
    here.connect((os.environ["MASTER_ADDR"], 5000))
    for number in range(count):
        here.send(b"%d" % number)
        time.sleep(0.0002)
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert owned_by(os.getpid()) == []


def quiet() -> bool:
    return os.getloadavg()[0] < 2 * (os.cpu_count() or 1)


@needs_delay
def test_ping_takes_twice_the_latency_and_directions_have_their_own_rates() -> None:
    with emulation.Cluster(2, uplink="20mbit", downlink="60mbit", latency_ms="25ms") as there:
        found = there.check_link()
        idle = there.run(["sleep", "0.2"])
    assert found.ping_ms is not None and found.ping_ms_min is not None
    print(found.text)
    assert 50 <= found.ping_ms_min < 55  # what is slow is this machine: never less than was asked
    assert [(host.bytes_sent, host.bytes_received) for host in idle.hosts] == [(0, 0), (0, 0)]
    for rate, asked in ((found.uplink_rate, 20e6), (found.downlink_rate, 60e6)):
        assert rate < 1.05 * asked and (rate > 0.85 * asked or not quiet())


@needs_delay
def test_jitter_spreads_packets_and_keeps_their_order() -> None:
    with emulation.Cluster(2, "100mbit", latency_ms=10, jitter_ms="8ms") as there:
        result = there.run([sys.executable, "-I", "-S", "-c", NUMBERED, "2000"], timeout_s=40)
        found = there.check_link()
    came = [int(number) for number in result.hosts[0].output.split()]
    assert came == list(range(2000))
    assert found.ping_ms_min is not None and found.ping_ms_max is not None
    assert 4 <= found.ping_ms_min < 18 and found.ping_ms_max > 22


@needs_delay
def test_loss_is_the_share_that_was_asked_and_the_same_in_every_run() -> None:
    came = []
    for _ in range(2):
        with emulation.Cluster(2, "100mbit", loss="5%") as there:
            result = there.run([sys.executable, "-I", "-S", "-c", NUMBERED, "3000"], timeout_s=40)
            came.append([int(number) for number in result.hosts[0].output.split()])
        assert 90 < 3000 - len(came[-1]) < 220, len(came[-1])
        assert result.hosts[1].packets_sent >= 3000
    if network.why_no_netem() is not None:  # netem has no seed
        assert came[0] == came[1]


@needs_delay
def test_bulk_transfer_fills_a_long_link() -> None:
    """4 MB at 50 Mb/s: 0.64 s and the start of TCP."""
    with emulation.Cluster(2, "50mbit", latency_ms=10) as there:
        result = there.run(transfer(4_000_000), timeout_s=40)
    assert result.exit_code == 0, result.hosts
    receiver, sender = result.hosts
    took = float(receiver.output)
    assert took > 0.62 and (took < 1.3 or not quiet())
    assert 4_000_000 < sender.bytes_sent < 4_300_000 and 4_000_000 < receiver.bytes_received < 4_300_000


@needs_delay
def test_cut_host_comes_back_behind_a_delay() -> None:
    with emulation.Cluster(2, "50mbit", latency_ms=5) as there:
        result = there.run(transfer(3_000_000), faults=[emulation.Cut(1, 0.1, 1.5)], timeout_s=40)
    assert result.exit_code == 0 and result.seconds > 1.5, result.hosts


@needs_relay
def test_relay_that_is_killed_ends_the_command_with_one_sentence() -> None:
    command = started("--hosts", "2", "--latency", "5ms", "--no-measure", "--", "sh", "-c", "echo ready; sleep 60",
                      until="ready", times=2)  # fmt: skip
    relays = [pid for pid in owned_by(command.pid) if relay.__file__ in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(relays) == 1
    os.kill(relays[0], signal.SIGKILL)
    _, said = command.communicate(timeout=30)
    assert said.count("\n") == 1 and "because the relay that delays the cluster's packets was ended" in said, said
    assert command.returncode == 2 and owned_by(command.pid) == []


@needs_delay
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_delayed_hosts_leave_nothing(number: signal.Signals) -> None:
    command = started("--hosts", "2", "--latency", "5ms", "--no-measure", "--", "sh", "-c", "echo ready; sleep 60",
                      until="ready", times=2)  # fmt: skip
    assert len(owned_by(command.pid)) >= 5
    command.send_signal(number)
    command.communicate(timeout=30)
    assert eventually(lambda: owned_by(command.pid) == [])


@needs_delay
def test_cluster_command_shows_what_links_give(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "links.json"
    options = ["--hosts", "2", "--rate", "50mbit", "--latency", "10ms", "--jitter", "1ms", "--json", str(file)]
    assert cli.run(["cluster", *options, "--", "true"]) == 0
    out, _ = capfd.readouterr()
    assert re.search(
        r"^measured: ping [\d.]+ ms \([\d.]+ to [\d.]+\) \(asked 20\), uplink [\d.]+mbit", out, re.MULTILINE
    )
    assert "2 hosts, 50mbit, 10 ms, jitter 1 ms: bytes by" in out
    settings = json.loads(file.read_text())["settings"]
    assert (settings["latency_ms"], settings["jitter_ms"], settings["loss"]) == (10, 1, 0)
    assert settings["measured"]["uplink_rate"] > 0 and settings["measured"]["ping_ms_min"] >= 18


def test_link_that_is_far_off_is_said_in_one_sentence() -> None:
    far = emulation.Distance(50, 0, 0.01)
    good = LinkCheck(10**8, 10**8, far, 104.0, 100.0, 110.0, 0.98e8, 1.01e8, 2000, 25)
    assert good.far_off is None
    assert "ping 104 ms (asked 100), uplink 98mbit (asked 100mbit)" in good.text
    bad = LinkCheck(10**8, 10**8, far, 131.0, 100.0, 140.0, 0.5e8, 1.01e8, 2000, 300)
    assert bad.far_off is not None
    assert bad.far_off.startswith("the ping, the uplink and the loss are more than 15 % off what was asked: ")
    assert LinkCheck(10**8, 10**8, far, None, None, None, 1e8, 1e8, 2000, 20).far_off is not None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--latency", "soon"], "the time 'soon' is not understood; write milliseconds such as 50ms."),
        (["--latency", "60s"], "a latency of 60000 ms is not possible."),
        (["--latency", "5ms", "--jitter", "6ms"], "a jitter of 6 ms does not lie between 0 and the latency, 5 ms."),
        (["--loss", "0.1"], "the loss '0.1' is not understood; write per cent of the packets, such as 0.1%."),
        (["--loss", "100%"], "a loss of 100 % is not possible."),
    ],
)
def test_link_mistake_is_one_sentence(options: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["cluster", "--hosts", "2", *options, "--", "true"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == f"thinwire: {sentence}\n"


def test_machine_without_netem_and_relay_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_try_qdisc", lambda qdisc: "Specified qdisc kind is unknown")
    monkeypatch.setattr(relay, "LIBRARY", Path("/nowhere/_relay.so"))
    assert emulation.why_no_latency() == (
        "this machine cannot add latency: the kernel has no netem (Specified qdisc kind is unknown), and the relay "
        "that would stand in for it cannot run (thinwire was installed without its native part); load sch_netem "
        "(modprobe sch_netem), or leave out latency, jitter and loss."
    )


def test_netem_is_asked_for_the_whole_distance() -> None:
    """No kernel without netem can run it; the words are what `man tc-netem` has."""
    lines = network._shaping("add", "eth0", 10**8, emulation.Distance(50, 5, 0.001))
    assert lines[0].endswith("netem delay 50ms 5ms rate 100gbit loss 0.1% limit 100000")
    assert lines[1].startswith("qdisc add dev eth0 parent 2:1 handle 1: tbf rate 100000000bit")


def test_links_are_kept_and_written_as_a_command() -> None:
    links = emulation.Links(2, "20mbit", "200mbit", 50, jitter_ms=5, loss=0.001)
    assert " ".join(links.command) == (
        "thinwire cluster --hosts 2 --uplink 20mbit --downlink 200mbit --latency 50 --jitter 5 --loss 0.1%"
    )
    assert emulation.Links.read(json.loads(json.dumps(links.as_dict()))) == links
    assert links.rates == "20mbit up, 200mbit down, 50 ms, jitter 5 ms, loss 0.1 %"
    before = {name: value for name, value in links.as_dict().items() if name not in ("jitter_ms", "loss")}
    assert emulation.Links.read(before).latency_ms == 50  # kept by a version without them


@pytest.mark.parametrize(("text", "ms"), [("50ms", 50.0), ("0.05s", 50.0), ("50", 50.0), ("200 us", 0.2)])
def test_times_are_read(text: str, ms: float) -> None:
    assert emulation.parse_ms(text) == pytest.approx(ms)
