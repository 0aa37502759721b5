"""What thinwire reads of torch's private names: they behave as it needs on this torch, and lie in one file."""

from __future__ import annotations

import ast
import builtins
import copy
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from thinwire import torch_private as private

PACKAGE = Path(thinwire.__file__).parent
# Not private by their names, but in no page of torch's documentation.
UNDOCUMENTED = {"parameters_to_ignore", "reducer", "distributed_c10d"}
VERSION = ".".join(torch.__version__.split(".")[:2])


def test_this_torch_is_one_that_was_tested() -> None:
    """On another one this warns: the probes below decide."""
    if VERSION not in private.TESTED:
        warnings.warn(f"torch {VERSION} is not in torch_private.TESTED; add it when all of this passes", stacklevel=1)


def test_autograd() -> None:
    weight, calls = nn.Parameter(torch.ones(3)), []
    weight.register_hook(lambda grad: calls.append(private.backward_is_running()))

    def queue(grad: torch.Tensor) -> None:
        private.after_backward(lambda: calls.append("first") or private.after_backward(lambda: calls.append("third")))
        private.after_backward(lambda: calls.append("second"))
        calls.append("hook")

    weight.register_hook(queue)
    assert not private.backward_is_running()
    weight.square().sum().backward()
    assert calls == [True, "hook", "first", "second", "third"] and not private.backward_is_running()

    assert weight.grad is not None
    before = private.version_of(weight.grad)
    weight.grad.mul_(0.5)
    assert private.version_of(weight.grad) > before


def test_an_error_in_a_callback_is_raised_by_backward_with_its_type() -> None:
    weight = nn.Parameter(torch.ones(3))

    def fail() -> None:
        raise KeyError("own")

    weight.register_hook(lambda grad: private.after_backward(fail))
    with pytest.raises(KeyError, match="own"):
        weight.square().sum().backward()


def test_a_compiled_model_is_seen_through() -> None:
    model = nn.Linear(2, 2)
    assert private.uncompiled(torch.compile(model, backend="eager")) is model and private.uncompiled(model) is model


def test_bucket_assignment() -> None:
    tensors = [torch.zeros(n) for n in (100, 100, 1000, 10)]
    assert private.bucket_assignment(tensors, [400, 1 << 20]) == [[0], [1, 2, 3]]


def test_a_scaler_tells_whether_it_has_scaled() -> None:
    scaler = torch.amp.GradScaler("cpu")
    assert not private.has_scaled(scaler)
    scaler.scale(torch.ones(()))
    assert private.has_scaled(scaler)
    assert private.has_scaled(object())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.ignored = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ignored(self.frozen(self.used(x)))


def ddp(group: Any) -> None:
    model = Net()
    names = ["ignored.weight", "ignored.bias"]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DDP(model, process_group=group)
    assert private.ignored_by_ddp(wrapped) == set(names)
    model.used.requires_grad_(False)  # later: DDP exchanges what was trained when it was made
    exchanged = private.exchanged_by_ddp(wrapped)
    assert {id(p) for p in exchanged} == {id(p) for p in model.used.parameters()} and len(exchanged) == 2
    model.used.requires_grad_(True)

    assert not private.has_comm_hook(wrapped)
    private.register_uncopied_hook(wrapped, unchanged)
    assert private.has_comm_hook(wrapped) and copy.deepcopy(wrapped._comm_hooks) == []

    assert not private.has_joined(wrapped) and private.divides_by_all_ranks(wrapped)
    for divides in (False, True):
        with wrapped.join(divide_by_initial_world_size=divides):
            assert private.has_joined(wrapped)
            assert private.divides_by_all_ranks(wrapped) is divides
            wrapped(torch.ones(1, 3)).sum().backward()
        assert private.has_joined(wrapped)  # torch leaves it so


def unchanged(state, bucket):  # without annotations: DDP compares them with the real classes
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def groups(group: Any) -> None:
    cpu, known = torch.device("cpu"), private.num_groups()
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(ranks, timeout=timedelta(seconds=77), use_local_synchronization=True)
    assert private.num_groups() == known + 1
    assert private.timeout_of(own, cpu) == timedelta(seconds=77)
    assert private.timeout_of(own, torch.device("meta")) is None
    assert private.is_alive(own)
    store = private.store_of(own)
    if dist.get_rank(group) == 0:
        store.set("thinwire-probe", "there")
    dist.barrier(own)
    assert store.get("thinwire-probe") == b"there"
    assert not private.is_tcp(store)  # the cluster's ranks meet in a file
    dist.destroy_process_group(own)
    assert not private.is_alive(own) and private.num_groups() == known


def test_distributed_data_parallel(cluster: Cluster) -> None:
    cluster.run(ddp, 2)


def test_process_groups() -> None:
    # Fresh processes: torch waits for ever where the ranks of a subgroup have made unequal numbers of groups before.
    cluster = Cluster(2)
    try:
        cluster.run(groups, 2)
    finally:
        cluster.stop()


