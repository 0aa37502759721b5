"""The other ways to exchange gradients that PyTorch users have, as rows of a benchmark.

`ddp` is DDP without any hook, `ddp-fp16` its own compression hook (its bf16 hook refuses Gloo), `powersgd-N` its
PowerSGD hook of rank N with one bucket, because on Gloo it aborts with several, and `torch-topk` a top-k hook in plain
torch. This module has no postponed annotations: DDP compares a hook's annotations with the real classes.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

PEERS = ("ddp", "ddp-fp16", "powersgd-1", "powersgd-2", "powersgd-4", "torch-topk")


def wrapped(module: nn.Module, peer: str | None) -> DDP:
    """DDP around a module that is equal on all ranks already, with the peer's hook; None leaves the hook free."""
    if peer is not None and peer.startswith("powersgd"):
        model = DDP(module, init_sync=False, bucket_cap_mb=1000)
        rank = int(peer.rpartition("-")[2])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model
    model = DDP(module, init_sync=False)
    if peer == "ddp-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif peer == "torch-topk":
        model.register_comm_hook(None, TopKHook().hook)
    return model


@lru_cache(maxsize=1)
def _own_group() -> dist.ProcessGroup | None:
    """Made once a process: a group is never given up."""
    return dist.new_group()


class TopKHook:
    """The plain-torch way, as one would write it first: residual, torch.topk, all-gather, on one ordered thread."""

    def __init__(self, density: float = 0.001) -> None:
        self.density = density
        self.residual: dict[int, Tensor] = {}
        self.thread = ThreadPoolExecutor(max_workers=1)  # collectives keep their order
        self.group = _own_group()  # and do not meet DDP's own

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self.thread.submit(self._exchange, bucket.index(), bucket.buffer(), future)
        return future

    def _exchange(self, index: int, buffer: Tensor, future: torch.futures.Future[torch.Tensor]) -> None:  # (n,)
        residual = self.residual.get(index)
        if residual is None or residual.numel() != buffer.numel():  # DDP rebuilds its buckets after the first step
            residual = self.residual[index] = torch.zeros_like(buffer)
        residual.add_(buffer)
        k, size = max(1, round(self.density * buffer.numel())), dist.get_world_size()
        indices = torch.topk(residual.abs(), k, sorted=False).indices
        values = residual[indices]
        residual[indices] = 0.0
        all_indices = [torch.empty_like(indices) for _ in range(size)]
        all_values = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(all_indices, indices, group=self.group)
        dist.all_gather(all_values, values, group=self.group)
        buffer.zero_()
        for where, what in zip(all_indices, all_values, strict=True):
            buffer.index_add_(0, where, what / size)
        future.set_result(buffer)
