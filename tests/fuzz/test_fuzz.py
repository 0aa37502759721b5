"""The short versions of fuzz_frames.py (mutated frames in both homes, native kernels under sanitizers) and of
fuzz_states.py (mutated states of every method)."""

from __future__ import annotations

from pathlib import Path

import fuzz_states
import numpy as np
import pytest
import torch
from fuzz_judging import Fuzzer
from fuzz_mutations import checksum
from fuzz_native import build_native, run_native, why_no_sanitizers
from fuzz_targets import make_targets
from torch import Tensor

import thinwire
from thinwire.codecs import frame as frame_module
from thinwire.errors import FrameError
from thinwire.kernels import checksum_around, reference
from thinwire.kernels.dispatch import TABLE
from thinwire.kernels.native import library
from thinwire.kernels.reference import counters

SEED = 20240
KINDS = {
    *(f"sparse {values} {indices}" for values in ("fp32", "fp16", "bf16", "int8", "int4", "int2")
      for indices in ("int32", "delta16", "rice")),
    "signs", "votes", "ternary", "ternary shared", "levels", "dense",
}  # fmt: skip


def test_mutated_frames_are_refused_or_read_right() -> None:
    report = Fuzzer(SEED).run(4000)
    assert report.findings == []
    assert set(report.tallies) == KINDS and report.frames == 4000
    assert all(tally.refused and tally.read for tally in report.tallies.values())
    assert report.sealed > 2000 and report.seeds_kept > 100 and len(report.sentences) > 30
    assert report.largest_allocation > 0


def test_fuzzer_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that lets a bad frame pass, a kernel that reads wrong, another exception, a huge allocation."""

    def finding(number: int = 300) -> str:
        report = Fuzzer(SEED).run(number)
        return report.findings[0]["what"] if report.findings else ""

    with monkeypatch.context() as patch:
        patch.setattr(frame_module, "_frame_checksum", lambda frame: torch.tensor(0))
        assert "wrong checksum was read" in finding()
    with monkeypatch.context() as patch:
        wrong = lambda packed, count: torch.full((count,), 7, dtype=torch.int8)  # noqa: E731
        patch.setitem(TABLE["unpack_trits"], "reference", wrong)
        assert "a trit that is none" in finding()
    with monkeypatch.context() as patch:
        patch.setitem(TABLE["unpack_bits"], "reference", lambda packed, count: packed[10**9])
        assert "IndexError" in finding()
    with monkeypatch.context() as patch:
        right = reference.checksum
        patch.setattr(counters, "checksum", lambda words, start=0: (torch.empty(1 << 24), right(words, start))[1])
        assert "bytes were allocated" in finding()
    if library.handle() is not None:
        with monkeypatch.context() as patch:
            patch.setitem(TABLE["checksum_around"], "native", lambda words, hole: torch.tensor(0))
            assert "the backends differ" in finding()


def test_fuzzer_gives_the_same_frames_for_the_same_seed() -> None:
    def frames() -> list[bytes]:
        seen: list[bytes] = []
        Fuzzer(SEED, lambda number, kind, data: seen.append(data)).run(300)
        return seen

    assert frames() == frames()


def test_fuzzers_checksum_is_the_engines() -> None:
    for target in make_targets():
        for seed in target.seeds:
            assert int.from_bytes(seed[32:36], "little") == checksum(seed)


def test_memory_that_is_not_aligned_never_reaches_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor over somebody else's memory may start anywhere: UBSan found native loads of whole words from there."""

    def aligned(words: Tensor, hole: int) -> Tensor:
        assert words.data_ptr() % 4 == 0
        return checksum_around(words, hole)

    monkeypatch.setattr(frame_module, "checksum_around", aligned)
    for target in make_targets():
        good = np.frombuffer(target.seeds[-1], dtype=np.uint8)
        for shift in range(4):
            memory = np.zeros(good.size + shift, dtype=np.uint8)
            memory[shift:] = good
            read = target.decode(torch.from_numpy(memory[shift:]))
            target.use(read.content, read.tail)
            memory[shift] ^= 1
            with pytest.raises(FrameError, match="starts with"):
                target.decode(torch.from_numpy(memory[shift:]))


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    if reason := why_no_sanitizers(folder):
        pytest.skip(reason)
    return folder


def test_native_kernels_under_sanitizers(sanitizers: Path) -> None:
    program = build_native(sanitizers)
    seen = run_native(program, 10_000, SEED, seconds=3.0)
    assert seen["inputs"] >= 256 and seen["edges"] > 100 and seen["seeds_kept"] > 18


def test_mutated_states_are_refused_whole_or_taken_as_saved() -> None:
    report = fuzz_states.fuzz(156, SEED)
    assert report.findings == [] and report.states == 156
    assert set(report.methods) == set(fuzz_states.METHODS)
    assert report.outcomes[fuzz_states.REFUSED] > 80 and report.outcomes[fuzz_states.TAKEN] > 10
    assert len(report.sentences) > 50


def test_state_fuzzer_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that compares nothing, and one that takes a step before it refuses."""

    def findings() -> set[str]:
        return {finding["what"] for finding in fuzz_states.fuzz(130, SEED).findings}

    with monkeypatch.context() as patch:
        patch.setattr("thinwire.checkpoint.format.check_contents", lambda *_: None)
        assert "taken, and not what was saved" in findings()
    with monkeypatch.context() as patch:
        take = thinwire.Reducer.load_state_dict

        def half(reducer: thinwire.Reducer, state: object) -> None:
            reducer.progress.optimizer_steps += 1
            take(reducer, state)  # type: ignore[arg-type]

        patch.setattr(thinwire.Reducer, "load_state_dict", half)
        assert "half loaded: the state changed" in findings()
