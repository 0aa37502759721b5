"""Method strings: read, written, and refused with a sentence."""

from __future__ import annotations

import pytest

import thinwire


@pytest.mark.parametrize("text", [
    "dgc:density=0.25,selection=sampled,momentum_correction=false,clip_norm=2.5,warmup=7,values=fp16,indices=delta16",
    "dgc:dense_below=0,exclude=a.*+b.?", "gtopk:density=0.5,momentum_correction=true,dense_below=9,exclude=x",
    "terngrad:clip_sigma=none,share_scaler=false,topology=server,seed=4", "terngrad:clip_sigma=1.5,scaler=model",
    "blocksign:block=64,two_way=false,topology=server", "dropping:density=0.1,local=sum,sync_every=3,warmup=2",
    "gtopk:clip_norm=0.25", "blocksign:clip_norm=2.0", "dropping:clip_norm=1.5", "dense:dtype=bf16",
])  # fmt: skip
def test_a_method_string_is_read_and_written_alike(text: str) -> None:
    method = thinwire.parse_method(text)
    assert thinwire.parse_method(str(method)) == method
    assert set(str(method).split(":")[1].split(",")) == set(text.split(":")[1].split(","))
    assert thinwire.parse_method("  " + text.replace(",", " , ").upper().split(":")[0] + ":" + text.split(":")[1])
