"""A Transformer language model with tied embeddings."""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.lab.recipes.models.transformer import Embedding, Layer


class TransformerLanguageModel(nn.Module):
    """Next-token logits for windows of up to `max_length` tokens; nothing is carried from window to window."""

    def __init__(
        self, num_words: int, *, width: int, num_layers: int, num_heads: int, max_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = Embedding(num_words, width, max_length, dropout)
        self.layers = nn.ModuleList([Layer(width, num_heads, dropout) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, state: None = None) -> tuple[Tensor, None]:
        """tokens: (B, T) int64; returns logits (B, T, num_words) and no state."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, causal=True)
        return self.embedding.logits(self.norm(x)), None
