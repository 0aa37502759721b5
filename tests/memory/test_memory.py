"""Memories: what was put in is either accepted or kept, whatever happens to buckets, rates, masks and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from generators import torch_generator_untouched  # noqa: F401  every test of this file
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.payloads import Accepted, Sparse
from thinwire.memory import ErrorFeedback, LocalClipping, MomentumCorrection, NoMemory, RescaledError, Velocity

QUICK = settings(deadline=None, max_examples=40, derandomize=True)
SIZES = {"a": 7, "b": 1, "c": 40, "d": 0, "e": 23, "f": 5}
DENSE = {"b", "f"}  # these travel in the tail
NAMES = list(SIZES)
NAN = float("nan")

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
            direct = self.memory.direct_decay(context)
            flat = torch.cat([torch.from_numpy(gradients[name].copy()) for name in names])
            x, candidates = self.memory.compensate(context, flat, direct, None, None)
            assert candidates is None
            assert x.shape == (layout.numel,) and x.dtype == torch.float32
            accepted = self.accept(layout, x)
            dense = whole(accepted, layout.numel)
            for segment in layout.segments:
                self.accepted[-1][segment.name] = dense[segment.span].double().numpy().copy()
                if direct:
                    share = direct[names.index(segment.name)]
                    self.accepted[-1][segment.name] += share * self.weights[segment.name].double().numpy()
                sent = np.zeros(segment.numel, dtype=bool)
                if segment.coded and accepted.sent is not None:
                    inside = (accepted.sent >= segment.start) & (accepted.sent < segment.start + segment.numel)
                    sent[(accepted.sent[inside] - segment.start).numpy()] = True
                self.sent[-1][segment.name] = sent
            self.memory.retain(context, x, accepted)

    def accept(self, layout: Layout, x: Tensor) -> Accepted:
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
def test_memory_loses_nothing(kind: str, seed: int, steps: int) -> None:
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
def test_memory_keeps_the_same_bits_whatever_the_buckets(kind: str, seed: int, data: st.DataObject) -> None:
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
def test_memory_goes_on_from_a_saved_state(kind: str) -> None:
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
def test_state_of_a_memory_is_a_copy(kind: str) -> None:
    driver = Driver(MEMORIES[kind](), 5, changing)
    driver.step(0, [NAMES])
    state = driver.memory.state_dict()
    kept = {name: tensor.clone() for name, tensor in state["residual"].items()}
    driver.step(1, [NAMES])
    assert all(torch.equal(kept[name], state["residual"][name]) for name in kept)


def test_memory_of_a_parameter_that_is_left_out_waits() -> None:
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
def test_learning_rate_of_zero_leaves_the_error_as_it_was(make: Callable[[], Any]) -> None:
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


def test_learning_rate_of_zero_counts_nothing_as_sent() -> None:
    """Masking clears the velocity of what was applied, and nothing was."""
    memory = MomentumCorrection(masking=True, rescaling=True)
    driver = Driver(memory, 1, lambda step, name: Hyper(lr=0.0 if name == "c" else 0.1, momentum=0.9))
    driver.step(0, [NAMES])
    velocity = memory.state.named["velocity"]
    assert np.array_equal(velocity["c"].numpy(), driver.gradients[0]["c"]) and driver.sent[0]["c"].any()
    assert np.array_equal(velocity["a"].numpy(), np.where(driver.sent[0]["a"], 0, driver.gradients[0]["a"]))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_failed_exchange_leaves_residual_and_rate_in_the_same_units(kept: torch.dtype) -> None:
    layout = Layout.of([("w", 0, 1, True)])
    memory = MomentumCorrection(masking=False, dtype=kept, rescaling=True)
    nothing = Accepted(Sparse(torch.zeros(0, dtype=torch.int64), torch.zeros(0), 1, 0), torch.zeros(0))
    contexts = [
        ExchangeContext(layout, step, (Hyper(lr=rate),), (torch.zeros(1),))
        for step, rate in enumerate((0.1, 0.01, 0.01))
    ]

    def compensated(context: ExchangeContext, gradient: Tensor) -> Tensor:
        x, _ = memory.compensate(context, gradient, (), None, None)
        return x

    memory.retain(contexts[0], compensated(contexts[0], torch.ones(1)), nothing)
    memory.commit(contexts[0], 0)
    memory.rollback()
    compensated(contexts[1], torch.zeros(1))  # and then a rank rings the alarm
    memory.rollback()
    assert float(compensated(contexts[2], torch.zeros(1))) == pytest.approx(10.0)


@QUICK
@given(
    seed=st.integers(0, 2**32 - 1), clip=st.sampled_from([1e-3, 0.5, 4.0, 1e6]), ranks=st.sampled_from([1, 2, 3, 16])
)
def test_local_clipping_scales_as_clip_grad_norm_does(seed: int, clip: float, ranks: int) -> None:
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


def test_memories_without_residual_send_everything() -> None:
    for memory in (NoMemory(), Velocity()):
        driver = Driver(memory, 4, lambda step, name: Hyper(lr=0.1, momentum=0.9, nesterov=step % 2 == 1))
        velocity = {name: np.zeros(n) for name, n in SIZES.items()}
        for step in range(4):
            sent: dict[str, Tensor] = {}
            keep = driver.accept
            driver.accept = lambda layout, x, sent=sent, keep=keep: (sent.update(  # type: ignore[method-assign]
                {s.name: x[s.span].clone() for s in layout.segments}), keep(layout, x))[1]  # fmt: skip
            driver.step(step, [NAMES] if step % 2 else [NAMES[:2], NAMES[2:]])
            driver.accept = keep  # type: ignore[method-assign]
            for name in NAMES:
                g = driver.gradients[step][name].astype(np.float64)
                if isinstance(memory, Velocity):
                    u = velocity[name] = 0.9 * velocity[name] + g
                    g = g + 0.9 * u if step % 2 else u
                assert np.allclose(sent[name].numpy(), g, atol=1e-5)
        assert memory.residual_square_sum() == 0.0 and memory.leftover({}) == {}
