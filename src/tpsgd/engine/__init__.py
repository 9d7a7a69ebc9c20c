"""The machinery behind `fit`: settings, batches, learners, observers; `assemble` joins them.

May import the paper's files, maths, nets and solvers.
"""
