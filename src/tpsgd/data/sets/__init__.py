"""The built-in data sets: each file has the readers of a publisher's files, and `ENTRIES`.

To add a set, write such a file and name it in `tpsgd.data.registry`.
"""
