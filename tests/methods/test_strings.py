"""Method strings: read, written, in full, and refused with a sentence."""

from __future__ import annotations

from dataclasses import fields

import pytest
from workers import sentence_of

import thinwire
from thinwire.lab import peers


@pytest.mark.parametrize("text", [
    "dgc:density=0.25,selection=sampled,momentum_correction=false,clip_norm=2.5,warmup=7,values=fp16,indices=delta16",
    "dgc:dense_below=0,exclude=a.*+b.?", "gtopk:density=0.5,momentum_correction=true,dense_below=9,exclude=x",
    "terngrad:clip_sigma=none,share_scaler=false,topology=server,seed=4", "terngrad:clip_sigma=1.5,scaler=model",
    "blocksign:block=64,two_way=false,topology=server", "dropping:density=0.1,local=sum,sync_every=3,warmup=2",
    "local:every=5,outer_momentum=0.9", "sparseloco:density=0.1,exclude=a.*",
    "local:start=2 epochs,qsr=0.3,most_apart=0.1", "sparseloco:start=5", "diloco:every=7,dtype=bf16",
    "gtopk:clip_norm=0.25", "blocksign:clip_norm=2.0", "dropping:clip_norm=1.5", "dense:dtype=bf16",
])  # fmt: skip
def test_method_string_is_read_and_written_alike(text: str) -> None:
    method = thinwire.parse_method(text)
    assert thinwire.parse_method(str(method)) == method
    assert set(str(method).split(":")[1].split(",")) == set(text.split(":")[1].split(","))
    assert thinwire.parse_method("  " + text.replace(",", " , ").upper().split(":")[0] + ":" + text.split(":")[1])


SPECS = ["dgc", "dgc:exclude=a.*+b.?,clip_norm=0.5,warmup=7", "terngrad:clip_sigma=none", "gtopk:values=int8", "bf16",
         "blocksign:block=64", "dropping:local=sum", "powersgd:rank=2", "signsgd", "noop",
         "local:every=5,method=(dropping:density=0.1,exclude=a+b)", "sparseloco",
         "local:method=(perlayer:a*=(dense:dtype=bf16),*=(dropping:scope=chunk,values=int2))"]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_method_in_full_is_the_same_method(spec: str) -> None:
    method = peers.parse(spec)
    again = peers.parse(method.in_full)
    assert again == method and again.in_full == method.in_full
    assert all(f"{option.name}=" in method.in_full for option in fields(method))


def test_exclude_of_nothing_excludes_nothing() -> None:
    assert thinwire.parse_method("dgc:exclude=").exclude == () == thinwire.parse_method("dgc").exclude


def test_exclude_patterns_are_joined_with_a_plus() -> None:
    with pytest.raises(ValueError, match=r"joined with \+: exclude=4.weight\+4.bias"):
        thinwire.parse_method("terngrad:exclude=4.weight,4.bias")
    assert thinwire.parse_method("terngrad:exclude=4.weight+4.bias").exclude == ("4.weight", "4.bias")
    with pytest.raises(ValueError, match=r"not of the form option=value$"):
        thinwire.parse_method("terngrad:seed=1,4.bias")


def test_option_that_is_misspelt_is_answered_with_the_right_one() -> None:
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
    ("local:every=0", ["local", "at least 1", "0"]),
    ("local:start=soon", ["local: start", "2 epochs", "soon"]),
    ("sparseloco:start=-1", ["sparseloco: start", "-1"]),
    ("sparseloco:most_apart=0", ["sparseloco: most_apart", "above 0"]),
    ("local:qsr=0", ["local: qsr", "above 0"]),
    ("local:method=dgc", ["dgc", "momentum_correction=False"]),
    ("local:method=(dropping:local=sum)", ["local=sum", "local gradients"]),
    ("local:method=noop", ["noop", "drift apart"]),
    ("local:method=diloco", ["diloco", "of its own"]),
    ("local:method=drop", ["local", "'drop'", "did you mean 'dropping'"]),
    ("local:every=5,method=dropping:density=0.1,scope=chunk", ["'scope'", "known options: every, method"]),
    ("perlayer:*=sparseloco", ["sparseloco", "local:method=(perlayer:...)"]),
    ("diloco:dtype=int8", ["diloco", "'int8'", "'bf16'"]),
    ("sparseloco:density=2", ["sparseloco", "(0, 1]"]),
    ("sparseloco:error_decay=1.5", ["error_decay", "[0, 1]"]),
    ("diloco:outer_momentum=1", ["outer_momentum", "[0, 1)"]),
    ("diloco:outer_lr=0", ["outer_lr", "above 0"]),
])  # fmt: skip
def test_method_string_that_cannot_be_read_is_refused(spec: str, words: list[str]) -> None:
    text = sentence_of(ValueError, lambda: thinwire.parse_method(spec))
    assert all(word in text for word in words), text
