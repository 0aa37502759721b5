"""A recurrent language model: embedding, LSTM layers, and the embedding again as the output layer.

Zaremba et al. 2014 with the tied weights of Press and Wolf 2017, which is DGC's model: with 1,500 units a layer and
10,000 words it has 51.0 M parameters, the 194.68 MiB of gradients in DGC's Table 2.
"""

from __future__ import annotations

from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden and cell state, (layers, B, units) each


class LstmLanguageModel(nn.Module):
    """Next-token logits; the state goes in and out, so that a stream can be read piece by piece."""

    def __init__(self, num_words: int, units: int, num_layers: int, dropout: float, init_range: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, units)
        self.lstm = nn.LSTM(units, units, num_layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(units, num_words)
        self.output.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name == "output.bias":
                nn.init.zeros_(parameter)
            else:
                nn.init.uniform_(parameter, -init_range, init_range)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens: (B, T) int64; returns logits (B, T, num_words) and the state after the last token."""
        x = self.dropout(self.embedding(tokens))  # (B, T, units)
        x, state = self.lstm(x, state)
        return self.output(self.dropout(x)), state
