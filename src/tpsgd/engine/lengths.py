"""How long `fit` trains by default: the batch size and the epochs, from the number of samples.

A block needs a number of steps, whatever the number of samples. A small table therefore has small
batches and many epochs; from about 50,000 samples on it is five epochs of batches of 128. Nothing
is held out: on small sets that costs more accuracy than stopping early gains
(`experiments/small_data.py`).
"""

import math
from dataclasses import replace
from operator import length_hint
from typing import Any

from torch.utils.data import DataLoader

from tpsgd.engine.settings import Settings
from tpsgd.engine.sources.loaders import count_samples

STEPS = 2000  # that a block takes, at least FEWEST_EPOCHS
FEWEST_EPOCHS = 5
SMALLEST, LARGEST = 8, 128  # batches


def batch_size_for(samples: int) -> int:
    """The power of two nearest to the root of the number of samples, 8 to 128; 128 if unknown.

    Examples:
        >>> batch_size_for(120), batch_size_for(1438), batch_size_for(60_000), batch_size_for(0)
        (8, 32, 128, 128)
    """
    nearest = 2 ** round(math.log2(samples) / 2) if samples else LARGEST
    return min(max(nearest, SMALLEST), LARGEST)


def epochs_for(steps: int, of_block: int = STEPS) -> int:
    """Enough epochs for the steps of a block, from the steps of an epoch; 0 if unknown.

    Examples:
        >>> epochs_for(15), epochs_for(469), epochs_for(0)
        (133, 5, 5)
    """
    return max(FEWEST_EPOCHS, of_block // steps) if steps else FEWEST_EPOCHS


def with_lengths(settings: Settings, data: Any) -> Settings:
    """The settings, with epochs and a batch size from the data where they are None."""
    if not isinstance(data, DataLoader):
        if settings.epochs is not None and settings.batch_size is not None:
            return settings
        return with_lengths_for(settings, count_samples(data))
    batch_size = data.batch_size or settings.batch_size or LARGEST
    settings = replace(settings, batch_size=batch_size)
    return settings if settings.epochs is not None else _with_epochs(settings, length_hint(data))


def with_lengths_for(settings: Settings, samples: int) -> Settings:
    """As `with_lengths`, for a number of samples; 0 if it is unknown."""
    batch_size = settings.batch_size or batch_size_for(samples)
    return _with_epochs(replace(settings, batch_size=batch_size), -(-samples // batch_size))


def _with_epochs(settings: Settings, steps: int) -> Settings:
    return settings if settings.epochs is not None else replace(settings, epochs=epochs_for(steps))
