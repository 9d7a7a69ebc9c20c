"""A deep net and the paper's adaptor on a GPU: accuracy, seconds and peak bytes from one run each.

    python benchmarks/vgg.py --images imagenette.npz --encoder vgg16_features.npz --out results

- VGG11 at 160 px from scratch, no BatchNorm, float32, batches of 64: `readout` block by block with
  inputs recomputed, backprop, backprop with checkpointing, predsim, and the frozen control. The
  learning rate of each arm is chosen on the last tenth of the training images.
- The same with torchvision's two dense layers of 4,096, for its bytes.
- The paper's adaptor, Conv(64, 5) - Dense(256) - Dense(10), on the features of a frozen VGG16 at
  pool5, three restarts.

The images are arrays x, y, x_test, y_test: uint8 RGB (samples, 3, 160, 160) and classes.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import Memory, Run, rules
from tpsgd.common.units import size
from tpsgd.comparison.provenance import machine, versions
from tpsgd.zoo.vgg import vgg

BATCH, SHAPE, CLASSES = 64, (3, 160, 160), 10
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RATES: dict[str, tuple[float, ...]] = {  # to try; the checkpointed net has backprop's
    "backprop": (1e-4, 3e-4, 1e-3),
    "backprop, checkpointed": (),
    "readout": (1e-4, 3e-4, 1e-3),
    "predsim": (3e-4, 1e-3),
    "frozen": (3e-4, 1e-3),
}
Samples = tuple[Tensor, Tensor]
Row = dict[str, Any]
Fit = Callable[..., Run]


def arms() -> dict[str, tuple[Fit, Row]]:
    """Every arm of VGG11: the function and its settings."""
    local = {"order": tpsgd.sequential, "memory": Memory(reuse=False)}
    return {
        "backprop": (tpsgd.fit_backprop, {}),
        "backprop, checkpointed": (tpsgd.fit_backprop, {"segments": True}),
        "readout": (tpsgd.fit, {"rule": rules.readout(), **local}),
        "predsim": (tpsgd.fit, {"rule": rules.predsim(), **local}),
        "frozen": (tpsgd.fit, {"rule": rules.frozen(), **local}),
    }


def net(dense: tuple[int, ...] = (512,)) -> nn.Module:
    """A fresh VGG11 on the GPU."""
    torch.manual_seed(0)
    return vgg(11, SHAPE, CLASSES, dense).cuda()


def deep(train: Samples, test: Samples, epochs: dict[str, int]) -> list[Row]:
    """VGG11 from scratch under every arm."""
    cut = len(train[1]) * 9 // 10
    part, held = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
    rows: list[Row] = []
    for name, (fit, settings) in arms().items():
        tries: dict[float, float] = {}
        for lr in RATES[name]:
            model = net()
            try:
                fit(model, part, lr=lr, epochs=epochs["search"], batch_size=BATCH, **settings)
                tries[lr] = tpsgd.evaluate(model, held, batch_size=256)
            except tpsgd.TpsgdError as error:
                tries[lr] = 0.0
                print(f"{name} at {lr:g}: {error}", flush=True)
        lr = max(tries, key=lambda lr: tries[lr]) if tries else rows[0]["lr"]
        model = net()
        run = fit(model, train, lr=lr, epochs=epochs[name], batch_size=BATCH, **settings)
        row = {"arm": name, "lr": lr, "held_out": tries, "epochs": epochs[name]}
        row |= {"accuracy": tpsgd.evaluate(model, test, batch_size=256), "seconds": run.seconds}
        row |= {"peak_bytes": run.peak_bytes, "kept_bytes": run.kept_bytes}
        rows.append(row | {"sample_passes": run.sample_passes})
        print(
            f"{name:24} {row['accuracy']:.2%} {run.seconds:7.1f} s {size(run.peak_bytes):>9}",
            flush=True,
        )
        del model
    return rows


def planned(rule: rules.Rule, dense: tuple[int, ...], order: Any) -> Any:
    """The plan of VGG11 on this GPU."""
    return tpsgd.plan(
        net(dense), SHAPE, batch_size=BATCH, rule=rule, order=order, epochs=1, device="cuda",
        memory=Memory(reuse=False),
    )  # fmt: skip


def sizes(train: Samples) -> list[Row]:
    """Measured and planned bytes of VGG11 and of torchvision's size, a few batches each."""
    few = train[0][: 4 * BATCH], train[1][: 4 * BATCH]
    rows: list[Row] = []
    for title, dense in (("dense 512", (512,)), ("dense 4096, 4096", (4096, 4096))):
        for name, (fit, settings) in arms().items():
            how = settings.get("rule") or rules.readout()
            plan = planned(how, dense, settings.get("order", tpsgd.sequential))
            line = plan[name] if name in {x.name for x in plan.lines} else plan.lines[0]
            if line.segments:
                settings = {"segments": line.segments}
            run = fit(net(dense), few, epochs=1, batch_size=BATCH, **settings)
            row = {"net": title, "arm": name, "measured": run.peak_bytes, "planned": line.peak}
            rows.append(row | {"ratio": line.peak / run.peak_bytes})
            print(
                f"{title:18} {name:24} {size(run.peak_bytes):>9} plan {rows[-1]['ratio']:.3f}",
                flush=True,
            )
    return rows


