"""The adviser: which method to train with on these machines, with numbers, and "do not compress" where that is true."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.advisor.cost import ExchangeCost, Prediction, Workload
from thinwire.advisor.cost.plans import why_unplanned
from thinwire.advisor.link import Link
from thinwire.advisor.microbench import DryNet
from thinwire.advisor.profile import Profile, exchanges_of, frames_grow, measure_codec, measure_profile
from thinwire.methods import METHODS, Dense, Method, parse_method
from thinwire.transport import TorchNet
from thinwire.transport.groups import acquire_group, release_group

MOST_HOSTS = 1024
WORTH = 1.10  # a method must train this much faster than dense, or it is not worth its trouble
AS_FAST = 1.05  # predictions that differ by less cannot be told apart
WIRE_SHARE = 0.94  # what Ethernet, IP and TCP headers leave of a link's rate for what is sent
WAYS_PER_ROUND = 2  # of the latency; measured, see docs/cost.md
SAMPLE = 2 * 2**20  # elements on which this machine's encoding speed is measured when there is no model
NAMES, SENT = 22, 17  # columns of its text beside the numbers: a method in front, or more, "1,234 MB per step" behind
UNSTEADY = 0.1  # a step without communication that changes by more while it is measured is worth a note


def compared(optimizer_is_sgd: bool) -> tuple[str, ...]:
    """The methods that suit the optimizer. Of equally fast ones the first is recommended, which lost less accuracy."""
    ranked = sorted(METHODS.values(), key=lambda kind: kind.advised.rank)
    return tuple(spec for kind in ranked for spec in kind.advised.settings(optimizer_is_sgd))


def not_compared(optimizer_is_sgd: bool) -> str:
    """The methods that are left out, and why."""
    names: dict[str, list[str]] = {}
    for name, kind in METHODS.items():
        if not kind.advised.settings(optimizer_is_sgd):
            names.setdefault(kind.advised.why_not(optimizer_is_sgd), []).append(name)
    said = [f"{', '.join(some[:-1])}{' and ' if some[:-1] else ''}{some[-1]} ({why})" for why, some in names.items()]
    return f"Not compared: {', '.join(said)}."


def caution(method: str) -> str:
    """What a choice by speed leaves to the reader."""
    name = method.partition(":")[0]
    said = METHODS[name].advised.wants.replace("{}", name) if name in METHODS else ""
    wants = f" {name}: {said}." if said else ""
    return f'Speed alone decides; docs/results.md, "The papers\' claims", has what it costs in accuracy.{wants}'


@dataclass(frozen=True)
class Advice:
    """Predicted steps of every method on this many hosts and on more, and what follows."""

    hosts: int
    params: int
    compute_s: float
    link: Link
    predictions: tuple[Prediction, ...]  # all methods for ``hosts``, then for 2 x, 4 x ... as many
    recommended: str
    reason: str
    notes: tuple[str, ...] = ()
    basis: str = ""  # what of the numbers was planned instead of measured

    @property
    def compress(self) -> bool:
        """Whether any compression is recommended."""
        return self.recommended != "dense"

    @property
    def caution(self) -> str:
        """What the recommendation did not look at, and what the method wants."""
        return caution(self.recommended)

    def step_s(self, method: str, hosts: int | None = None) -> float:
        """The predicted seconds of a step."""
        wanted = str(parse_method(method))
        for one in self.predictions:
            if one.method == wanted and one.hosts == (hosts or self.hosts):
                return one.step_s
        raise ValueError(f"no prediction of {wanted!r} on {hosts or self.hosts} hosts; there are {self._known()}")

    def _known(self) -> str:
        return f"{', '.join(self._methods)} on {', '.join(map(str, self.host_counts))} hosts"

    @property
    def _methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.method for one in self.predictions))

    @property
    def host_counts(self) -> list[int]:
        return list(dict.fromkeys(one.hosts for one in self.predictions))

    def __str__(self) -> str:
        return self.text()

    @property
    def line(self) -> str:
        """What to add to a training script; empty where nothing is to be added."""
        return f'wire = thinwire.attach(model, optimizer, "{self.recommended}")' if self.compress else ""

    def text(self, width: int | None = None, *, more_hosts: bool = False) -> str:
        """The verdict and the line to paste, a table, and notes.

        With ``more_hosts`` the table goes on to many hosts; one wider than ``width`` leaves out some between.
        """
        if self.compress:
            verdict = [f"recommended: {self.recommended}: {self.reason}", f"    {self.line}"]
            below = [self.caution]
        else:
            verdict = [f"do not compress: {self.reason}", "Keep DistributedDataParallel as it is."]
            below = []
        compute = f"{_ms(self.compute_s)} ms per step without communication"
        head = f"{self.params / 1e6:.3g} M parameters, {compute}, {self.link}"
        below += [not_compared(is_sgd) for is_sgd in (True, False) if compared(is_sgd) == self._methods][:1]
        below += [self.basis] if self.basis else []
        table = self._table_of_more(width) if more_hosts else self._table()
        return "\n".join([*verdict, "", head, "", *table, "", *self.notes, *below])

    def _table(self) -> list[str]:
        """Every method on these hosts."""
        rows = [one for one in self.predictions if one.hosts == self.hosts]
        dense = rows[0]
        first = max(12, *(len(one.method) for one in rows))
        lines = [f"{f'on {self.hosts} hosts':<{first}}  {'ms per step':>11}  {'than dense':>12}  {'sent per step':>13}"]
        for one in rows:
            against = "-" if one is dense else _against(one.step_s, dense.step_s)
            sent = f"{one.nbytes / 1e6:,.3g} MB"
            lines.append(f"{one.method:<{first}}  {_ms(one.step_s):>11}  {against:>12}  {sent:>13}")
        return lines

    def _table_of_more(self, width: int | None) -> list[str]:
        """Every method on these hosts and on more, as many columns as there is room for."""
        counts, first = self.host_counts, max(NAMES, *map(len, self._methods))
        if width is not None:
            room = width - first - SENT
            apart = next((n for n in range(1, len(counts)) if 8 * len(counts[::n]) <= room), len(counts))
            counts = counts[::apart]
        lines = ["predicted ms per step".ljust(first) + "".join(f"{n:>8}" for n in counts) + "  hosts"]
        for method in self._methods:
            own = [one for one in self.predictions if one.method == method and one.hosts in counts]
            sent = next(one.nbytes for one in own if one.hosts == self.hosts)
            lines.append(
                f"{method:<{first}}"
                + "".join(f"{_ms(one.step_s):>8}" for one in own)
                + f"  {sent / 1e6:,.3g} MB per step"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """In JSON's terms; the caller adds hardware, commit and date."""
        return {
            "kind": "advice",
            "hosts": self.hosts,
            "params": self.params,
            "compute_ms": 1e3 * self.compute_s,
            "alpha_s": self.link.alpha_s,
            "beta_s_per_byte": self.link.beta_s_per_byte,
            "predictions": [
                {"method": one.method, "hosts": one.hosts, "step_ms": one.step_ms, "bytes_per_step": one.nbytes}
                for one in self.predictions
            ],
            "recommended": self.recommended,
            "reason": self.reason,
            "notes": list(self.notes),
            "caution": self.caution if self.compress else "",
            "basis": self.basis,
        }


