"""Models by a word, VGGs and ResNets."""
