"""A Transformer that translates: encoder and decoder, one embedding for both languages and the output."""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.lab.recipes.models.transformer import Embedding, Layer

Memory = tuple[Tensor, Tensor]  # encoded source (B, S, width), where it is no padding (B, 1, 1, S)


class TransformerTranslator(nn.Module):
    """Pre-norm layers; token `pad` is not looked at."""

    def __init__(
        self, num_tokens: int, *, width: int, num_layers: int, num_heads: int, max_length: int, dropout: float, pad: int
    ) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = Embedding(num_tokens, width, max_length, dropout)
        self.encoder = nn.ModuleList([Layer(width, num_heads, dropout) for _ in range(num_layers)])
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList([Layer(width, num_heads, dropout, has_source=True) for _ in range(num_layers)])
        self.decoder_norm = nn.LayerNorm(width)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """source: (B, S); target: (B, T) from its begin token on; returns logits of what follows, (B, T, tokens)."""
        return self.decode(target, self.encode(source))

    def encode(self, source: Tensor) -> Memory:
        mask = (source != self.pad)[:, None, None, :]
        x = self.embedding(source)
        for layer in self.encoder:
            x = layer(x, mask=mask)
        return self.encoder_norm(x), mask

    def decode(self, target: Tensor, memory: Memory) -> Tensor:
        x = self.embedding(target)
        for layer in self.decoder:
            x = layer(x, causal=True, source=memory[0], source_mask=memory[1])
        return self.embedding.logits(self.decoder_norm(x))

    def next_logits(self, prefix: Tensor, memory: Memory, state: None) -> tuple[Tensor, None]:
        """prefix: (B, t); returns (B, tokens) for token t. Sentences are short: the prefix is read again each time."""
        return self.decode(prefix, memory)[:, -1], None
