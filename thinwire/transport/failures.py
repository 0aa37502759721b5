"""Who is missing when an exchange fails.

Gloo's errors name an address or nothing, and often a rank that only left because of another one. So ranks that wait
long leave a sign of life in the process group's store, and a rank whose exchange fails calls the roll there: whoever
gives no sign, or left a note about an error of its own, is the one that the error names. While exchanges take less than
a period nothing is written or asked. What a wire does here never takes part in a result.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.errors import ExchangeError
from thinwire.torch_private import agent_hosts_store, is_tcp, store_of

log = logging.getLogger("thinwire")

DEFAULT_TIMEOUT_S = 1800.0  # torch's own for Gloo
ROLL_PERIODS = 2.5  # how long signs of life are waited for
LINGER_PERIODS = 1.5  # how long a verdict is left for others before this process, which may host the store, ends
ENTERED = "which all ranks must enter"  # in the stage of a call that a user may have made on some ranks only
RESERVE_PERIODS = 5.0  # what all of this takes at most, and so what our groups' timeout leaves of the user's


def period_s(timeout_s: float) -> float:
    """How often a rank that waits says so, for a process group's timeout."""
    return min(1.0, timeout_s / 20)


@dataclass
class _Mark:
    """Where this rank is; written by whoever exchanges, read by the detector's thread."""

    step: int = 0
    stage: str = ""
    waits: bool = False
    moves: int = 0  # calls that began or ended so far


@dataclass(frozen=True)
class _Verdict:
    """Who is to blame, as the first rank that called the roll found it."""

    ranks: tuple[int, ...]
    text: str


class FailureDetector:
    """One rank's view of the others. ``store`` is the group's; ranks are global ones, as the user knows them."""

    def __init__(
        self, store: Any, rank: int, ranks: Sequence[int], timeout_s: float, store_host: int | None = None
    ) -> None:
        self._mark, self.period_s = _Mark(), period_s(timeout_s)
        self._others = tuple(other for other in ranks if other != rank)
        self._jobs: queue.SimpleQueue[Callable[[_Board], None] | None] = queue.SimpleQueue()
        board = _Board(store, rank, self._others, self.period_s, store_host)
        self._thread = threading.Thread(
            target=_watch, args=(board, self._mark, self._jobs, self.period_s), name="thinwire-failures", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread)  # also when the interpreter ends

    @property
    def step(self) -> int:
        return self._mark.step

    @step.setter
    def step(self, step: int) -> None:
        self._mark.step = step

    def begin(self, stage: str) -> None:
        """A call that waits for other ranks begins."""
        mark = self._mark
        mark.stage, mark.waits, mark.moves = stage, True, mark.moves + 1

    def finish(self) -> None:
        self._mark.waits, self._mark.moves = False, self._mark.moves + 1

    def explain(self, error: Exception, stage: str, peer: int | None) -> ExchangeError:
        """The error to raise for one of torch.distributed; ``peer`` is the only other rank of the call, if known."""
        step, reason, answers = self.step, reason_of(error), queue.SimpleQueue[_Verdict]()
        self._jobs.put(lambda board: answers.put(board.call_the_roll(step, stage, reason, peer)))
        try:
            verdict = answers.get(timeout=(RESERVE_PERIODS - 0.5) * self.period_s)
        except queue.Empty:
            suspects = (peer,) if peer is not None else self._others
            text = f"{named(suspects)} cannot be reached, and the store cannot either: this host's own link may be cut"
            verdict = _Verdict(suspects, text)
        sentence = f"the exchange of step {step} failed at stage '{stage}': {verdict.text} ({reason})"
        return ExchangeError(sentence, step=step, stage=stage, peers=verdict.ranks)

    def report(self, error: Exception) -> None:
        """Tell the others, who will miss this rank, about an error of its own."""
        step, stage, told = self.step, self._mark.stage, threading.Event()

        def tell(board: _Board) -> None:
            board.record(step, stage, f"{type(error).__name__}: {reason_of(error)}", own=True)
            told.set()

        self._jobs.put(tell)
        told.wait(2 * self.period_s)

    def close(self) -> None:
        self._end()


def failure_detector_of(group: dist.ProcessGroup, device: torch.device, timeout_s: float | None) -> FailureDetector:
    """A detector for the members of a group, with a connection to its store that nobody else waits on.

    A collective call: the ranks agree on a token, because torchrun can keep a store, with old notes, over restarts.
    """
    token = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device=device)
    dist.broadcast(token, group=group, group_src=0)
    store = store_of(group)
    store_host = None
    if is_tcp(store):
        store = store.clone() if hasattr(store, "clone") else store
        store_host = None if agent_hosts_store() else 0
    ranks = dist.get_process_group_ranks(group)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    return FailureDetector(
        dist.PrefixStore(f"thinwire/{int(token):x}", store), dist.get_rank(), ranks, timeout_s, store_host
    )


def reason_of(error: Exception) -> str:
    """The first sentence of an error, without the place in Gloo's sources and the advice behind it."""
    text = " ".join(str(error).split())
    if text.startswith("[/") and "] " in text:
        text = text.split("] ", 1)[1]
    return text.split(". This is typically", 1)[0][:300]


def named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _is_recent(note: Mapping[str, Any], step: int) -> bool:
    """Whether a note about an error can be why this step's exchange waits; a gradient that was refused may have been
    given again since."""
    return bool(note["step"] >= step - 1)


