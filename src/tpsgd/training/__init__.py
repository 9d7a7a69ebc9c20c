"""What a user calls: `fit`, `fit_backprop`, `fit_many`, `evaluate`, `check_rule`.

May import everything below: the paper's files, maths, nets, solvers, engine and memory.
"""