def advise(
    model: nn.Module,
    step: Callable[[], object],
    *,
    methods: Sequence[Method | str] | None = None,
    group: dist.ProcessGroup | None = None,
    optimizer_is_sgd: bool = True,
) -> Advice:
    """Measure this model on these machines for about half a minute, and say which method to train it with.

    ``methods`` are compared with dense; unless given, those that suit torch.optim.SGD or other optimizers.

    A collective call: every rank of the group (all ranks unless given) makes it. ``step`` does one forward and
    backward pass; under DistributedDataParallel gradients are not exchanged meanwhile. Parameters, buffers, gradients
    and torch's random state are put back afterwards. Leave optimizer.step() out: its own state would stay changed.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"advise needs a torch module, not {type(model).__name__}")
    if not callable(step):
        raise ValueError(f"step must be a function that runs forward and backward, not {type(step).__name__}")
    if not dist.is_initialized():
        raise ValueError(
            "advise measures between the ranks of a process group; start the script with torchrun, or with several "
            "processes and init_process_group (without any: thinwire advise --params ... --hosts ... --rate ...)"
        )
    chosen, unplanned = planned(to_compare(methods, optimizer_is_sgd))
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    parameters = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("the model has no parameters that are trained, so there is nothing to send")
    device = next(iter(parameters.values())).device
    if group is None:
        world = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
    else:
        world = group
    parent = TorchNet(world, device)  # type: ignore[arg-type]
    net = acquire_group(parent)
    silent = model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
    with silent, _untouched(inner):
        profile = measure_profile(net, parameters, step, chosen, optimizer_is_sgd=optimizer_is_sgd)
    release_group(parent, net)
    return _with_notes(advise_from(profile, chosen), unplanned)


def advise_offline(
    work: Workload,
    *,
    hosts: int,
    rate_bits: float,
    latency_s: float = 0.0001,
    methods: Sequence[Method | str] | None = None,
    optimizer_is_sgd: bool = True,
) -> Advice:
    """The same for machines that are not here: known model and compute time, a link's rate and its one-way latency.

    A round of an exchange counts two of them: Gloo sends to a rank when that one has said that it is ready to receive.
    Encoding speed is measured on one core of this machine; the network is taken to cost no processor time.
    """
    if hosts < 2:
        raise ValueError(f"advice is about at least 2 hosts, not {hosts}")
    if work.compute_s <= 0:
        raise ValueError(f"a step computes longer than {1e3 * work.compute_s:g} ms")
    chosen, unplanned = planned(to_compare(methods, optimizer_is_sgd))
    link = Link(WAYS_PER_ROUND * latency_s, 8 / (rate_bits * WIRE_SHARE))
    costs = {str(method): _codec_of_each(method, work, optimizer_is_sgd) for method in chosen}
    profile = Profile(hosts, work, link, 1.0, costs)
    basis = (
        f"Encoding is measured on one core of this machine; {_rate(rate_bits)} is planned as "
        f"{_rate(rate_bits * WIRE_SHARE)}, what packet headers leave."
    )
    return _with_notes(replace(advise_from(profile, chosen), basis=basis), unplanned)


def _codec_of_each(method: Method, work: Workload, optimizer_is_sgd: bool) -> ExchangeCost:
    """``codec_here`` of every method that parameters have: a sample's tensors have none of the names in patterns."""
    rows = [row for bucket in work.buckets for row in bucket.rows]
    if method.members != (method,):
        method.check_names([name for name, _, _ in rows])
    numels: dict[Method, int] = {}
    for name, _, shape in rows:
        one = method.member_of(name)
        numels[one] = numels.get(one, 0) + shape.numel()
    costs = [codec_here(one, numel, optimizer_is_sgd) for one, numel in numels.items()]
    framing = [cost.per_frame_s for cost in costs if cost.per_frame_s]
    return ExchangeCost(sum(cost.fixed_s for cost in costs), sum(framing) / max(1, len(framing)))


