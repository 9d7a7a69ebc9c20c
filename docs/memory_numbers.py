"""Tables and values of the memory page: memory-cpu.json, memory-gpu.json, vgg-memory.json."""

from written import Record, Results, count, origin, table

from tpsgd.units import size

WAYS = (
    "readout, sequential, recomputed",
    "readout, simultaneous",
    "tpsgd-l2, sequential, recomputed",
    "backprop",
    "backprop, 4 micro-batches",
    "backprop, checkpointed",
    "backprop, step inside",
    "last layer alone",
)


def planned(results: Results, where: str) -> str:
    """Measured bytes of every net and way, and the plan's over them."""
    record = results[f"memory-{where}"]
    rows = {(r["net"], r["way"]): r for r in record["plan"]}
    nets = list(dict.fromkeys(net for net, _ in rows))
    lines = []
    for way in WAYS:
        cells = [_planned(rows.get((net, way))) for net in nets]
        lines.append([way, *cells])
    note = (
        "Measured peak beyond the data set, in brackets the planned one over it; batches of 128, "
        "of 64 for VGG11. Inputs are computed again."
    )
    return f"{table(['', *nets], lines)}\n\n{note} {origin(record)}"


def _planned(row: Record | None) -> str:
    return "–" if row is None else f"{size(row['measured'])} ({row['ratio']:.3f})"


def spread(results: Results, where: str) -> str:
    """The least and the largest ratio of planned to measured bytes."""
    ratios = [row["ratio"] for row in results[f"memory-{where}"]["plan"]]
    return f"{min(ratios):.3f} to {max(ratios):.3f}"


def planned_ratio(results: Results, net: str, way: str, over: str) -> str:
    """One way's measured bytes over another's, on the GPU."""
    rows = {r["way"]: r["measured"] for r in results["memory-gpu"]["plan"] if r["net"] == net}
    return f"{rows[way] / rows[over]:.2f}"


