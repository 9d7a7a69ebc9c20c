"""Many small devices learn one model together: Flower apps whose clients need no backpropagation.

Flower (`flwr`) samples clients, sends messages and averages weights. This package has what local
learning adds: `client` trains with any rule on data that stays where it is; `server` shares the
class codes by a seed, gives new classes their rows, refuses broken updates and solves a ridge head
in one round. It imports the engine, training and streams; nothing imports it.
"""

from importlib.util import find_spec

from tpsgd.errors import TpsgdError

if find_spec("flwr") is None:
    raise TpsgdError("tpsgd.fleet needs Flower, which is not installed: pip install 'tpsgd[fleet]'")

from tpsgd.fleet.client import client
from tpsgd.fleet.report import Report, Round
from tpsgd.fleet.server import server
from tpsgd.fleet.splits import dirichlet
from tpsgd.fleet.strategy import LocalLearning

__all__ = ["LocalLearning", "Report", "Round", "client", "dirichlet", "server"]
