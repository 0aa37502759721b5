"""Mutated frames against every decoder, in both kernel backends; native kernels under sanitizers; the checksum's cost.

    python tests/fuzz/fuzz_frames.py --frames 1000000 --json benchmarks/results/fuzz_frames.json
    python tests/fuzz/fuzz_frames.py --native --frames 1000000
    python tests/fuzz/fuzz_frames.py --sanitize --frames 1000000
    python tests/fuzz/fuzz_frames.py --checksum

A mutated frame must either be refused with one FrameError of one sentence, or be read as something whose invariants
hold; both backends must say the same. Any other exception, a crash, a hang, an allocation far beyond the frame's
length or a changed input is a finding: it is printed with the frame and the exit status is 1. Mutants that reach a
new pair of consecutive lines of the codecs, or a new sentence, become seeds. The same seed gives the same frames.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from checksum_cost import RESNET50, checksum_costs, print_costs
from fuzz_judging import Fuzzer, Report, Tally, backends
from fuzz_native import build_native, build_sanitized_library, run_native, why_no_sanitizers
from fuzz_targets import CPU

from thinwire.kernels.native import library
from thinwire.lab.bench.rows import commit, hardware, today

ADDRESS_SPACE_SLACK = 256 << 20
HANG_SECONDS = 120


# ------------------------------------------------------------------------------------------------------------- workers

_NOTE = struct.Struct("<Q32sI")


def _work(worker: int, seed: int, frames: int, seconds: float, notes: str, library: str, out: Connection) -> None:
    torch.set_num_threads(1)
    with open(notes, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)

    def note(number: int, kind: str, data: bytes) -> None:
        shared[: _NOTE.size] = _NOTE.pack(number, kind.encode(), len(data))
        shared[_NOTE.size : _NOTE.size + len(data)] = data

    if library:
        _load(library)
    fuzzer = Fuzzer(f"{seed}/{worker}", note)
    fuzzer.run(min(frames, 256))  # everything is loaded and warm before the limit
    if not library:  # AddressSanitizer reserves terabytes of addresses
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + ADDRESS_SPACE_SLACK
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    out.send(fuzzer.run(frames - min(frames, 256), seconds))


def _load(path: str) -> None:
    """Use this build of the native library."""
    loaded = library.load(Path(path))
    assert not isinstance(loaded, str), loaded
    library.handle = lambda: loaded


def _watch(process: Any, notes: Path, inbox: Connection) -> Report:
    """Wait for one worker; a crash or a hang becomes a finding with the frame that was being decoded."""
    last, since = b"", time.monotonic()
    while not inbox.poll(1.0):
        current = notes.read_bytes()
        if current != last:
            last, since = current, time.monotonic()
        if time.monotonic() - since > HANG_SECONDS:
            process.kill()
            process.join()
            return _accident(notes, f"no progress for {HANG_SECONDS} s")
    try:
        report: Report = inbox.recv()
    except EOFError:
        process.join()
        return _accident(notes, f"the process ended with status {process.exitcode}")
    process.join()
    return report


def _accident(notes: Path, what: str) -> Report:
    written = notes.read_bytes()
    number, kind, nbytes = _NOTE.unpack_from(written)
    name, frame = kind.rstrip(b"\0").decode(), written[_NOTE.size : _NOTE.size + nbytes].hex()
    finding = {"decoder": name, "backend": "?", "what": f"{what} at frame {number}", "frame": frame}
    return Report({name: Tally(number, 0, 0)}, findings=[finding])


def fuzz(frames: int, seed: int, seconds: float, workers: int, library: str = "") -> Report:
    """Spread the frames over processes and add up what they saw."""
    context, total, running = multiprocessing.get_context("spawn"), Report(), []
    with tempfile.TemporaryDirectory(prefix="thinwire-fuzz-") as folder:
        for worker in range(workers):
            notes = Path(folder) / f"{worker}"
            notes.write_bytes(bytes(1 << 16))
            inbox, outbox = context.Pipe(duplex=False)
            share = frames // workers + (worker < frames % workers)
            process = context.Process(target=_work, args=(worker, seed, share, seconds, str(notes), library, outbox))
            process.start()
            outbox.close()
            running.append((process, notes, inbox))
        for process, notes, inbox in running:
            total.add(_watch(process, notes, inbox))
    return total


# ----------------------------------------------------------------------------------------------------------------- main


def _table(report: Report) -> str:
    lines = [f"{'decoder':22} {'frames':>10} {'refused':>10} {'read':>10}"]
    for kind, tally in report.tallies.items():
        lines.append(f"{kind:22} {tally.frames:>10,} {tally.refused:>10,} {tally.read:>10,}")
    total = [sum(getattr(t, name) for t in report.tallies.values()) for name in ("frames", "refused", "read")]
    lines.append(f"{'all':22} " + " ".join(f"{number:>10,}" for number in total))
    return "\n".join(lines)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="how many mutants (default 1,000,000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same frames (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument(
        "--native", action="store_true", help="fuzz the native kernels alone: native/fuzz.cpp, ASan, UBSan"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="fuzz frames with the native library under ASan and UBSan"
    )
    parser.add_argument("--checksum", action="store_true", help="measure what the checksum costs")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    options = _arguments(given)
    if options.checksum:
        torch.set_num_threads(1)
    facts = {"seed": options.seed, "commit": commit(), "hardware": hardware(CPU), "date": today()}
    if options.checksum:
        rows = checksum_costs(RESNET50, repeats=31)
        print_costs(rows)
        _write(options.json, {"numel": RESNET50, "repeats": 31, "load": os.getloadavg(), "rows": rows, **facts})
        return 0
    with tempfile.TemporaryDirectory(prefix="thinwire-sanitized-") as name:
        folder, library = Path(name), ""
        if (options.native or options.sanitize) and (reason := why_no_sanitizers(folder)):
            print(f"skipped: {reason}")
            return 0
        if options.native:
            try:
                seen = run_native(build_native(folder), options.frames, options.seed, options.seconds)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
            print(
                f"{seen['inputs']:,} inputs in {seen['seconds']:.1f} s under ASan and UBSan: {seen['edges']} edges of "
                f"the library reached, {seen['seeds_kept']} seeds, nothing found"
            )
            _write(options.json, {"native": True, **seen, **facts})
            return 0
        if options.sanitize:
            path, runtime = build_sanitized_library(folder)
            library = str(path)
            os.environ["LD_PRELOAD"] = runtime  # of the workers
            os.environ["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
        begin = time.monotonic()
        report = fuzz(options.frames, options.seed, options.seconds, options.workers, library)
        seconds = time.monotonic() - begin
    print(_table(report))
    names = " and ".join(backends())
    print(
        f"{report.frames:,} frames, each in {names}, in {seconds:.0f} s ({report.frames / max(seconds, 1e-9):,.0f}/s, "
        f"{1e6 * report.cpu_seconds / max(report.frames, 1):.0f} us of processor each); {report.sealed:,} with a right "
        f"checksum; {len(report.sentences)} different refusals; {report.features} features, {report.seeds_kept} seeds "
        f"kept; largest allocation {report.largest_allocation:,} B, at most {report.largest_ratio:.0f} times its "
        f"frame; {len(report.findings)} findings"
    )
    for finding in report.findings[:5]:
        print(json.dumps(finding), file=sys.stderr)
    _write(
        options.json,
        {
            "frames": report.frames, "seconds": round(seconds, 1), "frames_a_second": round(report.frames / seconds, 1),
            "cpu_seconds": round(report.cpu_seconds, 1), "workers": options.workers, "backends": names.split(" and "),
            "sanitized": options.sanitize, "sealed": report.sealed, "features": report.features,
            "seeds_kept": report.seeds_kept, "refusals": sorted(report.sentences),
            "largest_allocation": report.largest_allocation, "largest_ratio": round(report.largest_ratio, 1),
            "grown_kib": report.grown_kib, "mutations": dict(report.mutations),
            "decoders": {kind: asdict(tally) for kind, tally in report.tallies.items()},
            "findings": report.findings, **facts,
        },
    )  # fmt: skip
    return 1 if report.findings else 0


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
