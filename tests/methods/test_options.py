"""A value that an option does not take gets one sentence with the option and what it takes."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from workers import sentence_of

import thinwire
from thinwire.codecs.indices import INDEX_CODES
from thinwire.codecs.values import VALUE_CODES
from thinwire.compressors.quotas import SCOPES
from thinwire.engine.local_gradients import LOCAL_MODES
from thinwire.methods import choices

WITH_DENSITY = [thinwire.DGC, thinwire.GTopK, thinwire.GradientDropping]


@pytest.mark.parametrize("density", [0, -1, 1.5, float("nan"), float("inf"), "x", True, None, [0.1], 0.0], ids=repr)
@pytest.mark.parametrize("method", WITH_DENSITY)
def test_density_outside_0_to_1_is_refused(method: Any, density: Any) -> None:
    text = sentence_of(ValueError, lambda: method(density=density))
    assert "density" in text and "(0, 1]" in text and method.name in text and repr(density) in text


@pytest.mark.parametrize("density", [1, 1.0, 1e-9, 0.5])
@pytest.mark.parametrize("method", WITH_DENSITY)
def test_density_inside_0_to_1_is_taken(method: Any, density: float) -> None:
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
        ("values", "int3"), ("indices", "huffman"), ("momentum_correction", 1), ("warmup", 0), ("dense_below", -1),
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
def test_option_refuses_a_value_that_it_does_not_take(method: Any, options: dict[str, Any]) -> None:
    text = sentence_of(ValueError, lambda: method(**options))
    assert method.name in text
    assert any(option in text for option in options)


def test_choices_that_editors_complete_are_those_that_exist() -> None:
    assert get_args(choices.Values) == tuple(VALUE_CODES) and get_args(choices.Indices) == tuple(INDEX_CODES)
    assert get_args(choices.Scope) == SCOPES and get_args(choices.LocalMode) == tuple(LOCAL_MODES)
    for name, options in (("dgc", ("scope", "values", "indices", "residual", "selection")), ("dense", ("dtype",))):
        hints = get_type_hints(thinwire.METHODS[name])
        assert all(get_origin(hints[option]) is Literal for option in options)
    assert thinwire.parse_method("dropping:local=none").local is None
    assert thinwire.parse_method("blocksign:block=tensor").block == "tensor"
    assert thinwire.parse_method("blocksign:block=64").block == 64
