"""A wire's state as a checkpoint sees it: saved whole, loaded whole or not at all, for a group of any size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from thinwire.checkpoint.dcp import read_states
from thinwire.checkpoint.format import STATE_FORMAT, Shape, check_fits, check_run, pack, unpack, without_zeros
from thinwire.checkpoint.reshard import check_complete, reshard, served_by, without_servers
from thinwire.edges.watching import Watcher


class Saver(Watcher):
    """The part of a wire that saves and loads."""

    def _wait(self) -> None:
        raise AssertionError("the wire says how it waits for its exchanges")

    def state_dict(self) -> dict[str, Any]:
        """Return everything of this rank that a later run needs: residuals, velocities, errors, counters, method.

        The state of a moment has the same keys and shapes as that of any other, and what belongs to a rank lies under
        the rank's own key: torch.distributed.checkpoint takes a wire as it is, ``dcp.save({"wire": wire}, ...)``.
        """
        self._wait()
        return pack(self._plain_state(), self._shape())

    def _plain_state(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "method": self.method.in_full,
            "parameters": tuple((name, p.numel()) for name, p in self._parameters.items()),
            **self._place,
            "step": self._step,
            "optimizer_steps": self._optimizer_steps,
            "density_factor": getattr(self._compressor, "factor", 1.0),
            "pending": {name: tensor.clone() for name, tensor in self._pending.items()},
            "aggregator": self._aggregator.state_dict(),
        }

    def _shape(self) -> Shape:
        """The vectors that this rank's state has at any moment: none on a rank that stands behind its machine's."""
        numels = {name: p.numel() for name, p in self._parameters.items()}
        follows = self._follows
        serves = not follows and getattr(self.method, "two_way", False)
        topology, net = getattr(self.method, "topology", "sharded"), self._wire_net
        served = served_by(numels, net.rank, net.size, topology) if serves else {}
        coded = {name for name, p in self._parameters.items() if self.method.is_coded(name, p.shape)}
        return Shape(
            {} if follows else numels,
            {name: stop - start for name, (start, stop) in served.items() if name in coded},
            self.method.state_dtype,
            self._net.compute_device,
        )

    @property
    def _place(self) -> dict[str, Any]:
        """Where this rank stands in its group, as a state says it."""
        return {"world_size": self._net.size, "rank": self._net.rank, "hierarchy": self._groups}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take up where ``state_dict`` left off; a state that does not fit raises and changes nothing.

        ``state`` is what this rank saved, or the list of all ranks' states. With the list the group may have another
        size or hierarchy than the one that saved it: what was not sent is then redistributed, and none of it is lost.
        """
        self._wait()
        numels, own, given = {name: p.numel() for name, p in self._parameters.items()}, self.state_dict(), unpack(state)
        plain = unpack(own)[0]
        for one in given:
            check_run({**one, "method": self.method.in_full_now(one["method"])}, plain)
        if isinstance(state, (list, tuple)) or len(given) != 1:
            check_complete(given)
            if all(given[0][key] == plain[key] for key in ("world_size", "hierarchy")):
                given = [one for one in given if one["rank"] == self._net.rank]
            else:
                net, topology = self._wire_net, getattr(self.method, "topology", None)
                given = [{**reshard(given, numels, topology, net.rank, net.size), **self._place}]
        (one,) = given
        check_fits(one, plain, numels)
        self._steps_before = one["step"] - (self._step - self._steps_before)
        self._step = one["step"]
        self._optimizer_steps = one["optimizer_steps"]
        self._pending = {name: t.to(self._net.compute_device).clone() for name, t in one["pending"].items()}
        kept = without_zeros(one["aggregator"])
        if self._follows:  # a checkpoint of another group has a share for every rank; here the machine's first has it
            kept = {
                **kept,
                **{room: {kind: {} for kind in kept[room]} for room in ("memory", "collective") if room in kept},
            }
        elif not self._compresses:
            kept = without_servers(kept)
        self._aggregator.load_state_dict(kept)
        if self._guard is not None:
            self._guard.restart()
            self._guard.density_factor = one["density_factor"]
        self._set_density_factor(one["density_factor"])

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "wire") -> None:
        """Load what ``dcp.save({key: wire, ...}, checkpoint_id=...)`` wrote, also with another number of ranks.

        ``dcp.load`` itself is enough where the group is the one that saved. Nothing is communicated here: every rank
        reads its own part, or all parts where the group is another one.
        """
        place = self._place
        group = {name: place[name] for name in ("world_size", "hierarchy")}
        self.load_state_dict(read_states(checkpoint_id, key, self._net.rank, group))
