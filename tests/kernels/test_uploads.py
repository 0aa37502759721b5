"""Small tables on a device: made once in each thread, in one way everywhere, and gone with the thread."""

from __future__ import annotations

import ast
import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import thinwire
from thinwire.collectives import serving_shards as shards
from thinwire.kernels import reference
from thinwire.kernels.reference import quantization
from thinwire.kernels.uploads import once_a_thread, upload

CACHED = re.compile(r"(functools\.)?(lru_)?cache\b")
ELSEWHERE = torch.device("meta")  # a device that is not the host, and everywhere to be had


def in_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results.pop()


def test_table_is_made_once_a_thread_and_goes_with_it() -> None:
    made = []

    @once_a_thread(most=2)
    def table(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
        made.append(rows)
        return upload(torch.tensor(rows), device)

    cpu = torch.device("cpu")
    mine = table((1, 2), cpu)
    assert table((1, 2), cpu) is mine and mine.tolist() == [1, 2] and made == [(1, 2)]
    theirs = in_another_thread(lambda: (weakref.ref(table((1, 2), cpu)), table((1, 2), cpu) is not mine))
    gc.collect()
    assert theirs[0]() is None and theirs[1] and len(made) == 2 and table((1, 2), cpu) is mine
    table((3,), cpu), table((4,), cpu)
    assert table((1, 2), cpu) is not mine, "more tables than wanted are held"


def test_tables_go_with_their_thread() -> None:
    """What a wire's thread uploaded is freed when the wire is detached."""
    for make in (
        lambda: quantization._block_lengths(((3, 2), (5, 1)), ELSEWHERE),
        lambda: shards._on_device((0, 2, 3), ELSEWHERE),
    ):
        left = in_another_thread(lambda make=make: weakref.ref(make()))  # type: ignore[misc]
        gc.collect()
        assert left() is None
    scales = torch.empty(3, device=ELSEWHERE)
    assert reference.block_expand(scales, ((3, 2), (5, 1))).shape == (11,)


def test_nothing_on_a_device_is_cached_for_all_threads() -> None:
    """What functools caches is every thread's: a tensor in it would be read on streams that did not wait for it."""
    found = []
    for path in Path(thinwire.__file__).parent.rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for one in functions:
            signature = f"{ast.unparse(one.args)} -> {ast.unparse(one.returns) if one.returns else None}"
            cached = any(CACHED.match(ast.unparse(decorator)) for decorator in one.decorator_list)
            if cached and re.search(r"\b(Tensor|device)\b", signature):
                found.append(f"{path.name}: {one.name}")
    assert not found, "use thinwire.kernels.uploads.once_a_thread"
