"""Many small devices learn one model together: Flower apps whose clients need no backpropagation.

Flower (`flwr`) samples clients, sends messages and averages weights. This package has what local
learning adds: `client` trains with any rule on data that stays where it is; `server` shares the
class codes by a seed, gives new classes their rows, refuses broken updates and solves a ridge head
in one round. It imports the engine, training and streams; nothing imports it.
"""

from importlib.util import find_spec
from typing import Any

from tpsgd.errors import TpsgdError

__all__ = ["LocalLearning", "Report", "Round", "client", "dirichlet", "server"]

if find_spec("flwr") is not None:
    from tpsgd.fleet.client import client
    from tpsgd.fleet.report import Report, Round
    from tpsgd.fleet.server import server
    from tpsgd.fleet.splits import dirichlet
    from tpsgd.fleet.strategy import LocalLearning


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tpsgd.fleet' has no attribute {name!r}")
    raise TpsgdError("tpsgd.fleet needs Flower, which is not installed: pip install 'tpsgd[fleet]'")
