"""Models of fully_shard: torch adds up inside a replica, thinwire between the replicas."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster, Raised
from sharded import (
    NAMES,
    OPTIMIZERS,
    ShardedTraining,
    batch,
    loss_of,
    mesh_of,
    network,
    rows_digest,
    sharded,
    whole,
)
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import EXACT, sentence_of

import thinwire

MESHES = [(2, 2), (4, 1), (1, 4)]
SPARSE = thinwire.DGC(density=0.05, dense_below=0, values="fp32")


def ddp_run(group: Any, optimizer: str, steps: int, method: Any = None, passes: int = 1) -> list[Tensor]:
    """The same training in DDP, plain or with a method: the parameters after every step."""
    net, trajectory = network(), []
    model, its = DDP(net, process_group=group), OPTIMIZERS[optimizer](net)
    wire = thinwire.attach(model, its, method) if method is not None else None
    for step in range(steps):
        its.zero_grad()
        for one in range(passes):
            loss_of(model, dist.get_rank(), step + 100 * one).backward()
        its.step()
        trajectory.append(whole(net))
    if wire is not None:
        wire.detach()
    return trajectory


def equal_replicas(training: ShardedTraining) -> None:
    digests = [""] * training.mesh.size(0)
    dist.all_gather_object(digests, rows_digest(training.net), group=training.mesh.get_group(0))
    assert len(set(digests)) == 1, digests


# ------------------------------------------------------------------------------------------- what is computed


def at_density_one(group: Any) -> None:
    exact = {"heavy": (EXACT, thinwire.Dense()), "adamw": (thinwire.GTopK(density=1.0), thinwire.Dense())}
    for optimizer, methods in exact.items():
        plain = ddp_run(group, optimizer, 8)
        for method in methods:
            for shape in MESHES:
                training = ShardedTraining(mesh_of(*shape), method, optimizer, seed=dist.get_rank() * (shape[1] == 1))
                found = training.train(0, 8)
                for step, (mine, its) in enumerate(zip(found, plain, strict=True)):
                    torch.testing.assert_close(mine, its, rtol=1e-5, atol=3e-6, msg=f"{shape} {method} step {step}")
                assert training.wire.stats.steps == 8
                training.wire.detach()


def test_at_density_one_all_meshes_are_plain_ddp_over_all_ranks(four: Cluster) -> None:
    """Replicas that began with other parameters got the first one's; some ranks hold nothing of some parameters."""
    four.run(at_density_one, 4)


def like_ddp(group: Any) -> dict[str, float]:
    """The largest difference to DDP on the mesh of one shard, by method."""
    mesh = mesh_of(2, 1)
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return {}
    found = {}
    for name in [name for name, kind in thinwire.METHODS.items() if kind().outer_rule is None]:
        sgd = name in ("dgc", "perlayer")
        for method in (f"{name}", *([f"{name}:density=0.05,dense_below=0"] if name in ("dgc", "gtopk") else [])):
            optimizer = "heavy" if sgd else "adamw"
            training = ShardedTraining(mesh, method, optimizer, seed=5 * dist.get_rank())
            mine = torch.stack(training.train(0, 6))
            its = torch.stack(ddp_run(group, optimizer, 6, method))
            equal_replicas(training) if method != "noop" else None
            training.wire.detach()
            found[method] = float((mine - its).abs().max())
    return found


def test_one_shard_per_replica_is_ddp_with_the_same_method(four: Cluster) -> None:
    """Every method chooses by parameter, and what it groups it groups by the model, so it makes the same numbers."""
    for found in four.run(like_ddp, 4)[:2]:
        assert found and all(difference <= 1e-6 for difference in found.values()), found


def sparse_run(group: Any) -> dict[str, tuple[Tensor, thinwire.Stats]]:
    """The losses of all steps, and what was sent."""
    found = {}
    for method in ("dgc:density=0.1,dense_below=0", "dense"):
        training, losses = ShardedTraining(mesh_of(2, 2), method), []
        for step in range(180):
            losses.append(training.step(step % 10))
            if step < 10:
                equal_replicas(training)
        found[method.partition(":")[0]] = torch.tensor(losses), training.wire.stats
        training.wire.detach()
    return found


