"""What is not sent now is kept: error feedback, momentum correction, and the step-size-rescaled error."""

from thinwire.memory.clipping import LocalClipping
from thinwire.memory.error_feedback import ErrorFeedback
from thinwire.memory.lr_rescaling import RateRatio
from thinwire.memory.momentum import MomentumCorrection, Velocity
from thinwire.memory.none import NoMemory
from thinwire.memory.rescaled import RescaledError

__all__ = [
    "ErrorFeedback",
    "LocalClipping",
    "MomentumCorrection",
    "NoMemory",
    "RateRatio",
    "RescaledError",
    "Velocity",
]
