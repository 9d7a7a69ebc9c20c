"""One script for each experiment of the paper, on the library's public functions.

Run one with `python -m experiments.NAME --out results`. Choices are made on samples held out of the
training set; the test set is used once, for the numbers in the file. `common` is what they share.
"""
