"""The papers' cost models, formula by formula as they are printed.

gTop-k: Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth
Networks". TernGrad: Wen et al., Appendix B. DGC: Lin et al., section 4.3. All times are seconds, all sizes bytes, all
rates bytes per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# ------------------------------------------------------------------------------------------------- gTop-k, Table I

GTOPK_ALPHA_S = 0.436e-3  # section IV-C: measured on the authors' 1 Gb/s cluster
GTOPK_BETA_S = 9e-9  # a byte


def gtopk_dense_s(workers: int, nbytes: float, alpha_s: float = GTOPK_ALPHA_S, beta_s: float = GTOPK_BETA_S) -> float:
    """DenseAllReduce, a ring: 2 (P - 1) alpha + 2 (P - 1) / P m beta (Eq. 5)."""
    _check(workers, nbytes)
    return 2 * (workers - 1) * alpha_s + 2 * (workers - 1) / workers * nbytes * beta_s


def gtopk_topk_s(
    workers: int, nbytes: float, density: float, alpha_s: float = GTOPK_ALPHA_S, beta_s: float = GTOPK_BETA_S
) -> float:
    """TopKAllReduce, an all-gather of values and indices: log2(P) alpha + 2 (P - 1) k beta (Eq. 6), k = rho m."""
    _check(workers, nbytes, density)
    return math.log2(workers) * alpha_s + 2 * (workers - 1) * density * nbytes * beta_s


def gtopk_gtopk_s(
    workers: int, nbytes: float, density: float, alpha_s: float = GTOPK_ALPHA_S, beta_s: float = GTOPK_BETA_S
) -> float:
    """gTopKAllReduce, a tree and a broadcast: 2 log2(P) alpha + 4 k log2(P) beta (Eq. 7), k = rho m."""
    _check(workers, nbytes, density)
    return 2 * math.log2(workers) * alpha_s + 4 * density * nbytes * math.log2(workers) * beta_s


# ------------------------------------------------------------------------------------------- TernGrad, Appendix B


@dataclass(frozen=True)
class PaperCluster:
    """The machines of Appendix B: rates between GPUs, from GPU to CPU and between machines, and the latency there."""

    gpu_rate: float  # C_gwd
    cpu_rate: float  # C_cwd
    net_rate: float  # C_nwd
    latency_s: float = 0.0  # C_ncost


def strong_scaling_s(
    cluster: PaperCluster, gpus: int, machines: int, one_gpu_s: float, nbytes: float, wire_nbytes: float | None = None
) -> float:
    """T_strong (Eq. 27): one mini-batch of K samples spread over N = i j GPUs; ``one_gpu_s`` is T(1, 1, K, |g|).

    ``wire_nbytes`` is what travels between machines where that is not the gradient itself.
    """
    copy_s = nbytes / cluster.cpu_rate
    compute_s = (one_gpu_s - copy_s) / (gpus * machines)
    return compute_s + _communication_s(cluster, gpus, machines, nbytes, wire_nbytes)


def weak_scaling_s(
    cluster: PaperCluster, gpus: int, machines: int, one_gpu_s: float, nbytes: float, wire_nbytes: float | None = None
) -> float:
    """T_weak (Eq. 29): every GPU trains K samples."""
    copy_s = nbytes / cluster.cpu_rate
    return one_gpu_s - copy_s + _communication_s(cluster, gpus, machines, nbytes, wire_nbytes)


def strong_throughput(
    cluster: PaperCluster,
    gpus: int,
    machines: int,
    one_gpu_s: float,
    nbytes: float,
    batch: int,
    wire: float | None = None,
) -> float:
    """Samples a second, K / T_strong (Eq. 28)."""
    return batch / strong_scaling_s(cluster, gpus, machines, one_gpu_s, nbytes, wire)


def weak_throughput(
    cluster: PaperCluster,
    gpus: int,
    machines: int,
    one_gpu_s: float,
    nbytes: float,
    batch: int,
    wire: float | None = None,
) -> float:
    """Samples a second, N K / T_weak (Eq. 30)."""
    return gpus * machines * batch / weak_scaling_s(cluster, gpus, machines, one_gpu_s, nbytes, wire)


def _communication_s(
    cluster: PaperCluster, gpus: int, machines: int, nbytes: float, wire_nbytes: float | None
) -> float:
    """T_comm = |g| / C_gwd log2 i + |g| / C_cwd + (C_ncost + |g| / C_nwd) log2 j."""
    _check(gpus, nbytes)
    _check(machines, nbytes)
    between = nbytes if wire_nbytes is None else wire_nbytes
    inside_s = nbytes / cluster.gpu_rate * math.log2(gpus) + nbytes / cluster.cpu_rate
    return inside_s + (cluster.latency_s + between / cluster.net_rate) * math.log2(machines)


def ternary_bits(workers: int) -> tuple[float, float]:
    """Bits an element from worker to server and back: log2 3 and log2 (2 N + 1) (section 3.1)."""
    _check(workers, 0.0)
    return math.log2(3), math.log2(2 * workers + 1)


# -------------------------------------------------------------------------------------------------------------- DGC


def density_after(steps: int, density: float) -> float:
    """Worst-case density after so many aggregation steps: it doubles at every one until nothing is zero."""
    return min(1.0, density * 2.0**steps)


def sparse_all_reduce_s(
    nodes: int, nbytes: float, density: float, rate: float, latency_s: float = 0.0, entry_ratio: float = 2.0
) -> float:
    """TernGrad's all-reduce between machines with DGC's worst case: step s of log2(j) carries the gradient at density
    2^s rho. An entry takes ``entry_ratio`` times an element (value and index); never more than the dense gradient."""
    _check(nodes, nbytes, density)
    steps, total_s = math.log2(nodes), 0.0
    for step in range(math.ceil(steps)):
        share = min(1.0, steps - step)  # a number of nodes between two powers of two counts in proportion
        sent = min(nbytes, density_after(step, density) * entry_ratio * nbytes)
        total_s += share * (latency_s + sent / rate)
    return total_s


def speedup_over_one_node(
    nodes: int, one_node_s: float, nbytes: float, rate: float, density: float | None = None, latency_s: float = 0.0
) -> float:
    """DGC's Figure 4: samples per second of j nodes over those of one, weak scaling; ``density`` None is dense."""
    if density is None:
        _check(nodes, nbytes)
        wire_s = (latency_s + nbytes / rate) * math.log2(nodes)
    else:
        wire_s = sparse_all_reduce_s(nodes, nbytes, density, rate, latency_s)
    return nodes * one_node_s / (one_node_s + wire_s)


def _check(count: int, nbytes: float, density: float = 1.0) -> None:
    if count < 1:
        raise ValueError(f"the number of workers must be at least 1, not {count}")
    if nbytes < 0:
        raise ValueError(f"a gradient of {nbytes:g} bytes is not possible")
    if not 0 < density <= 1:
        raise ValueError(f"a density lies in (0, 1], not {density:g}")