def test_at_a_low_density_the_loss_falls_near_that_of_dense_with_fewer_bytes(four: Cluster) -> None:
    results = four.run(sparse_run, 4)
    sparse, dense = (torch.stack([row[name][0] for row in results]).mean(dim=0) for name in ("dgc", "dense"))
    assert sparse[-10:].mean() < 0.05 * sparse[0] and sparse[-10:].mean() < 1.2 * dense[-10:].mean()
    for row in results:
        stats, its = row["dgc"][1], row["dense"][1]
        assert stats.steps == 180 and stats.world_size == 2
        assert 0 < stats.bytes_sent < its.bytes_sent / 4
        assert stats.seconds_waiting > 0 and stats.residual_norm > 0
    rows = [row["dgc"][1].dense_bytes // 180 // 4 for row in results]
    assert rows[0] + rows[1] == sum(p.numel() for p in network().parameters()), "every rank exchanges its own rows"


# --------------------------------------------------------------------------------------- several passes, one step


def accumulated(group: Any) -> None:
    mesh = mesh_of(2, 2)
    for method in (EXACT, SPARSE, thinwire.BlockSign(), thinwire.GTopK(density=0.1)):
        runs = []
        for way in ("one pass", "no sync", "two exchanges"):
            training = ShardedTraining(mesh, method, "heavy" if method in (EXACT, SPARSE) else "adamw")
            trajectory = []
            for step in range(6):
                training.optimizer.zero_grad()
                losses = [loss_of(training.net, training.rank, step + 100 * one) for one in range(2)]
                if way == "one pass":
                    sum(losses).backward()
                else:
                    training.net.set_requires_gradient_sync(way == "two exchanges")
                    losses[0].backward()
                    training.net.set_requires_gradient_sync(True)
                    loss_of(training.net, training.rank, step + 100).backward()
                training.optimizer.step()
                equal_replicas(training)
                trajectory.append(whole(training.net))
            assert training.wire.stats.steps == 6, f"{way}: {training.wire.stats}"
            runs.append(torch.stack(trajectory))
            training.wire.detach()
        for way, other in zip(("no sync", "two exchanges"), runs[1:], strict=True):
            torch.testing.assert_close(other, runs[0], rtol=1e-4, atol=1e-5, msg=f"{method} {way}")


def test_accumulated_passes_are_one_exchange_of_their_sum(four: Cluster) -> None:
    """With set_requires_gradient_sync(False) before the last pass, and without it."""
    four.run(accumulated, 4)


def several_like_ddp(group: Any) -> float:
    mesh, group = mesh_of(2, 1), dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return 0.0
    training = ShardedTraining(mesh, SPARSE)
    trajectory = []
    for step in range(8):
        training.optimizer.zero_grad(set_to_none=step % 2 == 0)
        for one in range(3):
            training.backward(step + 100 * one)
        training.optimizer.step()
        trajectory.append(whole(training.net))
    training.wire.detach()
    its = torch.stack(ddp_run(group, "heavy", 8, SPARSE, passes=3))
    return float((torch.stack(trajectory) - its).abs().max())


def test_several_passes_before_a_step_are_those_of_ddp(four: Cluster) -> None:
    assert max(four.run(several_like_ddp, 4)) <= 1e-6


def broken_off(group: Any) -> None:
    """An error inside backward, gradients that are thrown away, and a pass in which torch's own hook comes last."""
    mesh = mesh_of(2, 2)
    one, other = (ShardedTraining(mesh, SPARSE) for _ in range(2))
    for training in (one, other):
        training.train(0, 2)
    loss = loss_of(one.net, one.rank, 50)
    handle = one.net[0].weight.register_hook(lambda _: 1 / 0)
    handle.remove()
    loss.backward()
    one.optimizer.zero_grad()  # thrown away
    torch.testing.assert_close(
        torch.stack(one.train(2, 5)), torch.stack(other.train(2, 5)), rtol=0, atol=0, msg="a trace was left"
    )
    for training in (one, other):
        training.wire.detach()


def test_gradients_that_are_thrown_away_leave_no_trace(four: Cluster) -> None:
    four.run(broken_off, 4)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.last(getattr(self, which)(x))


def branches(group: Any, zeros: bool, first: str) -> list[str]:
    """Each replica takes another branch, from the beginning or after some passes; nobody takes the third one."""
    net = Branches()
    for module in (net.a, net.b, net):
        fully_shard(module, mesh=mesh_of(2, 2)[NAMES[1]])
    if first == "all":  # a branch that is never there is frozen
        net.c.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.set_reduce_scatter_unused_params(zeros)
    wire = thinwire.attach(net, optimizer, SPARSE, mesh=mesh_of(2, 2))
    replica = dist.get_rank() // 2
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(3, 4)
        if first == "all" and step < 4:
            loss = net(x, "a").square().mean() + net(x, "b").square().mean()
        else:
            loss = net(x, "ab"[replica]).square().mean()
        loss.backward()
        assert first == "all" or zeros or net.c.weight.grad is None
        optimizer.step()
    digests = [""] * 2
    dist.all_gather_object(digests, rows_digest(net), group=mesh_of(2, 2).get_group(0))
    assert len(set(digests)) == 1
    wire.detach()
    return digests


def test_replicas_that_use_different_parameters_are_told_from_each_other(four: Cluster) -> None:
    for zeros, first in ((False, "own"), (True, "own"), (True, "all")):
        four.run(branches, 4, zeros, first)
    raised = four.run(branches, 4, False, "all", expect_errors=True)
    assert all(isinstance(one, Raised) for one in raised)
    for one in raised:
        assert "set_reduce_scatter_unused_params(True)" in one.message, one


# ------------------------------------------------------------------------------------------------- what goes wrong


def bad_gradient(group: Any, on_nonfinite: str) -> Any:
    training = ShardedTraining(mesh_of(2, 2), SPARSE, on_nonfinite=on_nonfinite)
    training.train(0, 2)
    before = whole(training.net)
    training.optimizer.zero_grad()
    x, y = batch(training.rank, 2)
    loss = (training.net(x) - y).square().mean()
    if training.rank == 3:
        loss = loss + training.net[4].bias[0] * float("inf")  # in one shard
    loss.backward()
    training.optimizer.step()
    assert torch.equal(before, whole(training.net)), "the step was passed over"
    training.train(3, 5)
    assert training.wire.stats.steps == 4 and training.wire.stats.steps_skipped == 1
    equal_replicas(training)
    training.wire.detach()
    return "passed over"


def test_a_gradient_that_is_not_finite_stops_or_passes_over_all_ranks(four: Cluster) -> None:
    assert four.run(bad_gradient, 4, "skip") == ["passed over"] * 4
    raised = four.run(bad_gradient, 4, "raise", expect_errors=True)
    assert all(isinstance(one, Raised) and one.type == "NonFiniteError" for one in raised), raised
    assert any("on a rank with another shard" in one.message for one in raised)


def corrupted(group: Any) -> None:
    training = ShardedTraining(mesh_of(2, 2), SPARSE, check_replicas_every=1)
    training.train(0, 2)
    with torch.no_grad():
        if training.rank == 1:
            training.net[2].weight.to_local()[0, 0] += 1
    training.train(2, 3)


def test_a_replica_that_differs_in_one_shard_stops_all_ranks(four: Cluster) -> None:
    raised = four.run(corrupted, 4, expect_errors=True)
    assert [one.type for one in raised] == ["ReplicaError"] * 4, raised
    assert all("2.weight" in one.message for one in raised)


def mixed(group: Any) -> None:
    policies = [
        MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    ]
    for policy in policies:
        training = ShardedTraining(mesh_of(2, 2), SPARSE, options={"mp_policy": policy})
        first = training.step(0)
        for step in range(1, 30):
            last = training.step(step % 10)
        equal_replicas(training)
        assert last < first
        training.wire.detach()


def test_mixed_precision_policies(four: Cluster) -> None:
    four.run(mixed, 4)


def clipping(group: Any, clips: bool) -> list[str]:
    training = ShardedTraining(mesh_of(2, 2), "dgc:density=0.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            training.optimizer.zero_grad()
            training.backward(step)
            norm = nn.utils.clip_grad_norm_(training.net.parameters(), 1e-3 if clips else float("inf"))
            assert norm.full_tensor() > 0
            training.optimizer.step()
    equal_replicas(training)
    training.wire.detach()
    return [str(one.message) for one in caught if "gradients are changed" in str(one.message)]


def test_clipping_after_the_exchange_is_told_once_by_one_rank(four: Cluster) -> None:
    assert [len(told) for told in four.run(clipping, 4, True)] == [1, 0, 0, 0]
    assert four.run(clipping, 4, False) == [[]] * 4


def scaled(group: Any) -> None:
    """A GradScaler's own skipping: an infinity in one shard of one replica."""
    runs = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=1024.0), None):
        training = ShardedTraining(mesh_of(2, 2), SPARSE, scaler=scaler)
        for step in range(4):
            training.optimizer.zero_grad()
            if scaler is None and step != 2:
                training.step(step)
            if scaler is None:
                continue
            loss = loss_of(training.net, training.rank, step)
            scaler.scale(loss * float("inf") if step == 2 and training.rank == 3 else loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            assert scaler.get_scale() == (512.0 if step > 1 else 1024.0)
        equal_replicas(training)
        assert training.wire.stats.steps == 3
        runs.append(whole(training.net))
        training.wire.detach()
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


def test_a_scaler_skips_the_same_steps_on_all_ranks(four: Cluster) -> None:
    four.run(scaled, 4)


# --------------------------------------------------------------------------------------------------- what drifts


def drifting(group: Any) -> None:
    method = thinwire.GradientDropping(density=0.05, dense_below=0, local="partial", sync_every=4)
    training = ShardedTraining(mesh_of(2, 2), method, "adamw")
    for step in range(10):
        training.step(step)
        if step % 4 == 3:
            equal_replicas(training)
    digests = [""] * 2
    dist.all_gather_object(digests, rows_digest(training.net), group=training.mesh.get_group(0))
    assert len(set(digests)) == 2, "replicas go different ways between two averagings"
    own = whole(training.net)
    with training.wire.averaged():
        equal_replicas(training)
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own, group=training.mesh.get_group(0))
        torch.testing.assert_close(whole(training.net), sum(both) / 2)
        assert "averaged()" in sentence_of(ValueError, lambda: training.backward(0))
    assert torch.equal(own, whole(training.net))
    training.optimizer.zero_grad()
    training.wire.switch("dense")
    equal_replicas(training)
    training.train(10, 12)
    equal_replicas(training)
    training.wire.detach()


