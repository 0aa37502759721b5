"""torch.distributed behind a byte-level face, with counters; and ranks as threads of one process.

A ``Net`` moves uint8 frames (and, for the dense methods, float vectors). It knows nothing about what is inside them.
"""

from thinwire.transport.net import GroupNet, Net, OverlapWith, Traffic, overhead
from thinwire.transport.processes import BystanderNet, TorchNet
from thinwire.transport.threads import ThreadNet, ThreadWorld

__all__ = [
    "BystanderNet",
    "GroupNet",
    "Net",
    "OverlapWith",
    "ThreadNet",
    "ThreadWorld",
    "TorchNet",
    "Traffic",
    "overhead",
]
