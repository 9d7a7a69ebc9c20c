"""The last layer of a trained net learns from a stream: each labelled sample is seen once.

python examples/stream.py
"""

import torch
from torch import nn
from torch.utils.data import IterableDataset

import tpsgd
from tpsgd import rls, rules

data = tpsgd.data.load("digits")
(x, y), (x_test, y_test) = data.train, data.test

# Train a net on upright digits.
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
tpsgd.fit(model, (x, y), rule=rules.readout(), epochs=20, batch_size=32)
print(f"upright digits: {tpsgd.evaluate(model, (x_test, y_test)):.1%}")

# After deployment the camera is upside down: some labelled images arrive, others are for testing.
turned = x_test.flip(2, 3)
stream = turned[:200], y_test[:200]
test = turned[200:], y_test[200:]
print(f"upside down, before adapting: {tpsgd.evaluate(model, test):.1%}")


class Camera(IterableDataset):
    """Yields each labelled image once, and prints the test accuracy from time to time."""

    def __iter__(self):
        for i, pair in enumerate(zip(*stream, strict=True)):
            if i in (50, 100, 150):
                print(f"upside down, after {i} images: {tpsgd.evaluate(model, test):.1%}")
            yield pair


run = tpsgd.fit(
    model,
    Camera(),
    rule=rules.frozen(),  # the hidden layer stays as it is
    optimizer=rls(gamma=1.0),  # the head is solved anew after every batch
    order=tpsgd.simultaneous,
    batch_size=10,
)
print(f"upside down, after {run.sample_passes} images: {tpsgd.evaluate(model, test):.1%}")
print(f"peak memory {run.peak_bytes:,} bytes, however long the stream is")
