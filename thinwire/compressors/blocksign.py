"""Blockwise scaled sign: one bit an element and the mean magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire.compressors.base import PlainCompressor
from thinwire.engine.context import ExchangeContext
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Signs, SignsOf
from thinwire.engine.topk_hint import Candidates
from thinwire.engine.traffic_plan import Budget
from thinwire.kernels import Runs, blockwise_sign, on_gpu, sign_scales


def cut_into_blocks(numel: int, block: int | None) -> Runs:
    """Return the blocks of one piece of a tensor: runs of ``block`` elements and a shorter last one, or one block."""
    if numel == 0:
        return ()
    if block is None or block >= numel:
        return ((numel, 1),)
    whole, rest = divmod(numel, block)
    return ((block, whole), (rest, 1)) if rest else ((block, whole),)


@dataclass(frozen=True)
class BlockSigns(PlainCompressor):
    """C_B(v) = ||v_b||_1 / d_b * sign(v_b) for every block b (section 3.2); sign(0) = +1."""

    block: int | None = None  # elements; None: a tensor is a block

    def budget(self, layout: Layout) -> Budget:
        runs = [run for segment in layout.coded for run in cut_into_blocks(segment.numel, self.block)]
        return Budget(scales=sum(count for _, count in runs))

    def compress(
        self,
        context: ExchangeContext,
        x: Tensor,
        agreed: Tensor | None,
        rank: int,
        candidates: Candidates | None = None,
    ) -> Signs | SignsOf:
        blocks = sum((cut_into_blocks(segment.numel, self.block) for segment in context.layout.coded), ())
        if on_gpu(x.device):  # bits and scales in one pass
            return Signs(*blockwise_sign(x, blocks), blocks)
        return SignsOf((x,), sign_scales(x, blocks), blocks)