def test_local_gradients_average_the_replicas_shards(four: Cluster) -> None:
    four.run(drifting, 4)


# ---------------------------------------------------------------------------------------- coming and going


def comes_and_goes(group: Any) -> None:
    plain = ddp_run(group, "heavy", 9)
    training = ShardedTraining(mesh_of(2, 2), EXACT)
    found = training.train(0, 3)
    training.wire.switch(thinwire.GTopK(density=1.0, momentum_correction=True))
    found += training.train(3, 5)
    rest = training.wire.detach()
    names = dict(training.net.named_parameters())
    assert rest.keys() == names.keys()
    for name, tensor in rest.items():
        assert tensor.shape == names[name].shape and not tensor.full_tensor().any()
        buffer = training.optimizer.state[names[name]]["momentum_buffer"]
        assert type(buffer) is type(names[name].data) and buffer.full_tensor().any()
    text = sentence_of(thinwire.DetachedError, lambda: training.net(batch(0, 0)[0]))
    assert "thinwire.attach again" in text
    with torch.no_grad():
        training.net(batch(0, 0)[0])  # evaluating is fine
    training.wire = thinwire.attach(training.net, training.optimizer, EXACT, mesh=training.mesh)
    found += training.train(5, 9)
    torch.testing.assert_close(torch.stack(found), torch.stack(plain), rtol=1e-5, atol=3e-6)
    training.wire.detach()


