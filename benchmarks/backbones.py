"""A frozen VGG16 in fewer bytes: ms per image, bytes and features compared with float32.

    python benchmarks/backbones.py --weights vgg16_features.npz --images FOLDER --out results

Float32 with channels last, bfloat16, int8 weights alone, and int8 weights and activations by
onnxruntime (`onnx_backbone.py`), each up to pool5 at 160 px, with one thread and with two. The
copies take turns, and each figure is the fastest of its turns, because a busy machine only adds
time. Images of the training part set the ranges of int8; the features of other images are compared.
Every number of threads has a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from onnx_backbone import file_bytes, onnx_int8
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.comparison.provenance import machine, versions
from tpsgd.data.images import image_files
from tpsgd.zoo.vgg import vgg
from tpsgd_adapt import IMAGENET, quantize, weights

SHAPE, TAP = (3, 160, 160), "features.30"
COUNT, BATCH, TURNS = 16, 8, 5  # images of each part and of a batch, turns of each copy
Row = dict[str, Any]


def backbone(file: Path) -> nn.Module:
    """VGG16 with these weights below the tap, channels last."""
    model: Any = vgg(16, SHAPE, 10)
    weights.put(model, weights.load(file), needed="features")
    part = nn.Sequential()
    part.add_module("features", model.features)
    part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return part.eval().requires_grad_(False)


def load_images(folder: Path) -> tuple[Tensor, Tensor]:
    """Images of train/ and of val/ from all classes, normalised for ImageNet's nets."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in IMAGENET)
    parts: list[Tensor] = []
    for part in ("train", "val"):
        files = list(image_files(folder / part))
        chosen = files[:: max(1, len(files) // COUNT)][:COUNT]
        images = [Image.open(f).convert("RGB").resize(SHAPE[1:]) for f in chosen]
        x = torch.stack([torch.from_numpy(np.array(i)).permute(2, 0, 1) for i in images])
        parts.append((x / 255 - mean) / std)
    return parts[0], parts[1]


def copies(model: nn.Module, examples: Tensor, folder: str) -> dict[str, nn.Module]:
    """Every way to run it."""
    models = {"float32": model, "bfloat16": quantize.bf16(model)}
    models["int8 weights"] = quantize.int8(model)
    try:
        models["int8 onnxruntime"] = onnx_int8(model, TAP, examples, folder)
    except TpsgdError as error:
        print(f"without onnxruntime: {error}", file=sys.stderr)
    return models


@torch.inference_mode()
def timed(model: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """Seconds for all images in batches, and their features."""
    start = perf_counter()
    y = torch.cat([model(part) for part in x.split(BATCH)])
    return perf_counter() - start, y


def measure(models: dict[str, nn.Module], x: Tensor, turns: int) -> list[Row]:
    """Milliseconds, bytes and cosine similarity of every copy, float32 first."""
    x = x.contiguous(memory_format=torch.channels_last)
    y = {
        name: timed(model, x)[1].flatten(1).float() for name, model in models.items()
    }  # warm up too
    seconds = {name: [] for name in models}
    for _ in range(turns):
        for name, model in models.items():
            seconds[name].append(timed(model, x)[0])
    weight_bytes = {name: file_bytes(m) or quantize.weight_bytes(m) for name, m in models.items()}
    cosines = {name: F.cosine_similarity(y[name], y["float32"]) for name in models}
    return [
        {
            "backbone": name,
            "ms": 1e3 * min(seconds[name]) / len(x),
            "time_ratio": min(seconds[name]) / min(seconds["float32"]),
            "bytes": weight_bytes[name],
            "bytes_ratio": weight_bytes[name] / weight_bytes["float32"],
            "cosine": cosines[name].mean().item(),
            "cosine_least": cosines[name].min().item(),
        }
        for name in models
    ]


def show(threads: int, rows: list[Row]) -> None:
    """A small table."""
    title = f"threads: {threads}"
    print(f"\n{title:16} ms/image  ratio  weights  ratio   cosine")
    for r in rows:
        print(
            f"{r['backbone']:16} {r['ms']:8.1f} {r['time_ratio']:6.2f} {size(r['bytes']):>8} "
            f"{r['bytes_ratio']:6.3f} {r['cosine']:8.5f}"
        )


def measure_here(options: argparse.Namespace) -> None:
    """Measure with one number of threads, in this process; print the rows as JSON."""
    torch.set_num_threads(options.threads)
    examples, others = load_images(options.images)
    with TemporaryDirectory() as folder:
        models = copies(backbone(options.weights), examples, folder)
        print(json.dumps(measure(models, others, options.turns)))


def measure_apart(threads: int) -> list[Row]:
    """The rows of a process with this number of threads."""
    command = [sys.executable, *sys.argv, "--threads", str(threads)]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, write `backbones.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        return measure_here(options)
    record: Row = {"machine": machine(), "versions": versions() | _runtime(), "tap": TAP}
    record |= {"images": COUNT, "batch_size": BATCH, "turns": options.turns, "shape": SHAPE}
    record["command"] = "python benchmarks/backbones.py --weights FILE --images FOLDER"
    record["threads"] = {}
    for threads in (1, 2):
        record["threads"][threads] = measure_apart(threads)
        show(threads, record["threads"][threads])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "backbones.json").write_text(json.dumps(record, indent=1))


def _runtime() -> dict[str, str]:
    """The version of onnxruntime, if it is installed."""
    try:
        import onnxruntime
    except ImportError:
        return {}
    return {"onnxruntime": onnxruntime.__version__}


if __name__ == "__main__":
    main()
