"""torch.set_default_dtype is the user's business: nothing of an exchange depends on it, whenever it is set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire.kernels.dispatch import CHOSEN

DEFAULTS = (torch.bfloat16, torch.float16, torch.float64)
SIZES = (24, 300, 40)  # the layers: tensors that many ranks serve, and small ones that travel dense
STEPS = 4
PACKAGE = Path(thinwire.__file__).parent
LAB = ("cli", "lab")  # what runs in no process of a user's training
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randn",
    "range", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip

PLAIN = [*thinwire.METHODS]
VARIANTS = [
    "dgc:density=0.05,values=fp32,scope=tensor,factor_masking=true",
    "dgc:density=0.05,values=fp16,indices=int32,lr_rescaling=true",
    "dgc:density=0.05,values=bf16,indices=delta16,residual=bf16",
    "dgc:density=0.05,values=int4,selection=sampled,clip_norm=1.0",
    "dgc:density=0.05,scope=model,dense_below=0,warmup=3",
    "gtopk:momentum_correction=false",
    "gtopk:values=int8,residual=bf16",
    "dropping:density=0.05,local=sum",
    "dropping:density=0.05,local=partial",
    "dropping:density=0.05,local=error",
    "terngrad:share_scaler=false,clip_sigma=none",
    "terngrad:scaler=model,topology=server,dense_below=0",
    "blocksign:two_way=false,block=100",
    "blocksign:topology=server,clip_norm=1.0,residual=bf16",
    "signsgd:topology=server",
    "dense:dtype=bf16",
    "dense:dtype=fp16",
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def model_of(group: dist.ProcessGroup, dtype: torch.dtype | None) -> DDP:
    """The same parameters in every run; those of the default type where ``dtype`` is None."""
    layers = torch.nn.Linear(*SIZES[:2], dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(*SIZES[1:], dtype=dtype)
    module = torch.nn.Sequential(*layers)
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(0.1 * noise(*parameter.shape, seed=place))
    return DDP(module, process_group=group, bucket_cap_mb=0.02)


def sgd(model: DDP) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def step(model: DDP, optimizer: torch.optim.Optimizer, rank: int, index: int, scale: Any = None) -> float:
    dtype = next(model.parameters()).dtype
    x, y = (noise(16, size, seed=100 * index + rank).to(dtype) for size in (SIZES[0], SIZES[-1]))
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    if scale is None:
        loss.backward()
        optimizer.step()
    else:
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
    return float(loss.detach())


def everything(state: Any) -> list[torch.Tensor]:
    """All tensors of a state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [tensor for one in state for tensor in everything(one)] if isinstance(state, (list, tuple)) else []


