"""Waiting for all ranks to come to attach, outside of any collective: who does not come can then be named."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from thinwire.errors import ExchangeError
from thinwire.torch_private import store_of, timeout_of
from thinwire.transport.failures import DEFAULT_TIMEOUT_S, named
from thinwire.transport.groups import check_agreement
from thinwire.transport.processes import TorchNet

log = logging.getLogger("thinwire")

PATIENCE_S = 10.0  # ranks come to attach from DDP's constructor, which has made them wait for each other
LONGEST_PAUSE_S = 0.2
WAITS = (
    "thinwire: rank {} waits for {} to call thinwire.attach (or to make a Reducer), as every rank of the process group "
    "must"
)
MISSING = (
    "not every rank called thinwire.attach (or made a Reducer): {} did not within {:.3g} s; do so on every rank of the "
    "process group, not on some"
)
GONE = "the process group's store went away while this rank waited in thinwire.attach: the rank that hosts it has ended"

_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # that all ranks made


def agree_to_attach(net: TorchNet, mine: dict[str, object], error: str | None) -> None:
    """``check_agreement``, once all ranks are there."""
    store = store_of(net.group)
    if net.size > 1 and store is not None:
        timeout = timeout_of(net.group, net.device)
        ranks, call = dist.get_process_group_ranks(net.group), _calls.get(net.group, 0)
        wait_for_all(
            store, call, dist.get_rank(), ranks, DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
        )
        _calls[net.group] = call + 1
    check_agreement(net, mine, error)


def wait_for_all(store: Any, call: int, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
    """Return when all ranks have come here for this ``call``; an ExchangeError names those who do not in time."""
    keys = {other: f"thinwire/attach/{call}/{other}" for other in ranks}
    start, pause, told = time.monotonic(), 0.001, False
    try:
        store.set(keys[rank], "here")
        while not store.check(list(keys.values())):
            waited = time.monotonic() - start
            if waited > timeout_s:
                missing = _missing(store, keys)
                store.delete_key(keys[rank])  # who comes later must not find this rank here
                raise ExchangeError(MISSING.format(named(missing), waited), stage="attach", peers=missing)
            if waited > PATIENCE_S and not told:
                log.warning(WAITS.format(rank, named(_missing(store, keys))))
                told = True
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
    except ExchangeError:
        raise
    except RuntimeError:
        raise ExchangeError(GONE, stage="attach", peers=tuple(other for other in ranks if other != rank)) from None


def _missing(store: Any, keys: Mapping[int, str]) -> tuple[int, ...]:
    return tuple(rank for rank, key in keys.items() if not store.check([key]))
