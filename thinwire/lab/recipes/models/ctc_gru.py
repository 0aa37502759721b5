"""Speech to characters: a convolution over frames, GRUs in both directions, and a distribution for CTC."""

from __future__ import annotations

from torch import Tensor, nn

from thinwire.lab.recipes.models.bigru import BiGru


class CtcGru(nn.Module):
    """Every second frame gives log probabilities of the characters and of the blank, which is number 0."""

    def __init__(self, num_inputs: int, num_outputs: int, *, width: int, units: int, num_layers: int, dropout: float):
        super().__init__()
        self.convolution = nn.Conv1d(num_inputs, width, kernel_size=5, stride=2, padding=2)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList([BiGru(2 * units if layer else width, units) for layer in range(num_layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(2 * units) for _ in range(num_layers)])
        self.output = nn.Linear(2 * units, num_outputs)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """frames: (B, T, inputs), zeros behind the end; lengths: (B,); returns (B, T', outputs) and its lengths."""
        x = self.convolution(frames.transpose(1, 2)).relu().transpose(1, 2)  # (B, T', width)
        lengths = (lengths + 1) // 2
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(self.dropout(x), lengths))
        return self.output(self.dropout(x)).log_softmax(dim=-1), lengths
