"""The examples in docstrings of `tpsgd.fleet` need Flower, which is optional."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["tpsgd/fleet/*"]
