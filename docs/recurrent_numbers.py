"""Tables and values of the recurrent nets: results/recurrent.json and results/sequences.json."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from written import FILES, IN_PAPER, Missing, Record, Results, cell, count, origin, percent, table

from experiments.recurrent import PAPER as BY_SET
from tpsgd.units import size

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
