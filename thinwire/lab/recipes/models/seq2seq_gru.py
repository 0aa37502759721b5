"""Recurrent translation with attention: a GRU in both directions, and two GRUs with attention between them.

The attention asks with the first decoder GRU's state and feeds the second: nothing flows back, so the whole target is
decoded in training by two calls, not token by token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.lab.recipes.models.bigru import BiGru

Memory = tuple[Tensor, Tensor, Tensor]  # encoded (B, S, units), no padding (B, 1, S), first state (1, B, units)
State = tuple[Tensor, Tensor | None]  # of both GRUs, (1, B, units) each


class GruTranslator(nn.Module):
    """One embedding of `width` for both languages and the output; `units` in every state; `pad` is not looked at."""

    def __init__(self, num_tokens: int, *, width: int, units: int, dropout: float, pad: int) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(num_tokens, width)
        # Small enough to be the output layer, and scaled up where it is the input.
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.scale = math.sqrt(width)
        self.encoder = BiGru(width, units // 2)
        self.first_state = nn.Linear(units, units)
        self.decoder1 = nn.GRU(width, units, batch_first=True)
        self.query = nn.Linear(units, units, bias=False)
        self.decoder2 = nn.GRU(2 * units, units, batch_first=True)
        self.output = nn.Linear(3 * units, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source: (B, S); target: (B, T) from its begin token on; returns logits of what follows, (B, T, tokens)."""
        memory = self.encode(source)
        return self.decode(target, memory, (memory[2], None))[0]

    def encode(self, source: Tensor) -> Memory:
        real = source != self.pad  # (B, S)
        lengths = real.sum(dim=1)
        encoded = self.dropout(self.encoder(self._embedded(source), lengths))  # (B, S, units)
        mean = (encoded * real[:, :, None]).sum(dim=1) / lengths[:, None]
        return encoded, real[:, None, :], self.first_state(mean).tanh()[None]

    def decode(self, target: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        encoded, real, _ = memory
        x, state1 = self.decoder1(self._embedded(target), state[0])  # (B, T, units)
        context = F.scaled_dot_product_attention(self.query(x), encoded, encoded, real)  # (B, T, units)
        x = self.dropout(torch.cat([x, context], dim=-1))
        y, state2 = self.decoder2(x, state[1])
        y = self.output(torch.cat([self.dropout(y), x], dim=-1)).tanh()  # (B, T, width)
        return F.linear(self.dropout(y), self.embedding.weight), (state1, state2)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.scale * self.embedding(tokens))

    def next_logits(self, prefix: Tensor, memory: Memory, state: State | None) -> tuple[Tensor, State]:
        """prefix: (B, t), of which the state has seen all but the last token; returns (B, tokens) for token t."""
        logits, state = self.decode(prefix[:, -1:], memory, state or (memory[2], None))
        return logits[:, -1], state
