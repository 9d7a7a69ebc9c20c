"""What stands where an optimizer stands, but needs no steps: solutions in closed form."""

from tpsgd.solvers.ridge import Ridge, ridge

__all__ = ["Ridge", "ridge"]
