"""Clusters of emulated hosts: network namespaces on one bridge, every link shaped in both directions.

    with emulation.Cluster(4, "100mbit") as cluster:
        result = cluster.run(["python", "train.py"])
    print(result.exit_code, [host.bytes_sent for host in result.hosts])

Nothing of the machine's own network is touched, and nothing has to be cleaned up by hand: the namespaces have no
names and end with the processes in them.
"""

from thinwire.lab.emulation.cluster import Cluster, HostResult, Result, RunInterrupted
from thinwire.lab.emulation.link_check import LinkCheck
from thinwire.lab.emulation.network import Counters, EmulationError, why_no_latency, why_no_tcp, why_not
from thinwire.lab.emulation.settings import (
    CUBIC,
    NOTHING,
    Cut,
    Distance,
    Fault,
    Kill,
    Links,
    Slow,
    parse_ms,
    parse_rate,
    parse_share,
    rate_text,
)

__all__ = [
    "CUBIC",
    "NOTHING",
    "Cluster",
    "Counters",
    "Cut",
    "Distance",
    "EmulationError",
    "Fault",
    "HostResult",
    "Kill",
    "LinkCheck",
    "Links",
    "Result",
    "RunInterrupted",
    "Slow",
    "parse_ms",
    "parse_rate",
    "parse_share",
    "rate_text",
    "why_no_latency",
    "why_no_tcp",
    "why_not",
]
