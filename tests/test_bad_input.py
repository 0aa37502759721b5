"""Bad input gets one sentence that says what, where and the way out, on all ranks, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import workers_input
from cluster import Cluster
from workers import sentence_of

import thinwire

WITH_DENSITY = [thinwire.DGC, thinwire.GTopK, thinwire.GradientDropping]


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan"), float("inf"), "x", True, None, [0.1], 0.0], ids=repr)
@pytest.mark.parametrize("method", WITH_DENSITY)
def test_density_outside_0_to_1_is_refused(method: Any, density: Any) -> None:
    text = sentence_of(ValueError, lambda: method(density=density))
    assert "density" in text and "(0, 1]" in text and method.name in text and repr(density) in text


@pytest.mark.parametrize("density", [1, 1.0, 1e-9, 0.5])
@pytest.mark.parametrize("method", WITH_DENSITY)
def test_density_inside_is_taken(method: Any, density: float) -> None:
    assert method(density=density).density == density


BAD_VALUES: list[tuple[Any, dict[str, Any]]] = [
    *((thinwire.DGC, {option: value}) for option, value in [
        ("selection", "random"), ("values", "fp8"), ("values", None), ("values", ["fp32"]), ("indices", "int64"),
        ("momentum_correction", 1), ("factor_masking", "yes"), ("clip_norm", 0), ("clip_norm", -1.0),
        ("clip_norm", True), ("clip_norm", float("nan")), ("warmup", 0), ("warmup", -5), ("warmup", 1.5),
        ("warmup", "long"), ("warmup", True), ("dense_below", -1), ("dense_below", 1.5), ("dense_below", None),
        ("exclude", 5), ("exclude", [1]), ("exclude", None),
    ]),
    *((thinwire.GTopK, {option: value}) for option, value in [
        ("values", "int2"), ("indices", "huffman"), ("momentum_correction", 1), ("warmup", 0), ("dense_below", -1),
        ("exclude", {"a"}), ("clip_norm", 0), ("clip_norm", "1"),
    ]),
    *((thinwire.TernGrad, {option: value}) for option, value in [
        ("clip_sigma", 0), ("clip_sigma", "2"), ("clip_sigma", float("nan")), ("share_scaler", 0), ("topology", "ring"),
        ("seed", -1), ("seed", 1.5), ("seed", None), ("exclude", 3), ("scaler", "layer"), ("scaler", None),
    ]),
    *((thinwire.BlockSign, {option: value}) for option, value in [
        ("block", 0), ("block", "layer"), ("block", 2.5), ("block", True), ("two_way", "yes"), ("topology", "mesh"),
        ("clip_norm", -0.5), ("clip_norm", float("nan")),
    ]),
    *((thinwire.GradientDropping, {option: value}) for option, value in [
        ("local", "average"), ("local", True), ("sync_every", 0), ("sync_every", 2.5), ("warmup", -1),
        ("momentum_correction", "no"), ("clip_norm", False), ("clip_norm", 0.0),
    ]),
    (thinwire.GradientDropping, {"local": "sum", "momentum_correction": True}),
    (thinwire.DGC, {"factor_masking": True, "momentum_correction": False}),
    (thinwire.GTopK, {"factor_masking": True, "momentum_correction": False}),
    (thinwire.DGC, {"lr_rescaling": True, "momentum_correction": False}),
    (thinwire.GTopK, {"lr_rescaling": True, "momentum_correction": False}),
    (thinwire.DGC, {"lr_rescaling": "yes"}),
    (thinwire.Dense, {"dtype": "int8"}),
    (thinwire.Dense, {"dtype": torch.float16}),
]  # fmt: skip


@pytest.mark.parametrize("method, options", BAD_VALUES, ids=lambda x: getattr(x, "name", str(x)))
def test_a_value_that_an_option_does_not_take_is_refused(method: Any, options: dict[str, Any]) -> None:
    text = sentence_of(ValueError, lambda: method(**options))
    assert method.name in text
    assert any(option in text for option in options)


def test_a_misspelt_keyword_is_answered_with_the_right_one() -> None:
    with pytest.raises(TypeError, match=r"DGC has no option 'warmup_steps' \(did you mean 'warmup'\?\)"):
        thinwire.DGC(warmup_steps=10)  # type: ignore[call-arg]


@pytest.mark.parametrize("spec, words", [
    ("dcg:density=0.1", ["'dcg'", "did you mean 'dgc'", "gtopk"]),
    ("", ["unknown method", "dgc"]),
    ("TopK", ["did you mean 'gtopk'"]),
    ("bf16", ["did you mean 'dense:dtype=bf16'"]),
    ("xyz", ["'xyz'", "known methods"]),
    ("dgc:densty=0.1", ["'densty'", "did you mean 'density'"]),
    ("dgc:density=0.1,density=0.2", ["'density'", "twice"]),
    ("dgc:density", ["'density'", "option=value"]),
    ("dgc:0.1", ["'0.1'", "option=value"]),
    ("dgc:density=abc", ["density", "'abc'"]),
    ("dgc:density=", ["density", "''"]),
    ("dgc:density=2", ["density", "(0, 1]"]),
    ("dgc:values=fp8", ["values", "'fp8'", "'int8'"]),
    ("dgc:momentum_correction=maybe", ["momentum_correction", "'maybe'"]),
    ("dgc:dense_below=few", ["dense_below", "'few'"]),
    ("dgc:warmup=long", ["warmup", "'long'"]),
    ("blocksign:block=big", ["block", "'big'"]),
    ("dropping:local=all", ["local", "'all'"]),
    ("noop:fast=yes", ["'fast'", "none"]),
])  # fmt: skip
def test_a_method_string_that_cannot_be_read_is_refused(spec: str, words: list[str]) -> None:
    text = sentence_of(ValueError, lambda: thinwire.parse_method(spec))
    assert all(word in text for word in words), text


# --- attach: on every rank, by the same sentence, and everything stays as it was --------------------


def test_attach_refuses_what_cannot_work_and_changes_nothing(cluster: Cluster) -> None:
    """Each case is followed by a look at hooks and groups, and in the end by an attach that works."""
    cluster.run(workers_input.refused_attaches, 2)


def test_ranks_that_differ_all_raise_and_name_the_difference(cluster: Cluster) -> None:
    texts = cluster.run(workers_input.differing_ranks, 3)
    for case in texts[0]:
        assert len({rank[case] for rank in texts}) == 1 or case.startswith("one rank"), f"{case}: {texts}"


def test_one_rank_works_and_says_that_nothing_is_sent(cluster: Cluster) -> None:
    cluster.run(workers_input.alone, 1)


def test_a_training_step_after_detach_is_refused_before_ddp_breaks(cluster: Cluster) -> None:
    """Evaluation still works, and so does attaching again; in eval mode the error comes from the backward pass."""
    cluster.run(workers_input.steps_after_detach, 2)


def test_an_old_wire_cannot_detach_the_new_one(cluster: Cluster) -> None:
    cluster.run(workers_input.old_and_new_wire, 2)
