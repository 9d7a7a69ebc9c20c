"""One short script per table or figure, on the library's own loop.

Run one with `python -m experiments.NAME --out results`. Choices are made on data held out of
the training set; the test set is used once, for the figures reported.
"""
