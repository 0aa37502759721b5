"""Several methods in one option: commas separate methods and options."""

from __future__ import annotations

from thinwire.cli._job import split_specs


def test_specs_are_separated_by_commas_as_options_are() -> None:
    assert split_specs("dgc", "") == ["dgc"]
    assert split_specs("dense", "dgc:density=0.01,warmup=72,dense,gtopk, signsgd") == [
        "dense",
        "dgc:density=0.01,warmup=72",
        "gtopk",
        "signsgd",
    ]


def test_specs_are_shown_without_what_says_nothing() -> None:
    assert split_specs("dgc:", "terngrad:, dgc:density=0.1,warmup=3,,dense") == [
        "dgc",
        "terngrad",
        "dgc:density=0.1,warmup=3",
        "dense",
    ]
