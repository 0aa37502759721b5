"""Telling a loop whose forward pass goes past DistributedDataParallel that its gradients are not exchanged."""

from __future__ import annotations

from thinwire.monitor.user_warning import warn_user

SENTENCE = (
    "thinwire: optimizer.step() uses gradients that were not exchanged, because their forward pass did not go through "
    "the DistributedDataParallel model; call model(...) instead of model.module(...)"
)


class BypassWarning:
    """Warns once when an optimizer step follows a backward pass, and neither a forward pass of DDP nor an exchange."""

    def __init__(self) -> None:
        self._saw_backward = self._saw_forward = self._told = False
        self._passes = 0  # exchanged up to the last step

    def backward(self) -> None:
        """A gradient of the model is about to be accumulated."""
        self._saw_backward = True

    def forward(self) -> None:
        """DDP runs a forward pass, which may be one under no_sync()."""
        self._saw_forward = True

    def before_step(self, passes: int) -> None:
        """``passes`` are those that were exchanged so far."""
        bypassed = self._saw_backward and not self._saw_forward and passes == self._passes
        self._saw_backward, self._saw_forward, self._passes = False, False, passes
        if bypassed and not self._told:
            self._told = True
            warn_user(SENTENCE)
