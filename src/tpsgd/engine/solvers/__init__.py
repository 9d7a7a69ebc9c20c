"""Least squares instead of an optimizer: `ridge` and `rls`. Imports nets and below."""

from tpsgd.engine.solvers.recursive import Recursive, rls
from tpsgd.engine.solvers.ridge import Ridge, ridge

SOLVERS = (Ridge, Recursive)

__all__ = ["SOLVERS", "Recursive", "Ridge", "ridge", "rls"]
