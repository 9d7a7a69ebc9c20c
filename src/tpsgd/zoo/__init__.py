"""Models: VGGs, ResNets, and models by a word such as `mlp:256,256` or `rnn:512`.

Imports `nets` and what is below it.
"""

from tpsgd.zoo import resnet, vgg, words

__all__ = ["resnet", "vgg", "words"]
