"""The one exception of this library."""


class TpsgdError(ValueError):
    """What was given, what was expected, what to do: one sentence, meant for the caller."""
