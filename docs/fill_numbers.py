"""Fill the numbers of the README and the docs in from `results/*.json`.

    python docs/fill_numbers.py             # write them
    python docs/fill_numbers.py --check     # exit 1 where a page is out of date

A place is `<!-- numbers: NAME -->` ... `<!-- end -->`: a table when the first mark ends its line, a
value inside a sentence otherwise. `TABLES` and `VALUES` list the names; words after a slash are
arguments, as in `accuracy/mnist-mlp/frozen`. What has not been measured yet says so.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from tpsgd.engine.record import BlockInfo, Epoch, Run
from tpsgd.units import size

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))  # the scripts beside this one

import adapt_numbers  # noqa: E402
import memory_numbers  # noqa: E402
import peer_numbers  # noqa: E402
import recurrent_numbers as recurrent  # noqa: E402
from written import (  # noqa: E402
    FILES,
    IN_PAPER,
    Missing,
    Record,
    Results,
    cell,
    count,
    origin,
    percent,
    table,
)

MARK = re.compile(r"<!-- numbers: (?P<name>.+?) -->(?P<old>.*?)<!-- end -->", re.DOTALL)

ORDER = (
    *("backprop", "readout", "readout-learned", "tpsgd-l2", "tpsgd-l1", "dfa", "sdfa", "drtp"),
    *("lm-karnet", "zorb", "dladmm", "elm"),
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
    "recurrent": recurrent.recurrent,
    "recurrent-gaps": recurrent.recurrent_gaps,
    "recurrent-paper": recurrent.recurrent_paper,
    "recurrent-seconds": recurrent.recurrent_seconds,
    "recurrent-choices": recurrent.recurrent_choices,
    "sequences": recurrent.sequences,
    "peers": peer_numbers.peers,
    "peers-held-out": peer_numbers.held_out,
    "planned": memory_numbers.planned,
    "depth-growth": memory_numbers.depth,
    "small": memory_numbers.small,
    "resident": memory_numbers.resident,
    "vgg": memory_numbers.deep,
    "vgg-sizes": memory_numbers.sizes,
    "adaptor": memory_numbers.adaptor,
    "adaptors": adapt_numbers.taps,
    "adaptors-paper": adapt_numbers.papers,
    "adaptors-few": adapt_numbers.few,
    "adaptors-shifts": adapt_numbers.shifts,
    "adaptors-detectors": adapt_numbers.detectors,
    "adaptors-precision": adapt_numbers.precision,
    "adaptors-combined": adapt_numbers.combinations,
    "backbones": adapt_numbers.speeds,
    "deep": adapt_numbers.full_nets,
}
VALUES: dict[str, Callable[..., str]] = {
    "accuracy": accuracy,
    "variant": variant,
    "paper": paper,
    "ratio": ratio,
    "depth": depth,
    "sequence": recurrent.sequence,
    "gap": recurrent.gap,
    "against": recurrent.against,
    "through-time": recurrent.through_time,
    "held": recurrent.held,
    "sequence-seconds": recurrent.sequence_seconds,
    "time-ratio": recurrent.time_ratio,
    "peer": peer_numbers.accuracy,
    "peers-history": peer_numbers.history,
    "peer-seconds": peer_numbers.seconds,
    "peer-memory": peer_numbers.memory,
    "planned-spread": memory_numbers.spread,
    "planned-ratio": memory_numbers.planned_ratio,
    "vgg-ratio": memory_numbers.ratio,
    "vgg-value": memory_numbers.vgg,
    "adaptor-ratio": memory_numbers.adaptor_ratio,
    "small-value": memory_numbers.small_value,
    "small-floor": memory_numbers.floor,
    "adaptor-accuracy": adapt_numbers.accuracy,
    "adaptor-shot": adapt_numbers.shot,
    "adaptor-shifted": adapt_numbers.shifted,
    "deep-accuracy": adapt_numbers.deep_accuracy,
    "search-note": adapt_numbers.search_note,
    "search-correlations": adapt_numbers.search_correlations,
}
PLACES = TABLES | VALUES


# What is particular to `shallow`


def cost(arm: Record | None, base: Record) -> tuple[str, str]:
    """Seconds and peak memory of an arm of `shallow`, each also over backprop's."""
    if arm is None:
        return "–", "–"
    seconds, peak = arm["seconds"], arm["peak_bytes"]
    return (
        f"{seconds:.2f} (×{seconds / base['seconds']:.2f})",
        f"{size(peak)} (×{peak / base['peak_bytes']:.2f})",
    )


def restarts(found: Record) -> int:
    """How many restarts a table of `shallow` was made from."""
    return len(found["arms"]["backprop"]["accuracies"])


def ordered(names: Iterable[str]) -> list[str]:
    """Backprop first, the control last."""
    names = set(names)
    return [n for n in ORDER if n in names] + sorted(names - set(ORDER))


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


def figures(results: Results, check: bool) -> list[str]:
    """The names of figures that were out of date; drawn anew unless only checked."""
    import adapt_figure  # beside this file
    import memory_figure
    import peers_figure
    import sequences_figure

    old = []
    scripts = {"recurrent": sequences_figure, "peers": peers_figure, "memory-gpu": memory_figure}
    scripts |= {"adaptors": adapt_figure}
    for name, script in scripts.items():
        try:
            record = results[name]
        except Missing:
            continue
        if script.stale(record):
            old.append(script.PICTURE.relative_to(ROOT).as_posix())
            if not check:
                script.draw(record)
    return old


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
    old += figures(results, wanted.check)
    said = "out of date; run python docs/fill_numbers.py" if wanted.check else "written"
    for name in old:
        print(f"{name}: {said}")
    sys.exit(bool(old) and wanted.check)


if __name__ == "__main__":
    main()
