"""Fill the numbers of the README and the docs in from `results/*.json`.

    python docs/fill_numbers.py             # write them
    python docs/fill_numbers.py --check     # exit 1 where a page is out of date

A place is `<!-- numbers: NAME -->` ... `<!-- end -->`: a table when the first mark ends its line, a
value inside a sentence otherwise. `TABLES` and `VALUES` list the names; words after a slash are
arguments, as in `accuracy/mnist-mlp/frozen`. What has not been measured yet says so.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tpsgd.experiments.recurrent import PAPER as BY_SET
from tpsgd.run import BlockInfo, Epoch, Run, size

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- numbers: (?P<name>.+?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"[\d*×–−+±]")  # how a cell of figures starts
Record = dict[str, Any]

# The files, and what makes them.
FILES = {
    "demo-mlp": "make demo (demo/mlp/results.json)",
    "demo-cnn": "make demo (demo/cnn/results.json)",
    "shallow": "python -m tpsgd.experiments.shallow --out results",
    "speed": "python benchmarks/speed.py --out results",
    "gpu": "python benchmarks/gpu.py --out results",
    "recurrent": "python -m tpsgd.experiments.recurrent --out results",
    "sequences": "python benchmarks/sequences.py --out results",
}
ORDER = (
    *("backprop", "readout", "readout-learned", "tpsgd-l2", "tpsgd-l1", "dfa", "sdfa", "drtp"),
    "frozen",
    "frozen-long",
)
NETS = {
    "mnist-mlp": "MNIST, MLP",
    "mnist-cnn": "MNIST, CNN",
    "cifar10-cnn": "CIFAR-10, CNN",
}
# Lomnitz et al. (2022), tables 2 and 3: accuracy in per cent and its deviation over 25 restarts,
# seconds. Its tpSGD lowers the squared error, so it stands beside our `tpsgd-l2`.
PAPER = {
    ("mnist-mlp", "tpsgd-l2"): ("88.3 ± 0.25", "1.7"),
    ("mnist-cnn", "tpsgd-l2"): ("96.6 ± 0.2", "2.7"),
    ("mnist-cnn", "backprop"): ("97.1 ± 0.21", "2.3"),
    ("cifar10-cnn", "tpsgd-l2"): ("46.5 ± 1.2", "4.6"),
    ("cifar10-cnn", "backprop"): ("46.8 ± 1.1", "4.8"),
}
PAPER_MACHINE = "NVIDIA RTX A5000"
IN_PAPER = "*in the paper*"
# Recurrent nets: columns of the tables and their sets, rows and their places in the paper's table.
SEQUENCES = {
    "seq-mnist-rows": "MNIST rows",
    "seq-mnist-pixels": "MNIST pixels",
    "eeg": "EEG, by recording",
    "tweets": "tweets, one-hot",
    "tweets-vectors": "tweets, vectors",
}
SPLITS = {
    "eeg-rows": "EEG, by row",
    "eeg-tumour": "tumour EEG, by recording",
    "eeg-tumour-rows": "tumour EEG, by row",
    "tweets-holdout": "tweets hold-out, one-hot",
    "tweets-vectors-holdout": "tweets hold-out, vectors",
}
PUBLISHED = ("random", "random-rnn", "drtp", "tpsgd-l1", "backprop")
SINGLE = (  # arms of that shape alone
    *("readout-perceptron", "reservoir-perceptron"),
    *("backprop-leaky", "backprop-leaky in readout's time"),
)
THROUGH_TIME = "backprop through time"  # the reference of `sequences`
SEQUENCE_ARMS = (*PUBLISHED, "reservoir", "readout", "readout-ridge", *SINGLE)


class Missing(Exception):
    """A file that has not been made yet."""


class Results:
    """The records in a folder, read when asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __getitem__(self, name: str) -> Record:
        path = self.folder / f"{name}.json"
        if not path.is_file():
            raise Missing(name)
        return json.loads(path.read_text(encoding="utf-8"))


# Tables


