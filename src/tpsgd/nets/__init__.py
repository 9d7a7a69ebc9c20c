"""Models: cut into blocks, and the gradients of each layer kind.

Imports the paper's files (rules, objectives, projections, losses) and maths.
"""
