"""An optimizer that changes after attach: loaded states, new groups, parameters that move between groups."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from cluster import Cluster
from rateless import Rateless
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import EXACT, Dot, Run, Training, close, digest, flat, pulls, sentence_of, tensors_of, through_a_file

import thinwire

TAKERS = [EXACT, "dgc", "gtopk", "blocksign:dense_below=1", "signsgd"]


def warmed_up(group: dist.ProcessGroup, optimizer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer of a plain training, as a checkpoint has them."""
    training = Training(group, Run(None, optimizer, task="net"))
    for step in range(5):
        training.step(step)
    state = {"model": training.module.state_dict(), "optimizer": training.optimizer.state_dict()}
    saved = through_a_file(state)
    return saved["model"], saved["optimizer"]


def resumed(group: dist.ProcessGroup, method: Any, optimizer: str, late: bool, into: str) -> torch.Tensor:
    """Go on from a plain checkpoint with an optimizer that was made otherwise; loaded before or after attach."""
    model, state = warmed_up(group, optimizer)
    training = Training(group, Run(None, into, task="net"))
    training.module.load_state_dict(model)
    if not late:
        training.optimizer.load_state_dict(state)
    if method is not None:
        training.happen("attach", method)
    if late:
        training.optimizer.load_state_dict(state)
    for step in range(5, 10):
        training.step(step)
    if training.wire is not None:
        training.wire.detach()
    return flat(training.module)


def loads_after_attach(group: dist.ProcessGroup) -> None:
    for optimizer, into in (("decay", "decay"), ("nesterov-decay", "heavy"), ("maximize", "plain")):
        plain = resumed(group, None, optimizer, False, into)
        close(resumed(group, EXACT, optimizer, True, into), plain, f"{optimizer} into {into}")
        for method in TAKERS:
            early, late = (resumed(group, method, optimizer, late, into) for late in (False, True))
            assert torch.equal(early, late), f"{method}: {optimizer} into {into}"


def test_a_plain_checkpoint_loaded_after_attach_is_one_loaded_before(cluster: Cluster) -> None:
    cluster.run(loads_after_attach, 2)


def loads_its_own(group: dist.ProcessGroup) -> None:
    """What an attached optimizer saved says nothing of momentum, which the wire's state has: it stays as it is."""
    for method in TAKERS:
        training = Training(group, Run(method, "nesterov-decay", task="net"))
        for step in range(3):
            training.step(step)
        before = digest(*tensors_of(training.wire.state_dict()))
        saved = through_a_file(training.optimizer.state_dict())
        assert (saved["param_groups"][0]["momentum"], saved["param_groups"][0]["weight_decay"]) == (0.9, 0.02)
        training.optimizer.load_state_dict(saved)
        assert digest(*tensors_of(training.wire.state_dict())) == before, method
        other = Training(group, Run(method, "nesterov-decay", task="net"))
        for step in range(3):
            other.step(step)
        for one in (training, other):
            one.step(3)
            one.wire.detach()
        assert torch.equal(flat(training.module), flat(other.module)), method


def test_what_an_attached_optimizer_saved_changes_nothing_when_it_is_loaded_again(cluster: Cluster) -> None:
    cluster.run(loads_its_own, 2)


def loads_between_two_passes(group: dist.ProcessGroup) -> None:
    """The pass before the load is not taken back: what it kept of the velocity is older than the state."""
    finals = []
    for method in (None, EXACT):
        _, state = warmed_up(group, "heavy")
        training = Training(group, Run(method, "heavy", task="net"))
        training.step(0)
        training.loss(1).backward()
        training.optimizer.load_state_dict(state)
        for step in (2, 3):
            training.step(step)
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    close(finals[1], finals[0])


def test_a_state_loaded_between_backward_and_step_is_the_one_that_counts(cluster: Cluster) -> None:
    cluster.run(loads_between_two_passes, 2)


def refuses_dampening(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(EXACT, "heavy"))
    training.step(0)
    optimizer, before = training.optimizer, digest(*tensors_of(training.wire.state_dict()))
    bad = copy.deepcopy(optimizer.state_dict())
    bad["param_groups"][0].update(dampening=0.5, momentum=0.3)
    assert "dampening=0" in sentence_of(ValueError, lambda: optimizer.load_state_dict(bad))
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["dampening"]) == (0.9, 0)
    optimizer.param_groups[0]["dampening"] = 0.5
    weights = flat(training.module)
    assert "dampening=0" in sentence_of(ValueError, optimizer.step)
    assert torch.equal(flat(training.module), weights) and optimizer.param_groups[0]["momentum"] == 0.9
    assert digest(*tensors_of(training.wire.state_dict())) == before
    optimizer.param_groups[0]["dampening"] = 0
    training.step(1)
    training.wire.detach()


def test_dampening_that_comes_after_attach_is_refused_and_nothing_changes(cluster: Cluster) -> None:
    cluster.run(refuses_dampening, 2)


