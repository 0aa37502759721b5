"""Parts that several methods are put together from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.codecs import SparseCodec
from thinwire.engine.protocols import Memory
from thinwire.memory import ErrorFeedback, LocalClipping, MomentumCorrection
from thinwire.transport import Net

if TYPE_CHECKING:
    from thinwire.methods.dgc import DGC
    from thinwire.methods.dropping import GradientDropping
    from thinwire.methods.gtopk import GTopK


def clipped(memory: Memory, clip_norm: float | None, net: Net) -> Memory:
    """The memory behind local clipping, where there is a norm: the whole gradient's, so it needs ``whole_model``."""
    return LocalClipping(memory, clip_norm, net.size) if clip_norm is not None else memory


def momentum_memory(method: DGC | GTopK, corrected: bool) -> MomentumCorrection | ErrorFeedback:
    """Error feedback, of velocities where momentum is ``corrected``."""
    if not corrected:
        return ErrorFeedback(method.state_dtype)
    return MomentumCorrection(method.factor_masking, method.state_dtype, method.lr_rescaling, method.direct_decay)


def gathered_codec(method: DGC | GradientDropping) -> SparseCodec:
    """The codec of frames that are all-gathered."""
    # Where buckets may share an exchange, entries must not wait because of what they share it with.
    return SparseCodec(method.values, method.indices, holds_any=method.bucket_independent and not method.whole_model)
