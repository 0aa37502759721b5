"""A trainer's clipping, moved in front of the compression."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from thinwire.edges.wire import Wire

log = logging.getLogger("thinwire")


def takes_clipping(wire: Wire, norm: float | None) -> bool:
    """Give the wire's method a trainer's threshold for the gradient's norm; return whether the method clips now.

    A method without ``clip_norm`` keeps no residual that clipping after the exchange would take from, so the trainer
    goes on clipping. Collective: call it before the first step.
    """
    method: Any = wire.method
    if not norm or not hasattr(method, "clip_norm"):
        return False
    if method.clip_norm is None:
        wire.switch(replace(method, clip_norm=float(norm)))
        log.info("thinwire: %s clips at a norm of %g before it compresses; the trainer does not", method.name, norm)
    return True
