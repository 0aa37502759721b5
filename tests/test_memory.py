"""Memories: what was put in is either accepted or kept, whatever happens to buckets, rates, masks and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.codecs import SparseCodec
from thinwire.collectives import AllGather, GlobalTopK
from thinwire.compressors import TopK
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.exchange import Exchange
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Accepted, Signs, Sparse, Ternary
from thinwire.errors import NonFiniteError
from thinwire.kernels import stream_key
from thinwire.memory import ErrorFeedback, LocalClipping, MomentumCorrection, NoMemory, RescaledError, Velocity
from thinwire.methods import METHODS
from thinwire.transport import ThreadNet, ThreadWorld

QUICK = settings(deadline=None, max_examples=40, derandomize=True)
SIZES = {"a": 7, "b": 1, "c": 40, "d": 0, "e": 23, "f": 5}
DENSE = {"b", "f"}  # these travel in the tail
NAMES = list(SIZES)
NAN, INF = float("nan"), float("inf")

MEMORIES: dict[str, Callable[[], Any]] = {
    "error": ErrorFeedback,
    "momentum": lambda: MomentumCorrection(masking=False),
    "masked": lambda: MomentumCorrection(masking=True),
    "momentum, decay waits": lambda: MomentumCorrection(masking=False, direct=False),
    "masked, decay waits": lambda: MomentumCorrection(masking=True, direct=False),
    "momentum, rescaled": lambda: MomentumCorrection(masking=False, rescaling=True),
    "masked, rescaled": lambda: MomentumCorrection(masking=True, rescaling=True),
    "rescaled": lambda: RescaledError(momentum_moved=True),
    "rescaled-alone": lambda: RescaledError(momentum_moved=False),
}
every_memory = pytest.mark.parametrize("kind", MEMORIES)


@pytest.fixture(autouse=True)
def _torch_generator_untouched() -> Any:
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def whole(accepted: Accepted, numel: int) -> Tensor:  # -> (numel,) float32
    """What was accepted as one vector, its tail behind."""
    coded = torch.zeros(numel - accepted.tail.numel())
    accepted.coded.add_to(coded)
    return torch.cat([coded, accepted.tail])


class Driver:
    """Runs a memory over random gradients; each tensor's acceptance is a function of its own content alone."""

    def __init__(self, memory: Any, seed: int, hyper: Callable[[int, str], Hyper]) -> None:
        self.memory, self.hyper = memory, hyper
        self.generator = np.random.default_rng(seed)
        self.weights = {
            name: torch.from_numpy(self.generator.standard_normal(n).astype(np.float32)) for name, n in SIZES.items()
        }
        self.accepted: list[dict[str, np.ndarray]] = []
        self.gradients: list[dict[str, np.ndarray]] = []
        self.sent: list[dict[str, np.ndarray]] = []

    def step(self, number: int, buckets: list[list[str]]) -> None:
        gradients = {name: self.generator.standard_normal(n).astype(np.float32) for name, n in SIZES.items()}
        self.gradients.append(gradients)
        self.accepted.append({})
        self.sent.append({})
        for bucket in buckets:
            layout = Layout.of([(name, NAMES.index(name), SIZES[name], name not in DENSE) for name in bucket])
            names = [segment.name for segment in layout.segments]
            hypers = tuple(self.hyper(number, name) for name in names)
            context = ExchangeContext(layout, number, hypers, tuple(self.weights[name] for name in names))
            context = replace(context, applied=self.memory.applied(context))
            flat = torch.cat([torch.from_numpy(gradients[name].copy()) for name in names])
            x = self.memory.compensate(context, flat)
            assert x.shape == (layout.numel,) and x.dtype == torch.float32
            accepted = self._accept(layout, x)
            dense = whole(accepted, layout.numel)
            for segment in layout.segments:
                self.accepted[-1][segment.name] = dense[segment.span].double().numpy().copy()
                if context.applied:
                    share = context.applied[names.index(segment.name)]
                    self.accepted[-1][segment.name] += share * self.weights[segment.name].double().numpy()
                sent = np.zeros(segment.numel, dtype=bool)
                if segment.coded and accepted.sent is not None:
                    inside = (accepted.sent >= segment.start) & (accepted.sent < segment.start + segment.numel)
                    sent[(accepted.sent[inside] - segment.start).numpy()] = True
                self.sent[-1][segment.name] = sent
            self.memory.retain(context, x, accepted)

    def _accept(self, layout: Layout, x: Tensor) -> Accepted:
        """Every third element of a coded tensor, starting where its first element says, in bf16; all of the tail."""
        chosen = []
        for segment in layout.coded:
            if segment.numel:
                first = int(abs(float(x[segment.start])) * 1000) % 3
                chosen.append(torch.arange(segment.start + first, segment.start + segment.numel, 3))
        indices = torch.cat(chosen) if chosen else torch.zeros(0, dtype=torch.int64)
        values = x[indices].to(torch.bfloat16).to(torch.float32)
        return Accepted(Sparse(indices, values, layout.coded_numel, indices.numel()), x[layout.coded_numel :],
                        sent=indices)  # fmt: skip

    def residual(self, name: str) -> np.ndarray:
        return self.memory.state.named["residual"][name].double().numpy()