def test_switching_and_detaching_hand_momentum_over(four: Cluster) -> None:
    four.run(comes_and_goes, 4)


def two_optimizers(group: Any) -> list[str]:
    """One for the first layer, one for the rest; and the method that attach chooses itself."""
    runs = []
    for several in (False, True):
        net = sharded(mesh_of(2, 2)[NAMES[1]])
        first, rest = list(net[0].parameters()), [*net[2].parameters(), *net[4].parameters()]
        shares = [first, rest] if several else [first + rest]
        optimizers = [torch.optim.SGD(share, lr=0.1, momentum=0.9) for share in shares]
        wire = thinwire.attach(net, optimizers if several else optimizers[0], SPARSE, mesh=mesh_of(2, 2))
        for step in range(5):
            net.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert wire.stats.steps == 5
        runs.append(whole(net))
        wire.detach()
    assert torch.equal(*runs)
    net = sharded(mesh_of(2, 2)[NAMES[1]])
    wire = thinwire.attach(net, torch.optim.AdamW(net.parameters()), mesh=mesh_of(2, 2))
    chosen = str(wire.method)
    wire.detach()
    return [chosen]


def test_several_optimizers_and_no_method_are_as_with_ddp(four: Cluster) -> None:
    assert four.run(two_optimizers, 4) == [["dense"]] * 4


