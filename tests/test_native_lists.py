"""Native listing, choosing and gathering, at sizes and edges where they take another way than for a small vector."""

from __future__ import annotations

import pytest
import torch

from thinwire import kernels
from thinwire.kernels import cpu, cpu_lists, lists, native, reference

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native library: {native.why_not()}")


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def segments(*numels: int) -> reference.Segments:
    starts = tuple(sum(numels[:place]) for place in range(len(numels)))
    zeros = (0.0,) * len(numels)
    return reference.Segments(starts, zeros, (False,) * len(numels), zeros, (None,) * len(numels), zeros)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("numels", [(1,), (127, 130), (300_001, 5, 64)])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5, 50.0])
def test_what_reaches_a_threshold_is_listed(
    threads: int, numels: tuple[int, ...], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the list just fits, and where it does not."""
    monkeypatch.setattr(native, "threads", lambda: threads)
    parts, limits = [noise(numel, numel) for numel in numels], [threshold] * len(numels)
    wanted = torch.nonzero(torch.cat(parts).abs() >= threshold).flatten()
    for room in (wanted.numel() + 1000, wanted.numel(), wanted.numel() - 1):
        if room >= 0:
            residual = torch.zeros(sum(numels))
            found = cpu.accumulate(parts, segments(*numels), None, residual, limits, room)
            assert torch.equal(residual, torch.cat(parts))
            assert (found is None) == (room < wanted.numel())
            assert found is None or torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("velocity", [False, True])
def test_what_waited_is_rescaled_in_the_same_pass(
    threads: int, velocity: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a pass of its own before, in both homes, and the list is of what is there afterwards."""
    monkeypatch.setattr(native, "threads", lambda: threads)
    numels, ratios = (1000, 127, 70_001), (1.0, 1.25, 1 / 3)
    parts, rows = [noise(numel, numel) for numel in numels], segments(*numels)
    expected, u = noise(sum(numels), 7), noise(sum(numels), 8) if velocity else None
    for start, numel, ratio in zip(rows.starts, numels, ratios, strict=True):
        expected[start : start + numel] *= ratio
    cpu.accumulate(parts, rows, u.clone() if u is not None else None, expected, None, 0)
    for home in (cpu, reference):
        monkeypatch.setattr(kernels, "_kernels", lambda _, home=home: home)
        residual = noise(sum(numels), 7)
        mine = u.clone() if u is not None else None
        found = kernels.accumulate(parts, rows, mine, residual, [2.5] * 3, 100_000, ratios=ratios)
        assert torch.equal(residual, expected), home
        assert torch.equal(found, torch.nonzero(expected.abs() >= 2.5).flatten()), home


def test_a_library_whose_functions_take_other_arguments_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not isinstance(native.load(native._PATH), str)
    monkeypatch.setattr(native, "_ABI", native._ABI + 1)
    why = native.load(native._PATH)
    assert isinstance(why, str) and why.endswith("_native.so was built from other sources; reinstall thinwire")


@pytest.mark.parametrize("levels", [1, 3, 1000, 10**9])
@pytest.mark.parametrize("k", [1, 5_000, 19_999])
def test_the_best_of_many_candidates(levels: int, k: int) -> None:
    """With few levels nearly all magnitudes are equal, and the lower index wins."""
    x = (noise(30_000) * levels).round() / levels if levels < 10**9 else noise(30_000)
    candidates = torch.arange(0, 30_000, 3).repeat_interleave(2)[:20_000]
    candidates[1::2] += 1  # rising, two of three
    bounds, ks = [0, 30_000], [k]
    for mine, theirs in zip(
        cpu.select_scopes(x, bounds, ks, candidates), reference.select_scopes(x, bounds, ks, candidates), strict=True
    ):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


def test_values_are_taken() -> None:
    x, indices = noise(1000), torch.tensor([0, 3, 4, 998, 999])
    assert torch.equal(cpu_lists.take_at(x, indices), lists.take_at(x, indices))
    assert cpu_lists.take_at(x, indices[:0]).numel() == 0
