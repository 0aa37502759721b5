"""The native kernels and native/fuzz.cpp under AddressSanitizer and UBSan; see fuzz_frames.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
COMMON = ("-O1", "-g1", "-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra")
SOURCES = ("pack", "accumulate", "quantize", "select", "ternary", "lists", "server", "two_bits")


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def _compile(arguments: Sequence[str]) -> None:
    done = subprocess.run([compiler() or "c++", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def why_no_sanitizers(folder: Path) -> str | None:
    """One sentence when programs with sanitizers cannot be built or run here."""
    if compiler() is None:
        return "there is no C++ compiler"
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text("int main() { return 0; }\n")
    try:
        _compile([*SANITIZERS, str(source), "-o", str(program)])
        subprocess.run([program], check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return f"the compiler has no AddressSanitizer and UBSan runtime ({str(error).splitlines()[0]})"
    return None


def build_native(folder: Path) -> Path:
    """native/fuzz.cpp and the library's sources with sanitizers; the latter also tell which edges they took."""
    objects = []
    for name in SOURCES:
        objects.append(str(folder / f"{name}.o"))
        coverage = ["-fsanitize-coverage=trace-pc", "-c", str(ROOT / "native" / f"{name}.cpp"), "-o", objects[-1]]
        _compile([*COMMON, *SANITIZERS, "-fno-pie", *coverage])
    program = folder / "fuzz"
    fuzz_source = str(ROOT / "native" / "fuzz.cpp")
    _compile([*COMMON, *SANITIZERS, "-fno-pie", "-no-pie", fuzz_source, *objects, "-pthread", "-o", str(program)])
    return program


def run_native(program: Path, inputs: int, seed: int, seconds: float) -> dict[str, Any]:
    """Run it; what a sanitizer or a comparison found is raised."""
    limit = str(min(seconds, 1e9))
    done = subprocess.run([program, str(inputs), str(seed), limit], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"native/fuzz.cpp, seed {seed}, ended with {done.returncode}:\n{done.stderr}")
    return dict(json.loads(done.stdout))


def build_sanitized_library(folder: Path) -> tuple[Path, str]:
    """The native library with sanitizers, and the runtime that must be loaded before it."""
    library = folder / "_native.so"
    sources = [str(ROOT / "native" / f"{name}.cpp") for name in SOURCES]
    _compile([*COMMON, *SANITIZERS, "-fPIC", "-shared", *sources, "-pthread", "-o", str(library)])
    where = [
        subprocess.run([compiler() or "c++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return library, ":".join(where)