def demo(results: Results) -> str:
    """What `make demo` found: every rule on both nets."""
    records = [results["demo-mlp"], results["demo-cnn"]]
    arms = [{arm["name"]: arm for arm in record["arms"]} for record in records]
    nets = [r["settings"]["model"].partition(":")[0].upper() for r in records]
    head = ["rule"]
    for net in nets:
        head += [f"{net}, accuracy %", "seconds", "peak memory"]
    rows = []
    for name in ordered({n for side in arms for n in side}):
        row = [f"`{name}`"]
        for side in arms:
            arm, base = side.get(name), side["backprop"]["summary"]
            row += demo_cells(arm, base) if arm and arm["summary"] else ["–"] * 3
        rows.append(row)
    kept = max(run["kept_bytes"] for r in records for a in r["arms"] for run in a["restarts"])
    shown = "; ".join(
        f"{net}: `{r['settings']['model']}`, {r['settings']['activation']}, "
        f"{count(r['settings']['epochs'], 'epoch')} per block"
        for net, r in zip(nets, records, strict=True)
    )
    settings, data = records[0]["settings"], records[0]["data"]
    note = (
        f"`{data['name']}`, {data['train']:,} training and {data['test']:,} test images. {shown}; "
        f"batches of {settings['batch_size']}; mean ± standard deviation of "
        f"{count(settings['restarts'], 'restart')}. × is over backprop. Inputs kept for reuse, "
        f"{size(kept)} at most, are not in the peak."
    )
    return f"{table(head, rows)}\n\n{note} {origin(*records)}"


def demo_cells(arm: Record, base: Record) -> list[str]:
    """Accuracy, seconds and peak memory of one arm of a comparison."""
    s = arm["summary"]
    return [
        percent([run["accuracy"] for run in arm["restarts"]], 1),
        f"{s['seconds']:.2f}",
        f"{size(s['peak_bytes'])} (×{s['peak_bytes'] / base['peak_bytes']:.2f})",
    ]


def printed_run(results: Results) -> str:
    """A run as `print(run)` shows it: the demo's CNN under `readout`."""
    arms = results["demo-cnn"]["arms"]
    found = next(a for a in arms if a["name"] == "readout")["restarts"][0]
    plain = {k: v for k, v in found.items() if k != "accuracy"}
    plain["blocks"] = [BlockInfo(**b) for b in plain["blocks"]]
    plain["history"] = [Epoch(**e) for e in plain["history"]]
    return f"```text\n{Run(**plain)}\n```"


