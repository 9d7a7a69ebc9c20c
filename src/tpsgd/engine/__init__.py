"""From `fit` to the weight update."""
