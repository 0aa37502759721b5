"""The Triton kernels against the reference: on a GPU where there is one, else in Triton's interpreter.

test_triton.py runs this file in a process of its own, because the interpreter is chosen by an environment variable when
Triton is imported.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import SparseCodec, TernaryCodec
from thinwire.codecs.frame import is_finished
from thinwire.compressors import TopK
from thinwire.engine.context import ExchangeContext, Hyper
from thinwire.engine.layout import Layout
from thinwire.engine.nonfinite_alarm import Alarm
from thinwire.engine.payloads import Sparse, Ternary, TernaryDraw
from thinwire.kernels import gpu, reference
from thinwire.kernels.gpu import ternary
from thinwire.kernels.reference import RiceStream, Segments
from thinwire.memory import ErrorFeedback, MomentumCorrection

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
SIZES = ((5000, 3, 4099, 100), (4096, 4096), (1, 1, 1)) + (((37, 9001), (2_000_000, 77, 300_001)) if ON_GPU else ())
STEPS = 5 if ON_GPU else 3
FEW = settings(max_examples=200 if ON_GPU else 5, deadline=None, suppress_health_check=list(HealthCheck))


def noise(numel: int, seed: int) -> Tensor:  # -> (numel,) float32
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def segments_of(numels: tuple[int, ...], weights: list[Tensor] | None = None) -> Segments:
    starts = tuple(sum(numels[:place]) for place in range(len(numels)))
    number = len(numels)
    return Segments(
        starts=starts,
        momentum=tuple(0.9 if place % 3 else 0.5 for place in range(number)),
        nesterov=tuple(place % 2 == 0 for place in range(number)),
        decay=tuple(0.01 if weights else 0.0 for _ in range(number)),
        weights=tuple(weights) if weights else (None,) * number,
        applied=tuple(0.05 if weights and place % 2 else 0.0 for place in range(number)),
    )


def test_the_dispatch_point_takes_triton() -> None:
    assert kernels.backend_name(DEVICE) == "triton" and kernels.on_gpu(DEVICE)


@pytest.mark.parametrize("numels", SIZES)
@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("per_tensor", [True, False])
def test_accumulation_and_exact_selection(numels: tuple[int, ...], moved: bool, per_tensor: bool) -> None:
    """Some steps: the first has no thresholds, the others carry them; every choice is the reference's."""
    coded = max(1, len(numels) - 1)  # the last one is the dense tail
    weights = [noise(numel, 90 + place) for place, numel in enumerate(numels)]
    segments, total = segments_of(numels, weights if moved else None), sum(numels)
    scopes = list(range(coded)) if per_tensor else [0] * coded
    scoped = [
        [numel for numel, own in zip(numels[:coded], scopes, strict=True) if own == s] for s in sorted(set(scopes))
    ]
    wanted = [max(1, round(0.01 * sum(own))) for own in scoped]
    search = gpu.device_topk(segments.starts, numels, scopes + [-1] * (len(numels) - coded), wanted, DEVICE)
    state = [torch.zeros(total, device=DEVICE) for _ in range(4)]
    velocity, residual, plain_velocity, plain_residual = state
    for step in range(STEPS):
        parts = [noise(numel, 7 * step + place) * 10.0 ** (step % 3) for place, numel in enumerate(numels)]
        found = gpu.accumulate(parts, segments, velocity if moved else None, residual, search)
        assert found is search
        plain = plain_velocity if moved else None
        reference.accumulate(parts, segments, plain, plain_residual, None, 0)
        torch.testing.assert_close(residual, plain_residual, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(velocity, plain_velocity, rtol=1e-6, atol=1e-5)
        indices, values = search.indices, search.values
        start, expected = 0, []
        for own, k in zip(scoped, wanted, strict=True):
            expected.append(reference.select_topk(residual[start : start + sum(own)], k) + start)
            start += sum(own)
        assert torch.equal(indices, torch.cat(expected)), step
        assert torch.equal(values, residual[indices])
        gpu.subtract_at(residual, indices, values)
        assert not residual[indices].any()
        velocity[indices] = 0.0
        plain_residual.copy_(residual)
        plain_velocity.copy_(velocity)


def test_a_large_scope_is_searched_by_many_programs() -> None:
    """Steps whose magnitudes jump: thresholds that were carried are too high, then too low, then right."""
    numel, k = 31_000, 1_100
    search = gpu.device_topk((0,), (numel,), (0,), (k,), DEVICE)
    assert search.num_large == 1
    residual = torch.zeros(numel, device=DEVICE)
    for step, size in enumerate((1.0, 1.0, 1e-3, 50.0, 1.0, 0.0)):
        gpu.accumulate([noise(numel, step) * size], segments_of((numel,)), None, residual, search)
        assert torch.equal(search.indices, reference.select_topk(residual, k)), step
        gpu.subtract_at(residual, search.indices, search.values)
        if size == 50.0:
            residual.mul_(1e-3)  # what is left is far below what was carried


@pytest.mark.parametrize("fill", ["zeros", "ones", "one nonzero", "all equal but some", "nan"])
def test_ties_go_to_the_lower_index(fill: str) -> None:
    numel = 9000
    x = torch.zeros(numel, device=DEVICE)
    if fill == "ones":
        x += 1
    elif fill == "one nonzero":
        x[8000] = 1e-30
    elif fill == "all equal but some":
        x += 0.5
        x[7000:7030] = 3.0
    elif fill == "nan":
        x += noise(numel, 3)
        x[4567] = float("nan")
    search = gpu.device_topk((0,), (numel,), (0,), (90,), DEVICE)
    residual, nothing = x.clone(), torch.zeros(numel, device=DEVICE)
    for step in range(3):
        gpu.accumulate([nothing], segments_of((numel,)), None, residual, search)
        indices = search.indices
        assert torch.equal(indices, reference.select_topk(residual, 90)), step


def test_what_is_not_below_the_limit_raises_the_flag_and_stays_out() -> None:
    for bad in (float("nan"), float("inf"), -float("inf"), 2.0**64, -3e38):
        parts = [noise(5000, 1), noise(300, 2)]
        parts[1][17] = bad
        flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        velocity, residual = torch.zeros(5300, device=DEVICE), torch.zeros(5300, device=DEVICE)
        gpu.accumulate(parts, segments_of((5000, 300)), velocity, residual, None, 0, flag)
        assert int(flag) == 1 and float(residual.abs().max()) < 1e3 and float(velocity.abs().max()) < 1e3
        flag.zero_()
        gpu.error_step(parts, segments_of((5000, 300)), (1.0, 1.0), velocity, residual, flag)
        assert int(flag) == 1 and float(residual.abs().max()) < 1e3
        flag.zero_()
        gpu.watch(parts, flag)
        assert int(flag) == 1
        flag.zero_()
        gpu.watch(parts[:1], flag)
        assert int(flag) == 0


@FEW
@given(
    numel=st.integers(50, 40_000 if ON_GPU else 9_000),
    density=st.floats(0.0005, 0.2),
    tail=st.integers(0, 9),
    values=st.sampled_from(["fp32", "fp16", "bf16", "int8", "int4", "int2"]),
    seed=st.integers(0, 2**31),
    huge=st.booleans(),
)
def test_frames_are_the_codec_s_bytes(
    numel: int, density: float, tail: int, values: str, seed: int, huge: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = max(1, round(density * numel))
    indices = torch.randperm(numel, generator=generator)[:count].sort().values.to(DEVICE)
    floats = torch.randn(count, generator=generator) * (1e37 if huge else 1.0)
    rows = [("a", 0, numel, True)] + ([("b", 1, tail, False)] if tail else [])
    context = ExchangeContext(Layout.of(rows), 5, (Hyper(),) * len(rows))
    payload = Sparse(indices, floats.to(DEVICE), numel, count)
    rest = torch.randn(tail, generator=generator).to(DEVICE)
    codec = SparseCodec(values=values)
    frame = codec.encode(context, payload, rest)
    if is_finished(frame):
        assert torch.equal(frame, codec.encode(context, payload, rest, within_budget=True))


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_values_in_two_bits(count: int) -> None:
    x = noise(count, 17)
    for wide in (x, x * 1e-40, x * 1e38, torch.where(noise(count, 18) > 0, x, 0.0), torch.zeros_like(x)):
        wide = wide.clone()
        if count == 1000:
            wide[100], wide[900] = float("inf"), float("nan")
        levels, packed = gpu.two_bit_encode(wide)
        plain_levels, plain_packed = reference.two_bit_encode(wide)
        assert torch.equal(levels.view(torch.int16), plain_levels.view(torch.int16)) and torch.equal(
            packed, plain_packed
        )
        back, plain = gpu.two_bit_decode(levels, packed, count), reference.two_bit_decode(levels, packed, count)
        assert torch.equal(back.view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize(("chunk", "k"), [(4096, 64), (4096, 4096), (1000, 7)])
@pytest.mark.parametrize("numels", [(5000, 3, 4096, 0, 100), (7,), ()])
def test_the_largest_of_every_chunk(numels: tuple[int, ...], chunk: int, k: int) -> None:
    bounds, total = [sum(numels[:place]) for place in range(len(numels) + 1)], sum(numels)
    lasts = [min(2, numel % chunk) for numel in numels]
    x = noise(total, 19)
    odd = x.clone()
    odd[::50], odd[1::70], odd[3::90] = float("nan"), float("-inf"), 1e-45
    for flavour in (x, x.round(), torch.zeros_like(x), torch.full_like(x, -2.5), odd):
        chosen = gpu.select_chunks(flavour, bounds, chunk, k, lasts)
        assert torch.equal(chosen, reference.select_chunks(flavour, bounds, chunk, k, lasts))


def test_a_frame_over_its_budget_is_left_unfinished() -> None:
    numel, count = 6_000_000, 6_000
    clustered = torch.arange(count // 2) * 2  # dense at the front, sparse behind: more bits than a random choice
    spread = torch.linspace(count * 2, numel - 1, count - count // 2).long()
    indices = torch.cat([clustered, spread]).to(DEVICE)
    context = ExchangeContext(Layout.of([("a", 0, numel, True)]), 5, (Hyper(),))
    payload = Sparse(indices, noise(count, 5), numel, count)
    codec, nothing = SparseCodec(), torch.zeros(0, device=DEVICE)
    fits = is_finished(codec.encode(context, payload, nothing))
    smaller = codec.encode(context, payload, nothing, within_budget=True)
    assert is_finished(smaller)
    kept = codec.decode(context, smaller, numel, count, 0, DEVICE, "here").content
    assert fits == (kept.indices.numel() == count)


@pytest.mark.parametrize(
    ("memory", "density"), [(MomentumCorrection(masking=True), 0.02), (ErrorFeedback(), 0.02), (ErrorFeedback(), 0.3)]
)
def test_steps_from_gradient_to_frame(memory: MomentumCorrection | ErrorFeedback, density: float) -> None:
    """The boxes put together as the engine does it: what is decoded is exactly the top-k of what the memory holds."""
    numels = (6000, 50, 900)
    layout = Layout.of([(f"p{place}", place, numel, place < 2) for place, numel in enumerate(numels)])
    compressor, codec = TopK(density), SparseCodec()
    k = round(density * 6000)
    for step in range(3):
        context = ExchangeContext(layout, step, tuple(Hyper(lr=0.1, momentum=0.9) for _ in numels))
        hint = compressor.hint(context, DEVICE)
        assert hint is not None and hint.flag is not None
        gradients = [noise(numel, step + place) for place, numel in enumerate(numels)]
        x, candidates = memory.compensate(context, gradients, (), hint, hint.flag)
        payload = compressor.compress(context, x[:6050], None, 0, candidates)
        assert torch.equal(payload.indices[:k], reference.select_topk(x[:6000], k))
        frame = codec.encode_finished(context, payload, x[6050:], alarm=Alarm(flag=hint.flag))
        decoded, tail, alarm = codec.decode(context, frame, 6050, payload.capacity, 900, DEVICE, "here")
        assert torch.equal(decoded.indices, payload.indices) and torch.equal(decoded.values, payload.values)
        assert torch.equal(tail, x[6050:]) and not alarm


@pytest.mark.parametrize("numels", SIZES)
def test_ternary_and_moments(numels: tuple[int, ...]) -> None:
    parts = [noise(numel, 11 + place) + (3.0 if place == 0 else 0.0) for place, numel in enumerate(numels)]
    deviations, largest = ternary.moments(parts)
    plain_deviations, plain_largest = reference.moments(parts)
    torch.testing.assert_close(deviations, plain_deviations, rtol=1e-6, atol=1e-7)
    assert torch.equal(largest, plain_largest)
    keys = [(place * 0x9E3779B1) & 0xFFFFFFFF for place in range(len(numels))]
    scales = torch.minimum(plain_largest, 2.5 * plain_deviations + 1e-3)
    for limits in (None, 2.5 * plain_deviations + 1e-3):
        assert torch.equal(
            gpu.ternarize_packed(parts, scales, keys, limits), reference.ternarize_packed(parts, scales, keys, limits)
        )


@pytest.mark.parametrize("numels", (*SIZES, (0, 6000), ()))
@pytest.mark.parametrize("tail", [0, 5, 700])
@pytest.mark.parametrize("with_scales", [True, False])
def test_frames_of_trits_are_the_codec_s_bytes(numels: tuple[int, ...], tail: int, with_scales: bool) -> None:
    """Drawn straight into the frame, with header, tail, scales and checksum: what the reference puts together."""
    rows = [(f"p{place}", place, numel, True) for place, numel in enumerate(numels)] + [("t", 9, tail, False)]
    context = ExchangeContext(Layout.of(rows), 2**32 - 7, (Hyper(),) * len(rows))
    alarm = Alarm(flag=torch.full((1,), tail % 2, dtype=torch.int32, device=DEVICE))
    parts = tuple(noise(numel + 1, 31 + place)[1:] for place, numel in enumerate(numels))  # from an odd address
    if tail == 0:
        parts = tuple(part.clone() for part in parts)
    if tail == 5:  # denormal thresholds, of aligned parts
        parts = tuple(part * 1e-37 for part in parts)
    scales, limits = kernels.clipped_scalers(parts, 2.5 if with_scales else None)
    keys = tuple((place * 0x9E3779B1 + 77) & 0xFFFFFFFF for place in range(len(numels)))
    draw = TernaryDraw(parts, scales.to(DEVICE), limits, keys, tuple(1000 * place for place in range(len(numels))))
    rest = -noise(tail, 3).relu()  # with negative zeros
    frame = TernaryCodec().encode(context, draw, rest, with_scales, alarm=alarm)
    packed = reference.ternarize_packed(parts, draw.scales, keys, limits, draw.counters)
    blocks = tuple((part.numel(), 1) for part in parts)
    put_together = Ternary(packed, draw.scales, blocks)
    assert torch.equal(frame, TernaryCodec().encode(context, put_together, rest, with_scales, alarm=alarm))
    assert torch.equal(draw.drawn().packed, packed)


def test_scalers_are_the_reference_s() -> None:
    """The limit is a nan nowhere; tensors without deviation are not clipped."""
    parts = [noise(9000, 1), torch.full((9000,), 0.3, device=DEVICE), noise(1, 2), torch.zeros(50, device=DEVICE)]
    bad = [noise(9000, 3), noise(100, 4)]
    bad[0][8999], bad[1][0] = float("nan"), float("-inf")
    for sigma in (2.5, None):
        for own, plain in zip(
            gpu.clipped_scalers(parts + bad, sigma), reference.clipped_scalers(parts + bad, sigma), strict=True
        ):
            if own is None or plain is None:
                assert own is plain
            else:
                torch.testing.assert_close(own, plain, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("runs", [((9000, 1),), ((4096, 2), (1000, 4), (808, 1)), ((64, 50), (5, 3)), ((3, 1),)])
def test_blockwise_signs(runs: tuple[tuple[int, int], ...]) -> None:
    numel = sum(length * count for length, count in runs)
    x, out = noise(numel, 21), noise(numel, 22)
    x[0] = 0.0
    plain_bits, plain_scales = reference.blockwise_sign(x, runs)
    bits, scales = gpu.blockwise_sign(x, runs)
    assert torch.equal(bits, reference.pack_bits(plain_bits))
    torch.testing.assert_close(scales, plain_scales, rtol=1e-6, atol=0)
    plain, unpacked = out.clone(), out.clone()
    gpu.add_signs(unpacked, plain_bits, scales, runs, -1.0)
    gpu.add_signs(out, bits, scales, runs, -1.0)
    reference.add_signs(plain, plain_bits, plain_scales, runs, -1.0)
    assert torch.equal(out, unpacked)
    torch.testing.assert_close(out, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("numels", SIZES)
def test_error_step(numels: tuple[int, ...]) -> None:
    weights = [noise(numel, 40 + place) for place, numel in enumerate(numels)]
    segments, total = segments_of(numels, weights), sum(numels)
    ours, plain = torch.zeros(2, total, device=DEVICE), torch.zeros(2, total, device=DEVICE)
    for step in range(3):
        parts = [noise(numel, step + place) for place, numel in enumerate(numels)]
        ratios = [1.0 + 0.1 * step] * len(numels)
        gpu.error_step(parts, segments, ratios, ours[0], ours[1])
        reference.error_step(parts, segments, ratios, plain[0], plain[1])
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-5)


def test_what_is_done_without_waiting_equals_its_twin() -> None:
    frames = [noise(numel, 5).view(torch.uint8) for numel in (1500, 1500)]
    assert torch.equal(gpu.frame_heads(frames), reference.frame_heads(frames))
    streams = []
    for place, count in enumerate((300, 1, 40)):
        gaps = (noise(count, place).abs() * 20).to(torch.int64)
        low, unary = reference.rice_encode(gaps, 3)
        streams.append(RiceStream(low, torch.nn.functional.pad(unary, (0, -unary.numel() % 4)), count, 3))
    rows, faults = gpu.launch_rice_indices(streams, 10_000)
    plain_rows, plain_faults = reference.launch_rice_indices(streams, 10_000)
    assert rows.shape == plain_rows.shape and not faults.any() and not plain_faults.any()
    for stream, row, plain in zip(streams, rows, plain_rows, strict=True):
        assert torch.equal(row[: stream.count], plain[: stream.count])
    assert gpu.launch_rice_indices(streams, 30)[1].bool().tolist()[0] is True
    assert reference.launch_rice_indices(streams, 30)[1].bool().tolist()[0] is True


def test_the_default_type_changes_nothing() -> None:
    numels = (4500, 700)
    parts, segments = [noise(numel, 60 + numel) for numel in numels], segments_of(numels)
    runs = tuple((numel, 1) for numel in numels)

    def work() -> list[Tensor]:
        search = gpu.device_topk(segments.starts, numels, [0, 1], [45, 7], DEVICE)
        velocity, residual = (torch.zeros(sum(numels), dtype=torch.float32, device=DEVICE) for _ in range(2))
        found = [search.thresholds, search.shares, search.smallest, search.indices, search.values]
        for _ in range(2):
            gpu.accumulate(parts, segments, velocity, residual, search)
            found += [tensor.clone() for tensor in (velocity, residual, search.indices, search.values)]
        scalers, limits = gpu.clipped_scalers(parts, 2.5)
        return [*found, scalers, limits, *ternary.moments(parts), *gpu.blockwise_sign(residual, runs)]

    made = []
    try:
        for default in (torch.float64, torch.bfloat16, torch.float32):
            torch.set_default_dtype(default)
            made.append(work())
    finally:
        torch.set_default_dtype(torch.float32)
    for other in made[:2]:
        for ours, expected in zip(other, made[2], strict=True):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected)


assert os.environ.get("TRITON_INTERPRET") == "1" or ON_GPU, "run me through test_triton.py"
