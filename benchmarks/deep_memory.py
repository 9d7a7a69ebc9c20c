"""Memory of deep nets: by depth, measured on a CPU; of large nets at 224 pixels, computed.

    python benchmarks/deep_memory.py --out results

A vision transformer of 8, 16, 32 and 64 layers takes two steps; memory is the peak beyond the data,
with and without what grows with the weights alone: weights, gradients and the optimizer's state.
ResNet50 and ViT-B are planned for batches of 256, cut into 1 to 16 blocks, on one device and as
pipelines over 8 and 64: of more devices than blocks, each takes its share of the batch.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tpsgd
from experiments.common import origin, result_file
from experiments.nets.classic import Bottleneck, ResNet
from tpsgd import rules
from tpsgd.memory.plan import Plan
from tpsgd.zoo.vit import vit

DEPTHS, BATCH = (8, 16, 32, 64), 64
LARGE, SAMPLES = 256, 1_281_167  # of ImageNet
BLOCKS, DEVICES = (1, 2, 4, 8, 16), (8, 64)
NETS: dict[str, Any] = {
    "ResNet50": lambda: ResNet(Bottleneck, (3, 4, 6, 3), classes=1000, small=False),
    "ViT-B": lambda: vit((3, 224, 224), 1000, depth=12, width=768, heads=12, hidden=3072),
}


def transformer(depth: int) -> nn.Module:
    """A small vision transformer."""
    torch.manual_seed(0)
    return vit((3, 32, 32), 10, depth=depth, width=64)


def ways(depth: int) -> dict[str, dict[str, Any]]:
    """How a net of so many layers is trained: without a rule by backprop."""
    pairs = {"rule": rules.auxiliary(), "blocks": depth // 2}
    return {
        "backprop": {},
        "backprop, checkpointed": {"segments": round(depth**0.5)},
        "backprop, micro-batches of 8": {"memory": tpsgd.Memory(micro_batch=8)},
        "two layers per block, simultaneous": pairs | {"order": tpsgd.simultaneous},
        "two layers per block, sequential": pairs | {"order": tpsgd.sequential},
    }


def by_depth() -> dict[str, Any]:
    """Bytes of each way at each depth, all of them and those that are no weights' own."""
    data = torch.randn(2 * BATCH, 3, 32, 32), torch.arange(2 * BATCH) % 10
    rows: dict[str, Any] = {}
    for depth in DEPTHS:
        weights = sum(p.nbytes for p in transformer(depth).parameters())
        for name, settings in ways(depth).items():
            train = tpsgd.fit if "rule" in settings else tpsgd.fit_backprop
            run = train(transformer(depth), data, epochs=1, batch_size=BATCH, **settings)
            row = {"total_bytes": run.total_bytes, "beyond_weights": run.total_bytes - weights}
            rows.setdefault(name, {})[str(depth)] = row
            print(f"{depth:3} layers  {name:36} {run.total_bytes / 2**20:8.1f} MB", flush=True)
    return rows


def planned(name: str) -> dict[str, Any]:
    """Bytes of a large net in several numbers of blocks, on one device and on several."""
    net, shape = NETS[name](), (3, 224, 224)

    def plan(batch: int, **settings: Any) -> Plan:
        common = {"rule": rules.auxiliary(), "order": tpsgd.simultaneous, "others": False}
        return tpsgd.plan(net, shape, batch_size=batch, samples=SAMPLES, **common, **settings)

    rows: dict[str, Any] = {"parameters": sum(p.numel() for p in net.parameters()), "blocks": {}}
    most = len(tpsgd.split(net, shape, blocks="layers"))
    for blocks in (n for n in BLOCKS if n <= most):
        row = {"one": plan(LARGE, blocks=blocks).peak_bytes}
        for devices in DEVICES if blocks > 1 else ():
            stages = min(blocks, devices)
            pipeline = plan(LARGE * stages // devices, blocks=blocks, ranks=stages).pipeline
            row[str(devices)] = max(rank.peak_bytes for rank in pipeline.ranks)
        rows["blocks"][str(blocks)] = row
        print(name, blocks, {k: f"{v / 2**30:.2f} GB" for k, v in row.items()}, flush=True)
    settings = {"rule": rules.auxiliary(), "order": tpsgd.simultaneous, "blocks": 4}
    ways = tpsgd.plan(net, shape, batch_size=LARGE, samples=SAMPLES, **settings)
    rows["ways"] = {line.name: line.total for line in ways.lines if "backprop" in line.name}
    return rows


def main() -> None:
    """Measure, and compute."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    options.smoke = False
    torch.set_num_threads(1)
    record, save = result_file(options, "deep_memory")
    record |= origin("deep_memory", "cpu")
    record["command"] = "python benchmarks/deep_memory.py --out results"
    record |= {"depth": by_depth(), "large": {name: planned(name) for name in NETS}}
    save()


if __name__ == "__main__":
    main()