# ---- the adaptor ---------------------------------------------------------------------------------


def encoder(file: Path) -> nn.Module:
    """The frozen VGG16 up to pool5."""
    features = vgg(16, (3, 32, 32), CLASSES).features
    arrays = np.load(file)
    state = {k.removeprefix("features."): torch.from_numpy(arrays[k]).float() for k in arrays.files}
    assert isinstance(features, nn.Module)
    features.load_state_dict(state)
    return features.cuda().eval()


@torch.no_grad()
def encoded(model: nn.Module, x: Tensor) -> Tensor:
    """The features of every image."""
    return torch.cat([model(scaled(part)) for part in x.split(256)])


def scaled(x: Tensor) -> Tensor:
    """Bytes as ImageNet's nets want them, on the GPU."""
    mean, std = (torch.tensor(v, device="cuda").view(1, 3, 1, 1) for v in (MEAN, STD))
    return (x.cuda().float() / 255 - mean) / std


def adaptor() -> nn.Module:
    """The paper's."""
    return nn.Sequential(
        nn.Conv2d(512, 64, 5, padding=2), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(64 * 25, 256), nn.LeakyReLU(), nn.Linear(256, CLASSES),
    ).cuda()  # fmt: skip


def adapt(train: Samples, test: Samples, batch: int) -> list[Row]:
    """The adaptor under every rule, three restarts; Adam at 1e-3, eight epochs."""
    rows: list[Row] = []
    each: dict[str, tuple[Fit, Row]] = {"backprop": (tpsgd.fit_backprop, {})}
    for rule in (rules.readout(), rules.tpsgd_l2(), rules.frozen()):
        each[rule.name] = (tpsgd.fit, {"rule": rule, "memory": Memory(reuse=False)})
    for name, (fit, settings) in each.items():
        shares, runs = [], []
        for seed in range(3):
            torch.manual_seed(seed)
            model = adaptor()
            runs.append(fit(model, train, epochs=8, batch_size=batch, seed=seed, **settings))
            shares.append(tpsgd.evaluate(model, test))
        row = {"arm": name, "accuracy": fmean(shares), "accuracy_std": stdev(shares)}
        row |= {"batch_size": batch}
        row |= {"seconds": fmean(r.seconds for r in runs), "accuracies": shares}
        row |= {"peak_bytes": max(r.peak_bytes for r in runs), "restarts": len(runs)}
        rows.append(row)
        print(
            f"adaptor, batch {batch} {name:10} {row['accuracy']:.2%} {row['seconds']:6.1f} s "
            f"{size(row['peak_bytes']):>9} x {row['peak_bytes'] / rows[0]['peak_bytes']:.3f}",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure, write `vgg-memory.json` after each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--note", default="", help="how the images were made, for the record")
    parser.add_argument("--epochs", type=int, default=10, help="of backprop; half for blocks")
    parser.add_argument("--only", default="adaptor,sizes,vgg11")
    options = parser.parse_args()
    arrays = np.load(options.images)
    x, y, x_test, y_test = (torch.from_numpy(arrays[k]) for k in ("x", "y", "x_test", "y_test"))
    file = options.out / "vgg-memory.json"
    record: Row = json.loads(file.read_text()) if file.exists() else {}
    record |= {"machine": machine("cuda"), "versions": versions(), "note": options.note}
    record |= {"train": len(y), "test": len(y_test), "batch_size": BATCH}
    record["command"] = "python benchmarks/vgg.py --images FILE --encoder FILE"
    options.out.mkdir(parents=True, exist_ok=True)

    def keep(name: str, rows: list[Row]) -> None:
        record[name] = rows
        file.write_text(json.dumps(record, indent=1))

    if "adaptor" in options.only:
        frozen = encoder(options.encoder)
        pairs = [(encoded(frozen, a), b.long().cuda()) for a, b in ((x, y), (x_test, y_test))]
        del frozen
        keep("adaptor", [row for batch in (32, 64) for row in adapt(*pairs, batch)])
        del pairs
    train, test = ((scaled(a), b.long().cuda()) for a, b in ((x, y), (x_test, y_test)))
    if "sizes" in options.only:
        keep("sizes", sizes(train))
    if "vgg11" not in options.only:
        return
    epochs = {"search": max(1, options.epochs // 10), "backprop": options.epochs}
    epochs |= {"backprop, checkpointed": options.epochs}
    epochs |= {name: max(1, options.epochs // 2) for name in arms() if name not in epochs}
    keep("vgg11", deep(train, test, epochs))


if __name__ == "__main__":
    main()
