"""Gradients by name, as the engine takes them and gives them back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.engine.layout import shaped_like


def places_of(gradients: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[int, str]:
    """The names by their places in the model; a ValueError where a gradient is not one of theirs."""
    places = {name: place for place, name in enumerate(parameters)}
    for name, gradient in gradients.items():
        if name not in places:
            raise ValueError(f"reduce got a gradient {name!r}, which is none of the reducer's tensors")
        if not isinstance(gradient, Tensor) or gradient.shape != parameters[name].shape:
            form = tuple(gradient.shape) if isinstance(gradient, Tensor) else type(gradient).__name__
            expected = tuple(parameters[name].shape)
            raise ValueError(f"reduce got {form} for {name!r}, whose shape is {expected}; give a gradient as large")
        if not gradient.is_floating_point() or gradient.is_sparse:
            raise ValueError(f"reduce got a gradient of {name!r} that is not of dense real numbers; make it so")
        if any(not stride and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)):
            raise ValueError(f"reduce got a gradient of {name!r} whose elements share memory; give a clone() of it")
    if not gradients:
        raise ValueError("reduce got no gradients: give at least one, by the name of its tensor")
    return {places[name]: name for name in gradients}


def copy_back(part: Tensor, parameter: Tensor, gradient: Tensor) -> None:
    """Put the mean where the gradient lies, where it is not there already."""
    if part.untyped_storage().data_ptr() != gradient.untyped_storage().data_ptr():
        with torch.no_grad():
            gradient.copy_(shaped_like(part, parameter.detach()))
