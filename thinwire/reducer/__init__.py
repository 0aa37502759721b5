"""The engine without a framework: gradients by name in, the group's mean out."""

from thinwire.reducer.reducer import Entering, Reducer
from thinwire.reducer.setup import EdgeTerms, HierarchySpec, Optimizers

__all__ = ["EdgeTerms", "Entering", "HierarchySpec", "Optimizers", "Reducer"]
