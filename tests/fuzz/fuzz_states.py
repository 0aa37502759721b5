"""Mutated states of every method, loaded on all ranks: refused whole, or taken as they were saved.

    python tests/fuzz/fuzz_states.py --states 2000 --json benchmarks/results/fuzz_states.json

After a refusal, which is one sentence of the library's own error on every rank, the state of every rank must be what it
was, to the bit, and the training go on. What is taken must be, to the bit, what was saved. Anything else is a finding:
it is printed and the exit status is 1. The ranks are threads. The same seed gives the same states.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fuzz_state_mutations import StateMutator
from torch import Tensor

import thinwire
from thinwire.lab.bench.rows import commit, hardware, today
from thinwire.transport import ThreadNet, ThreadWorld

RANKS = 3
STEPS = 2  # before the state that is mutated; the earlier one is of one step less
SHAPES = {"a": (40, 30), "b": (17,), "c": (70, 60)}  # c has more than 4,096 elements: servers cut it
METHODS = (
    "dgc:density=0.05,dense_below=8", "dgc:density=0.05,values=fp32,residual=bf16,factor_masking=true",
    "dgc:density=0.05,lr_rescaling=true", "gtopk:density=0.05", "gtopk:density=0.05,momentum_correction=true",
    "terngrad:dense_below=0", "blocksign:dense_below=1", "blocksign:dense_below=1,topology=server,residual=bf16",
    "dropping:density=0.05", "dropping:density=0.05,local=partial,sync_every=3", "signsgd", "dense", "noop",
)  # fmt: skip
FOREIGN = re.compile(r"\w+(Error|Exception): ")  # what Python or torch found, and no check of ours
TAKEN, REFUSED, UNREAD = "taken as saved", "refused", "not read by torch"


@dataclass
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    mutations: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, str]] = field(default_factory=list)

    @property
    def states(self) -> int:
        return sum(self.outcomes.values())


def noise(shape: tuple[int, ...], rank: int, step: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{rank}/{step}/{name}".encode()))
    return torch.randn(shape, generator=generator)


def through_a_file(state: Any) -> Any:
    """What torch.load(weights_only=True) gives back of what torch.save wrote."""
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


class Training:
    """One rank's training with a method, whose gradients depend on rank and step alone."""

    def __init__(self, net: ThreadNet, method: str) -> None:
        self.net, self.step = net, 0
        self.weights = {name: noise(shape, 9, 9, name).requires_grad_() for name, shape in SHAPES.items()}
        self.optimizer = torch.optim.SGD(self.weights.values(), lr=0.01, momentum=0.9)
        self.reducer = thinwire.Reducer(self.weights, method, net, self.optimizer)

    def train(self) -> None:
        gradients = {name: noise(shape, self.net.rank, self.step, name) for name, shape in SHAPES.items()}
        self.reducer.reduce(gradients)
        for name, weight in self.weights.items():
            weight.grad = gradients[name]
        self.optimizer.step()
        self.step += 1

    def copy_weights(self) -> None:
        """Methods without an exchange let ranks drift, which a load refuses: everybody gets rank 0's."""
        for weight in self.weights.values():
            self.net.broadcast(weight.data, 0)


def bits(state: dict[str, Any], rank: int) -> str:
    """Everything of a saved state that is loaded, as a short text."""
    sha = hashlib.sha256()
    common = sorted((key, repr(value)) for key, value in state.items() if not key.startswith("rank "))
    part = state[f"rank {rank}"]
    rooms = {"": {"pending": part["pending"]}, **part["aggregator"]}
    rows = [(r, k, n, v) for r, kinds in rooms.items() for k, named in kinds.items() for n, v in dict(named).items()]
    for *names, value in sorted(rows, key=lambda row: row[:3]):
        sha.update(repr(names).encode())
        is_tensor = isinstance(value, Tensor)
        sha.update(value.contiguous().view(torch.uint8).numpy().tobytes() if is_tensor else repr(value).encode())
    return hashlib.sha256(repr(common).encode() + sha.digest()).hexdigest()[:16]


