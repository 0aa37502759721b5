"""What most compressors have in common: nothing to look for in advance, and nothing to agree on."""

from __future__ import annotations

import torch

from thinwire.engine.context import ExchangeContext
from thinwire.engine.flat_gradient import Gradient


class PlainCompressor:
    """A compressor that chooses from the vector alone."""

    def hint(self, context: ExchangeContext, device: torch.device) -> None:
        return None

    def measure(self, context: ExchangeContext, x: Gradient) -> None:
        return None