# --------------------------------------------------------------------------------------------------- mistakes


def mistakes(group: Any) -> None:
    mesh = mesh_of(2, 2)
    shard = mesh[NAMES[1]]

    def refused(words: list[str], model: Any, method: Any = EXACT, optimizer: Any = None, **more: Any) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = [len(model._forward_pre_hooks), len(optimizer._optimizer_step_pre_hooks)]
        text = sentence_of(ValueError, lambda: thinwire.attach(model, optimizer, method, **more))
        assert all(word in text for word in words), f"{words} in {text!r}"
        assert before == [len(model._forward_pre_hooks), len(optimizer._optimizer_step_pre_hooks)]

    def fresh(mesh: Any = shard, **options: Any) -> Any:
        return sharded(mesh, **options)

    refused(["thinwire.attach(model, optimizer, method, mesh=mesh)"], fresh())
    two = fresh(mesh)
    refused(['mesh=mesh["piece"]', "attach it with both", "two dimensions"], two, mesh=mesh)
    refused(["two dimensions", "attach it with both"], two)
    refused(["(replicas", "shards", "one of 1 dimensions"][1:], fresh(), mesh=shard)
    refused(["DeviceMesh", "str"], fresh(), mesh="2x2")
    other = mesh_of(4, 1)
    refused(["sharded over the ranks", 'mesh["piece"]'], fresh(), mesh=other)
    refused(["sharded over the ranks"], fresh(mesh_of(1, 4)[NAMES[1]]), mesh=mesh)
    refused(["leave it out", "DistributedDataParallel"], DDP(network(), process_group=group), mesh=mesh)
    refused(["fully_shard(model", 'mesh["piece"]'], network(), mesh=mesh)
    old = FullyShardedDataParallel(network(), process_group=group, device_id=torch.device("cpu"))
    refused(["FullyShardedDataParallel", "fully_shard(module", "mesh=mesh"], old)
    part = network()
    fully_shard(part[0], mesh=shard)
    refused(["parts of this Sequential", "call fully_shard on it as well"], part, mesh=mesh)
    refused(["hierarchy", "DistributedDataParallel"], fresh(), hierarchy=2, mesh=mesh)
    refused(['"auto"', "name a method"], fresh(), "auto", mesh=mesh)
    refused(["clip_norm", "leave it out"], fresh(), "dgc:clip_norm=1", mesh=mesh)
    refused(["densify", 'guard="warn"'], fresh(), mesh=mesh, guard="densify")
    refused(["unknown method"], fresh(), "dcg", mesh=mesh)
    model = network()
    fully_shard(model, mesh=shard, ignored_params={model[0].bias})
    refused(["'0.bias'", "ignored_params"], model, mesh=mesh)
    columns = network()
    fully_shard(columns, mesh=shard, shard_placement_fn=lambda p: Shard(1) if p.shape == (33, 8) else None)
    refused(["'0.weight'", "not cut into rows alone", "Shard(dim=1)"], columns, mesh=mesh)
    whole_ones = replicate(network(), mesh=mesh_of(4, 1)[NAMES[0]])
    refused(["not cut into rows alone", "Replicate()"], whole_ones, mesh=mesh)
    hooked = fresh()
    hooked[0].set_all_reduce_hook(lambda flat: None)
    refused(["all-reduce hook"], hooked, mesh=mesh)
    swapped = fresh()
    refused(["does not own"], swapped, optimizer=torch.optim.SGD(network().parameters(), lr=0.1), mesh=mesh)
    refused(["ranks differ", "method"], fresh(), EXACT if dist.get_rank() != 1 else "dense", mesh=mesh)
    lr = 0.1 if dist.get_rank() != 2 else 0.2
    odd = fresh()
    refused(["ranks differ", "options"], odd, optimizer=torch.optim.SGD(odd.parameters(), lr=lr), mesh=mesh)
    some = fresh()
    optimizer = torch.optim.SGD(some.parameters(), lr=0.1, momentum=0.9)
    one_rank = "dgc:exclude=zz*" if dist.get_rank() == 3 else EXACT
    text = sentence_of(ValueError, lambda: thinwire.attach(some, optimizer, one_rank, mesh=mesh))
    assert "'zz*'" in text, text

    wire = thinwire.attach(some, optimizer, SPARSE, mesh=mesh)  # after all that
    refused(["attached already", "wire.switch"], some, optimizer=optimizer, mesh=mesh)
    text = sentence_of(ValueError, lambda: wire.switch("dgc:clip_norm=1"))
    assert "clip_norm" in text
    text = sentence_of(ValueError, lambda: wire.switch("dense" if dist.get_rank() < 3 else "gtopk"))
    assert "ranks differ" in text
    loss_of(some, dist.get_rank(), 0).backward()
    optimizer.step()
    assert wire.stats.steps == 1
    wire.detach()