def changing(step: int, name: str) -> Hyper:
    """Everything changes over time, and by parameter."""
    rates = [0.1, 0.1, 0.05, 0.4, 0.001, 0.3]
    group = NAMES.index(name) % 2
    return Hyper(lr=rates[step % 6] * (1 + group), momentum=[0.9, 0.5][group], nesterov=step % 4 == 3,
                 weight_decay=[0.0, 0.1][group])  # fmt: skip


def produced(driver: Driver, kind: str, steps: int) -> list[dict[str, np.ndarray]]:
    """What each step adds to what should be sent or is applied without, in float64, from the definitions."""
    velocity = {name: np.zeros(n) for name, n in SIZES.items()}
    out = []
    for step in range(steps):
        row = {}
        for name in NAMES:
            hyper, d = driver.hyper(step, name), driver.gradients[step][name].astype(np.float64)
            if kind not in ("error", "rescaled-alone"):
                decay = hyper.weight_decay * driver.weights[name].double().numpy()
                apart = kind in ("masked", "masked, rescaled") and name not in DENSE  # never part of the velocity
                d = d + (0 if apart else decay)
                u = velocity[name] = hyper.momentum * velocity[name] + d
                d = d + hyper.momentum * u if hyper.nesterov else u
                d = d + (decay / (1 - hyper.momentum) if apart else 0)
                if kind.startswith("masked"):
                    velocity[name] = np.where(driver.sent[step][name], 0, u)
            row[name] = d
        out.append(row)
    return out


@every_memory
@QUICK
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 12))
def test_nothing_is_lost(kind: str, seed: int, steps: int) -> None:
    """Accepted so far + residual = produced so far; where it is rescaled, in units of the weights."""
    driver = Driver(MEMORIES[kind](), seed, changing)
    for step in range(steps):
        driver.step(step, [NAMES])
    increments = produced(driver, kind, steps)
    for name in NAMES:
        rates = [driver.hyper(step, name).lr if "rescaled" in kind else 1.0 for step in range(steps)]
        put_in = sum(rate * row[name] for rate, row in zip(rates, increments, strict=True))
        came_out = sum(rate * row[name] for rate, row in zip(rates, driver.accepted, strict=True))
        kept = rates[-1] * driver.residual(name)
        size = sum(rate * np.abs(row[name]) for rate, row in zip(rates, increments, strict=True))
        assert np.allclose(came_out + kept, put_in, rtol=0, atol=2e-5 * (1 + np.max(size, initial=0))), name
        if name in DENSE:
            assert not kept.any()


@every_memory
@QUICK
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_buckets_do_not_matter(kind: str, seed: int, data: st.DataObject) -> None:
    """Rebuilt buckets, in any number and order, at every step: the same bits as one bucket all the time."""
    one, many = (Driver(MEMORIES[kind](), seed, changing) for _ in range(2))
    for step in range(5):
        one.step(step, [NAMES])
        order = data.draw(st.permutations(NAMES))
        cuts = sorted(data.draw(st.sets(st.integers(1, 5), max_size=3)))
        many.step(step, [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)])
        for name in NAMES:
            assert np.array_equal(one.accepted[-1][name], many.accepted[-1][name])
    for vectors, others in zip(one.memory.state.named.values(), many.memory.state.named.values(), strict=True):
        for name in others:
            assert torch.equal(vectors[name], others[name])
    assert one.memory.residual_square_sum() == pytest.approx(many.memory.residual_square_sum(), rel=1e-6)


