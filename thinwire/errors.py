"""The error types that are not plain ValueErrors, and sentences that two rooms say."""

ATTACHED_ALREADY = "this model is attached already; use wire.switch(method) to change the method, or wire.detach()"
UNCOPIED = (
    "a wire and its reducer belong to one model and process group and cannot be copied or saved; save "
    "wire.state_dict(), or attach the copy of the model"
)

TRAINED_INSIDE = (
    "a training step inside averaged() would be lost, because every rank's own parameters come back at the end of the "
    "block; train outside of it"
)


class FrameError(RuntimeError):
    """A frame from the wire is not what the format says; the sentence names the field."""


class NonFiniteError(RuntimeError):
    """A gradient holds an infinity, a nan or a number so large that sums overflow; nothing of it entered a residual."""


class DetachedError(RuntimeError):
    """A training step on a model whose wire was detached."""


class ReplicaError(RuntimeError):
    """The ranks' parameters are no longer the same; the sentence names the parameters and the ranks."""


class ExchangeError(RuntimeError):
    """Other ranks could not be reached: one died, a link was cut, or the process group's timeout passed.

    ``step`` and ``stage`` say what was going on, ``peers`` are the ranks that are to blame as far as it can be known.
    The wire cannot go on: its step is half done. Start again from the last checkpoint.
    """

    def __init__(self, sentence: str, *, step: int = -1, stage: str = "", peers: tuple[int, ...] = ()) -> None:
        super().__init__(sentence)
        self.step, self.stage, self.peers = step, stage, peers
