"""Complete training set-ups that `thinwire train --recipe NAME` runs; one file a recipe or a family of them."""

from thinwire.lab.recipes.an4 import An4Gru
from thinwire.lab.recipes.base import Batch, Metric, MissingData, Recipe
from thinwire.lab.recipes.cifar10 import Cifar10Cifarnet, Cifar10Resnet20, Cifar10Resnet110, Cifar10Vgg16
from thinwire.lab.recipes.digits import Digits
from thinwire.lab.recipes.mnist import MnistLenet
from thinwire.lab.recipes.multi30k import Multi30kGru, Multi30kTransformer
from thinwire.lab.recipes.ptb import PtbLstm, PtbLstm1500
from thinwire.lab.recipes.shakespeare import Shakespeare
from thinwire.lab.recipes.wikitext2 import Wikitext2Transformer

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