class Beside:
    """A training whose optimizer also has parameters that are not in the model, which learn on every rank alike."""

    def __init__(self, group: dist.ProcessGroup, method: Any, mixed: bool) -> None:
        self.training = Training(group, Run(method, "nesterov-decay", task="net"))
        self.own = torch.nn.Parameter(torch.ones(4))
        self.late = torch.nn.Parameter(torch.ones(3))
        optimizer = self.training.optimizer
        if mixed:
            optimizer.param_groups[0]["params"].append(self.own)
        else:
            optimizer.add_param_group({"params": [self.own]})
        optimizer.add_param_group({"params": [self.late], "lr": 0.3, "momentum": 0.5, "weight_decay": 0.1})

    def train(self) -> torch.Tensor:
        for step in range(4):
            self.training.optimizer.zero_grad()
            loss = self.training.loss(step) + (self.own * step).sum() + (self.late * step).square().sum()
            loss.backward()
            self.training.optimizer.step()
        if self.training.wire is not None:
            self.training.wire.detach()
        groups = self.training.optimizer.param_groups
        assert [len(group["params"]) for group in groups] in ([5, 1], [4, 1, 1]) and groups[-1]["momentum"] == 0.5
        return torch.cat([flat(self.training.module), self.own.detach(), self.late.detach()])


def leaves_others_alone(group: dist.ProcessGroup) -> None:
    for mixed in (False, True):
        plain = Beside(group, None, mixed).train()
        close(Beside(group, EXACT, mixed).train(), plain, f"{mixed=}")
        for method in TAKERS:
            found = Beside(group, method, mixed).train()
            assert torch.equal(found[-7:], plain[-7:]), f"{method} {mixed=}"


def test_parameters_of_others_in_the_optimizer_keep_their_momentum_and_decay(cluster: Cluster) -> None:
    """In a group of their own, or beside the model's, added before attach or after it."""
    cluster.run(leaves_others_alone, 2)


def frozen_at_first(group: dist.ProcessGroup) -> None:
    """Layers that DDP did not train, given to the optimizer later: as long as they are frozen nothing happens."""
    module = Dot()
    module.b.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    model = DDP(module, process_group=group)
    wire = thinwire.attach(model, optimizer, EXACT)
    optimizer.add_param_group({"params": [module.b], "momentum": 0.5, "weight_decay": 0.3})
    before = module.b.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        model(pulls(dist.get_rank(group), step)).backward()
        optimizer.step()
    assert torch.equal(module.b, before) and optimizer.param_groups[1]["momentum"] == 0.5
    module.b.requires_grad_(True)
    assert "'b'" in sentence_of(ValueError, lambda: model(pulls(dist.get_rank(group), 4)))
    wire.detach()


def test_a_frozen_layer_given_to_the_optimizer_stays_and_is_refused_when_it_thaws(cluster: Cluster) -> None:
    cluster.run(frozen_at_first, 2)


def moves(training: Training, step: int) -> None:
    """What a loop does to the groups before these steps."""
    groups = training.optimizer.param_groups
    if step == 2:  # the last parameter gets values of its own
        training.optimizer.add_param_group(
            {"params": [groups[0]["params"].pop()], "lr": 0.01, "momentum": 0.5, "weight_decay": 0.2}
        )
    elif step == 4:  # two change places: as many in each group as before
        first, second = groups[0]["params"], groups[1]["params"]
        first[0], second[0] = second[0], first[0]
    elif step == 6:  # rebuilt from scratch, in another order
        everything = [p for group in groups for p in group["params"]]
        groups.clear()
        for place, parameter in enumerate(reversed(everything)):
            values = {"lr": 0.02 * (place + 1), "momentum": 0.2 * place, "weight_decay": 0.01 * place}
            training.optimizer.add_param_group({"params": [parameter], **values, "nesterov": place > 1})
    elif step == 8:  # one is not trained any more
        del groups[0]


def moved(group: dist.ProcessGroup) -> None:
    finals = []
    for method in (None, EXACT):
        training = Training(group, Run(method, "decay", task="net", ddp={"bucket_cap_mb": 1e-5}))
        for step in range(11):
            moves(training, step)
            training.step(step)
        finals.append(flat(training.module))
        if training.wire is not None:
            training.wire.detach()
    close(finals[1], finals[0])


def test_the_groups_of_the_moment_say_what_a_parameters_values_are(cluster: Cluster) -> None:
    cluster.run(moved, 2)


def test_a_group_without_learning_rate_has_one(cluster: Cluster) -> None:
    """An optimizer of one's own: errors are in units of 1, and not of 0, where nothing would be sent."""
    cluster.run(without_rate, 2)


def without_rate(group: dist.ProcessGroup) -> None:
    module = Dot()
    model, before = DDP(module, process_group=group), flat(module)
    optimizer = Rateless(module.parameters(), 0.5)
    wire = thinwire.attach(model, optimizer, "blocksign:dense_below=1")
    for step in range(2):
        optimizer.zero_grad()
        model(pulls(dist.get_rank(group), step)).backward()
        optimizer.step()
    rest = torch.cat([t.reshape(-1) for t in wire.detach().values()])
    given = [torch.cat([p.reshape(-1) for p in pulls(rank, step).values()]) for rank in range(2) for step in range(2)]
    close(flat(module) - 0.5 * rest, before - 0.5 * sum(given) / 2, atol=1e-5)