@every_memory
def test_a_saved_state_goes_on(kind: str) -> None:
    straight, broken = (Driver(MEMORIES[kind](), 5, changing) for _ in range(2))
    for step in range(6):
        straight.step(step, [NAMES])
        broken.step(step, [NAMES])
        state = broken.memory.state_dict()
        broken.memory = MEMORIES[kind]()
        broken.memory.load_state_dict(state)
        for vectors in (v for v in state.values() if isinstance(v, dict)):
            for tensor in vectors.values():
                if isinstance(tensor, Tensor):
                    tensor.fill_(NAN)  # the memory has its own copy
    for name in NAMES:
        assert np.array_equal(straight.accepted[-1][name], broken.accepted[-1][name])
        assert np.array_equal(straight.residual(name), broken.residual(name))


@every_memory
def test_a_saved_state_is_a_copy(kind: str) -> None:
    driver = Driver(MEMORIES[kind](), 5, changing)
    driver.step(0, [NAMES])
    state = driver.memory.state_dict()
    kept = {name: tensor.clone() for name, tensor in state["residual"].items()}
    driver.step(1, [NAMES])
    assert all(torch.equal(kept[name], state["residual"][name]) for name in kept)


def test_a_parameter_that_is_left_out_keeps_its_state() -> None:
    """Unused this step: not in any layout; its residual waits."""
    driver = Driver(ErrorFeedback(), 3, changing)
    driver.step(0, [NAMES])
    waiting = driver.residual("c").copy()
    driver.step(1, [["a", "b"], ["e", "f"]])
    assert np.array_equal(driver.residual("c"), waiting)
    driver.step(2, [NAMES])
    everything = sum(driver.gradients[step]["c"].astype(np.float64) for step in (0, 2))
    came_out = sum(driver.accepted[step]["c"] for step in (0, 2))
    assert np.allclose(came_out + driver.residual("c"), everything, atol=1e-6)


def test_masking_spares_the_dense_tail_and_what_stayed() -> None:
    driver = Driver(MomentumCorrection(masking=True), 1, lambda step, name: Hyper(lr=0.1, momentum=0.9))
    driver.step(0, [NAMES])
    velocity = driver.memory.state.named["velocity"]
    for name in NAMES:
        gradient = driver.gradients[0][name]
        assert np.array_equal(velocity[name].numpy(), np.where(driver.sent[0][name], 0, gradient))
    assert not driver.sent[0]["b"].any() and driver.sent[0]["c"].any()


@pytest.mark.parametrize(
    "make", [lambda: RescaledError(momentum_moved=False), lambda: MomentumCorrection(False, rescaling=True)]
)
def test_a_rate_of_zero_divides_nothing(make: Callable[[], Any]) -> None:
    """Schedules start at zero or pass it: such a step applies nothing, and the error stays what and in what it was."""
    rates = [0.0, 0.1, 0.0, 0.0, 0.05, 0.0]
    driver = Driver(make(), 2, lambda step, name: Hyper(lr=rates[step]))
    for step in range(6):
        before = driver.residual("c").copy() if step else np.zeros(40)
        driver.step(step, [NAMES])
        ratio = {4: 0.1 / 0.05}.get(step, 1.0)
        expected = before * ratio + driver.gradients[step]["c"] - driver.accepted[step]["c"] if rates[step] else before
        assert np.allclose(driver.residual("c"), expected, atol=1e-5)
    left = driver.memory.leftover({name: 0.1 for name in NAMES})
    assert np.allclose(left["c"].numpy(), driver.residual("c") * 0.5, atol=1e-6)  # from units of 0.05 to 0.1


def test_at_a_rate_of_zero_nothing_counts_as_sent() -> None:
    """Masking clears the velocity of what was applied, and nothing was."""
    memory = MomentumCorrection(masking=True, rescaling=True)
    driver = Driver(memory, 1, lambda step, name: Hyper(lr=0.0 if name == "c" else 0.1, momentum=0.9))
    driver.step(0, [NAMES])
    velocity = memory.state.named["velocity"]
    assert np.array_equal(velocity["c"].numpy(), driver.gradients[0]["c"]) and driver.sent[0]["c"].any()
    assert np.array_equal(velocity["a"].numpy(), np.where(driver.sent[0]["a"], 0, driver.gradients[0]["a"]))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_an_exchange_that_failed_leaves_residual_and_rate_in_the_same_units(kept: torch.dtype) -> None:
    layout = Layout.of([("w", 0, 1, True)])
    memory = MomentumCorrection(masking=False, dtype=kept, rescaling=True)
    nothing = Accepted(Sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 1, 0), torch.zeros(0))
    turns = [
        ExchangeContext(layout, step, (Hyper(lr=rate),), (torch.zeros(1),))
        for step, rate in enumerate((0.1, 0.01, 0.01))
    ]
    memory.retain(turns[0], memory.compensate(turns[0], torch.ones(1)), nothing)
    memory.commit(turns[0], 0)
    memory.forget()
    memory.compensate(turns[1], torch.zeros(1))  # and then a rank rings the alarm
    memory.forget()
    assert float(memory.compensate(turns[2], torch.zeros(1))) == pytest.approx(10.0)


