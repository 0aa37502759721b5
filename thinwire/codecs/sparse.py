"""Sparse frames: dense tail, values, indices, inside a byte budget known to every rank."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.frame import (
    Decoded,
    Head,
    Header,
    as_bytes,
    build,
    check_numbers,
    entries_of,
    frame_size,
    is_finished,
    open_frame,
    pack_header,
    read_heads,
)
from thinwire.codecs.indices import (
    INDEX_CODES,
    IndexPlan,
    check_rice,
    decode_indices,
    index_budget,
    rice_best,
    take_rice,
)
from thinwire.codecs.values import VALUE_CODES, decode_values, encode_values, value_sections_nbytes
from thinwire.engine.context import ExchangeContext
from thinwire.engine.nonfinite_alarm import QUIET, Alarm
from thinwire.engine.payloads import Sparse, Spread
from thinwire.engine.workspace import BACK, FRONT, Workspace
from thinwire.errors import FrameError
from thinwire.kernels import RiceStream, encode_rice_frame, keep_largest, on_gpu, rice_indices

_DEVICE_ENTRIES = 1 << 18  # a GPU's programs each add up all blocks before theirs: not for warm-ups of large models
_VALUE_NAMES = {code: name for name, code in VALUE_CODES.items()}
_INDEX_NAMES = {code: name for name, code in INDEX_CODES.items()}

Room = tuple[Tensor, Tensor | None]
"""Memory for the entries of a frame: (capacity,) int32 for indices, (capacity,) float32 for values."""


def _could_be_frame(tensor: Tensor) -> bool:
    return tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.numel() >= 40 and tensor.numel() % 4 == 0


@dataclass(frozen=True)
class SparseCodec:
    """Encodes at most k entries of a vector of n, and t dense elements behind them.

    With ``holds_any`` a frame has room for any k entries, half a bit an entry more with Rice coding: nothing is ever
    left out, so what shares a frame changes nothing.
    """

    values: str = "fp32"
    indices: str = "rice"
    holds_any: bool = False

    def _budget(self, numel: int, k: int, spread: Spread) -> int:
        return index_budget(self.indices, numel, k, self.holds_any, spread)

    def nbytes(self, numel: int, k: int, tail: int, spread: Spread = ()) -> int:
        """Return the length of every frame of such an exchange, full or not."""
        return frame_size(4 * tail, *value_sections_nbytes(self.values, k), self._budget(numel, k, spread))

    def encode(
        self,
        context: ExchangeContext,
        payload: Sparse,
        tail: Tensor,
        within_budget: bool = False,
        workspace: Workspace | None = None,
        alarm: Alarm = QUIET,
    ) -> Tensor:  # -> (nbytes,) uint8
        """Encode; entries that do not fit into the budget are left out, the smallest first.

        The frame lies at the back of the scratch memory, where there is one.

        A GPU writes the frame by itself, and leaves one whose entries do not fit without its first byte: to find out
        which ones to leave out the host would have to wait. Who takes the frame to the wire must look
        (``is_finished``) and then encode once more ``within_budget``.
        """
        indices, values, numel, k = payload.indices, payload.values, payload.numel, payload.capacity
        assert indices.numel() <= k, "a payload of more entries than its capacity"
        budget = self._budget(numel, k, payload.spread)
        on_device = self.indices == "rice" and 0 < indices.numel() <= _DEVICE_ENTRIES and on_gpu(values.device)
        if on_device and not within_budget:
            return self._encode_on_device(context, payload, tail, budget, alarm)
        nbytes, device = self.nbytes(numel, k, tail.numel(), payload.spread), values.device
        workspace = workspace or Workspace()
        frame = workspace.take(nbytes, torch.uint8, device, BACK)
        mark = workspace.mark(BACK)
        plan = IndexPlan(self.indices, indices, numel)
        while excess := plan.excess(budget):
            kept = max(0, indices.numel() - excess)
            room = workspace.entries(kept, numel, device, BACK)
            indices, values = keep_largest(indices, values, kept, room)
            plan = IndexPlan(self.indices, indices, numel)
        header = Header(
            kind="sparse", numel=numel, count=indices.numel(), tail=tail.numel(), layout=context.layout.fingerprint,
            step=context.step, index_code=INDEX_CODES[self.indices], value_code=VALUE_CODES[self.values],
            parameter=plan.parameter, alarm=alarm.rings,
        )  # fmt: skip
        codes = workspace.take(values.numel() if self.values == "int8" else 0, torch.int8, device, BACK)
        sections = [as_bytes(tail), *encode_values(self.values, values, codes), *plan.sections()]
        frame = build(header, sections, nbytes, alarm.flag, frame)
        workspace.release(mark, BACK)
        return frame

    def encode_finished(
        self,
        context: ExchangeContext,
        payload: Sparse,
        tail: Tensor,
        workspace: Workspace | None = None,
        alarm: Alarm = QUIET,
    ) -> Tensor:  # -> (nbytes,) uint8
        """A frame that is complete, at the price of a wait for the device."""
        frame = self.encode(context, payload, tail, workspace=workspace, alarm=alarm)
        return frame if is_finished(frame) else self.encode(context, payload, tail, within_budget=True, alarm=alarm)

    def says_all(self, frame: Tensor, payload: Sparse) -> bool:
        """Whether a finished frame of ours decodes to the payload bit for bit: fp32 values, none of them left out."""
        return self.values == "fp32" and entries_of(frame) == payload.indices.numel()

    def _encode_on_device(
        self, context: ExchangeContext, payload: Sparse, tail: Tensor, budget: int, alarm: Alarm
    ) -> Tensor:
        numel, k, count = payload.numel, payload.capacity, payload.indices.numel()
        header = Header(
            kind="sparse", numel=numel, count=count, tail=tail.numel(), layout=context.layout.fingerprint,
            step=context.step, index_code=INDEX_CODES[self.indices], value_code=VALUE_CODES[self.values],
            alarm=alarm.rings,
        )  # fmt: skip
        fields = struct.unpack("<9I", pack_header(header, 4 * tail.numel()))
        return encode_rice_frame(
            self.nbytes(numel, k, tail.numel(), payload.spread), fields, tail, payload.indices, payload.values,
            self.values, rice_best(numel, count), budget, alarm.flag,
        )  # fmt: skip

    def room(self, payload: Sparse, workspace: Workspace, end: int = FRONT) -> Room | None:
        """Memory for the entries of a frame with such a payload: values of 32 bits need none, and where 32 bits are too
        few for its indices there is none at all."""
        if payload.numel >= 1 << 31:
            return None
        device, values = payload.values.device, None
        indices = workspace.take(payload.capacity, torch.int32, device, end)
        if self.values == "int8":
            values = workspace.take(payload.capacity, torch.float32, device, end)
        return (indices, values) if indices is not None else None

    def decode(
        self,
        context: ExchangeContext,
        frame: Tensor,
        numel: int,
        capacity: int,
        tail: int,
        device: torch.device,
        origin: str,
        room: Room | None = None,
    ) -> Decoded[Sparse]:
        """Return the entries and the dense tail of a frame, or raise FrameError."""
        rooms = [room] if room is not None else None
        return self.decode_all(context, [(frame, origin)], numel, capacity, tail, device, rooms)[0]

    def decode_all(
        self,
        context: ExchangeContext,
        frames: Sequence[tuple[Tensor, str]],
        numel: int,
        capacity: int,
        tail: int,
        device: torch.device,
        rooms: Sequence[Room] | None = None,
    ) -> list[Decoded[Sparse]]:
        """``decode`` several frames, each with its origin; Rice coded indices of all of them in one call.

        ``rooms``, one per frame, are where the native kernels put Rice coded indices and 8-bit values. Values of 32
        bits, and tails, are where the frame is.
        """
        tensors: list[Tensor] = [frame for frame, _ in frames]
        heads: Sequence[Head | None] = [None] * len(frames)
        if on_gpu(device) and len({tensor.shape for tensor in tensors}) == 1 and _could_be_frame(tensors[0]):
            tensors = list(torch.stack(tensors).to(device, non_blocking=True))  # one copy, one wait for their headers
            heads = read_heads(tensors)
        indices: dict[int, Tensor] = {}  # by the frame's place
        streams: dict[int, RiceStream] = {}
        floats: list[tuple[Tensor, Tensor, bool]] = []  # values, tail, alarm
        for place, (frame, head, (_, origin)) in enumerate(zip(tensors, heads, frames, strict=True)):
            header, body = open_frame(frame, context, "sparse", numel, tail, device, origin, head)
            for name, code, names in (
                ("value", header.value_code, _VALUE_NAMES),
                ("index", header.index_code, _INDEX_NAMES),
            ):
                if code not in names:
                    raise FrameError(f"bad frame from {origin}: its {name} coding {code} is unknown")
            if header.count > capacity:
                raise FrameError(f"bad frame from {origin}: it holds {header.count} entries, {capacity} are allowed")
            tail_values = body.take_floats(tail, "dense tail")
            room = rooms[place][1] if rooms is not None else None
            room = room[: header.count] if room is not None else None
            values = decode_values(_VALUE_NAMES[header.value_code], header.count, body, room)
            floats.append((values, tail_values, header.alarm))
            coding = _INDEX_NAMES[header.index_code]
            if coding == "rice":
                streams[place] = take_rice(header.count, header.parameter, body)
            else:
                indices[place] = decode_indices(coding, header.count, numel, header.parameter, body)
            body.finish()
        check_numbers((origin, alarm, numbers) for (_, origin), (*numbers, alarm) in zip(frames, floats, strict=True))
        outs = [rooms[place][0][: stream.count] for place, stream in streams.items()] if rooms else None
        for place, (found, fault) in zip(streams, rice_indices(list(streams.values()), numel, outs), strict=True):
            check_rice(streams[place], found, fault, numel, frames[place][1])
            indices[place] = found
        return [
            Decoded(Sparse(indices[place], values, numel, capacity), rest, alarm)
            for place, (values, rest, alarm) in enumerate(floats)
        ]
