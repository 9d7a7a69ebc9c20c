"""Training: settings, the specification of a run, batches, learners, and `fit`.

It knows no feature: checkpoints, memory budgets, logs and ranks are extensions around a run.
"""
