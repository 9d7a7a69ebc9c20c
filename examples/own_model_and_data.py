"""Train your model on your files: a folder of images, or an .npz file (both made here from digits).

python examples/own_model_and_data.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import tpsgd

folder = Path(tempfile.mkdtemp())
samples = tpsgd.data.load("digits", max_train=600)

# What you may have on disk: photos/CLASS/NAME.png, or the arrays x and y in one file.
for i, (x, y) in enumerate(zip(*samples.train, strict=True)):
    subfolder = folder / "photos" / f"digit-{int(y)}"
    subfolder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * x[0]).byte().numpy()).save(subfolder / f"{i:03}.png")
np.savez(folder / "photos.npz", x=samples.train[0].numpy(), y=samples.train[1].numpy())


def cnn(channels: int) -> nn.Sequential:
    """Any nn.Sequential with layers, normalisation, pooling, dropout."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


for spec in (folder / "photos", folder / "photos.npz"):
    data = tpsgd.data.load(str(spec))  # 20 % of each class is held out as test data
    torch.manual_seed(0)
    model = cnn(channels=data.shape[0])
    run = tpsgd.fit(model, data.train, epochs=8, batch_size=32)
    accuracy = tpsgd.evaluate(model, data.test)
    print(f"{spec.name}: {len(data.train[1])} images of shape {data.shape}, {data.note}")
    print(f"  {accuracy:.1%} right, {run.seconds:.1f} s, peak {run.total_bytes:,} bytes")

# The model is still a plain torch model: save it, load it, use it.
torch.save(model.state_dict(), folder / "model.pt")
fresh = cnn(channels=data.shape[0])
fresh.load_state_dict(torch.load(folder / "model.pt"))
x, y = data.test
answer = fresh.eval()(x[:1]).argmax(1)
print(f"the first test image shows a {data.classes[y[0]]}; the model says {data.classes[answer]}")