class _Board:
    """The notes in the store; used by the detector's thread alone, because a store can keep one waiting."""

    def __init__(self, store: Any, rank: int, others: tuple[int, ...], period_s: float, store_host: int | None) -> None:
        self.store, self.rank, self.others, self.period_s = store, rank, others, period_s
        self.store_host = store_host
        self.heard: _Verdict | None = None
        self._beats = 0
        self._reachable = True
        self._warned_of: Any = None

    def beat(self, mark: _Mark) -> None:
        """A sign of life of a rank that waits; and is there news?"""
        self._beats += 1
        self._set(f"at/{self.rank}", {"beat": self._beats, "step": mark.step, "stage": mark.stage})
        self._listen()
        self._warn(mark.step)

    def _warn(self, step: int) -> None:
        """Say, while this rank waits, that another one told of an error of its own."""
        told = self._get("announced")
        if told is None or told == self._warned_of or told["rank"] == self.rank or not _is_recent(told, step):
            return
        self._warned_of = told
        log.warning(
            "thinwire waits at step %d for rank %d, which failed at step %d with %s",
            step, told["rank"], told["step"], told["reason"],
        )  # fmt: skip

    def record(self, step: int, stage: str, reason: str, own: bool) -> None:
        """``own``: the error began here, so that this rank is the one to name."""
        self._set(f"failed/{self.rank}", {"step": step, "stage": stage, "reason": reason, "own": own})
        if own:
            self._set("announced", {"rank": self.rank, "step": step, "reason": reason})

    def call_the_roll(self, step: int, stage: str, reason: str, peer: int | None) -> _Verdict:
        self.record(step, stage, reason, own=False)
        before = {other: self._get(f"at/{other}") for other in self.others}
        elsewhere: dict[int, str] = {}  # the stages of ranks that did not enter what this one did, or the reverse
        present: set[int] = set()
        verdict, end_s = self._listen(), time.monotonic() + ROLL_PERIODS * self.period_s
        while verdict is None and self._reachable and len(present) < len(self.others) and time.monotonic() < end_s:
            time.sleep(self.period_s / 8)
            for other in self.others:
                failed = self._get(f"failed/{other}")
                if failed is not None and failed["own"] and _is_recent(failed, step):
                    text = f"rank {other} had failed at step {failed['step']} with {failed['reason']}"
                    verdict = _Verdict((other,), text)
                    continue
                note = failed if failed is not None else self._get(f"at/{other}")
                if note is None or note == before[other]:
                    continue
                present.add(other)
                # At the same step a rank may just be ahead, or held up by a link.
                if ENTERED in note["stage"] + stage and note["stage"] != stage and note["step"] != step:
                    elsewhere[other] = note["stage"]
            verdict = self._listen() or verdict
        if verdict is None:
            verdict = self._judge(present, peer, elsewhere)
        if self._reachable:
            self._publish(verdict)
        return verdict

    def _judge(self, present: set[int], peer: int | None, elsewhere: Mapping[int, str]) -> _Verdict:
        missing = tuple(other for other in self.others if other not in present)
        if not self._reachable:
            if self.store_host is not None and self.store_host != self.rank:
                return _Verdict((self.store_host,), f"rank {self.store_host} is gone, and the store that it hosts too")
            suspects = (peer,) if peer is not None else self.others
            return _Verdict(suspects, f"{named(suspects)} cannot be reached, and the store is gone too")
        if missing:
            text = f"no sign of life from {named(missing)}, which ended, hangs or has not come to this exchange"
            return _Verdict(missing, text)
        if elsewhere:
            rank, theirs = min(elsewhere.items())
            text = f"all ranks are there, but rank {rank} is at stage '{theirs}' instead"
            return _Verdict(tuple(sorted(elsewhere)), f"{text}: all ranks must make the same calls")
        if peer is not None:
            text = f"rank {peer} is there, but the link to it is broken or slower than the timeout, or it stood still"
            return _Verdict((peer,), text)
        text = (
            "all ranks are there now, but a link is broken or slower than the timeout, or a rank stood still meanwhile"
        )
        return _Verdict(self.others, text)

    def _publish(self, verdict: _Verdict) -> None:
        if self.heard is None:
            self._set("verdict", {"ranks": verdict.ranks, "text": verdict.text})
        time.sleep(LINGER_PERIODS * self.period_s)

    def _listen(self) -> _Verdict | None:
        if self.heard is None and (told := self._get("verdict")) is not None:
            ranks = tuple(told["ranks"])
            if self.rank not in ranks:  # whoever is missed elsewhere needs to say what it misses itself
                self.heard = _Verdict(ranks, told["text"])
        return self.heard

    def _set(self, key: str, value: dict[str, Any]) -> None:
        if self._reachable:
            try:
                self.store.set(key, json.dumps(value))
            except RuntimeError:
                self._reachable = False

    def _get(self, key: str) -> Any:
        if self._reachable:
            try:
                return json.loads(self.store.get(key)) if self.store.check([key]) else None
            except (RuntimeError, ValueError):
                self._reachable = False
        return None


def _watch(board: _Board, mark: _Mark, jobs: queue.SimpleQueue[Any], every_s: float) -> None:
    """The thread: does what is asked of it, and gives a sign of life while a call takes longer than a period."""
    seen = -1
    while True:
        try:
            job = jobs.get(timeout=every_s)
        except queue.Empty:
            if mark.waits and mark.moves == seen:
                board.beat(mark)
            seen = mark.moves
            continue
        if job is None:
            return
        job(board)


def _end(jobs: queue.SimpleQueue[Any], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(1.0)  # not for ever: it may wait for a store whose host is gone