def codec_here(method: Method, params: int, optimizer_is_sgd: bool = True) -> ExchangeCost:
    """A method's encoding cost on one core of this machine for so many parameters, measured on a sample and scaled.

    Processor time of one thread, the least of a few: other work on this machine says nothing about the machines that
    are asked about.
    """
    sample, threads = Workload.of_size(min(params, SAMPLE), 1.0), torch.get_num_threads()
    known = _with_patterns_of(method, [name for bucket in sample.buckets for name, _, _ in bucket.rows])
    torch.set_num_threads(1)
    try:
        cost = measure_codec(
            DryNet(1), known, exchanges_of(known, sample), (8, 32), optimizer_is_sgd, torch.device("cpu"),
            typical=min, clock=time.process_time,
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    longer = params / sample.numel
    more = longer if frames_grow(method) else _exchanges(params) / len(sample.buckets)
    return ExchangeCost(cost.fixed_s * longer, cost.per_frame_s * more)


def _with_patterns_of(method: Method, names: Sequence[str]) -> Method:
    """The method without those names to exclude that are none of these: a sample's tensors are not the user's."""
    patterns: tuple[str, ...] = getattr(method, "exclude", ())
    met = tuple(pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names))
    return method if met == patterns else replace(method, exclude=met)  # type: ignore[call-arg]


def _exchanges(params: int) -> int:
    return len(Workload.of_size(params, 1.0).buckets)


def to_compare(methods: Sequence[Method | str] | None, optimizer_is_sgd: bool) -> list[Method]:
    """The methods that were asked for, or those that suit the optimizer, with dense in front."""
    asked = methods if methods is not None else compared(optimizer_is_sgd)
    return with_dense([parse_method(method) if isinstance(method, str) else method for method in asked])