def test_mistakes_are_one_sentence_on_all_ranks_and_change_nothing(four: Cluster) -> None:
    four.run(mistakes, 4)


def later_mistakes(group: Any) -> None:
    mesh = mesh_of(2, 2)
    net = network()
    net[2].bias.requires_grad_(False)
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh[NAMES[1]])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wire = thinwire.attach(net, optimizer, SPARSE, mesh=mesh)
    loss_of(net, dist.get_rank(), 0).backward()
    optimizer.step()
    net[2].bias.requires_grad_(True)
    assert "'2.bias'" in sentence_of(ValueError, lambda: net(batch(0, 0)[0]))
    net[2].bias.requires_grad_(False)
    net.double().float()
    assert "other memory" in sentence_of(ValueError, lambda: net(batch(0, 0)[0]))
    wire.abandon()


def test_what_changes_after_attach_is_refused_by_the_next_forward_pass(four: Cluster) -> None:
    four.run(later_mistakes, 4)


def outside(group: Any) -> None:
    mesh = mesh_of(2, 1)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fully_shard(net, mesh=mesh_of(4, 1)[NAMES[1]])
    if dist.get_rank() > 1:
        text = sentence_of(ValueError, lambda: thinwire.attach(net, optimizer, "dense", mesh=mesh))
        assert "not in the mesh" in text


def test_a_rank_outside_of_the_mesh_is_told(four: Cluster) -> None:
    four.run(outside, 4)
