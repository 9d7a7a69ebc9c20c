"""Tables and values of the pages on adaptors and on deep nets: adaptors.json, deep.json."""

from statistics import fmean

from written import IN_PAPER, Record, Results, cell, count, origin, percent, table

from tpsgd.units import size

# Lomnitz et al. (2022), table of Imagenette: accuracy in per cent and its spread over 25 restarts.
PAPER = {
    "full, rule": "64 (3.1)",
    "full, backprop": "78 (1.4)",
    "transfer": "87 (1.3)",
    "adaptor, rule": "83 (0.95)",
    "adaptor, backprop": "88 (1.7)",
}
TRANSFER = "transfer (dense layers, backprop)"
SHOWN = ("backprop", "readout", "tpsgd-l2", "frozen", "linear probe")


def _rows(record: Record, **wanted: object) -> list[Record]:
    return [r for r in record if all(r.get(k) == v for k, v in wanted.items())]


def taps(results: Results) -> str:
    """Every arm at pool5, and the main ones at earlier taps."""
    record = results["adaptors"]
    arms = list(dict.fromkeys(row["arm"] for row in record["table"]))
    lines = []
    for arm in arms:
        cells = []
        for tap in ("pool5", "pool4", "pool3"):
            found = _rows(record["table"], arm=arm, tap=tap)
            cells.append(cell(found[0]) if found else "–")
        row = _rows(record["table"], arm=arm, tap="pool5")[0]
        cost = [size(row["trained_bytes"]), size(row["peak_bytes"]), f"{row['seconds']:.2f}"]
        lines.append([f"`{arm}`" if arm != TRANSFER else arm, *cells, *cost])
    head = ["", "pool5 %", "pool4 %", "pool3 %", "trained", "peak", "seconds"]
    note = (
        f"The paper's adaptor on VGG16, {record['train']:,} training and {record['test']:,} test "
        f"images of Imagenette, {record['note']}; {count(record['fitting']['epochs'], 'epoch')} "
        f"per block, batches of {record['fitting']['batch_size']}, Adam, mean and deviation of "
        f"{record['restarts']} restarts; bytes and seconds at pool5, of training the layers on "
        "features that are kept. Rates were chosen at pool5 on held-out training images."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def papers(results: Results) -> str:
    """The paper's table of Imagenette beside ours."""
    adaptors, deep = results["adaptors"], results["deep"]
    net = deep["nets"]["vgg11"]["arms"]
    at = {r["arm"]: r for r in adaptors["table"] if r["tap"] == "pool5"}
    rows = [
        ["full net, VGG11", "backprop", _deep(net["backprop"]), PAPER["full, backprop"]],
        ["", "`tpsgd-l2`, pooled and standardised", _deep(net["tpsgd-l2"]), PAPER["full, rule"]],
        ["", "`tpsgd-l2` as printed", _deep(net["tpsgd-l2, as printed"]), "–"],
        ["", "`predsim`, no convolution", _deep(net["predsim, no convolution"]), "–"],
        ["transfer, dense layers of VGG16", "backprop", cell(at[TRANSFER]), PAPER["transfer"]],
        ["adaptor", "backprop", cell(at["backprop"]), PAPER["adaptor, backprop"]],
        ["", "`tpsgd-l2`", cell(at["tpsgd-l2"]), PAPER["adaptor, rule"]],
        ["", "`readout`", cell(at["readout"]), "–"],
        ["linear probe", "solved", cell(at["linear probe"]), "–"],
    ]
    costs = [
        *(net[a] for a in ("backprop", "tpsgd-l2", "tpsgd-l2, as printed")),
        net["predsim, no convolution"],
        *(at[a] for a in (TRANSFER, "backprop", "tpsgd-l2", "readout", "linear probe")),
    ]
    trained = ["–"] * 4 + [size(row["trained_bytes"]) for row in costs[4:]]
    lines = [
        [*row, own, size(cost["peak_bytes"]), f"{cost['seconds']:.2f}"]
        for row, own, cost in zip(rows, trained, costs, strict=True)
    ]
    head = ["", "learns by", "accuracy %", IN_PAPER, "trained", "peak", "seconds"]
    note = (
        "Peak memory and seconds are of the same runs as the accuracy; of adaptors they are those "
        "of the layers, not of the backbone. The paper's spread is in brackets; its images, "
        "widths and epochs are not given, so its column is beside ours, not under one roof."
    )
    return f"{table(head, lines)}\n\n{note} {origin(adaptors, deep)}"


def _deep(row: Record) -> str:
    restarts = row["restarts"]
    return cell(row) + (f" ({count(restarts, 'restart')})" if restarts < 3 else "")


def full_nets(results: Results) -> str:
    """Deep nets from scratch."""
    record, lines = results["deep"], []
    names = {"vgg11": "VGG11, Imagenette at 160 px", "vgg8": "VGG8, CIFAR-10"}
    for name, net in record["nets"].items():
        base = net["arms"]["backprop"]
        for arm, row in net["arms"].items():
            peak = f"{size(row['peak_bytes'])} (×{row['peak_bytes'] / base['peak_bytes']:.2f})"
            times = f"{row['seconds']:.1f} (×{row['seconds'] / base['seconds']:.2f})"
            cells = [cell(row), str(row["restarts"]), times, peak, f"{row['lr']:g}"]
            lines.append([names[name] if arm == "backprop" else "", f"`{arm}`", *cells])
    first, second = record["nets"]["vgg11"], record["nets"]["vgg8"]
    head = ["", "arm", "test accuracy %", "restarts", "seconds", "peak memory", "rate"]
    note = (
        f"Batch normalisation, bfloat16, random flips and crops; {first['epochs']} epochs in "
        f"batches of {first['batch_size']} and {second['epochs']} in batches of "
        f"{second['batch_size']}; {record['note']}. × is over backprop in the same run. Every "
        "batch teaches every block as it passes. Rates were chosen after two epochs on held-out "
        "training images: a short search."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def few(results: Results) -> str:
    """Accuracy by labelled images per class."""
    record, lines = results["adaptors"], []
    for tap in ("pool5", "pool4"):
        mine = _rows(record["few"], tap=tap)
        for shots in dict.fromkeys(row["shots"] for row in mine):
            cells = [cell(_rows(mine, shots=shots, arm=arm)[0]) for arm in SHOWN]
            lines.append([tap, str(shots), *cells])
    head = ["tap", "images a class", *(f"`{arm}`" for arm in SHOWN)]
    fitting = record["few_fitting"]
    note = (
        f"Test accuracy in per cent, {record['restarts']} restarts with images of their own; "
        f"{fitting['epochs']} epochs per block, batches of {fitting['batch_size']}, the rates of "
        "the whole training set."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def shifts(results: Results) -> str:
    """Shifted domains, before and after ten labelled images a class."""
    record = results["adaptors"]
    rows = [r for r in record["shifts"] if r.get("replay") == 0]
    due = {r["shift"]: r for r in record["shifts"] if r.get("detector") == "mahalanobis"}
    lines = []
    for word in dict.fromkeys(row["domain"] for row in rows):
        cells = []
        for arm in SHOWN:
            mine = _rows(rows, domain=word, arm=arm)
            before, after, lost = (
                100 * fmean(r[k] for r in mine) for k in ("new_before", "new_after", "forgotten")
            )
            cells.append(f"{before:.1f} → {after:.1f} (−{lost:.1f})")
        lines.append([f"`{word}`", "due" if due[word]["due"] else "not due", *cells])
    head = ["shift", "detector", *(f"`{arm}`" for arm in SHOWN)]
    clean = ", ".join(
        f"`{arm}` {percent([r['known_before'] for r in _rows(rows, arm=arm, domain='grey')], 1)}"
        for arm in SHOWN
    )
    note = (
        "Test accuracy in per cent on shifted images, before and after learning from 10 labelled "
        "ones per class; in brackets the points lost on the clean images by doing so. Before, on "
        f"clean images: {clean}. Adaptors at pool5, {record['restarts']} restarts, each with "
        "labelled images of its own."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def detectors(results: Results) -> str:
    """What both detectors say about every shift."""
    record = results["adaptors"]
    rows = [r for r in record["shifts"] if "detector" in r]
    lines = []
    for word in dict.fromkeys(row["shift"] for row in rows):
        cells = []
        for name in ("mahalanobis", "hyperdimensional"):
            row = _rows(rows, shift=word, detector=name)[0]
            said = "due" if row["due"] else "not due"
            cells += [f"{row['auroc']:.2f}", f"{100 * row['share_new']:.0f} %, {said}"]
        lines.append([f"`{word}`", *cells])
    head = ["shift", "Mahalanobis: AUROC", "new", "hyperdimensional: AUROC", "new"]
    note = (
        "VGG16 at pool5, averaged over space; fitted on nine tenths of the training images, its "
        "threshold set by the tenth so that one in twenty known images is beyond it."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def precision(results: Results) -> str:
    """Lighter backbones."""
    record, lines = results["adaptors"], []
    whole = _rows(record["precision"], backbone="float32")[0]["weight_bytes"]
    arms = ("backprop", "readout", "tpsgd-l2", "linear probe")
    for name in dict.fromkeys(row["backbone"] for row in record["precision"]):
        mine = _rows(record["precision"], backbone=name)
        held = f"{size(mine[0]['weight_bytes'])} (×{mine[0]['weight_bytes'] / whole:.2f})"
        cells = [cell(_rows(mine, arm=arm)[0]) for arm in arms]
        lines.append([name, held, f"{mine[0]['cosine']:.4f}", *cells])
    head = ["backbone", "weights", "cosine", *(f"`{arm}`" for arm in arms)]
    note = (
        f"Test accuracy in per cent of adaptors at pool5, {record['restarts']} restarts; the "
        "cosine is that of the features with those of float32. Pruned weights are zeros and are "
        "stored as such here."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def speeds(results: Results) -> str:
    """Milliseconds an image of every copy of the backbone on a CPU."""
    record = results["backbones"]
    counts = list(record["threads"])
    lines = []
    for i, first in enumerate(record["threads"][counts[0]]):
        each = [record["threads"][n][i] for n in counts]
        cells = [f"{row['ms']:.0f} (×{row['time_ratio']:.2f})" for row in each]
        held = f"{size(first['bytes'])} (×{first['bytes_ratio']:.2f})"
        lines.append([first["backbone"], *cells, held, f"{first['cosine']:.4f}"])
    times = [f"ms an image, {count(int(n), 'thread')}" for n in counts]
    head = ["backbone", *times, "weights", "cosine"]
    note = f"VGG16 up to {record['tap']} at 160 px; × is over float32 in the same run."
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def combinations(results: Results) -> str:
    """One, two and three taps."""
    record, lines = results["adaptors"], []
    for names in dict.fromkeys(row["taps"] for row in record["combinations"]):
        for how in ("averaged", "learned"):
            mine = _rows(record["combinations"], taps=names, combine=how)
            if mine:
                single = "+" not in names
                lines.append([names, "–" if single else how, *(cell(row) for row in mine)])
    arms = dict.fromkeys(row["arm"] for row in record["combinations"])
    head = ["taps", "combined", *(f"`{arm}`" for arm in arms)]
    note = (
        "L0 is pool5, L1 pool4, L2 pool3. Test accuracy in per cent of adaptors trained on nine "
        f"tenths of the training images, {record['restarts']} restarts; learned weights were found "
        "on the tenth."
    )
    return f"{table(head, lines)}\n\n{note} {origin(record)}"


def accuracy(results: Results, tap: str, arm: str) -> str:
    """The mean accuracy of one arm at one tap."""
    return f"{100 * _rows(results['adaptors']['table'], tap=tap, arm=arm)[0]['accuracy']:.2f}"


def deep_accuracy(results: Results, net: str, arm: str) -> str:
    """The mean accuracy of one arm of a deep net."""
    return f"{100 * results['deep']['nets'][net]['arms'][arm]['accuracy']:.1f}"


def shot(results: Results, tap: str, shots: str, arm: str) -> str:
    """The mean accuracy of one arm with so many images a class."""
    row = _rows(results["adaptors"]["few"], tap=tap, shots=int(shots), arm=arm)[0]
    return f"{100 * row['accuracy']:.1f}"


def shifted(results: Results, word: str, arm: str, key: str) -> str:
    """One figure of one arm on one shift, without replay."""
    mine = _rows(results["adaptors"]["shifts"], domain=word, arm=arm, replay=0)
    return f"{100 * fmean(r[key] for r in mine):.1f}"


def search_note(results: Results) -> str:
    """What the heatmaps show."""
    record = results["search"]
    return f"`{record['command']}`."


def search_correlations(results: Results) -> str:
    """How the score without training ranks layers beside their accuracy, by tap and over all."""
    record = results["search"]
    from tpsgd.adapt.naswot import spearman

    rows = [r for r in record["rows"] if r["score"] is not None and r["accuracy"] is not None]
    parts = []
    for tap in dict.fromkeys(row["tap"] for row in rows):
        mine = [row for row in rows if row["tap"] == tap]
        found = spearman([r["score"] for r in mine], [r["accuracy"] for r in mine])
        parts.append(f"{found:+.2f} at {tap}")
    return f"{', '.join(parts)}, {record['rank_correlation']:+.2f} over all"
