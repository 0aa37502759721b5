"""Wire states out of torch.distributed.checkpoint, for a group of any size.

``dcp.save({"wire": wire}, ...)`` and ``dcp.load`` into an equal group need nothing from here: a wire is a stateful
object to them, and every rank writes and reads its own part. A group of another size has other parts than the ones
that were saved; here each of its ranks reads all of them.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from thinwire.checkpoint.format import COMMON


def read_states(checkpoint_id: str | os.PathLike[str], key: str, own: str, group: dict[str, Any]) -> dict[str, Any]:
    """Return the wire's state as saved under ``key``: the part ``own`` where the ``group`` (its size and the like) is
    the one that saved it, all parts where it is not. Communicates nothing; a ValueError where the checkpoint cannot be
    read."""
    import torch.distributed.checkpoint as dcp  # here: it takes longer to import than all of thinwire

    reader = dcp.FileSystemReader(checkpoint_id)
    try:
        metadata = reader.read_metadata()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"there is no checkpoint in {str(checkpoint_id)!r}; give a folder that torch.distributed.checkpoint wrote"
        ) from error
    except Exception as error:
        raise _unreadable(checkpoint_id, error) from error
    # planner_data maps every stored name to its path: ("wire", "rank 0", "aggregator", "memory", "residual", "fc.bias")
    paths = {name: path for name, path in (metadata.planner_data or {}).items() if path[0] == key and len(path) > 1}
    if not paths:
        known = sorted({path[0] for path in (metadata.planner_data or {}).values()})
        raise ValueError(f"the checkpoint {checkpoint_id} has no {key!r}; it has {', '.join(map(repr, known))}")
    try:
        return _read_parts(reader, metadata, paths, key, own, group)
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        raise _unreadable(checkpoint_id, error) from error


def _unreadable(checkpoint_id: Any, error: BaseException) -> ValueError:
    why = str(error).strip().partition("\n")[0]
    return ValueError(f"the checkpoint {str(checkpoint_id)!r} cannot be read ({why}): it is damaged, load another one")


def _read_parts(
    reader: Any, metadata: Any, paths: dict[str, Any], key: str, own: str, group: dict[str, Any]
) -> dict[str, Any]:
    common = _read(reader, metadata, [path for path in paths.values() if path[1] in COMMON]).get(key, {})
    same = all(common.get(name) == value for name, value in group.items())
    wanted = [path for path in paths.values() if path[1] not in COMMON and (not same or path[1] == own)]
    return {**common, **_read(reader, metadata, wanted).get(key, {})}


def _read(reader: Any, metadata: Any, paths: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Read the named leaves into a nested dictionary, tensors on the host."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    names = {path: name for name, path in metadata.planner_data.items()}
    state: dict[str, Any] = {}
    for path in paths:
        room = state
        for step in path[:-1]:
            room = room.setdefault(step, {})
        entry = metadata.state_dict_metadata[names[path]]
        is_tensor = isinstance(entry, TensorStorageMetadata)
        room[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    if paths:
        with warnings.catch_warnings():  # it says that it reads without the group, which is what is wanted
            warnings.simplefilter("ignore")
            dcp.load(state, storage_reader=reader, no_dist=True)
    return state
