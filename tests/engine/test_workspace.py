"""Memory that all exchanges of a wire use again: it grows, shrinks, and changes no frame."""

from __future__ import annotations

import pytest
import torch

from thinwire import kernels
from thinwire.codecs import SparseCodec
from thinwire.compressors import TopK
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Sparse
from thinwire.engine.workspace import BACK, Workspace
from thinwire.kernels import reference
from thinwire.kernels.native import library
from thinwire.memory import ErrorFeedback

pytestmark = pytest.mark.skipif(library.handle() is None, reason=f"no native library here: {library.why_not()}")
CPU = torch.device("cpu")


def test_scratch_grows_once_is_used_again_and_shrinks() -> None:
    workspace = Workspace()

    def exchange(count: int) -> set[int]:
        workspace.begin()
        front = workspace.take(count, torch.float32, CPU)
        mark = workspace.mark()
        more = workspace.take(count, torch.int32, CPU)
        back = workspace.take(3 * count, torch.uint8, CPU, BACK)
        assert front is not None and more is not None and back is not None
        front.fill_(1.0), more.fill_(2), back.fill_(3)
        assert front.eq(1).all() and more.eq(2).all() and back.eq(3).all(), "they overlap"
        workspace.release(mark)
        again = workspace.take(count, torch.float32, CPU)
        assert again is not None
        again.fill_(4.0)
        assert front.eq(1).all() and back.eq(3).all()
        return {front.data_ptr(), more.data_ptr(), again.data_ptr(), back.data_ptr()}

    exchange(1000)
    assert workspace.nbytes == 0
    assert exchange(1000) == exchange(1000) and 11_000 <= workspace.nbytes <= 11_200
    exchange(5000)
    exchange(1000)
    assert workspace.nbytes >= 55_000, "as long as the longest so far"
    for _ in range(201):
        exchange(1000)
    assert workspace.nbytes <= 11_200, "given back when nobody needs it"


def test_scratch_that_was_not_begun_allocates_everything() -> None:
    workspace = Workspace()
    a, b = workspace.take(10, torch.float32, CPU), workspace.take(10, torch.float32, CPU)
    assert a is not None and b is not None and a.data_ptr() != b.data_ptr() and workspace.nbytes == 0


def test_scratch_is_for_the_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.engine.workspace.backend_name", lambda device: "reference")
    assert Workspace().take(10, torch.float32, CPU) is None
    monkeypatch.undo()
    assert Workspace().entries(10, 1 << 31, CPU) is None, "32 bits are too few for its indices"


@pytest.mark.parametrize("density", [0.001, 0.02, 0.25, 1.0])
@pytest.mark.parametrize("values", ["fp32", "int8", "bf16"])
def test_frames_made_in_scratch_memory_are_the_same(density: float, values: str) -> None:
    """Selection and coding in kept memory give the frames that plain torch gives, step after step."""
    layout = Layout.of([("a", 0, 70_001, True), ("b", 1, 5, True), ("c", 2, 900, True), ("d", 3, 30, False)])
    workspace, codec = Workspace(), SparseCodec(values)
    lean, plain = TopK(density, workspace=workspace), TopK(density)
    memory, tail = ErrorFeedback(), torch.ones(30)
    generator = torch.Generator().manual_seed(3)
    for step in range(8):
        context = ExchangeContext(layout, step, (Hyper(),) * 4)
        grad = torch.randn(layout.numel, generator=generator)
        if step % 3 == 2:
            grad[:7000] *= 40  # clustered: some entries do not fit into the frame
        workspace.begin()
        hint = lean.hint(context, CPU)
        residual, candidates = memory.compensate(context, grad, (), hint, None)
        x = residual[: layout.coded_numel]
        chosen = reference.select_scopes(
            x, [0, 70_001, 70_006, 70_906], [max(1, round(density * n)) for n in (70_001, 5, 900)], None
        )[0]
        expected = codec.encode(context, Sparse(chosen, x[chosen], x.numel(), plain.num_entries(context)), tail)
        payload = lean.compress(context, x, None, 0, candidates)
        assert torch.equal(payload.indices.to(torch.int64), chosen) and payload.indices.dtype == torch.int32
        frame = codec.encode(context, payload, tail, workspace=workspace)
        assert torch.equal(frame, expected)
        entries = workspace.entries(payload.capacity, x.numel(), CPU)
        assert entries is not None
        read = codec.decode(
            context, frame, x.numel(), payload.capacity, 30, CPU, "x", (entries.indices, entries.values)
        )
        again = codec.decode(context, frame, x.numel(), payload.capacity, 30, CPU, "x")
        assert torch.equal(read.content.indices.to(torch.int64), again.content.indices)
        assert torch.equal(read.content.values, again.content.values)
        assert torch.equal(read.tail, tail) and not read.alarm
        kernels.subtract_at(x, read.content.indices, read.content.values)
