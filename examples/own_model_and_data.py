"""Train your model on your files: a folder of images, or an .npz file (both made here from digits).

python examples/own_model_and_data.py
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd

folder = Path(tempfile.mkdtemp())
samples = tpsgd.data.load("digits", max_train=600)

# What you may have on disk: photos/CLASS/NAME.png, or the arrays x and y in one file.
for i, (x, y) in enumerate(zip(*samples.train, strict=True)):
    subfolder = folder / "photos" / f"digit-{int(y)}"
    subfolder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * x[0]).byte().numpy()).save(subfolder / f"{i:03}.png")
np.savez(folder / "photos.npz", x=samples.train[0].numpy(), y=samples.train[1].numpy())


class Net(nn.Module):
    """Any class with a `forward`: here a convolution, a residual part, a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.norm0, self.norm1, self.norm2 = (nn.BatchNorm2d(16) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = F.relu(self.norm0(self.stem(x)))
        x = x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return self.head(self.dropout(F.max_pool2d(F.relu(x), 2).flatten(1)))


for spec in (folder / "photos", folder / "photos.npz"):
    data = tpsgd.data.load(str(spec))  # 20 % of each class is held out as test data
    torch.manual_seed(0)
    model = Net(channels=data.shape[0])
    run = tpsgd.fit(model, data.train, epochs=12, batch_size=32)
    accuracy = tpsgd.evaluate(model, data.test)
    print(f"{spec.name}: {len(data.train[1])} images of shape {data.shape}, {data.note}")
    print(f"  {accuracy:.1%} right, {run.seconds:.1f} s, peak {run.total_bytes:,} bytes")

print(tpsgd.split(model, data.shape))  # where it was cut

# The model is still a plain torch model: save it, load it, use it.
torch.save(model.state_dict(), folder / "model.pt")
fresh = Net(channels=data.shape[0])
fresh.load_state_dict(torch.load(folder / "model.pt"))
x, y = data.test
answer = fresh.eval()(x[:1]).argmax(1)
print(f"the first test image shows a {data.classes[y[0]]}; the model says {data.classes[answer]}")
