"""A head that learns from each sample once, in C: random features and recursive least squares."""
