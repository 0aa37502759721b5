"""`thinwire cluster` and `thinwire.lab.emulation`, on real network namespaces.

All traffic stays inside namespaces made here and is bounded in bytes and time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paths import ROOT

from thinwire import cli
from thinwire.lab import emulation
from thinwire.lab.emulation import keeper, network

REASON = emulation.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no clusters here: {REASON}")

PYTHON = sys.executable

# Host 1 sends so many bytes to host 0, which asks for them and prints how long they took.
TRANSFER = """
import os, socket, sys, time
size, address = int(sys.argv[1]), (os.environ["MASTER_ADDR"], 5000)
if os.environ["RANK"] == "0":
    peer, _ = socket.create_server(address).accept()
    left, buffer = size, bytearray(1 << 20)
    start = time.perf_counter()
    peer.sendall(b"go")
    while left:
        left -= peer.recv_into(buffer) or sys.exit("the stream ended early")
    print(time.perf_counter() - start)
elif os.environ["RANK"] == "1":
    for attempt in range(1000):
        try:
            peer = socket.create_connection(address, 5)
            break
        except OSError:
            time.sleep(0.02)
    peer.settimeout(60)
    peer.recv(2)
    peer.sendall(bytes(size))
"""


def transfer(size: int) -> list[str]:
    return [PYTHON, "-I", "-S", "-c", TRANSFER, str(size)]


def started(*arguments: str, until: str, times: int = 1) -> subprocess.Popen[str]:
    """`thinwire cluster` in a process of its own, after it has printed so many lines that contain `until`."""
    process = subprocess.Popen(
        [PYTHON, "-m", "thinwire", "cluster", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        times -= until in line
        if not times:
            return process
    raise AssertionError(process.stderr.read())


def owned_by(pid: int) -> list[int]:
    return list(keeper.members(lambda name: name.split("-")[1] == str(pid)))


def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return condition()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a process or a namespace of its own."""
    yield
    assert owned_by(os.getpid()) == []


# -- links and counters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "size"), [("100mbit", 6_000_000), ("1gbit", 60_000_000)])
def test_link_has_its_rate_and_the_counters_have_its_bytes(rate: str, size: int) -> None:
    wanted = emulation.parse_rate(rate)
    speeds = []
    with emulation.Cluster(2, rate) as there:
        for _ in range(16):  # the machine may be busy with something else: the best of a few
            result = there.run(transfer(size), timeout_s=30)
            assert result.exit_code == 0, result.hosts
            speeds.append(size * 8 / float(result.hosts[0].output))
            receiver, sender = result.hosts
            assert size < sender.bytes_sent < 1.06 * size + 10_000  # headers, ARP, a few packets sent again
            assert size < receiver.bytes_received < 1.06 * size + 10_000
            assert receiver.bytes_sent < 0.05 * size and sender.packets_sent > size / 65536
            if 0.9 * wanted < speeds[-1]:
                break
    print(f"{rate}: {max(speeds) / 1e6:.1f} Mbit/s")
    assert max(speeds) < 1.02 * wanted
    if max(speeds) < 0.9 * wanted and (load := os.getloadavg()[0]) > 8 * (os.cpu_count() or 1):
        pytest.skip(f"{max(speeds) / 1e6:.0f} Mbit/s at a load of {load:.0f}: no core was free to send and receive")
    assert max(speeds) > 0.9 * wanted


def test_uplink_and_downlink_differ() -> None:
    with emulation.Cluster(2, uplink="100mbit", downlink="20mbit") as there:
        slow = there.run(transfer(500_000), timeout_s=30)
        assert 0.17 < float(slow.hosts[0].output) < 5
        assert there.uplink == 100_000_000 and there.downlink == 20_000_000


def test_short_messages_take_their_time() -> None:
    """A bucket of a few milliseconds would let a compressed gradient pass in no time."""
    with emulation.Cluster(2, "100mbit") as there:
        result = there.run(transfer(100_000), timeout_s=30)
    assert float(result.hosts[0].output) > 0.8 * 100_000 * 8 / 100e6