def depth(results: Results, where: str) -> str:
    """What 2 and 16 equal layers hold beyond their weights."""
    record = results[f"memory-{where}"]
    rows = [
        [
            r["net"],
            f"`{r['arm']}`",
            size(r["two"]),
            size(r["sixteen"]),
            f"{100 * r['growth']:+.1f} %",
        ]
        for r in record["depth"]
    ]
    head = ["net", "arm", "2 layers", "16 layers", "growth"]
    note = "Peak beyond the data set and the weights; batches of 128, inputs computed again."
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def deep(results: Results) -> str:
    """VGG11 from scratch: accuracy, seconds and bytes of each arm's one run."""
    record = results["vgg-memory"]
    base = record["vgg11"][0]
    rows = []
    for row in record["vgg11"]:
        times = f"{row['seconds']:.0f} (×{row['seconds'] / base['seconds']:.2f})"
        peak = f"{size(row['peak_bytes'])} (×{row['peak_bytes'] / base['peak_bytes']:.2f})"
        passes = f"{row['epochs']} × {'blocks' if row['arm'] in LOCAL else 'net'}"
        cells = [f"{100 * row['accuracy']:.2f}", times, peak, passes, f"{row['lr']:g}"]
        rows.append([f"`{row['arm']}`", *cells])
    head = ["arm", "test accuracy %", "seconds", "peak memory", "epochs", "rate"]
    note = (
        "VGG11 with a dense layer of 512, no BatchNorm, float32 (TF32 in convolutions), no "
        f"augmentation; {record['note']}; {record['train']:,} training and {record['test']:,} test "
        f"images, batches of {record['batch_size']}, Adam, one restart. Blocks learn one after "
        "another, their inputs computed again. Rates were chosen after one epoch on the last tenth "
        "of the training images: a short search, so read the bytes, not a ranking of rules."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


LOCAL = ("readout", "predsim", "frozen")


def sizes(results: Results) -> str:
    """Bytes of VGG11 with both dense parts, and what was planned."""
    record = results["vgg-memory"]
    nets = list(dict.fromkeys(r["net"] for r in record["sizes"]))
    rows = {(r["net"], r["arm"]): r for r in record["sizes"]}
    base = {net: rows[net, "backprop"]["measured"] for net in nets}
    lines = []
    for arm in dict.fromkeys(r["arm"] for r in record["sizes"]):
        cells = []
        for net in nets:
            row = rows[net, arm]
            times = row["measured"] / base[net]
            cells.append(f"{size(row['measured'])} (×{times:.2f}, planned {row['ratio']:.3f})")
        lines.append([f"`{arm}`", *cells])
    note = "VGG11 at 160 px, batches of 64; × is over backprop, planned is over measured."
    return f"{table(['arm', *nets], lines)}\n\n{note} {origin(record)}"


def adaptor(results: Results) -> str:
    """The paper's adaptor: accuracy, seconds and bytes."""
    record = results["vgg-memory"]
    rows = []
    for row in record["adaptor"]:
        base = next(r for r in record["adaptor"] if r["batch_size"] == row["batch_size"])
        peak = f"{size(row['peak_bytes'])} (×{row['peak_bytes'] / base['peak_bytes']:.2f})"
        got = f"{100 * row['accuracy']:.2f} ± {100 * row['accuracy_std']:.2f}"
        cells = [str(row["batch_size"]), f"`{row['arm']}`", got, f"{row['seconds']:.1f}", peak]
        rows.append(cells)
    head = ["batch", "arm", "test accuracy %", "seconds", "peak memory"]
    note = (
        "Conv(64, 5) - Dense(256) - Dense(10) on the features of a frozen ImageNet VGG16 at pool5, "
        "Adam at 1e-3, 8 epochs (per block), "
        f"{count(record['adaptor'][0]['restarts'], 'restart')}. "
        "ImageNet holds these classes, so a high accuracy is no finding."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def small(results: Results) -> str:
    """MNIST in little memory."""
    record = results["memory-cpu"]
    rows = []
    for row in record["small"]:
        mine = row["arms"]["readout"]
        held = mine["peak_bytes"] + (mine["kept_bytes"] if row["budget"] else 0)
        cells = [
            size(row["budget"]) if row["budget"] else "–", str(row["batch_size"]),
            f"`{row['optimizer']}`", size(held), f"{100 * mine['accuracy']:.2f}",
            *(
                f"{100 * row['arms'][a]['accuracy']:.2f} in {size(row['arms'][a]['peak_bytes'])}"
                for a in ("backprop", "frozen")
            ),
        ]  # fmt: skip
        rows.append(cells)
    head = ["budget", "batch", "optimizer", "held", "`readout` %", "`backprop`", "`frozen`"]
    note = (
        "MNIST, 784-256-10, all training samples, test accuracy, one restart, 5 epochs per block. "
        "Held: the measured peak beyond the data set, the model and kept inputs included (without "
        "a budget: without them). Rates of plain SGD were chosen after an epoch on the last 10,000 "
        "training samples; backprop has no budget."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def floor(results: Results) -> str:
    """What plain SGD on one sample at a time is planned to hold."""
    return size(results["memory-cpu"]["small"][-1]["planned_with_batches_of_1"])


def resident(results: Results) -> str:
    """What fresh processes took."""
    record = results["memory-cpu"]
    names = {
        "data": "import torch and tpsgd, load MNIST as float32, one product",
        "optimizer": "and make a `torch.optim.Adam`",
        "adam": "`fit`, one epoch per block, Adam",
        "sgd": "`fit`, one epoch per block, `tpsgd.sgd`",
        "backprop": "`fit_backprop`, one epoch, Adam",
    }
    rows = [[names[r["what"]], size(r["resident"]), size(r["most"])] for r in record["resident"]]
    head = ["a fresh process", "resident at the end", "at its peak"]
    return f"{table(head, rows)}\n\n{origin(record)}"


def ratio(results: Results, arm: str, over: str) -> str:
    """VGG11's peak over another arm's, in the training run."""
    peaks = {r["arm"]: r["peak_bytes"] for r in results["vgg-memory"]["vgg11"]}
    return f"{peaks[arm] / peaks[over]:.2f}"


def vgg(results: Results, arm: str, what: str) -> str:
    """One figure of the VGG11 run, for a sentence."""
    row = next(r for r in results["vgg-memory"]["vgg11"] if r["arm"] == arm)
    return {
        "accuracy": f"{100 * row['accuracy']:.1f} %",
        "memory": size(row["peak_bytes"]),
        "seconds": f"{row['seconds']:.0f} s",
    }[what]


def adaptor_ratio(results: Results, batch: str, arm: str) -> str:
    """The adaptor's peak over backprop's."""
    rows = [r for r in results["vgg-memory"]["adaptor"] if r["batch_size"] == int(batch)]
    peaks = {r["arm"]: r["peak_bytes"] for r in rows}
    return f"{peaks[arm] / peaks['backprop']:.2f}"


def small_value(results: Results, number: str, what: str) -> str:
    """A figure of `readout` in one row of the MNIST table."""
    row = results["memory-cpu"]["small"][int(number)]["arms"]["readout"]
    if what == "accuracy":
        return f"{100 * row['accuracy']:.2f} %"
    return size(row["peak_bytes"] + row["kept_bytes"])
