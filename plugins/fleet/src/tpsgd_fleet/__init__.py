"""Many small devices learn one model together: Flower apps whose clients need no backpropagation.

Flower (`flwr`) samples clients, sends messages and averages weights. This package has what local
learning adds: `client` trains with any rule on data that stays where it is; `server` shares the
class codes by a seed, gives new classes their rows, refuses broken updates and solves a ridge head
in one round.
"""

from tpsgd_fleet.client import client
from tpsgd_fleet.report import Report, Round
from tpsgd_fleet.server import server
from tpsgd_fleet.splits import dirichlet
from tpsgd_fleet.strategy import LocalLearning

__all__ = ["LocalLearning", "Report", "Round", "client", "dirichlet", "server"]
