"""What stands where an optimizer stands, but needs no gradient: solutions in closed form."""

from tpsgd.solvers.recursive import Recursive, rls
from tpsgd.solvers.ridge import Ridge, ridge

SOLVERS = (Ridge, Recursive)

__all__ = ["SOLVERS", "Recursive", "Ridge", "ridge", "rls"]
