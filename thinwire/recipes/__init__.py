"""Complete training set-ups that `thinwire train --recipe NAME` runs; one file a recipe or a family of them."""

from thinwire.recipes.an4 import An4Gru
from thinwire.recipes.base import Batch, Metric, MissingData, Recipe
from thinwire.recipes.cifar10 import Cifar10Cifarnet, Cifar10Resnet20, Cifar10Resnet110, Cifar10Vgg16
from thinwire.recipes.digits import Digits
from thinwire.recipes.mnist import MnistLenet
from thinwire.recipes.multi30k import Multi30kGru, Multi30kTransformer
from thinwire.recipes.ptb import PtbLstm, PtbLstm1500
from thinwire.recipes.shakespeare import Shakespeare
from thinwire.recipes.wikitext2 import Wikitext2Transformer

RECIPES: dict[str, type[Recipe]] = {
    recipe.name: recipe
    for recipe in (
        Digits,
        Shakespeare,
        MnistLenet,
        Cifar10Resnet20,
        Cifar10Resnet110,
        Cifar10Vgg16,
        Cifar10Cifarnet,
        PtbLstm,
        PtbLstm1500,
        Wikitext2Transformer,
        Multi30kTransformer,
        Multi30kGru,
        An4Gru,
    )
}

__all__ = ["RECIPES", "Batch", "Digits", "Metric", "MissingData", "Recipe"]
