"""Models: VGGs, ResNets, vision transformers, or by a word such as `mlp:256,256`; recipes.

Imports `engine` and what is below it.
"""

from tpsgd.zoo import recipes, resnet, vgg, vit, words

__all__ = ["recipes", "resnet", "vgg", "vit", "words"]
