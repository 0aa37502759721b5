"""A trainer's clipping, moved in front of the compression."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from thinwire.edges.no_process_group import WireAlone
from thinwire.edges.wire import Wire

log = logging.getLogger("thinwire")


def takes_clipping(wire: Wire, norm: float | None) -> bool:
    """Give the wire's method a trainer's threshold for the gradient's norm; return whether the method clips now.

    The trainer goes on clipping where the method has no ``clip_norm`` of its own, as ``Dense`` and mixtures, and where
    there is no process group. Collective: call it before the first step.
    """
    method: Any = wire.method
    if not norm or isinstance(wire, WireAlone) or not hasattr(method, "clip_norm"):
        return False
    if method.clip_norm is None:
        wire.switch(replace(method, clip_norm=float(norm)))
        log.info("thinwire: %s clips at a norm of %g before it compresses; the trainer does not", method.name, norm)
    return True
