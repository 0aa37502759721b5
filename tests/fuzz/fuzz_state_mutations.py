"""How good states become bad ones; see fuzz_states.py."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = Any
WRONG = (None, 7, -1, 1.5, True, "text", b"bytes", [], [1], (), ("a",), {}, {"a": 1}, {1: 2}, {3, 4}, torch.zeros(3))


class StateMutator:
    """Makes of the whole states of all ranks what every rank is given to load; ``name`` says what was done."""

    def __init__(self, seed: int | str) -> None:
        self.random, self.name = random.Random(seed), ""
        self.changes: dict[str, Callable[[list[State], list[State]], list[State]]] = {
            "key missing": self._one(self._drop),
            "key added": self._one(self._add),
            "wrong type": self._one(self._wrong_type),
            "value": self._one(self._value),
            "bits": self._one(self._bits),
            "shape": self._one(self._shape),
            "type": self._one(self._type),
            "counter": self._one(self._counter),
            "exchanged vectors": self._one(self._exchange),
            "kept twice": self._one(self._pairs),
            "file": self._file,
            "ranks": self._ranks,
            "moments": self._moments,
            "lists": self._lists,
        }
        self.names = list(self.changes)

    def __call__(self, states: list[State], earlier: list[State]) -> list[State]:
        """``states`` of one moment and of an ``earlier`` one, by rank -> what the ranks load."""
        self.name = self.random.choice(self.names)
        return self.changes[self.name](copy.deepcopy(states), copy.deepcopy(earlier))

    # ------------------------------------------------------------------------------------------ inside one state

    def _one(self, change: Callable[[State], State | None]) -> Callable[[list[State], list[State]], list[State]]:
        """Change one rank's state, or the same in all of them."""

        def changed(states: list[State], earlier: list[State]) -> list[State]:
            rank = self.random.randrange(len(states))
            found = change(states[rank])
            states[rank] = states[rank] if found is None else found
            if self.random.random() < 0.3:  # the parts of all ranks in one state, one of them bad
                return [_together(states)] * len(states)
            return [list(states)] * len(states) if self.random.random() < 0.3 else states

        return changed

    def _dictionaries(self, state: State) -> list[dict[Any, Any]]:
        inner = [one for value in state.values() if isinstance(value, dict) for one in self._dictionaries(value)]
        return [state, *inner]

    def _vectors(self, state: State) -> list[tuple[dict[Any, Any], Any]]:
        rooms = self._dictionaries(state)
        return [(room, key) for room in rooms for key, value in room.items() if isinstance(value, Tensor)]

    def _place(self, state: State) -> tuple[dict[Any, Any], Any]:
        room = self.random.choice([one for one in self._dictionaries(state) if one])
        return room, self.random.choice(list(room))

    def _drop(self, state: State) -> None:
        room, key = self._place(state)
        del room[key]

    def _add(self, state: State) -> None:
        room = self.random.choice(self._dictionaries(state))
        key = self.random.choice(("nowhere", "rank 7", "rank x", 3, None, "residual", "pending", "0"))
        room.setdefault(key, self.random.choice((*WRONG, torch.ones(5))))

    def _wrong_type(self, state: State) -> State:
        if self.random.random() < 0.05:
            return self.random.choice(WRONG)
        room, key = self._place(state)
        room[key] = copy.deepcopy(self.random.choice(WRONG))
        return state

    def _some_vector(self, state: State) -> tuple[dict[Any, Any], Any, Tensor] | None:
        places = self._vectors(state)
        if not places:
            return None
        room, key = self.random.choice(places)
        return room, key, room[key]

    def _value(self, state: State) -> None:
        if (found := self._some_vector(state)) and found[2].numel():
            place = self.random.randrange(found[2].numel())
            found[2][place] = self.random.choice((float("nan"), float("inf"), -float("inf"), 1e30, 0.0, 1.0))

    def _bits(self, state: State) -> None:
        if (found := self._some_vector(state)) and found[2].numel():
            data = found[2].view(torch.uint8)
            data[self.random.randrange(data.numel())] ^= 1 << self.random.randrange(8)

    def _shape(self, state: State) -> None:
        if found := self._some_vector(state):
            room, key, tensor = found
            n = tensor.numel()
            ways = (
                tensor[None], tensor[:, None], tensor[: n // 2], torch.cat([tensor, tensor]), tensor[:0],
                tensor.view(-1, 2) if n % 2 == 0 else tensor[None, None], tensor.sum(),
            )  # fmt: skip
            room[key] = self.random.choice(ways)

    def _type(self, state: State) -> None:
        if found := self._some_vector(state):
            room, key, tensor = found
            kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool, torch.complex64)
            others = (tensor.to("meta"), tensor.to_sparse(), tensor.tolist(), tensor.to(torch.float32).numpy())
            room[key] = self.random.choice((*(tensor.to(kind) for kind in kinds), *others))

    def _counter(self, state: State) -> None:
        key = self.random.choice([key for key in state if not str(key).startswith("rank ")])
        value = state[key]
        if isinstance(value, str):
            state[key] = self.random.choice((value + " ", value[:-1], value.replace("0", "1"), "dense", ""))
        elif isinstance(value, (int, float)):
            numbers = (value + 1, value - 1, -value, float(value), value * 2, 10**30, float("nan"), value + 0.5)
            state[key] = self.random.choice(numbers)
        elif isinstance(value, tuple):
            state[key] = self.random.choice((value[::-1], value[:-1], (*value, *value[:1]), list(value)))
        else:
            state[key] = ((0,), (1,))

    def _exchange(self, state: State) -> None:
        places = self._vectors(state)
        if len(places) > 1:
            (one, a), (other, b) = self.random.sample(places, 2)
            one[a], other[b] = other[b], one[a]

    def _pairs(self, state: State) -> None:
        """Numbers by parameter lie in tuples of pairs."""
        rooms = [
            (room, key) for room in self._dictionaries(state) for key, v in room.items() if isinstance(v, tuple) and v
        ]
        room, key = self.random.choice(rooms)
        value = room[key]
        entry = value[0]
        changed = (entry[0], self.random.choice((0.5, -1, "x", None))) if isinstance(entry, tuple) and entry else 7
        room[key] = self.random.choice(((*value, entry), (changed, *value[1:]), value[1:], value[::-1]))

    # -------------------------------------------------------------------------------------- of all ranks together

    def _file(self, states: list[State], earlier: list[State]) -> list[State]:
        rank = self.random.randrange(len(states))
        file = io.BytesIO()
        torch.save(states[rank], file)
        data = bytearray(file.getvalue())
        place, length = self.random.randrange(len(data)), self.random.choice((1, 8, 64, 1024))
        kind = self.random.choice(("bit", "bit", "bit", "zeros", "cut", "noise", "splice"))
        if kind == "bit":
            data[place] ^= 1 << self.random.randrange(8)
        elif kind == "cut":
            del data[place:]
        elif kind == "splice":
            torch.save(earlier[rank], file := io.BytesIO())
            data[place : place + length] = file.getvalue()[place : place + length]
        else:
            length = min(length, len(data) - place)
            data[place : place + length] = bytes(length) if kind == "zeros" else self.random.randbytes(length)
        try:
            states[rank] = torch.load(io.BytesIO(data), weights_only=True)
        except Exception:  # torch's own refusal, before anything is asked of a wire
            return []
        return states

    def _ranks(self, states: list[State], earlier: list[State]) -> list[State]:
        kind = self.random.choice(("rotated", "first", "part keys", "renamed"))
        if kind == "rotated":
            return states[1:] + states[:1]
        if kind == "first":
            return [states[0]] * len(states)
        whole = _together(states)
        parts = [key for key in whole if str(key).startswith("rank ")]
        if kind == "part keys":
            whole[parts[0]], whole[parts[-1]] = whole[parts[-1]], whole[parts[0]]
        else:
            whole[self.random.choice(("rank 00", "rank 9", "rank -1", "rank ²"))] = whole.pop(parts[0])
        return [whole] * len(states)

    def _moments(self, states: list[State], earlier: list[State]) -> list[State]:
        rank = self.random.randrange(len(states))
        mixed = [earlier[place] if place == rank else state for place, state in enumerate(states)]
        kind = self.random.choice(("own", "list", "part", "vector"))
        if kind == "own":
            return mixed
        if kind == "list":
            return [list(mixed)] * len(states)
        if kind == "part":
            key = f"rank {rank}"
            states[rank][key] = earlier[rank][key]
            return states
        places, others = self._vectors(states[rank]), self._vectors(earlier[rank])
        if places:
            place = self.random.randrange(len(places))
            places[place][0][places[place][1]] = others[place][0][others[place][1]]
        return states

    def _lists(self, states: list[State], earlier: list[State]) -> list[State]:
        kind = self.random.choice(("short", "twice", "reversed", "inside", "empty", "tuple", "together"))
        given: Any = {
            "short": states[:-1], "twice": [*states, states[0]], "reversed": states[::-1],
            "inside": [list(states)], "empty": self.random.choice(([], {}, [[]], [{}])), "tuple": tuple(states),
            "together": _together(states),
        }[kind]  # fmt: skip
        return [given] * len(states)


def _together(states: list[State]) -> State:
    """The parts of all ranks in one state, as ``state_dict(all_ranks=True)`` gives them."""
    if any(not isinstance(state, dict) for state in states):
        return states
    whole: dict[Any, Any] = dict(states[0])
    for state in states[1:]:
        whole.update({key: value for key, value in state.items() if str(key).startswith("rank ")})
    return whole