def shallow(results: Results) -> str:
    """Accuracy of every rule on the paper's nets, cost on the largest, the paper's own figures."""
    record = results["shallow"]
    tables = {k: record["tables"][k] for k in NETS if k in record["tables"]}
    costly, last = tables[list(tables)[-1]]["arms"], NETS[list(tables)[-1]]
    rows = []
    for name in ordered({n for t in tables.values() for n in t["arms"]}):
        figures = [cell(t["arms"].get(name)) for t in tables.values()]
        rows.append([f"`{name}`", *figures, cost(costly.get(name), costly["backprop"])[0]])
        known = [PAPER.get((key, name), ("–", "–")) for key in tables]
        if known != [("–", "–")] * len(known):
            rows.append([IN_PAPER, *(accuracy for accuracy, _ in known), known[-1][1]])
    shown = "; ".join(
        f"{NETS[k]}: {count(t['settings']['epochs'], 'epoch')} per block, "
        f"{count(restarts(t), 'restart')}"
        for k, t in tables.items()
    )
    head = ["test accuracy %", *(NETS[k] for k in tables), f"seconds ({last})"]
    note = (
        f"Mean ± standard deviation; × is over backprop. {shown}; Adam at 1e-3, batches of 128. "
        "Variants of a rule were chosen on held-out training data; the paper's seconds are from an "
        f"{PAPER_MACHINE}."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def one_net(results: Results, key: str) -> str:
    """One of the tables of `shallow` in full: cost, the paper's figures, what was chosen.

    The peak of a GPU's allocator holds workspaces of its libraries, so bytes are those of a CPU.
    """
    record = results["shallow"]
    found, on_cpu = record["tables"][key], not record["machine"]["gpu"]
    base, known = found["arms"]["backprop"], any(net == key for net, _ in PAPER)
    rows = []
    for name in ordered(found["arms"]):
        arm = found["arms"][name]
        time, peak = cost(arm, base)
        kept = size(arm["kept_bytes"]) if arm["kept_bytes"] else "–"
        passes = f"{arm['sample_passes'] / 1e6:.2f} M"
        figures = [cell(arm), time, *[peak] * on_cpu, kept, passes]
        rows.append([f"`{name}`", *figures, arm["variant"] or "–"])
        if (key, name) in PAPER:
            rows.append([IN_PAPER, *PAPER[key, name], *["–"] * (len(figures) - 1)])
    head = ["rule", "accuracy %", "seconds", *["peak memory"] * on_cpu]
    head += ["kept inputs", "sample passes", "chosen on held-out data"]
    settings = found["settings"]
    note = (
        f"{settings['activation']}, {count(settings['epochs'], 'epoch')} per block, "
        f"{count(restarts(found), 'restart')}; × is over backprop."
    )
    if known:
        note += f" The paper's seconds are from an {PAPER_MACHINE}."
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def held_out(results: Results, key: str) -> str:
    """What every variant reached on held-out data; the chosen one in bold."""
    record = results["shallow"]
    found = record["tables"][key]
    rows = []
    for name in ordered(found["arms"]):
        arm = found["arms"][name]
        for variant, accuracy in arm["held_out"].items():
            bold = "**" if variant == arm["variant"] else ""
            value = f"{100 * accuracy:.2f}"
            rows.append([f"`{name}`", f"{bold}{variant}{bold}", f"{bold}{value}{bold}"])
    note = f"Trained without the last {found['held_out']:,} training samples, tested on them."
    return f"{table(('rule', 'variant', 'held-out accuracy %'), rows)}\n\n{note} {origin(record)}"


def speed(results: Results) -> str:
    """Seconds of every rule, and over backprop's in its faster memory layout."""
    record = results["speed"]
    nets = record["speed"]
    arms = list(dict.fromkeys(arm for rows in nets.values() for arm in rows))

    def seconds(net: Record, arm: str) -> str:
        row = net.get(arm)
        return f"{row['seconds']:.2f} (×{row['ratio']:.2f})" if row else "–"

    rows = [[f"`{arm}`", *(seconds(net, arm) for net in nets.values())] for arm in arms]
    note = (
        f"Seconds of training, the fastest of {count(record['turns'], 'turn')}; × is over the "
        "faster of backprop's two memory layouts. Passes that make the next block's inputs are "
        "included."
    )
    return f"{table(('', *nets), rows)}\n\n{note} {origin(record)}"


def memory(results: Results) -> str:
    """Peak bytes by depth."""
    record = results["speed"]
    arms = [arm for arm in record["memory"][0] if arm != "depth"]
    rows = [
        [
            str(row["depth"]),
            *(f"{size(row[a])} (×{row[a] / row['backprop']:.2f})" for a in arms),
        ]
        for row in record["memory"]
    ]
    note = (
        "Peak memory of training plain CNNs (16 channels, 32 x 32 images, batches of 128): model, "
        "optimizer, activations and projections, no inputs kept (`reuse=False`); × is over "
        "backprop."
    )
    return f"{table(('layers', *(f'`{a}`' for a in arms)), rows)}\n\n{note} {origin(record)}"


def many_restarts(results: Results) -> str:
    """25 restarts stacked into one step, against one."""
    record = results["gpu"]
    rows = [
        [
            f"`{row['rule']}`",
            *(f"{1e3 * row[k]:.0f} ms" for k in ("seconds_1", "seconds_25")),
            f"×{row['ratio']:.2f}",
            f"{1e3 * row['seconds_backprop']:.0f} ms",
            f"{100 * row['accuracy_25']:.2f}",
            f"{100 * row['accuracy_backprop']:.2f}",
        ]
        for row in record["restarts"]
    ]
    head = (
        *("rule", "1 restart", "25 together", "25 over 1", "backprop, 1 restart"),
        *("accuracy %, mean of 25", "backprop's accuracy %"),
    )
    first = record["restarts"][0]
    note = (
        f"MNIST, MLP 784-256-10, {first['epochs']} epochs, batches of {first['batch_size']}, all "
        f"blocks at once; medians of {record['repeats'] - 1} runs after a warm-up."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def time_to_paper(results: Results) -> str:
    """Milliseconds to the paper's accuracy."""
    record = results["gpu"]
    rows = [
        [
            f"`{row['rule']}`",
            percent(row["accuracies"], 2),
            f"{1e3 * row['seconds']:.1f} ms",
            f"{1e3 * row['setup_seconds']:.1f} ms",
            f"batch {row['batch_size']}, learning rate {row['lr']:g}",
        ]
        for row in record["time_to_paper"]
    ]
    accuracy, seconds = PAPER["mnist-mlp", "tpsgd-l2"]
    rows.append([f"the paper, {PAPER_MACHINE}", accuracy, f"{seconds} s", "–", "not given"])
    head = ("rule", "accuracy %", "training", "set-up", "chosen on held-out data")
    note = (
        "MNIST, MLP 784-256-10, one epoch, all blocks at once; medians of "
        f"{len(record['time_to_paper'][0]['accuracies'])} runs on a warm device; the set-up "
        "(model, data checks, projections) is stated apart, and so is the warm-up: the very first "
        f"training of the process took {record['warm_up_seconds']:.1f} s."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def recurrent(results: Results, shape: str, which: str = "sets") -> str:
    """Table 5, 6 or 7: every arm on every set, the paper's figures below; what is missing."""
    record = results["recurrent"]
    columns = SPLITS if which == "splits" else SEQUENCES
    tables = {name: record["tables"].get(f"{name}, {shape}", {}) for name in columns}
    arms = [a for a in SEQUENCE_ARMS if shape == "single" or a not in SINGLE]
    rows = []
    for i, name in enumerate(arms):
        found = [table.get("arms", {}).get(name) for table in tables.values()]
        rows.append([f"`{name}`", *map(cell, found)])
        if name in PUBLISHED:
            known = [t.get("paper") or BY_SET.get((key, shape)) for key, t in tables.items()]
            rows.append([IN_PAPER, *(f"{k[i]:.2f}" if k else "–" for k in known)])
    head = ("test accuracy %", *columns.values())
    note = f"{_legend(record | {'tables': tables})} {_missing(tables, arms, shape)}"
    if (shape, which) == ("single", "sets"):
        note += _history(record)
    return f"{table(head, rows)}\n\n{note}{origin(record)}"


def _restarts(tables: Iterable[Record]) -> str:
    """`3 restarts`, or `3 to 5 restarts` where arms differ."""
    arms = [arm for table in tables for arm in table.get("arms", {}).values()]
    counts = sorted({len(arm["accuracies"]) for arm in arms}) or [0]
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + " restarts"


def _missing(tables: dict[str, Record], arms: Sequence[str], shape: str) -> str:
    """Which cells are still to be run, and by what; nothing where all are there."""
    lacking = {n: [a for a in arms if a not in t.get("arms", {})] for n, t in tables.items()}
    sets = [name for name, lost in lacking.items() if lost]
    if not sets:
        return ""
    lost = sum(map(len, lacking.values()))
    return (
        f"{lost} of {len(arms) * len(tables)} cells (–) are still to be run: `{FILES['recurrent']} "
        f"--shapes {shape} --sets {' '.join(sets)}` runs them and keeps the others. "
    )


def _history(record: Record) -> str:
    """How the file came about, where it was not made in one go."""
    return f"{record['history']} " if record.get("history") else ""


def recurrent_gaps(results: Results, *against: str) -> str:
    """The readout beside other arms of a single layer, and how far it is from each."""
    record = results["recurrent"]
    rows = []
    for key, title in (SEQUENCES | SPLITS).items():
        arms = record["tables"].get(f"{key}, single", {}).get("arms", {})
        if "readout" in arms:
            ours = arms["readout"]
            rows.append([title, cell(ours), *(_beside(ours, arms.get(a)) for a in against)])
    head = ("test accuracy %", "`readout`", *(f"`{a}`" for a in against))
    note = f"In brackets, `readout` minus that arm, in points. {_legend(record)}"
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def recurrent_paper(results: Results, *arms: str) -> str:
    """Arms of the paper's tables, ours beside the paper's, where measured."""
    record = results["recurrent"]
    rows = []
    for key, title in SEQUENCES.items():
        for shape in ("single", "stacked", "bidirectional"):
            found = record["tables"].get(f"{key}, {shape}", {})
            cells = []
            for name in arms:
                ours = found.get("arms", {}).get(name)
                paper = found["paper"][PUBLISHED.index(name)] if ours else None
                cells.append(f"{_minus(ours, [paper / 100])} to {paper:.2f}" if paper else "–")
                cells.insert(-1, cell(ours))
            if set(cells) != {"–"}:
                rows.append([f"{title}, {shape}", *cells])
    head = ["test accuracy %", *(h for a in arms for h in (f"`{a}`", "points, to the paper's"))]
    return f"{table(head, rows)}\n\n{_legend(record)} {origin(record)}"


def _beside(ours: Record, other: Record | None) -> str:
    return f"{cell(other)} ({_minus(ours, other['accuracies'])})" if other else "–"


def _minus(ours: Record, other: Sequence[float]) -> str:
    """A difference in points, signed."""
    points = round(100 * (fmean(ours["accuracies"]) - fmean(other)), 1)
    return f"{'−' if points < 0 else '+' if points > 0 else '±'}{abs(points):.1f}"


def _legend(record: Record) -> str:
    settings = record["settings"]
    return (
        f"{settings['hidden']} units, {count(settings['epochs'], 'epoch')}, batches of "
        f"{settings['batch_size']}; mean ± standard deviation of "
        f"{_restarts(record['tables'].values())}."
    )


def recurrent_seconds(results: Results) -> str:
    """Seconds of the arms that train, all restarts together."""
    record = results["recurrent"]
    tables = [record["tables"].get(f"{name}, single", {}).get("arms", {}) for name in SEQUENCES]

    def seconds(arm: Record | None) -> str:
        return f"{arm['seconds']:.1f} ({len(arm['accuracies'])})" if arm and _timed(arm) else "–"

    rows = [
        [f"`{name}`", *(seconds(arms.get(name)) for arms in tables)]
        for name in SEQUENCE_ARMS
        if name != "random" and any(name in arms and _timed(arms[name]) for arms in tables)
    ]
    note = (
        "Seconds of training all restarts together, stacked into one step; in brackets, how many. "
        "Searches are not included. –: not run, or trained while others used the GPU."
    )
    return f"{table(('seconds', *SEQUENCES.values()), rows)}\n\n{note} {origin(record)}"


def _timed(arm: Record) -> bool:
    """Whether an arm's seconds count: it had the GPU for itself, all its restarts together."""
    return arm.get("alone", True) and arm["stacked"]


def recurrent_choices(results: Results) -> str:
    """What held-out samples chose for a single layer."""
    record = results["recurrent"]
    rows = []
    for key, title in SEQUENCES.items():
        arms = record["tables"].get(f"{key}, single", {}).get("arms", {})
        for name in SEQUENCE_ARMS:
            if name in arms and arms[name]["held_out"]:
                rows.append([title, f"`{name}`", *_choice(name, arms[name])])
    head = ("set", "arm", "optimizer, rate", "W_X", "W_H", "leak", "trials", "held-out accuracy %")
    note = (
        "W_X begins uniform within ± the figure; W_H within ± the figure in the paper's cell, with "
        "that spectral radius in the leaky one. Every trial of every search is in the file. "
    )
    return f"{table(head, rows)}\n\n{note}{_history(record)}{origin(record)}"


def _choice(name: str, arm: Record) -> list[str]:
    """An arm's row: its choice, out of how many, and what the choice reached."""
    choice, best = arm["choice"], max(score for _, score in arm["held_out"])
    rate = f"{'Adam' if choice['adam'] else 'SGD'}, {choice['lr']:g}"
    if choice.get("ratio", 1.0) != 1.0:
        rate += f"; W_X at {choice['lr'] * choice['ratio']:g}"
    if name == "reservoir":
        rate = f"ridge, {choice['alpha']:g}"
    sizes = [f"{choice[k]:g}" for k in ("x", "h", "leak")]
    return [rate, *sizes, str(len(arm["held_out"])), f"{100 * best:.1f}"]


def sequences(results: Results, layers: str, *wanted: str) -> str:
    """Bytes and seconds over time by length, of all arms or some, against backprop's."""
    record = results["sequences"]
    lengths = [row for row in record["rows"] if row["layers"] == int(layers)]
    head = ["", *(f"{row['steps']:,} steps: {k}" for row in lengths for k in ("memory", "seconds"))]
    rows = [
        [f"`{arm}`", *(cell for row in lengths for cell in _over_time(row["arms"][arm]))]
        for arm in wanted or lengths[0]["arms"]
    ]
    s = record["settings"]
    note = (
        f"{count(int(layers), 'layer')} of {s['hidden']} units on {s['features']} features, "
        f"batches of {s['batch_size']}; rules have `reuse=False`. Peak memory beyond the data set, "
        f"and seconds of an epoch, the fastest of {count(s['turns'], 'turn')}; × is over "
        f"{THROUGH_TIME}. "
        "Longer sequences are fewer: compare seconds within a length."
    )
    return f"{table(head, rows)}\n\n{note} {origin(record)}"


def _over_time(arm: Record) -> tuple[str, str]:
    return (
        f"{size(arm['peak_bytes'])} (×{arm['memory_ratio']:.2f})",
        f"{arm['seconds']:.2f} (×{arm['time_ratio']:.2f})",
    )


# Values inside sentences


def accuracy(results: Results, key: str, arm: str) -> str:
    """Of one arm of `shallow`."""
    return f"{cell(results['shallow']['tables'][key]['arms'][arm])} %"


def variant(results: Results, key: str, arm: str) -> str:
    """The variant of an arm that held-out data chose."""
    return results["shallow"]["tables"][key]["arms"][arm]["variant"]


def paper(results: Results, key: str, arm: str) -> str:
    """The paper's accuracy."""
    return f"{PAPER[key, arm][0]} %"


def ratio(results: Results, net: str, arm: str) -> str:
    """Seconds over backprop's, from `speed`."""
    return f"{results['speed']['speed'][net][arm]['ratio']:.2f}"


def depth(results: Results, layers: str, arm: str) -> str:
    """Peak memory over backprop's at that many layers, from `speed`."""
    row = next(r for r in results["speed"]["memory"] if r["depth"] == int(layers))
    return f"{row[arm] / row['backprop']:.2f}"


def sequence(results: Results, name: str, shape: str, arm: str) -> str:
    """The accuracy of an arm of `recurrent`; `paper:drtp` is the paper's."""
    figures = _sequence(results, name, shape, arm)
    return f"{percent(figures, 2)} %"


def gap(results: Results, name: str, shape: str, arm: str, other: str) -> str:
    """How far an arm of `recurrent` is from another: `0.8 points behind`."""
    ours, theirs = (fmean(_sequence(results, name, shape, a)) for a in (arm, other))
    points = round(100 * (ours - theirs), 1)
    if not points:
        return "level with"
    return f"{abs(points):.1f} points {'ahead of' if points > 0 else 'behind'}"


def against(results: Results, name: str, shape: str, arm: str, *others: str) -> str:
    """How far an arm of `recurrent` is from each of several, of those that were measured."""
    found = []
    for other in others:
        try:
            found.append(f"{gap(results, name, shape, arm, other)} `{other}`")
        except Missing:
            continue
    if not found:
        raise Missing("recurrent")
    return " and ".join(found)


def through_time(results: Results, steps: str, layers: str, arm: str) -> str:
    """Seconds and memory over those of backprop through time, from `sequences`."""
    key = {"steps": int(steps), "layers": int(layers)}
    rows = [r for r in results["sequences"]["rows"] if key.items() <= r.items()]
    if not rows:
        raise Missing("sequences")
    found = rows[0]["arms"][arm]
    return f"{found['time_ratio']:.2f} of its seconds and {found['memory_ratio']:.2f} of its memory"


def _sequence(results: Results, name: str, shape: str, arm: str) -> list[float]:
    """An arm's accuracies, 0..1."""
    found = results["recurrent"]["tables"].get(f"{name}, {shape}", {})
    kind, _, wanted = arm.rpartition(":")
    if kind == "paper":
        return [found["paper"][PUBLISHED.index(wanted)] / 100]
    if arm not in SEQUENCE_ARMS:
        raise KeyError(arm)
    if arm not in found.get("arms", {}):
        raise Missing("recurrent")
    return found["arms"][arm]["accuracies"]


def held(results: Results, name: str, arm: str) -> str:
    """What the choice of a single layer's arm reached on held-out samples."""
    _sequence(results, name, "single", arm)
    trials = results["recurrent"]["tables"][f"{name}, single"]["arms"][arm]["held_out"]
    return f"{100 * max(score for _, score in trials):.1f} %"


def sequence_seconds(results: Results, name: str, arm: str) -> str:
    """Seconds of a single layer's restarts, all together."""
    return f"{_seconds(results, name, arm):.1f} s"


def time_ratio(results: Results, name: str, arm: str, other: str) -> str:
    """A single layer's seconds over another arm's."""
    return f"{_seconds(results, name, arm) / _seconds(results, name, other):.2f}"


def _seconds(results: Results, name: str, arm: str) -> float:
    _sequence(results, name, "single", arm)
    found = results["recurrent"]["tables"][f"{name}, single"]["arms"][arm]
    if not _timed(found):
        raise Missing("recurrent")
    return found["seconds"]


TABLES: dict[str, Callable[..., str]] = {
    "demo": demo,
    "run": printed_run,
    "shallow": shallow,
    "table": one_net,
    "held-out": held_out,
    "speed": speed,
    "memory": memory,
    "restarts": many_restarts,
    "time-to-paper": time_to_paper,
    "recurrent": recurrent,
    "recurrent-gaps": recurrent_gaps,
    "recurrent-paper": recurrent_paper,
    "recurrent-seconds": recurrent_seconds,
    "recurrent-choices": recurrent_choices,
    "sequences": sequences,
}
VALUES: dict[str, Callable[..., str]] = {
    "accuracy": accuracy,
    "variant": variant,
    "paper": paper,
    "ratio": ratio,
    "depth": depth,
    "sequence": sequence,
    "gap": gap,
    "against": against,
    "through-time": through_time,
    "held": held,
    "sequence-seconds": sequence_seconds,
    "time-ratio": time_ratio,
}
PLACES = TABLES | VALUES


# How a figure is written


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, columns of numbers to the right."""
    rows = list(rows)
    sides = [
        "---:" if all(NUMBER.match(c) for c in col) else "---" for col in zip(*rows, strict=True)
    ]
    lines = [head, sides, *([whole(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def whole(text: str) -> str:
    """Figures that no line break may part."""
    return re.sub(r" (?=±|[KMG]?B\b|M\b|ms\b)|(?<=±) ", "\N{NO-BREAK SPACE}", text)


def percent(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation in per cent."""
    mean = f"{100 * fmean(values):.{digits}f}"
    return f"{mean} ± {100 * stdev(values):.{digits}f}" if len(values) > 1 else mean


def cell(arm: Record | None) -> str:
    """The accuracy of an arm; 10,000 test images allow two digits."""
    return percent(arm["accuracies"], 2) if arm else "–"


def cost(arm: Record | None, base: Record) -> tuple[str, str]:
    """Seconds and peak memory of an arm of `shallow`, each also over backprop's."""
    if arm is None:
        return "–", "–"
    seconds, peak = arm["seconds"], arm["peak_bytes"]
    return (
        f"{seconds:.2f} (×{seconds / base['seconds']:.2f})",
        f"{size(peak)} (×{peak / base['peak_bytes']:.2f})",
    )


def count(number: int, thing: str) -> str:
    """`1 epoch`, `2 epochs`."""
    return f"{number} {thing}{'s' * (number != 1)}"


def restarts(found: Record) -> int:
    """How many restarts a table of `shallow` was made from."""
    return len(found["arms"]["backprop"]["accuracies"])


def ordered(names: Iterable[str]) -> list[str]:
    """Backprop first, the control last."""
    names = set(names)
    return [n for n in ORDER if n in names] + sorted(names - set(ORDER))


def origin(*records: Record) -> str:
    """Machine, versions and command, under every table."""
    machine, versions = records[0]["machine"], records[0]["versions"]
    cpu = re.sub(r"\((R|TM)\)", "", machine["cpu"])
    where = machine["gpu"] or f"{cpu}, {count(machine['threads'], 'thread')}"
    commands = " and ".join(f"`{r['command']}`" for r in records)
    return f"{where}; Python {versions['python']}, torch {versions['torch']}. Made by {commands}."


def content(name: str, results: Results, block: bool) -> str:
    """What belongs in a place."""
    kind, *words = name.split("/")
    if kind not in (TABLES if block else VALUES):
        raise SystemExit(f"no {'table' if block else 'value'} is called {kind!r} (of {name!r})")
    try:
        return PLACES[kind](results, *words)
    except Missing as missing:
        file = str(missing)
        if not block:
            return "(not measured yet)"
        return f"Not measured yet: `{FILES[file]}` makes `results/{file}.json`."
    except (KeyError, StopIteration, TypeError) as error:
        raise SystemExit(f"{name!r} cannot be filled in: {error!r}") from error


def fill(text: str, results: Results) -> str:
    """A page with every place filled in."""
    if text.count("<!-- numbers: ") != len(MARK.findall(text)):
        raise SystemExit("a mark <!-- numbers: NAME --> has no <!-- end -->")

    def put(match: re.Match[str]) -> str:
        block = match["old"].startswith("\n")
        new = content(match["name"], results, block)
        gap = "\n\n" if block else ""
        return f"<!-- numbers: {match['name']} -->{gap}{new}{gap}<!-- end -->"

    return MARK.sub(put, text)


def figure(results: Results, check: bool) -> str | None:
    """The figure's name if it was out of date; drawn anew unless only checked."""
    import sequences_figure  # beside this file

    try:
        record = results["recurrent"]
    except Missing:
        return None
    if not sequences_figure.stale(record):
        return None
    if not check:
        sequences_figure.draw(record)
    return sequences_figure.PICTURE.relative_to(ROOT).as_posix()


def main() -> None:
    """Fill the pages in, or say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    wanted = parser.parse_args()
    results, old = Results(wanted.results), []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        filled = fill(text, results)
        if filled != text:
            old.append(page.relative_to(ROOT).as_posix())
            if not wanted.check:
                page.write_text(filled, encoding="utf-8")
    if drawing := figure(results, wanted.check):
        old.append(drawing)
    said = "out of date; run python docs/fill_numbers.py" if wanted.check else "written"
    for name in old:
        print(f"{name}: {said}")
    sys.exit(bool(old) and wanted.check)


if __name__ == "__main__":
    main()