class Judge:
    """What one rank sees of a mutated state; all ranks make every call alike."""

    def __init__(self, net: ThreadNet, method: str) -> None:
        self.net, self.training = net, Training(net, method)
        for _ in range(STEPS - 1):
            self.training.train()
        self.earlier = self._states()
        self.training.train()
        self.training.copy_weights()
        self.good = self._states()

    def _states(self) -> list[Any]:
        return list(self.net.world.share(self.net.rank, through_a_file(self.training.reducer.state_dict())))

    def bits(self) -> str:
        try:
            return bits(self.training.reducer.state_dict(), self.net.rank)
        except Exception as error:  # something was taken that is no state
            return f"not saved any more: {error}"

    def judge(self, given: list[Any], goes_on: bool) -> tuple[str, str, str]:
        """The outcome, the sentence of a refusal, and what was found wrong."""
        if not given:
            return UNREAD, "", ""
        before, said, wrong = self.bits(), "", ""
        try:
            self.training.reducer.load_state_dict(given[self.net.rank])
        except ValueError as error:
            said = str(error)
            if "\n" in said or ". " in said or not said or FOREIGN.search(said):
                wrong = f"not one sentence of the library's own: {said!r}"
        except Exception as error:
            said = wrong = f"{type(error).__name__}: {error}"
        everybody = self.net.world.share(self.net.rank, bool(said))
        after = self.bits()
        if len(set(everybody)) > 1:
            wrong = wrong or f"refused on some ranks only: {everybody}"
        elif said and after != before:
            wrong = wrong or "half loaded: the state changed"
        elif not said and after not in self._saved():
            wrong = "taken, and not what was saved"
        fine = not any(self.net.world.share(self.net.rank, bool(wrong)))
        again = self._go_on(said, goes_on and fine)
        return REFUSED if said else TAKEN, said, wrong or again

    def _saved(self) -> set[str]:
        return {bits(states[self.net.rank], self.net.rank) for states in (self.good, self.earlier)}

    def _go_on(self, said: str, goes_on: bool) -> str:
        """Train a step where asked to, and go back to the good state."""
        if goes_on:
            self.training.train()
            self.training.copy_weights()
        if goes_on or not all(self.net.world.share(self.net.rank, bool(said))):
            self.training.reducer.load_state_dict(self.good[self.net.rank])
            if self.bits() != bits(self.good[self.net.rank], self.net.rank):
                return "the whole state was not loaded afterwards"
        return ""


def fuzz(states: int, seed: int, seconds: float = float("inf")) -> Report:
    """Spread the states over the methods; the judgement of all ranks on each."""
    report, deadline = Report(), time.monotonic() + seconds
    for place, method in enumerate(METHODS):
        share = states // len(METHODS) + (place < states % len(METHODS))

        def work(net: ThreadNet, method: str = method, place: int = place, share: int = share) -> list[Any]:
            judge, found = Judge(net, method), []
            for number in range(share):
                if net.world.share(net.rank, time.monotonic())[0] > deadline:
                    break
                mutator = StateMutator(f"{seed}/{place}/{number}")
                given = mutator(judge.good, judge.earlier)
                found.append((mutator.name, *judge.judge(given, goes_on=number % 10 == 0)))
            return found

        for number, ranks in enumerate(zip(*ThreadWorld(RANKS, one_at_a_time=True).run(work), strict=True)):
            _add(report, method, f"{seed}/{place}/{number}", ranks)
    return report


def _add(report: Report, method: str, seed: str, ranks: Sequence[tuple[str, str, str, str]]) -> None:
    name, outcome, _, _ = ranks[0]
    report.outcomes[outcome] += 1
    report.mutations[name] += 1
    report.methods[method] += 1
    report.sentences.update({said for _, _, said, _ in ranks if said})
    wrong = next((wrong for *_, wrong in ranks if wrong), "")
    if wrong:
        report.findings.append({"method": method, "seed": seed, "mutation": name, "what": wrong})


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--states", type=int, default=2000, help="how many mutants (default 2,000)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same states (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    begin = time.monotonic()
    report = fuzz(options.states, options.seed, options.seconds)
    seconds = time.monotonic() - begin
    told = ", ".join(f"{number:,} {outcome}" for outcome, number in report.outcomes.items())
    print(
        f"{report.states:,} states of {len(report.methods)} methods in {seconds:.0f} s: {told}; "
        f"{len(report.sentences)} different sentences; {len(report.findings)} findings"
    )
    for finding in report.findings[:5]:
        print(json.dumps(finding), file=sys.stderr)
    if options.json is not None:
        facts = {"seed": options.seed, "commit": commit(), "hardware": hardware(torch.device("cpu")), "date": today()}
        counts = {name: dict(getattr(report, name)) for name in ("outcomes", "mutations", "methods")}
        result = {"states": report.states, "ranks": RANKS, "seconds": round(seconds, 1), **counts}
        options.json.write_text(json.dumps({**result, "findings": report.findings, **facts}, indent=1) + "\n")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