def trained(group: dist.ProcessGroup, spec: str, options: dict[str, Any], early: Any, late: Any) -> list[torch.Tensor]:
    """Parameters and state after some steps, with a default type from the beginning, and one from after attach on."""
    rank = dist.get_rank(group)
    with default_dtype(early or torch.float32):
        model = model_of(group, torch.float32)
        optimizer = sgd(model)
        options = dict(options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if options.pop("scaled", False) else None
        wire = thinwire.attach(model, optimizer, spec, **options, **({"scaler": scaler} if scaler else {}))
        with default_dtype(late or torch.get_default_dtype()):
            for index in range(STEPS):
                step(model, optimizer, rank, index, scaler)
            state = wire.state_dict()
            wire.load_state_dict(state)
            step(model, optimizer, rank, STEPS, scaler)
            found = [*(p.detach().clone() for p in model.parameters()), *everything(wire.state_dict())]
            rest = wire.detach()
            return [*found, *everything(rest), *(p.detach().clone() for p in model.parameters())]


def differs(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """How two lists of tensors differ; nothing where all bits are the same."""
    if [(t.dtype, t.shape) for t in ours] != [(t.dtype, t.shape) for t in expected]:
        return "types or shapes differ"
    wrong = [place for place, (a, b) in enumerate(zip(ours, expected, strict=True)) if not torch.equal(a, b)]
    return f"tensors {wrong} of {len(ours)} differ" if wrong else ""


def compare(group: dist.ProcessGroup, runs: list[tuple[str, dict[str, Any]]], defaults: list[Any]) -> list[str]:
    """What differs from the same training without a default type of the user's."""
    problems = []
    for spec, options in runs:
        expected = trained(group, spec, options, None, None)
        assert not differs(trained(group, spec, options, None, None), expected), spec
        for early, late in defaults:
            problem = differs(trained(group, spec, options, early, late), expected)
            if problem:
                problems.append(f"{spec} {options}, default {early} at first and {late} after attach: {problem}")
    return problems


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", PLAIN)
def test_a_method_makes_the_same_bits_whatever_the_default_type_is(cluster: Cluster, spec: str, ranks: int) -> None:
    defaults = [(dtype, None) for dtype in DEFAULTS] + [(None, dtype) for dtype in DEFAULTS]
    assert cluster.run(compare, ranks, [(spec, {})], defaults) == [[]] * ranks


@pytest.mark.parametrize("spec", VARIANTS)
def test_a_variant_makes_the_same_bits_whatever_the_default_type_is(cluster: Cluster, spec: str) -> None:
    defaults = [(torch.bfloat16, None), (None, torch.float64)]
    assert cluster.run(compare, 3, [(spec, {})], defaults) == [[]] * 3


def compare_options(group: dist.ProcessGroup) -> list[str]:
    runs: list[tuple[str, dict[str, Any]]] = [
        ("dgc:density=0.05", {"guard": "densify", "guard_every": 1, "check_replicas_every": 2}),
        ("dgc:density=0.05", {"on_nonfinite": "skip"}),
        ("blocksign", {"scaled": True}),
        ("terngrad", {"hierarchy": [[0, 1], [2]]}),
        ("gtopk", {"hierarchy": [[0], [1, 2]]}),
    ]
    return compare(group, runs, [(torch.bfloat16, None), (None, torch.float64)])


def test_what_attach_can_do_besides_makes_the_same_bits_whatever_the_default_type_is(cluster: Cluster) -> None:
    assert cluster.run(compare_options, 3) == [[]] * 3


def compare_reference(group: dist.ProcessGroup) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHOSEN, torch.device("cpu"), "reference")
        runs: list[tuple[str, dict[str, Any]]] = [(spec, {}) for spec in [*PLAIN, *VARIANTS]]
        return compare(group, runs, [(torch.bfloat16, torch.float64)])


def test_plain_torch_kernels_make_the_same_bits_whatever_the_default_type_is(cluster: Cluster) -> None:
    assert cluster.run(compare_reference, 2) == [[]] * 2


def switches(group: dist.ProcessGroup, dtype: Any) -> list[torch.Tensor]:
    with default_dtype(dtype or torch.float32):
        model = model_of(group, torch.float32)
        optimizer = sgd(model)
        wire = thinwire.attach(model, optimizer, "dgc:density=0.05")
        for index, spec in enumerate(["gtopk", "blocksign", "terngrad", "signsgd", "dropping:local=error", "dense"]):
            step(model, optimizer, dist.get_rank(group), index)
            wire.switch(spec)
        step(model, optimizer, dist.get_rank(group), 9)
        return [p.detach().clone() for p in model.parameters()]


def compare_switches(group: dist.ProcessGroup) -> list[str]:
    return [differs(switches(group, dtype), switches(group, None)) for dtype in DEFAULTS]


def test_switching_makes_the_same_bits_whatever_the_default_type_is(cluster: Cluster) -> None:
    assert cluster.run(compare_switches, 3) == [[""] * len(DEFAULTS)] * 3


def choose(group: dist.ProcessGroup) -> list[str]:
    """``auto`` measures links and computes in the user's process."""
    with default_dtype(torch.bfloat16):
        model = model_of(group, torch.float32)
        optimizer = sgd(model)
        wire = thinwire.attach(model, optimizer, "auto")
        for index in range(12):
            loss = step(model, optimizer, dist.get_rank(group), index % 3)
        assert loss == loss
        return [wire.method.name]


def test_auto_chooses_with_another_default_type(cluster: Cluster) -> None:
    first, second = cluster.run(choose, 2)
    assert first == second


def losses(group: dist.ProcessGroup, spec: str | None, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    """A model that is of the default type itself."""
    with default_dtype(dtype):
        model = model_of(group, None)
        assert all(p.dtype == dtype for p in model.parameters())
        optimizer = sgd(model)
        if spec is not None:
            thinwire.attach(model, optimizer, spec)
        seen = [step(model, optimizer, dist.get_rank(group), index % 3) for index in range(30)]
        return seen, [p.detach().to(torch.float64) for p in model.parameters()]


def follow_plain_ddp(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    plain, parameters = losses(group, None, dtype)
    assert plain[-1] < 0.9 * plain[0], "plain DDP itself learns nothing here"
    close = max(1e-5, 16 * torch.finfo(dtype).eps)  # gradients are exchanged as float32, also float64's
    for spec in ("dense", "dgc:density=1,values=fp32", "gtopk:density=1", "dropping:density=1,values=fp32"):
        ours, own = losses(group, spec, dtype)
        assert ours == pytest.approx(plain, rel=close), spec
        for mine, expected in zip(own, parameters, strict=True):
            apart = (mine - expected).norm() / expected.norm()
            assert apart < close, (spec, float(apart))


@pytest.mark.parametrize("dtype", DEFAULTS, ids=str)
def test_a_model_of_the_default_type_trains_as_in_plain_ddp(cluster: Cluster, dtype: torch.dtype) -> None:
    cluster.run(follow_plain_ddp, 2, dtype)


def implicit_types(source: str) -> list[int]:
    """The lines on which a factory of torch is left to the default type."""

    def named(call: ast.Call) -> str | None:
        of_torch = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
        return call.func.attr if of_torch and call.func.value.id == "torch" else None

    def number(node: ast.expr) -> bool:
        return isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Constant) and not isinstance(node.value, str))

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and named(node) in FACTORIES:
            if not any(keyword.arg == "dtype" for keyword in node.keywords):
                found.append(node.lineno)
        elif isinstance(node, ast.Call) and named(node) == "where" and all(map(number, node.args[1:])):
            found.append(node.lineno)  # of two numbers torch makes a tensor of the default type
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [node.lineno for alias in node.names if alias.name in FACTORIES]  # not to be seen by their name
    return sorted(found)


def test_every_tensor_of_the_engine_says_its_type() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] not in LAB
        for line in implicit_types(path.read_text())
    ]
    assert not wrong, f"factories without dtype=: {', '.join(wrong)}"


def test_the_check_of_types_sees_what_it_should() -> None:
    assert implicit_types("torch.zeros(3)\ntorch.empty(3, dtype=torch.float32)\nx.new_zeros(3)") == [1]
    assert implicit_types("torch.where(x, 1.0, -1.0)\ntorch.where(x, y, 0.0)\nfrom torch import full") == [1, 3]
