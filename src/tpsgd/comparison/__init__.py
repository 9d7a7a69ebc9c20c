"""Rules compared with one another, with backprop and with controls; and the report.

`arms` names what can be compared, `compare` trains it, `report` writes tables and plots. Imports
training and what is below it, `data`, `zoo` and `peers`.
"""