@QUICK
@given(
    seed=st.integers(0, 2**32 - 1), clip=st.sampled_from([1e-3, 0.5, 4.0, 1e6]), ranks=st.sampled_from([1, 2, 3, 16])
)
def test_local_clipping(seed: int, clip: float, ranks: int) -> None:
    """The whole gradient is scaled as clip_grad_norm_ scales it, at clip * sqrt(N), before it is accumulated."""
    memory = LocalClipping(ErrorFeedback(), clip, ranks)
    driver = Driver(memory, seed, changing)
    total = {name: np.zeros(n) for name, n in SIZES.items()}
    for step in range(3):
        driver.step(step, [NAMES])
        parameters = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES.values()]
        for parameter, name in zip(parameters, NAMES, strict=True):
            parameter.grad = torch.from_numpy(driver.gradients[step][name].copy())
        torch.nn.utils.clip_grad_norm_(parameters, clip * ranks**0.5)
        for parameter, name in zip(parameters, NAMES, strict=True):
            total[name] += parameter.grad.double().numpy()
    for name in NAMES:
        came_out = sum(row[name] for row in driver.accepted)
        assert np.allclose(came_out + driver.residual(name), total[name], rtol=1e-5, atol=1e-6)
    kept = sum(float((driver.residual(name) ** 2).sum()) for name in NAMES)
    assert set(memory.state_dict()) == {"residual"} and memory.residual_square_sum() == pytest.approx(kept)


def test_memories_without_residual() -> None:
    for memory in (NoMemory(), Velocity()):
        driver = Driver(memory, 4, lambda step, name: Hyper(lr=0.1, momentum=0.9, nesterov=step % 2 == 1))
        velocity = {name: np.zeros(n) for name, n in SIZES.items()}
        for step in range(4):
            sent: dict[str, Tensor] = {}
            keep = driver._accept
            driver._accept = lambda layout, x, sent=sent, keep=keep: (sent.update(  # type: ignore[method-assign]
                {s.name: x[s.span].clone() for s in layout.segments}), keep(layout, x))[1]  # fmt: skip
            driver.step(step, [NAMES] if step % 2 else [NAMES[:2], NAMES[2:]])
            driver._accept = keep  # type: ignore[method-assign]
            for name in NAMES:
                g = driver.gradients[step][name].astype(np.float64)
                if isinstance(memory, Velocity):
                    u = velocity[name] = 0.9 * velocity[name] + g
                    g = g + 0.9 * u if step % 2 else u
                assert np.allclose(sent[name].numpy(), g, atol=1e-5)
        assert memory.residual_square_sum() == 0.0 and memory.leftover({}) == {}


# -------------------------------------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", ["dgc", "gtopk", "terngrad", "blocksign", "dropping", "signsgd"])
@pytest.mark.parametrize(("odd", "in_place"), [(NAN, False), (INF, True), (-INF, False), (NAN, True)])
def test_a_gradient_that_is_not_finite_stops_all_ranks_and_touches_no_residual(
    odd: float, in_place: bool, name: str, ranks: int
) -> None:
    """One rank's bad gradient is heard by every rank in the same exchange; its own memory stays bit for bit."""
    layout = Layout.of([("w", 0, 1000, True), ("b", 1, 40, True)])
    hypers = (Hyper(lr=0.1, momentum=0.9),) * 2

    def work(net: ThreadNet) -> str:
        exchange = METHODS[name]().aggregator(net, True)
        exchange.mean(ExchangeContext(layout, 0, hypers), torch.linspace(-1, 1, 1040))
        before = exchange.state_dict()
        grad = torch.linspace(-1, 1, 1040)
        if net.rank == ranks - 1:
            grad[1002] = odd
        own = grad.clone()
        with pytest.raises(NonFiniteError) as caught:
            if in_place:
                exchange.reduce(ExchangeContext(layout, 1, hypers), layout.split(grad))
            else:
                exchange.mean(ExchangeContext(layout, 1, hypers), grad)
        if net.rank == ranks - 1:
            assert torch.equal(grad.isfinite(), own.isfinite()), "whoever looks at the gradient finds what is wrong"
        for kind, vectors in exchange.state_dict()["memory"].items():
            for name_, after in vectors.items():
                if isinstance(after, Tensor):
                    assert bool(torch.isfinite(after).all())
                    assert net.rank != ranks - 1 or torch.equal(after, before["memory"][kind][name_])
        return str(caught.value)

    sentences = ThreadWorld(ranks).run(work)
    assert "'b' on this rank" in sentences[-1]
    assert all("another rank" in sentence for sentence in sentences[:-1])


