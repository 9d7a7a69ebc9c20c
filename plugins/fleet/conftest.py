"""The modules of this plug-in import Flower: without it, pytest has no doctests to collect here."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["src/*"]
