"""A small recurrent model of characters."""

from __future__ import annotations

from torch import Tensor, nn


class GruLanguageModel(nn.Module):
    """Next-character logits; the state goes in and out, so that a stream can be read piece by piece."""

    def __init__(self, num_characters: int, embedding: int, units: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, embedding)
        self.gru = nn.GRU(embedding, units, batch_first=True)
        self.output = nn.Linear(units, num_characters)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """tokens: (B, T) int64; returns logits (B, T, num_characters) and the state (1, B, units)."""
        x, state = self.gru(self.embedding(tokens), state)
        return self.output(x), state