def planned(methods: Sequence[Method]) -> tuple[list[Method], list[str]]:
    """The methods of which something can be predicted, and a line about each of the others."""
    reasons = {method: why_unplanned(method) for method in methods}
    lines = [f"not predicted: {method} ({reason})." for method, reason in reasons.items() if reason is not None]
    return [method for method, reason in reasons.items() if reason is None], lines


def _with_notes(advice: Advice, notes: Sequence[str]) -> Advice:
    return replace(advice, notes=(*advice.notes, *notes))


def with_dense(methods: Sequence[Method]) -> list[Method]:
    """The methods with dense in front, which they are compared with."""
    return list(dict.fromkeys([Dense(), *methods]))


def advise_from(profile: Profile, methods: Sequence[Method]) -> Advice:
    """What follows from a profile."""
    counts = [profile.hosts]
    while 2 * counts[-1] <= MOST_HOSTS:
        counts.append(2 * counts[-1])
    table = [profile.predict(method, hosts) for hosts in counts for method in methods]
    now = [one for one in table if one.hosts == profile.hosts]
    dense, best = now[0], _choose(now)
    free_s = profile.work.compute_s
    gain = dense.step_s / best.step_s
    if best is dense or gain < WORTH:
        chosen = dense
        fastest = min(now[1:], key=lambda one: one.step_s, default=dense)
        reason = (
            f"on {profile.hosts} hosts a dense step takes {_ms(dense.step_s)} ms, the fastest other method "
            f"({fastest.method}) {_ms(fastest.step_s)} ms, and a free network would give {_ms(free_s)} ms; "
            f"a gain under {round(100 * (WORTH - 1))} % is not worth a changed optimisation."
        )
    else:
        chosen = best
        reason = (
            f"on {profile.hosts} hosts {_ms(best.step_s)} ms per step instead of {_ms(dense.step_s)} ms dense "
            f"({gain:.2g}x{_told_by_less('; ', best, now)}); a free network would give {_ms(free_s)} ms."
        )
    notes = [*_notes(table, counts, chosen.method)]
    if abs(profile.drift) > UNSTEADY:
        change = f"{100 * abs(profile.drift):.0f} % {'longer' if profile.drift > 0 else 'less'}"
        notes.append(f"unsteady machines: a step took {change} after the measurements than before them.")
    return Advice(
        profile.hosts, profile.work.numel, free_s, profile.link, tuple(table), chosen.method, reason, tuple(notes)
    )


def as_fast(steps: Sequence[float]) -> int:
    """The place of the first step that is as good as the fastest."""
    return next(place for place, step in enumerate(steps) if step <= AS_FAST * min(steps))


def _choose(rows: Sequence[Prediction]) -> Prediction:
    return rows[as_fast([one.step_s for one in rows])]


def _told_by_less(comma: str, chosen: Prediction, rows: Sequence[Prediction]) -> str:
    """Which method is faster by less than can be told beforehand, where one is."""
    fastest = min(rows, key=lambda one: one.step_s)
    near = round(100 * (AS_FAST - 1))
    return "" if fastest is chosen else f"{comma}{fastest.method} is less than {near} % faster"


def _notes(table: Sequence[Prediction], counts: Sequence[int], chosen: str) -> Iterator[str]:
    """Where the choice changes with the number of hosts, and where a method is slower than dense."""
    last = chosen
    for hosts in counts[1:]:
        rows = [one for one in table if one.hosts == hosts]
        best = _choose(rows)
        verdict = best.method if rows[0].step_s / best.step_s >= WORTH else "dense"
        if verdict != last:
            told = "do not compress" if verdict == "dense" else f"{verdict}{_told_by_less(', ', best, rows)}"
            yield f"from {hosts} hosts on: {told}."
            last = verdict
    now = [one for one in table if one.hosts == counts[0]]
    slower = [one.method for one in now[1:] if one.step_s > now[0].step_s]
    if slower:
        yield f"slower than dense here: {', '.join(slower)}."


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Put parameters, buffers, gradients and torch's random state back."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    gradients = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, kept, strict=True):
                    tensor.copy_(before)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient


def _rate(bits: float) -> str:
    return f"{bits / 1e9:.3g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mb/s"


def _against(step_s: float, dense_s: float) -> str:
    """ "7.6x faster", "1.13x slower"; the larger time over the smaller one."""
    ratio, word = (dense_s / step_s, "faster") if step_s <= dense_s else (step_s / dense_s, "slower")
    return "as fast" if ratio < 1.005 else f"{ratio:.3g}x {word}"


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
