"""Real training on a GPU through Gloo (several processes share it) and NCCL (one process); run by hand.

    python tests/kernels/cuda_check.py [WORKERS]

Every method must follow the same method on the CPU, all ranks must end with the same bits.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

SPECS = [
    "dense",
    "dense:dtype=bf16",
    "dgc:density=0.05,dense_below=64,values=fp32,factor_masking=true",
    "dgc:density=0.05,selection=sampled,values=int8,factor_masking=true",
    "dgc:density=0.05,clip_norm=1.0,values=fp16,indices=delta16,factor_masking=true",
    "dgc:density=0.05,values=int4,factor_masking=true",
    "dgc:density=0.05,scope=model,factor_masking=true",
    "dgc:density=0.05,scope=balanced,dense_below=64",
    "dgc:density=0.05,lr_rescaling=true",
    "gtopk:density=0.05",
    "gtopk:density=0.05,factor_masking=true",
    "gtopk:density=0.05,values=bf16",
    "terngrad",
    "terngrad:dense_below=0",
    "terngrad:dense_below=0,share_scaler=false,topology=server",
    "terngrad:dense_below=0,scaler=model",
    "blocksign",
    "blocksign:block=100,topology=server",
    "dropping:density=0.05",
    "dropping:density=0.05,local=partial,sync_every=5",
    "dropping:density=0.05,scope=balanced,values=int8,dense_below=64,local=partial,sync_every=5",
    "signsgd",
    "signsgd:topology=server",
]


def train(spec: str, device: torch.device, rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 10)).to(device)
    model = DDP(model, bucket_cap_mb=0.02)
    lr = 0.001 if spec.startswith("signsgd") else 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    wire = thinwire.attach(model, optimizer, spec)
    data = torch.Generator().manual_seed(rank)
    for step in range(10):
        optimizer.param_groups[0]["lr"] = lr * (1 - 0.05 * step)
        x = torch.randn(16, 32, generator=data).to(device)
        y = torch.randint(0, 10, (16,), generator=data).to(device)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()
    if rank == 0:
        print(f"    {wire.stats}", flush=True)
    wire.detach()
    return flat


def work(rank: int, size: int, backend: str, path: str) -> None:
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
    torch.set_num_threads(1)
    cuda = torch.device("cuda", 0)
    torch.cuda.set_device(cuda)
    for spec in SPECS:
        start = time.perf_counter()
        on_gpu = train(spec, cuda, rank)
        everybody = [torch.empty_like(on_gpu) for _ in range(size)]
        if backend == "gloo":
            dist.all_gather(everybody, on_gpu)
            assert all(torch.equal(one, everybody[0]) for one in everybody), f"{spec}: ranks differ"
            on_cpu = train(spec, torch.device("cpu"), rank)
            error = float((on_gpu - on_cpu).abs().max())
            # Rounding may turn a sign or a tie; a step moves a parameter by no more than about lr.
            assert error < 0.02, f"{spec}: the GPU does not follow the CPU, they differ by {error:.2e}"
        else:
            error = 0.0
        if rank == 0:
            print(f"{backend} {spec}: ok, GPU against CPU {error:.2e}, {time.perf_counter() - start:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    for backend, size in (("gloo", workers), ("nccl", 1)):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (size, backend, os.path.join(folder, "store")), nprocs=size)
