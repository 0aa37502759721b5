"""Who is named when an exchange fails: the roll call over the store."""

from __future__ import annotations

import json
from typing import Any

from thinwire.transport.failures import _Board


class FadingStore(dict[str, str]):
    """A store that other ranks write to while one calls the roll, and that may go away."""

    def __init__(self, later: dict[str, str], lasts: int = 10**9) -> None:
        super().__init__()
        self.later, self.left = later, lasts

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the store is gone")
        return keys[0] in self

    def get(self, key: str, default: Any = None) -> Any:
        value = self[key]
        self[key] = self.later.get(key, value)  # what it says when it is asked again
        return value


def note(beat: int, step: int, stage: str) -> str:
    return json.dumps({"beat": beat, "step": step, "stage": stage})


def test_roll_call_does_not_blame_a_rank_that_is_ahead_for_a_link() -> None:
    ahead = "averaged(), which all ranks must enter"
    for step, blamed, word in ((7, (2,), "link to it is broken"), (6, (0,), "must make the same calls")):
        store = FadingStore({"at/0": note(2, step, ahead), "at/2": note(2, 7, "exchange frames")})
        store.update({"at/0": note(1, 7, "exchange frames"), "at/2": note(1, 7, "exchange frames")})
        verdict = _Board(store, 1, (0, 2), 0.01, None).call_the_roll(7, "exchange frames", "timed out", 2)
        assert verdict.ranks == blamed and word in verdict.text, verdict


def test_roll_call_of_ranks_that_are_all_back_knows_that_one_may_have_stood_still() -> None:
    store = FadingStore({f"at/{rank}": note(2, 7, "exchange frames") for rank in (0, 2)})
    store.update({f"at/{rank}": note(1, 7, "exchange frames") for rank in (0, 2)})
    verdict = _Board(store, 1, (0, 2), 0.01, None).call_the_roll(7, "exchange frames", "timed out", None)
    assert verdict.ranks == (0, 2) and "or a rank stood still meanwhile" in verdict.text, verdict


def test_roll_call_whose_store_goes_away_names_its_host() -> None:
    store = FadingStore({}, lasts=4)
    store.update({"at/0": note(1, 7, "exchange frames"), "at/2": note(1, 7, "exchange frames")})
    verdict = _Board(store, 1, (0, 2), 0.01, 0).call_the_roll(7, "exchange frames", "timed out", 2)
    assert verdict.ranks == (0,) and "the store that it hosts too" in verdict.text