def test_finite_values_beside_a_broken_one_are_kept() -> None:
    """int8 shows an inf as a nan of its whole chunk: the chunk's other values stay where they were."""
    x = torch.arange(1.0, 301.0)
    x[3] = INF
    codec, layout = SparseCodec("int8"), Layout.of([("w", 0, 300, True)])
    context, payload = ExchangeContext(layout, 0, ()), Sparse(torch.arange(300), x.clone(), 300, 300)
    back, tail = codec.decode(context, codec.encode(context, payload, torch.zeros(0)), 300, 300, 0, x.device, "x")
    Accepted(back, tail).subtract_from(x)
    assert bool(torch.isfinite(x).all()) and x[3] == 0
    assert torch.equal(x[4:256], torch.arange(5.0, 257.0)) and float(x[256:].abs().max()) < 1.2


# ------------------------------------------------------------------------------------------------------------ payloads


def test_accepted_of_every_payload() -> None:
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal(14).astype(np.float32))
    blocks = ((4, 2), (3, 1))
    payloads = [
        Sparse(torch.tensor([0, 5, 10]), torch.tensor([1.0, -2.0, 0.25]), 11, 5),
        Signs(torch.from_numpy(generator.random(11) < 0.5), torch.tensor([0.5, 1.0, 2.0]), blocks),
        Ternary.of(
            torch.from_numpy(generator.integers(-1, 2, 11).astype(np.int8)), torch.tensor([0.5, 1.0, 2.0]), blocks
        ),
    ]
    for payload in payloads:
        accepted = Accepted(payload, x[11:].clone())
        dense, rest = whole(accepted, 14), x.clone()
        accepted.subtract_from(rest)
        assert torch.allclose(dense + rest, x, atol=1e-6) and bool((rest[11:] == 0).all())
        total = torch.zeros(11)
        payload.add_to(total)
        assert torch.equal(total, dense[:11])


# ------------------------------------------------------------------------------------------ nothing is lost in between


def run_exchange(size: int, numel: int, make: Callable[[ThreadNet], Exchange], gradient: Callable[[int, int], Tensor],
                 steps: int = 4) -> None:  # fmt: skip
    """Over a run: what all ranks applied + what all kept = what was put in; and all ranks apply the same bits."""
    layout = Layout.of([("w", 0, numel - 3, True), ("b", 1, 3, False)])
    hypers = (Hyper(), Hyper())

    def work(net: ThreadNet) -> tuple[list[Tensor], Tensor, Tensor]:
        exchange, means, put_in = make(net), [], torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            grad = gradient(net.rank, step)
            put_in += grad.double()
            means.append(exchange.mean(ExchangeContext(layout, step, hypers), grad).clone())
        named = exchange.memory.state.named["residual"]
        return means, torch.cat([named["w"], named["b"]]).double(), put_in

    results = ThreadWorld(size).run(work)
    applied = size * sum(mean.double() for mean in results[0][0])
    for means, _, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(means, results[0][0], strict=True))
    kept, put_in = sum(row[1] for row in results), sum(row[2] for row in results)
    assert float((applied + kept - put_in).abs().max()) <= 2e-5 * float(put_in.abs().max() + 1)
    assert float(applied.abs().max()) > 0


@pytest.mark.parametrize("indices", ["int32", "delta16", "rice"])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("collective", [AllGather, GlobalTopK])
def test_exchanges_lose_nothing(collective: type, values: str, indices: str) -> None:
    for size in (1, 2, 3, 6):
        run_exchange(
            size,
            2003,
            lambda net: Exchange(ErrorFeedback(), TopK(0.02, scope="tensor" if collective is AllGather else "model"),
                                 collective(SparseCodec(values, indices)), net),
            lambda rank, step: torch.from_numpy(
                np.random.default_rng([rank, step]).standard_normal(2003).astype(np.float32)),
        )  # fmt: skip


