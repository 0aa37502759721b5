"""attach: what cannot work is refused on all ranks with one sentence, and nothing is changed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from cluster import Cluster
from heard import heard
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import DGC, LR, OPTIMIZERS, Dot, Run, Training, pulls, sentence_of

import thinwire


def _footprint(model: Any, optimizer: Any) -> tuple[Any, ...]:
    """Everything that attach may change, as far as it can be counted."""
    inner = getattr(model, "module", model)
    return (
        len(getattr(model, "_comm_hooks", [])),
        len(model._forward_pre_hooks),
        sum(len(p._post_accumulate_grad_hooks or ()) for p in inner.parameters()),
        *(
            len(getattr(optimizer, f"_optimizer_{name}_hooks", ()))
            for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre")
        ),
        len(dist.distributed_c10d._world.pg_names),
        str(getattr(optimizer, "state_dict", dict)()),
    )


def refused_attaches(group: dist.ProcessGroup) -> None:
    def fresh(kind: str = "heavy", module: torch.nn.Module | None = None) -> tuple[DDP, torch.optim.Optimizer]:
        module = module if module is not None else Dot()
        return DDP(module, process_group=group), OPTIMIZERS[kind](module)

    def check(words: list[str], model: Any, optimizer: Any, method: Any, kind: type = ValueError, **more: Any) -> None:
        before = _footprint(model, optimizer)
        text = sentence_of(kind, lambda: thinwire.attach(model, optimizer, method, **more))
        assert all(word in text for word in words), f"{words} in {text!r}"
        assert _footprint(model, optimizer) == before, f"{words}: something was changed"

    model, optimizer = fresh()
    adam = torch.optim.Adam(model.parameters())
    damped = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, dampening=0.1)
    check(["DistributedDataParallel", "Dot", "DDP("], model.module, optimizer, DGC)
    check(["exclude", "'zz*'", "matches no parameter"], model, optimizer, thinwire.DGC(exclude=("a", "zz*")))
    check(["exclude"], model, optimizer, thinwire.TernGrad(exclude="nothing"))
    check(["unknown method", "did you mean"], model, optimizer, "dcg")
    check(["the class DGC", "thinwire.DGC()"], model, optimizer, thinwire.DGC)
    swapped = sentence_of(ValueError, lambda: thinwire.attach(optimizer, model, DGC))  # type: ignore[arg-type]
    assert "the model first" in swapped and "SGD came first" in swapped
    check(["method must be a thinwire method"], model, optimizer, 3)
    check(["torch optimizer", "dict"], model, {}, DGC)
    for method in (thinwire.DGC(), thinwire.GTopK(momentum_correction=True), "dropping:momentum_correction=true"):
        check(["Adam", "SGD", "momentum_correction=False"], model, adam, method)
    for method in (thinwire.DGC(), thinwire.BlockSign()):
        check(["dampening"], model, damped, method)
    for hierarchy in ("far", 3, [[0]], [[0], [1, 1]], [0, 1], True):
        check(["hierarchy"], model, optimizer, DGC, hierarchy=hierarchy)

    other = torch.optim.SGD(Dot().parameters(), lr=LR)
    check(["does not own", "5 of", "'a'", "model.parameters()"], model, other, DGC)
    some = torch.optim.SGD([model.module.a, model.module.c], lr=LR)
    check(["does not own", "3 of", "'b'"], model, some, DGC)
    foreign = torch.nn.Parameter(torch.zeros(3))
    more = torch.optim.SGD([*model.parameters(), foreign], lr=LR, momentum=0.9)

    hooked, its = fresh()
    hooked.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    check(["hook", "new"], hooked, its, DGC)

    sparse = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    check(["sparse", "'0'", "sparse=False"], *fresh(module=sparse), DGC)
    bag = torch.nn.ModuleDict({"words": torch.nn.EmbeddingBag(9, 4, sparse=True), "out": torch.nn.Linear(4, 2)})
    check(["sparse", "'words'"], *fresh(module=bag), DGC)

    wire = thinwire.attach(model, optimizer, DGC)  # after all that, the first model is as good as new
    check(["attached already", "switch", "detach"], model, optimizer, DGC)
    check(["attached already"], model, adam, thinwire.Dense())
    optimizer.zero_grad()
    model(pulls(dist.get_rank(group), 0)).backward()
    optimizer.step()
    assert wire.stats.steps == 1 and wire.stats.frame_bytes > 0
    wire.detach()
    thinwire.attach(model, more, DGC).detach()  # extra parameters are fine


def test_attach_refuses_what_cannot_work_and_changes_nothing(cluster: Cluster) -> None:
    """Each case is followed by a look at hooks and groups, and in the end by an attach that works."""
    cluster.run(refused_attaches, 2)


def differing_ranks(group: dist.ProcessGroup) -> dict[str, str]:
    """The sentence of each case, which all ranks must raise; the model works afterwards."""
    rank = dist.get_rank(group)
    texts = {}

    def note(case: str, words: list[str], model: DDP, optimizer: Any, method: Any, **more: Any) -> None:
        before = _footprint(model, optimizer)
        texts[case] = sentence_of(ValueError, lambda: thinwire.attach(model, optimizer, method, **more))
        assert all(word in texts[case] for word in words), f"{case}: {texts[case]}"
        assert _footprint(model, optimizer) == before

    module = Dot()
    model, optimizer = DDP(module, process_group=group), OPTIMIZERS["heavy"](module)
    odd = rank == 1
    other = thinwire.GTopK() if odd else DGC
    note("method", ["ranks differ", "method", "rank 1", "GTopK", "DGC"], model, optimizer, other)
    note("option", ["ranks differ", "0.05", "0.06"], model, optimizer, thinwire.DGC(density=0.06 if odd else 0.05))
    note("seed", ["seed=1"], model, optimizer, thinwire.TernGrad(seed=int(odd)))
    note("hierarchy", ["hierarchy"], model, optimizer, DGC, hierarchy=[[0], [1, 2]] if odd else [[0, 1], [2]])
    note("no hierarchy", ["hierarchy"], model, optimizer, DGC, hierarchy=3 if odd else None)
    note("one rank, bad option", ["density"] if odd else ["rank 1", "density"], model, optimizer,
         "dgc:density=7" if odd else "dgc")  # fmt: skip
    note("one rank, bad hierarchy", ["hierarchy"], model, optimizer, DGC, hierarchy="x" if odd else None)
    adam = torch.optim.Adam(module.parameters())
    note("one rank, adam", ["Adam"], model, adam if odd else optimizer, DGC)
    stranger = torch.optim.SGD(Dot().parameters(), lr=LR)
    note("one rank, other optimizer", ["does not own"], model, stranger if odd else optimizer, DGC)

    renamed = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=True))
    if odd:  # the same sizes for DDP's own check, another name for ours
        renamed = torch.nn.ModuleDict({"0": renamed[0], "last": renamed[1]})
    note("model", ["ranks differ", "parameters", "1.weight", "missing", "rank 1"],
         DDP(renamed, process_group=group), OPTIMIZERS["heavy"](renamed), DGC)  # fmt: skip
    wire = thinwire.attach(model, optimizer, DGC)
    optimizer.zero_grad()
    model(pulls(rank, 0)).backward()
    optimizer.step()
    wire.detach()
    return texts


def test_attach_on_ranks_that_differ_raises_on_all_and_names_the_difference(cluster: Cluster) -> None:
    texts = cluster.run(differing_ranks, 3)
    for case in texts[0]:
        assert len({rank[case] for rank in texts}) == 1 or case.startswith("one rank"), f"{case}: {texts}"


def refused(group: dist.ProcessGroup, dtype: torch.dtype) -> str:
    module = torch.nn.Linear(2, 2)
    module.phase = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    model = DDP(module, process_group=group, find_unused_parameters=dist.get_rank(group) == 1)
    with pytest.raises(ValueError) as caught:
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "dgc")
    return str(caught.value)


def test_attach_refuses_complex_parameters_and_ranks_that_differ_in_unused_ones(cluster: Cluster) -> None:
    assert "'phase' is complex64" in cluster.run(refused, 1, torch.complex64)[0]
    for sentence in cluster.run(refused, 2, torch.float32):
        assert "ranks differ in find_unused_parameters" in sentence


def adamw(group: dist.ProcessGroup) -> None:
    training = Training(group, Run(None, "adamw"))
    text = workers.sentence_of(ValueError, lambda: training.happen("attach", "dgc"))
    works = ("terngrad", "blocksign", "gtopk", "dropping", "dgc:momentum_correction=false")
    assert all(method in text for method in works), text
    for method in works:
        training = Training(group, Run(method, "adamw"))
        training.step(0)
        training.happen("detach")


def test_attach_with_adamw_names_the_methods_that_work(cluster: Cluster) -> None:
    cluster.run(adamw, 2)


def alone(group: dist.ProcessGroup) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("thinwire").addHandler(handler)
    try:
        for method in (
            "dgc:density=0.1",
            "gtopk",
            "terngrad:dense_below=0",
            "blocksign:dense_below=1",
            "dropping:local=sum",
            "signsgd",
            "dense",
        ):
            records.clear()
            training = Training(group, Run(method, "tiny"))
            assert [r.levelname for r in records] == ["WARNING"] and "nothing is sent" in records[0].getMessage()
            for step in range(3):
                training.step(step)
            assert training.wire.stats.bytes_sent == 0 and training.wire.stats.ratio is None
            training.wire.detach()
    finally:
        logging.getLogger("thinwire").removeHandler(handler)


def test_attach_on_one_rank_works_and_says_that_nothing_is_sent(cluster: Cluster) -> None:
    cluster.run(alone, 1)


def test_attach_on_one_machine_says_so_once(cluster: Cluster) -> None:
    first, *others = cluster.run(heard, 3, Run("dgc", "heavy", hierarchy=3))
    assert len(first) == 1 and "mean is exact and nothing is compressed or kept back" in first[0], first
    assert others == [[], []]
    first, *_ = cluster.run(heard, 2, Run("signsgd", "heavy", hierarchy=2))
    assert "the update is signsgd's of it" in first[0] and "nothing is compressed" not in first[0]


def test_attach_with_a_warm_up_of_a_few_steps_says_what_it_counts(cluster: Cluster) -> None:
    (told,), other = cluster.run(heard, 2, Run("dgc:warmup=4", "heavy"))
    assert "counts optimizer steps" in told and "after 4 steps" in told and not other
    assert 'give warmup="4 epochs" to the method and steps_per_epoch=len(loader) to attach' in told
    for spec in ("dgc:warmup=40", "dgc"):
        assert cluster.run(heard, 2, Run(spec, "heavy")) == [[], []]
