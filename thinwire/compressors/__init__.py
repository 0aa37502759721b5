"""What to send: one file, one name, one class."""

from thinwire.compressors.base import PlainCompressor
from thinwire.compressors.blocksign import BlockSigns
from thinwire.compressors.sign import Sign
from thinwire.compressors.ternary import Ternarize
from thinwire.compressors.topk import TopK

__all__ = ["BlockSigns", "PlainCompressor", "Sign", "Ternarize", "TopK"]
