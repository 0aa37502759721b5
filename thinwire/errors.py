"""The error types that are not plain ValueErrors."""


class FrameError(RuntimeError):
    """A frame from the wire is not what the format says; the sentence names the field."""


class NonFiniteError(RuntimeError):
    """A gradient holds an infinity or a nan; nothing of it entered a residual."""


class DetachedError(RuntimeError):
    """A training step on a model whose wire was detached."""


class ReplicaError(RuntimeError):
    """The ranks' parameters are no longer the same; the sentence names the parameters and the ranks."""
