"""The parts of Transformers: attention, and layers that normalise before each part (pre-norm)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Scaled dot-product attention with several heads."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """x: (B, T, width) asks; source: (B, S, width) is asked; mask: (B, 1, 1, S) bool, True where one may look."""
        query = self._heads(self.query(x))  # (B, heads, T, width / heads)
        key, value = (self._heads(part) for part in self.key_value(source).chunk(2, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)
        return self.output(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Self-attention, attention to a source where there is one, and two dense layers; each beside a shortcut."""

    def __init__(self, width: int, num_heads: int, dropout: float, *, has_source: bool = False) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        if has_source:
            self.norm2 = nn.LayerNorm(width)
            self.source_attention = Attention(width, num_heads, dropout)
        self.norm3 = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """x: (B, T, width); masks as in Attention."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, mask, causal))
        if source is not None:
            x = x + self.dropout(self.source_attention(self.norm2(x), source, source_mask))
        return x + self.dropout(self.dense(self.norm3(x)))


class Embedding(nn.Module):
    """Tokens with their positions; `logits` uses the same weights to go back."""

    def __init__(self, num_tokens: int, width: int, max_length: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.tokens = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T) int64, to (B, T, width)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.scale * self.tokens(tokens) + self.positions(positions))

    def logits(self, x: Tensor) -> Tensor:
        """x: (B, T, width), to (B, T, num_tokens)."""
        return F.linear(x, self.tokens.weight)
