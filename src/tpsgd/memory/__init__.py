"""Peak memory before training: `plan` rehearses the run without numbers, `budget` chooses settings.

May import the paper's files, maths, nets, solvers and engine.
"""