@pytest.mark.parametrize("collective", [AllGather, GlobalTopK])
def test_frames_that_overflow_lose_nothing(collective: type) -> None:
    """Runs of neighbours with wide gaps between them need more 16-bit distances than the frame has room for."""
    numel, k = 1_200_003, 30

    def gradient(rank: int, step: int) -> Tensor:
        generator = np.random.default_rng([rank, step])
        grad = (generator.standard_normal(numel) * 1e-3).astype(np.float32)
        for place in (5, 600_000, 1_199_900):
            grad[place : place + 12] = 10 + generator.random(12)
        return torch.from_numpy(grad)

    codec = SparseCodec("fp32", "delta16")
    left_out = []

    def make(net: ThreadNet) -> Exchange:
        class Counting(SparseCodec):
            def encode(
                self, context: ExchangeContext, payload: Sparse, tail: Tensor, *options: Any, **named: Any
            ) -> Tensor:
                frame = codec.encode(context, payload, tail, *options, **named)
                written = int(frame[8:12].view(torch.int32))
                left_out.append(payload.indices.numel() - written)
                return frame

        counting = Counting("fp32", "delta16")
        return Exchange(ErrorFeedback(), TopK(k / (numel - 3), scope="model"), collective(counting), net)

    run_exchange(3, numel, make, gradient, steps=3)
    assert max(left_out) > 0, "the case is meant to overflow"


def test_exchanges_repeat_bit_for_bit() -> None:
    def run() -> list[Tensor]:
        def work(net: ThreadNet) -> Tensor:
            layout = Layout.of([("w", 0, 2000, True)])
            exchange = Exchange(ErrorFeedback(), TopK(0.01, sampled=True), AllGather(SparseCodec("int8")), net)
            out = [
                exchange.mean(
                    ExchangeContext(layout, step, (Hyper(),)),
                    torch.from_numpy(np.random.default_rng([net.rank, step]).standard_normal(2000).astype(np.float32)),
                ).clone()
                for step in range(4)
            ]
            return torch.stack(out)

        return ThreadWorld(3).run(work)

    first, second = run(), run()
    assert all(torch.equal(a, b) and torch.equal(a, first[0]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_an_exchange_goes_on_from_its_state(sampled: bool) -> None:
    """A resumed run makes the same choices as one that was never broken off, also where a sample misleads."""
    numel, k = 20_000, 400
    layout = Layout.of([("w", 0, numel, True)])
    stride = numel // (32 * numel // k)

    def work(net: ThreadNet) -> list[bool]:
        def make() -> Exchange:
            return Exchange(ErrorFeedback(), TopK(k / numel, sampled=sampled), AllGather(SparseCodec()), net)

        straight, same = make(), []
        for step in range(6):
            context = ExchangeContext(layout, step, (Hyper(),))
            grad = torch.from_numpy(np.random.default_rng([9, step]).standard_normal(numel).astype(np.float32))
            grad[stream_key(0, step, 0, "w") % stride :: stride] *= 3  # the sample sees larger values than the rest
            resumed = make()
            resumed.load_state_dict(straight.state_dict())
            same.append(torch.equal(straight.mean(context, grad.clone()), resumed.mean(context, grad.clone())))
        return same

    assert ThreadWorld(1).run(work) == [[True] * 6]


def test_steps_at_learning_rate_zero_leave_both_errors_of_blocksign_alone() -> None:
    """Nothing of such a step is applied, so nothing may enter or leave an error; the velocity goes on as SGD's does."""
    layout = Layout.of([("w", 0, 300, True), ("b", 1, 20, True)])

    def work(net: ThreadNet) -> None:
        exchange = METHODS["blocksign"]().aggregator(net, True)
        for step, rate in enumerate([0.1, 0.0, 0.0, 0.05]):
            before = exchange.state_dict()
            hypers = (Hyper(lr=rate, momentum=0.9), Hyper(lr=0.1, momentum=0.9))
            generator = torch.Generator().manual_seed(10 * step + net.rank)
            exchange.mean(ExchangeContext(layout, step, hypers), torch.randn(320, generator=generator))
            after = exchange.state_dict()
            for room in ("memory", "collective"):
                for name in set(before[room]["residual"]) & set(after[room]["residual"]):
                    same = torch.equal(before[room]["residual"][name], after[room]["residual"][name])
                    assert same == (rate == 0.0 and name == "w"), (room, name, step)
                serves = room == "memory" or "w" in after[room]["residual"]
                assert after[room]["rates"].get("w") == ((rate or 0.1) if serves else None)

    ThreadWorld(3).run(work)
