"""The one exception family of the package."""


class HfGrowError(ValueError):
    """Something the user asked for cannot be done; nothing was changed. The message says what to do instead."""


class NothingToGain(HfGrowError):
    """Nothing that could grow promises to lower the loss."""
