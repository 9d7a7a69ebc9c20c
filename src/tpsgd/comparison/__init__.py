"""Rules compared with one another, with backprop and with controls; and the report.

`arms` names what can be compared, `compare` and `session` train it, `report` writes tables and
plots. `search` chooses values on held-out samples by `trials`; `finished_runs` is the file by which
a comparison, and any search, goes on. Imports training and what is below it, `data`, `zoo` and
`peers`.
"""
