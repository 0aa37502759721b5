"""What is run on hosts to see what a link gives: standard library only.

probe.py echo                            send back what comes, until standard input ends
probe.py ping ADDRESS COUNT WAIT_S       print the round trips in seconds
probe.py flood ADDRESS SEGMENTS S RATE   send as fast as a link of this rate takes it
probe.py watch INTERFACE SKIP_S S        print what the kernel counts there while a flood comes in
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import time

ECHO, SINK = 7, 9  # ports
PAYLOAD = 1400
HEADERS = 14 + 20 + 8  # Ethernet, IPv4, UDP
SPACING_S = 0.01  # between pings
QUEUE_S = 0.02  # what waits in front of the link: it has to drain afterwards
_UDP_SEGMENT = 103  # socket option: one large packet, cut where the kernel likes best


def echo() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("", ECHO))
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([here, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            data, sender = here.recvfrom(64)
            here.sendto(data, sender)


def ping(address: str, count: int, wait_s: float) -> None:
    """The first round trip finds the neighbour and is not counted; the others may be under way at the same time."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, ECHO))
        for _ in range(20):
            with contextlib.suppress(OSError):  # nobody answered for the address yet
                here.send(b"-1")
                if select.select([here], [], [], wait_s)[0]:
                    here.recv(64)
                    break
        sent: list[float] = []
        took: list[float] = []
        end_s = time.perf_counter() + count * SPACING_S + wait_s
        while len(took) < count and (now := time.perf_counter()) < end_s:
            if len(sent) < count and (not sent or now >= sent[-1] + SPACING_S):
                sent.append(time.perf_counter())
                here.send(str(len(sent) - 1).encode())
            next_s = sent[-1] + SPACING_S if len(sent) < count else end_s
            if select.select([here], [], [], max(0.0, next_s - time.perf_counter()))[0]:
                arrived, place = time.perf_counter(), int(here.recv(64))
                if place >= 0:
                    took.append(arrived - sent[place])
    print(json.dumps(took))


def flood(address: str, segments: int, seconds: float, rate: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, SINK))
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(1 << 14, round(rate / 8 * QUEUE_S)))
        try:
            here.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, PAYLOAD)
        except OSError:  # Linux before 4.18
            segments = 1
        data, end_s = bytes(segments * PAYLOAD), time.monotonic() + seconds
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):  # a full queue, or nobody who listens
                here.send(data)


def watch(interface: str, skip_s: float, seconds: float) -> None:
    """Bits a second, as frames: from `skip_s` after the first packet, when bursts have passed, for so many seconds."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("", SINK))  # nobody answers that the port is closed
        print("ready", flush=True)
        end_s = time.monotonic() + 10 + skip_s + seconds
        idle = _received(interface)
        while _received(interface) == idle and time.monotonic() < end_s:
            time.sleep(0.001)
        time.sleep(skip_s)
        changes = [(time.monotonic(), *_received(interface))]
        end_s = min(end_s, changes[0][0] + seconds)
        while time.monotonic() < end_s:
            time.sleep(0.001)
            at_s, counted = time.monotonic(), _received(interface)
            if counted != changes[-1][1:]:
                changes = [changes[0], (at_s, *counted)] if len(changes) > 1 else [(at_s, *counted), (at_s, *counted)]
    (from_s, nbytes, packets), (to_s, more_bytes, more_packets) = changes[0], changes[-1]
    payload = more_bytes - nbytes - HEADERS * (more_packets - packets)  # a large packet has its headers once
    frames = payload * (PAYLOAD + HEADERS) / PAYLOAD
    print(8 * frames / (to_s - from_s) if to_s > from_s else 0.0)


def _received(interface: str) -> tuple[int, int]:
    """Bytes and packets."""
    with open("/proc/net/dev", encoding="ascii") as file:
        line = next(line for line in file if line.strip().startswith(f"{interface}:"))
    numbers = line.partition(":")[2].split()
    return int(numbers[0]), int(numbers[1])


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "echo":
        echo()
    elif verb == "ping":
        ping(given[0], int(given[1]), float(given[2]))
    elif verb == "flood":
        flood(given[0], int(given[1]), float(given[2]), int(given[3]))
    elif verb == "watch":
        watch(given[0], float(given[1]), float(given[2]))
