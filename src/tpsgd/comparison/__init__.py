"""Rules compared with one another, with backprop and with controls; searches; and the report.

`arms` names what can be compared, `compare` and `session` train it, `report` writes tables and
plots. `trials` is the engine of every search, those of `adapt` too; `finished_runs` is the file
from which a comparison or a search goes on.
"""