def test_a_server_is_seen_below_its_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert private.is_tcp(dist.PrefixStore("a", dist.PrefixStore("b", server)))
    assert not private.is_tcp(dist.PrefixStore("a", dist.HashStore()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert not private.agent_hosts_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(True))  # as torchrun writes it
    assert private.agent_hosts_store()


def test_a_name_that_torch_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(RuntimeError) as caught:
        private.backward_is_running()
    assert str(caught.value) == (
        f"torch {torch.__version__} has no torch._C._current_graph_task_id, which thinwire needs; use torch 2.13"
    )


# --- no other file touches them --------------------------------------------------------------------


def is_private(name: str) -> bool:
    """torch._foreach_add and its like are documented."""
    dunder = name.startswith("__") and name.endswith("__")
    return (name.startswith("_") and not dunder and not name.startswith("_foreach_")) or name in UNDOCUMENTED


def fully_sharded(group: dist.ProcessGroup) -> None:
    """Torch's order in a pass of fully_shard: the hook, .grad, the parameter's hook, its last callback, ours."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh, calls = DeviceMesh.from_group(group, "cpu"), []
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    assert private.reduction_hooks(model) == private.reduction_hooks(model[0]) == [None]
    weights = [model[0].weight, model[1].weight]

    def at_the_end() -> None:
        with torch.no_grad():
            calls.append(("end", [bool(w.grad.to_local().any()) or not w.to_local().numel() for w in weights]))

    def accumulated(parameter: torch.Tensor) -> None:
        calls.append("accumulated")
        private.after_backward(at_the_end)

    for module in (model[0], model):
        module.set_all_reduce_hook(lambda flat: calls.append(("hook", private.backward_id() != private.OUTSIDE)))
    weights[0].register_post_accumulate_grad_hook(accumulated)
    assert all(hook is not None for hook in private.reduction_hooks(model) + private.reduction_hooks(model[0]))
    held = [weight.to_local().data_ptr() for weight in weights]
    for requires_grad in (False, True):  # without it torch reduces the first layer in its own last callback
        calls.clear()
        model(torch.ones(2, 3, requires_grad=requires_grad)).sum().backward()
        assert len(calls) == 4 and calls.count(("hook", True)) == 2, calls
        assert calls[0] == ("hook", True) and calls[-1] == ("end", [True, True]), calls
    with torch.no_grad():
        assert held == [weight.to_local().data_ptr() for weight in weights]
    calls.clear()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 3)).sum().backward()
    assert not calls, "nothing is reduced, and nobody is called"
    model.set_requires_gradient_sync(True)
    for module in (model[0], model):
        private.unhook_reduction(module)
    assert private.reduction_hooks(model) == [None]
    model(torch.ones(2, 3)).sum().backward()
    assert calls == ["accumulated", ("end", [True, True])]


def test_fully_shard(cluster: Cluster) -> None:
    cluster.run(fully_sharded, 2)


def own_names() -> set[str]:
    """The underscored attributes, functions, classes and modules that thinwire itself defines."""
    paths = {path for path in PACKAGE.rglob("*.py") if path.name != "torch_private.py"}
    found = {path.stem for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def private_names(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """What a file takes of torch, or of an object that thinwire did not make, although it is private there."""
    libraries = {}  # a name in the file -> the library that it was imported from
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            libraries |= {(a.asname or a.name.split(".")[0]): a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            libraries |= {(a.asname or a.name): (node.module or "").split(".")[0] for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            of_torch = any(alias.name.split(".")[0] == "torch" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            of_torch = names[0] == "torch"
        elif isinstance(node, ast.Attribute):
            names, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            library = libraries.get(root.id) if isinstance(root, ast.Name) else None
            of_torch = library == "torch" or (library in (None, "thinwire") and node.attr not in own)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            of_torch = hasattr(builtins, node.func.id) and not set(names) & own
        else:
            continue
        if of_torch:
            yield from (f"{name} (line {node.lineno})" for name in names if is_private(name))


@pytest.mark.parametrize("line", [
    "import torch\ntorch._C._current_graph_task_id()", "import torch.distributed as dist\ndist._functional",
    "from torch.utils._python_dispatch import TorchDispatchMode", "import torch._dynamo", "model._join_config.enable",
    "getattr(model, '_comm_hooks', [])", "model.reducer._rebuild_buckets()", "self.model._comm_hooks",
    "from torch.distributed import _functional_collectives", "group._get_backend(device).options._timeout",
    "grad._version",
])  # fmt: skip
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names(ast.parse(line), own_names()))


@pytest.mark.parametrize("line", [
    "import torch\ntorch._foreach_add_(a, b)", "import os\nos._exit(1)", "self._jobs.put(None)", "wire._step += 1",
    "from thinwire.cli import _text", "type(a).__name__", "getattr(a, 'dense_below', 0)",
])  # fmt: skip
def test_what_is_our_own_or_documented_is_not(line: str) -> None:
    assert not list(private_names(ast.parse(line), own_names()))


def test_no_other_file_touches_private_names_of_torch() -> None:
    own, found = own_names(), {}
    for path in PACKAGE.rglob("*.py"):
        if names := list(private_names(ast.parse(path.read_text()), own)):
            found[path.name] = {name.split()[0] for name in names}
    here = found.pop("torch_private.py")
    assert not found, "put them into thinwire/torch_private.py, with a probe above"
    assert {"_C", "_python_dispatch", "_orig_mod", "_comm_hooks", "_scale", "_timeout", "parameters_to_ignore"} <= here
