"""Models: VGGs, ResNets, vision transformers, models by a word such as `mlp:256,256`; recipes to train deep ones.

Imports `engine` and what is below it.
"""

from tpsgd.zoo import recipes, resnet, vgg, vit, words

__all__ = ["recipes", "resnet", "vgg", "vit", "words"]
