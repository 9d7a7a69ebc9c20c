"""What goes around a run and is not needed to train: checkpoints, last good weights, logs, bars.

Each is an `engine.extension.Extension`; `extensions` chooses those that the settings ask for.
"""
