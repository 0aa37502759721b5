"""Complete training set-ups that `thinwire train --recipe NAME` runs; one file a recipe."""

from thinwire.recipes.base import Batch, Metric, MissingData, Recipe
from thinwire.recipes.digits import Digits

RECIPES: dict[str, type[Recipe]] = {recipe.name: recipe for recipe in (Digits,)}

__all__ = ["RECIPES", "Batch", "Digits", "Metric", "MissingData", "Recipe"]