@pytest.mark.parametrize("name", [None, "reno"])
def test_hosts_have_the_congestion_control_that_was_asked_for(name: str | None) -> None:
    """Both ends of a connection, and Linux's own default if nothing was said: this machine's may be another."""
    told = "print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())"
    script = [PYTHON, "-I", "-S", "-c", f"{TRANSFER}{told}", "1000"]
    with emulation.Cluster(2, **({"tcp": name} if name else {})) as there:
        result = there.run(script, timeout_s=30)
    assert [host.output.split()[-1] for host in result.hosts] == [name or "cubic"] * 2


def test_congestion_control_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name, sentence in (
        ("nosuch", "the congestion control 'nosuch' is not there, take one of "),
        ("no such", "a congestion control has a name such as cubic, reno or bbr, not 'no such'."),
    ):
        assert cli.run(["cluster", "--hosts", "2", "--tcp", name, "--", "true"]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_idle_hosts_count_nothing() -> None:
    with emulation.Cluster(2) as there:
        result = there.run(["sleep", "0.3"])
    assert [(host.bytes_sent, host.bytes_received) for host in result.hosts] == [(0, 0), (0, 0)]


# -- what a command finds ----------------------------------------------------------------------------------------


def test_host_finds_its_environment_names_and_interfaces() -> None:
    script = """
import os, socket, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK NNODES MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
print(*(os.environ[name] for name in names.split()))
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), socket.gethostbyname("localhost"))
print(os.environ["HOST_ADDR"], os.getcwd(), os.environ["EXTRA"], *sorted(name for _, name in socket.if_nameindex()))
print(*sorted(os.listdir("/sys/class/net")), open("/sys/class/net/eth0/statistics/tx_bytes").read())
"""
    with emulation.Cluster(3, "1gbit") as there:
        result = there.run([PYTHON, "-I", "-S", "-c", script], env={"EXTRA": "more"})
        addresses = there.addresses
    assert result.exit_code == 0, result.hosts[0].output
    for rank, host in enumerate(result.hosts):
        assert host.output.splitlines()[:3] == [
            f"{rank} 3 0 1 {rank} 3 {addresses[0]} 29500 eth0",
            f"host{rank} {addresses[rank]} 127.0.0.1",
            f"{addresses[rank]} {os.getcwd()} more eth0 lo",
        ]
        assert re.fullmatch(r"eth0 lo \d+", host.output.splitlines()[3])


def test_gloo_all_reduce_works_over_three_hosts(tmp_path: Path) -> None:
    script = tmp_path / "reduce.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.full((250_000,), float(dist.get_rank()))\n"
        "dist.all_reduce(x)\n"
        "print('sum', x[0].item(), x[-1].item())\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    with emulation.Cluster(3, "1gbit") as there:
        result = there.run([PYTHON, str(script)], timeout_s=90)
    assert result.exit_code == 0, [host.output for host in result.hosts]
    for host in result.hosts:
        assert "sum 3.0 3.0" in host.output
        assert 1_300_000 < host.bytes_sent < 1_500_000  # a ring sends 2 (n - 1) / n of a megabyte


def test_torchrun_works_over_two_hosts(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print('of torchrun', os.environ['RANK'], x.item())\n"
        "dist.destroy_process_group()\n"
    )
    how = "--node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
    result = torchrun(f"{how} {script}")
    assert [re.findall(r"of torchrun (\d) 2\.0", host.output) for host in result.hosts] == [["0"], ["1"]]


def test_torchrun_works_with_its_own_rendezvous(tmp_path: Path) -> None:
    """c10d asks every host whether the endpoint is its own, and hands on the name of the first host."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, socket\nprint('of torchrun', os.environ['RANK'], socket.gethostbyname(os.environ['MASTER_ADDR']))\n"
    )
    result = torchrun(f"--rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT --rdzv_id 7 {script}")
    said = [re.findall(r"of torchrun (\d) (10\.[\d.]+)", host.output) for host in result.hosts]
    assert sorted(ranks[0][0] for ranks in said) == ["0", "1"] and said[0][0][1] == said[1][0][1]


def torchrun(arguments: str) -> emulation.Result:
    line = f"{PYTHON} -m torch.distributed.run --nnodes $NNODES --nproc_per_node 1 {arguments}"
    with emulation.Cluster(2, "1gbit") as there:
        result = there.run(["sh", "-c", line], timeout_s=90)
    assert result.exit_code == 0, [host.output for host in result.hosts]
    return result


# -- faults and endings ------------------------------------------------------------------------------------------


def test_kill_ends_the_whole_tree_of_one_host_only() -> None:
    line = 'if [ "$RANK" = 1 ]; then setsid sleep 60 & sleep 60; else sleep 1.5; fi'
    with emulation.Cluster(3, grace_s=0.2) as there:
        result = there.run(["sh", "-c", line], faults=[emulation.Kill(1, 0.5)], timeout_s=50)
        assert list(there.network.processes(1)) == []
    assert [host.exit_code for host in result.hosts] == [0, 137, 0]  # an ordered death does not end the others
    assert (result.exit_code, result.failed_rank) == (137, 1)
    assert result.hosts[1].seconds >= 0.5


def test_cut_stops_traffic_for_a_time() -> None:
    with emulation.Cluster(2, "100mbit") as there:
        result = there.run(transfer(10_000_000), faults=[emulation.Cut(1, 0.1, 2.5)], timeout_s=60)
    assert result.exit_code == 0, result.hosts
    assert result.seconds > 2.5  # 0.8 and the start of Python without the cut


def test_slow_changes_one_host_and_is_over_after_the_run() -> None:
    with emulation.Cluster(2, "1gbit") as there:
        slow = there.run(transfer(500_000), faults=[emulation.Slow(1, 10_000_000)], timeout_s=30)
        fast = there.run(transfer(500_000), timeout_s=30)
    assert float(slow.hosts[0].output) > 0.36
    assert float(fast.hosts[0].output) < 0.36


def test_first_failure_ends_the_other_hosts_after_the_grace_time() -> None:
    line = 'if [ "$RANK" = 1 ]; then sleep 0.2; exit 7; else sleep 60; fi'
    with emulation.Cluster(3, grace_s=0.5) as there:
        result = there.run(["sh", "-c", line])
    assert (result.exit_code, result.failed_rank) == (7, 1)
    assert [host.exit_code for host in result.hosts] == [143, 7, 143] and result.seconds < 30


def test_cluster_timeout_ends_hosts_with_124() -> None:
    with emulation.Cluster(2) as there:
        result = there.run(["sh", "-c", "sleep $((RANK * 60))"], timeout_s=2)
    assert [host.exit_code for host in result.hosts] == [0, 124]


def test_background_processes_end_with_the_run() -> None:
    with emulation.Cluster(1) as there:
        result = there.run(["sh", "-c", "setsid sleep 60 & echo done"])
        assert list(there.network.processes(0)) == []
    assert result.exit_code == 0 and result.hosts[0].output == "done\n" and result.seconds < 10


def test_ctrl_c_reaches_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import time\ntry:\n    print('ready')\n    time.sleep(300)\nexcept KeyboardInterrupt:\n    print('saved')\n"
    )
    file = tmp_path / "result.json"
    process = started("--hosts", "2", "--json", str(file), "--", PYTHON, "-c", script, until="ready", times=2)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "thinwire: stopped by Ctrl-C; all 2 hosts have ended.\n"
    assert out.count("saved") == 2 and "interface counters" in out
    assert owned_by(process.pid) == []
    assert len(json.loads(file.read_text())["hosts"]) == 2


def test_kill_9_leaves_nothing_and_does_not_touch_a_cluster_beside_it() -> None:
    with emulation.Cluster(2, "100mbit") as beside:
        killed = started(
            "--hosts", "2", "--", "sh", "-c", "setsid sleep 300 & echo ready; sleep 300", until="ready", times=2
        )
        assert beside.network.name != "" and len(owned_by(killed.pid)) >= 5
        killed.kill()
        killed.communicate()
        assert eventually(lambda: owned_by(killed.pid) == [])
        assert beside.run(transfer(100_000), timeout_s=20).exit_code == 0


def test_next_cluster_removes_what_is_left_of_one_whose_keeper_was_killed() -> None:
    killed = started(
        "--hosts", "2", "--", "sh", "-c", "setsid sleep 300 & echo ready; sleep 300", until="ready", times=2
    )
    # Stopped, it can neither end its hosts itself nor be taken for dead by a cluster that another test starts.
    killed.send_signal(signal.SIGSTOP)
    try:
        for pid in owned_by(killed.pid):
            if keeper.__file__ in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert owned_by(killed.pid) != []
    finally:
        killed.kill()
        killed.communicate()
    with emulation.Cluster(1):
        assert owned_by(killed.pid) == []


def test_keeper_that_is_killed_alone_ends_the_command_with_one_sentence() -> None:
    command = started("--hosts", "2", "--", "sh", "-c", "echo ready; sleep 1", until="ready", times=2)
    kept = [pid for pid in owned_by(command.pid) if keeper.__file__ in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(min(kept), signal.SIGKILL)  # the first: the others, which it has forked, keep the hosts
    _, said = command.communicate(timeout=30)
    assert said.count("\n") == 1 and "the link of host 0 is gone" in said, said
    assert command.returncode == 2 and owned_by(command.pid) == []


def test_two_clusters_run_at_once() -> None:
    with emulation.Cluster(2, "100mbit") as one, emulation.Cluster(2, "100mbit") as two:
        assert one.run(transfer(200_000), timeout_s=20).exit_code == 0
        assert two.run(transfer(200_000), timeout_s=20).exit_code == 0


def test_cluster_works_in_a_user_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens without root; root may do it too."""
    options = ("--user", "--map-root-user", "--net", "--mount")
    if subprocess.run(["unshare", *options, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system allows no user namespaces")
    monkeypatch.setattr(network, "_unshare_options", lambda: options)
    with emulation.Cluster(2, "100mbit") as there:
        result = there.run(transfer(1_000_000), faults=[emulation.Slow(1, 50_000_000)], timeout_s=20)
    assert result.exit_code == 0, result.hosts
    assert 0.13 < float(result.hosts[0].output) < 5 and result.hosts[1].bytes_sent > 1_000_000


# -- the command line --------------------------------------------------------------------------------------------


def test_cluster_command_prefixes_lines_and_writes_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    arguments = ["--hosts", "2", "--rate", "100mbit", "--uplink", "50mbit", "--slow", "1:10mbit", "--json", str(file)]
    assert cli.run(["cluster", *arguments, "--", "sh", "-c", "echo I am $RANK; exit $((RANK * 3))"]) == 3
    out, err = capfd.readouterr()
    assert {"[host 0] I am 0", "[host 1] I am 1"} <= set(out.splitlines())
    assert "2 hosts, 50mbit up, 100mbit down" in out and re.search(r"^ +1 +3 ", out, re.MULTILINE)
    assert re.fullmatch(r"thinwire: host 1 ended with exit code 3 after \d\.\d s\.\n", err)
    written = json.loads(file.read_text())
    assert written["settings"]["uplink"] == "50mbit" and written["exit_code"] == 3
    assert written["settings"]["faults"] == [{"kind": "slow", "rank": 1, "rate": 10_000_000}]
    assert [host["exit_code"] for host in written["hosts"]] == [0, 3] and "bytes_sent" in written["hosts"][0]
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hosts", "0", "--", "true"], "a cluster has 1 to 250 hosts, not 0."),
        (["--hosts", "two", "--", "true"], "--hosts takes a whole number."),
        (["--", "true"], "missing option '--hosts'."),
        (["--hosts", "2"], "the command to run on every host is missing"),
        (["--hosts", "2", "--", "no-such-command"], "the command 'no-such-command' was not found."),
        (["--hosts", "2", "--", str(ROOT / "LICENSE")], "LICENSE' cannot be executed."),
        (["--hosts", "2", "--rate", "1gib", "--", "true"], "the rate '1gib' is not understood"),
        (["--hosts", "2", "--rate", "0mbit", "--", "true"], "the rate '0mbit' is not between 10kbit and 100gbit."),
        (["--hosts", "2", "--rate", "100", "--", "true"], "the rate '100' has no unit; write bits as 100mbit or 1Gb/s"),
        (["--hosts", "2", "--uplink", "fast", "--", "true"], "the rate 'fast' is not understood"),
        (["--hosts", "2", "--latency", "-1", "--", "true"], "a latency of -1 ms is not possible."),
        (["--hosts", "2", "--kill", "2@1", "--", "true"], "a fault names host 2, but ranks go from 0 to 1."),
        (["--hosts", "2", "--kill", "1", "--", "true"], "--kill: the fault '1' is not understood"),
        (["--hosts", "2", "--cut", "1@3-2", "--", "true"], "--cut: the cut of host 1 ends (2 s) before it begins"),
        (["--hosts", "2", "--slow", "1:1gib", "--", "true"], "--slow: the rate '1gib' is not understood"),
        (["--hosts", "2", "--json", "/no/such/folder/f", "--", "true"], "'/no/such/folder/f' cannot be written:"),
        (["--hosts", "2", "--json", "/tmp", "--", "true"], "'/tmp' cannot be written: it is a folder."),
        (["--hosts", "2", "--rat", "1", "--", "true"], "unknown option '--rat'"),
    ],
)
def test_cluster_mistake_is_one_sentence(
    arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["cluster", *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("thinwire: ") and sentence in err and err.count("\n") == 1


def test_cluster_names_missing_tools_and_permissions(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(network, "_path", lambda: "/nowhere")
        assert cli.run(["cluster", "--hosts", "2", "--", "true"]) == 2
        assert "the command 'ip' is missing; install the package iproute2" in capfd.readouterr().err
    monkeypatch.setattr(network, "_unshare_options", lambda: None)
    assert cli.run(["cluster", "--hosts", "2", "--", "true"]) == 2
    assert "run it as root (sudo), or allow user namespaces" in capfd.readouterr().err


def test_latency_is_added_or_refused(capfd: pytest.CaptureFixture[str]) -> None:
    reason = emulation.why_no_latency()
    if reason is not None:
        assert cli.run(["cluster", "--hosts", "2", "--latency", "20", "--", "true"]) == 2
        assert "this machine cannot add latency: the kernel has no netem" in capfd.readouterr().err
        return
    with emulation.Cluster(2, "1gbit", latency_ms=20) as there:
        ping = "[ $RANK = 1 ] || exit 0; python3 -c \"import socket; socket.create_connection(('host0', 9), 5)\""
        began = time.monotonic()
        there.run(["sh", "-c", ping], timeout_s=20)  # refused, after one round trip and one of ARP
        assert time.monotonic() - began > 0.04


@pytest.mark.parametrize(("text", "rate"), [
    ("1gbit", 10**9), ("1.5Mbit/s", 1_500_000), ("64 kbit", 64_000), ("1Gbps", 10**9), ("1 Gb/s", 10**9),
    ("100 Mbit/s", 10**8), ("1GBIT", 10**9), ("10MBits/s", 10**7), ("125MB/s", 10**9), ("125 mB/s", 10**9),
    ("12.5 megabytes", None), ("12.5 MBytes/s", 10**8), ("25MBps", 2 * 10**8), ("1gb", 10**9), ("100000 b/s", 10**5),
])  # fmt: skip
def test_rates_are_read_and_written(text: str, rate: int | None) -> None:
    if rate is None:
        with pytest.raises(ValueError, match="is not understood; write bits as 100mbit or 1Gb/s, and bytes as 125MB/s"):
            emulation.parse_rate(text)
        return
    assert emulation.parse_rate(text) == rate == emulation.parse_rate(emulation.rate_text(rate))
