"""Forward and backward passes of several ranks as one CUDA graph with a branch per rank.

A small network's kernels neither fill a large GPU nor take as long as their launches. Recorded once and replayed, all
ranks' passes run side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.lab.recipes.base import Batch, Recipe
from thinwire.transport import ThreadWorld

WARM_UP_PASSES = 3  # libraries choose their kernels before anything is recorded


@dataclass
class _Branch:
    recipe: Recipe
    module: nn.Module
    batch: tuple[Tensor, ...]  # where the graph reads
    parameters: list[nn.Parameter]
    loss: Tensor | None = None
    grads: tuple[Tensor, ...] = ()

    def passes(self) -> None:
        self.loss = self.recipe.loss(self.module, self.batch)
        self.grads = torch.autograd.grad(self.loss, self.parameters)


class JointStep:
    """Shared by the threads of one training; every rank calls ``run`` at every step, with batches of one shape.

    What a pass does beside its result (batch normalisation's running means) happens as often as it should.
    """

    def __init__(self, world: ThreadWorld) -> None:
        self.world = world
        self._branches: list[_Branch | None] = [None] * world.size
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, rank: int, recipe: Recipe, module: nn.Module, batch: Batch) -> Tensor:
        """This rank's loss, (), detached; its gradient is in .grad. Both are overwritten by the next run."""
        branch = self._branches[rank]
        if branch is None:
            own = tuple(tensor.clone() for tensor in batch)
            branch = _Branch(recipe, module, own, [p for p in module.parameters() if p.requires_grad])
            self._branches[rank] = branch
        else:
            torch._foreach_copy_(list(branch.batch), list(batch))
        self.world.meet()
        if rank == 0:
            if self._graph is None:
                self._graph = self._record()
            self._graph.replay()
        self.world.meet()
        for parameter, grad in zip(branch.parameters, branch.grads, strict=True):
            parameter.grad = grad
        assert branch.loss is not None
        return branch.loss.detach()

    def _record(self) -> torch.cuda.CUDAGraph:
        branches = [branch for branch in self._branches if branch is not None]
        dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
        drawing = (*dropout, nn.RNNBase)  # a replay would draw the same numbers again
        assert not any(isinstance(m, drawing) for b in branches for m in b.module.modules())
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):  # of torch 2.10
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # only leaves, whose stream is free
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for branch in branches:
                before = [buffer.clone() for buffer in branch.module.buffers()]
                for _ in range(WARM_UP_PASSES):
                    branch.passes()
                for buffer, value in zip(branch.module.buffers(), before, strict=True):
                    buffer.copy_(value)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            trunk = torch.cuda.current_stream()
            streams = [torch.cuda.Stream() for _ in branches]
            for branch, stream in zip(branches, streams, strict=True):
                stream.wait_stream(trunk)
                with torch.cuda.stream(stream):
                    branch.passes()
            for stream in streams:
                trunk.wait_stream(stream)
        return graph
