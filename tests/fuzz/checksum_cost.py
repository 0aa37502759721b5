"""What the checksum costs beside the rest of a frame's work; see fuzz_frames.py --checksum."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from fuzz_judging import backend, backends
from fuzz_targets import CPU, ORIGIN, STEP
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import SignsCodec, SparseCodec
from thinwire.codecs import frame as frame_module
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Signs, Sparse
from thinwire.lab.bench.rows import percentiles

RESNET50 = 25_557_032


def checksum_costs(numel: int, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of the checksum beside those of choosing, encoding and decoding, for a DGC and a BlockSign frame.

    Processor time of one thread: with two, on a machine that others use, torch's threads wait for each other, and that
    (up to 200 ms a call) is all that one sees.
    """
    x, none, k = torch.randn(numel, generator=torch.Generator().manual_seed(0)), torch.zeros(0), round(numel / 1000)
    context, blocks = ExchangeContext(Layout.of([("w", 0, numel, True)]), STEP, (Hyper(),)), ((numel, 1),)
    sparse, signs, rows = SparseCodec(), SignsCodec(), []

    def chosen() -> Sparse:
        indices = kernels.select_topk(x, k)
        return Sparse(indices, x[indices], numel, k)

    def signed() -> Signs:
        return Signs(*kernels.blockwise_sign(x, blocks), blocks)

    def decode_sparse(frame: Tensor) -> object:
        return sparse.decode(context, frame, numel, k, 0, CPU, ORIGIN)

    def decode_signs(frame: Tensor) -> object:
        return signs.decode(context, frame, blocks, 1, 0, CPU, ORIGIN)

    works: list[tuple[str, Callable[[], Any], Callable[[Any], Tensor], Callable[[Tensor], object]]] = [
        ("DGC 0.1 %, fp32 rice", chosen, lambda payload: sparse.encode(context, payload, none), decode_sparse),
        ("BlockSign", signed, lambda payload: signs.encode(context, payload, none), decode_signs),
    ]
    for own in backends():
        with backend(own):
            for name, choose, encode, decode in works:
                rows.append(_cost(name, own, repeats, choose, encode, decode))
    return rows


def _cost(
    name: str,
    own: str,
    repeats: int,
    choose: Callable[[], Any],
    encode: Callable[[Any], Tensor],
    decode: Callable[[Tensor], object],
) -> dict[str, Any]:
    payload = choose()
    frame = encode(payload)
    works: dict[str, Callable[[], object]] = {
        "checksum": lambda: frame_module._frame_checksum(frame),
        "choose": choose,
        "encode": lambda: encode(payload),
        "decode": lambda: decode(frame),
    }
    seconds: dict[str, list[float]] = {what: [] for what in works}
    for turn in range(repeats + 2):  # by turns: what else the machine does meets all of them alike
        for what, work in works.items():
            begin = time.thread_time()
            work()
            if turn >= 2:
                seconds[what].append(time.thread_time() - begin)
    row: dict[str, Any] = {"frame": name, "backend": own, "bytes": frame.numel()}
    for what, times in seconds.items():
        row |= {f"{what}_{p}_ms": round(ms, 4) for p, ms in zip(("p20", "p50", "p80"), percentiles(times), strict=True)}
    # Encoding contains the checksum: where it seems faster, something else was measured.
    row["consistent"] = all(row[f"checksum_{p}_ms"] <= row[f"encode_{p}_ms"] for p in ("p20", "p50"))
    return row


def print_costs(rows: list[dict[str, Any]]) -> None:
    names = ("checksum", "choose", "encode", "decode")
    print(
        f"{'frame':22} {'backend':10} {'bytes':>10} "
        + " ".join(f"{name:>10}" for name in names)
        + "  (ms of one thread)"
    )
    for row in rows:
        times = [row[f"{name}_p50_ms"] for name in names]
        doubt = "" if row["consistent"] else "  disturbed: measure again"
        print(
            f"{row['frame']:22} {row['backend']:10} {row['bytes']:>10,} "
            + " ".join(f"{t:>10.3f}" for t in times)
            + doubt
        )
