"""What exists for speed alone: tapes, CUDA graphs, fused optimizer steps.

`wrapper` is how `fit` uses them: it wraps the plain step of the training loop, which computes the
same numbers. With `TPSGD_FAST=0` in the environment every step is the plain one.
"""
