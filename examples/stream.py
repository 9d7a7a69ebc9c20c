"""A device in a new place: the last layer of a trained encoder learns from a stream, read once.

python examples/stream.py
"""

import torch
from torch import nn
from torch.utils.data import IterableDataset

import tpsgd
from tpsgd import rls, rules

data = tpsgd.data.load("digits")
(x, y), (x_test, y_test) = data.train, data.test

# At home: an encoder is trained on upright digits.
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10))
tpsgd.fit(model, (x, y), rule=rules.readout(), epochs=20, batch_size=32)
print(f"upright digits: {tpsgd.evaluate(model, (x_test, y_test)):.1%}")

# In the new place the camera hangs upside down.
turned = x_test.flip(2, 3)
new, new_labels, old, old_labels = turned[:200], y_test[:200], turned[200:], y_test[200:]
print(f"upside down, as it came: {tpsgd.evaluate(model, (old, old_labels)):.1%}")


class Camera(IterableDataset):
    """Yields each labelled image once, and reports on the model as it goes."""

    def __iter__(self):
        for i, pair in enumerate(zip(new, new_labels, strict=True)):
            if i in (50, 100, 150):
                share = tpsgd.evaluate(model, (old, old_labels))
                print(f"upside down, after {i} images: {share:.1%}")
            yield pair


run = tpsgd.fit(
    model,
    Camera(),
    rule=rules.frozen(),  # the encoder stays
    optimizer=rls(gamma=1.0),  # the head is right after every batch
    schedule=tpsgd.simultaneous,
    batch_size=10,
)
share = tpsgd.evaluate(model, (old, old_labels))
print(f"upside down, after {run.sample_passes} images: {share:.1%}")
print(f"peak memory {run.peak_bytes:,} bytes, however long the stream is")
