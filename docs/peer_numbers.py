"""Tables and values of the peers: results/peers.json."""

from written import IN_PAPER, Missing, Record, Results, cell, count, origin, percent, table

from tpsgd.units import size

ORDER = (
    *("backprop", "readout", "readout, ridge head"),
    *("tpsgd-l2", "tpsgd-l2, ridge head", "tpsgd-l2, quick", "tpsgd-l2, one epoch", "drtp"),
    *("lm-karnet", "zorb", "dladmm", "dladmm, rho 1", "elm", "frozen"),
)
AS_PAPER = "mlp-256-steep"  # where the paper's figures stand: it names no width and no slope
# Lomnitz et al. (2022), table 2: accuracy in per cent and its deviation, seconds on an A5000.
PAPER = {
    "tpsgd-l2": ("88.3 ± 0.25", "1.7"),
    "zorb": ("89.4 ± 0.22", "7.9"),
    "lm-karnet": ("89.9 ± 0.12", "4.9"),
}


def peers(results: Results, net: str) -> str:
    """Every arm on one net: accuracy, seconds on both machines, peak memory."""
    record = results["peers"]
    found, there = record["nets"][net], record.get("cpu", {}).get("nets", {}).get(net, {})
    rows = []
    for name in ORDER:
        arm, slow = found["arms"].get(name), there.get("arms", {}).get(name)
        base, base_slow = found["arms"]["backprop"], there.get("arms", {}).get("backprop")
        if arm or slow:
            times = _time(arm, base), _time(slow, base_slow)
            rows.append([f"`{name}`", cell(arm or slow), *times, _peak(slow)])
        if name in PAPER and net == AS_PAPER:
            rows.append([IN_PAPER, *PAPER[name], "–", "–"])
    head = ["arm", "test accuracy %", "seconds, GPU", "seconds, CPU", "peak memory, CPU"]
    note = (
        f"MNIST, 784-{found['width']}-10, LeakyReLU of slope {found['slope']:g}; mean ± standard "
        f"deviation of {_restarts(found, there)}, one by one, on all 60,000 samples; median "
        "seconds, × is over backprop; memory beyond the data set, inputs kept for a second block "
        f"({_kept(there)}) not counted. ZORB's GPU seconds leave out the making of its targets."
    )
    if net == AS_PAPER:
        note += " The paper's seconds are from an NVIDIA RTX A5000."
    machines = f"{origin(record)} {_cpu(record) if there else ''}".strip()
    return f"{table(head, rows)}\n\n{note} {machines}"


def history(results: Results) -> str:
    """How the file was put together."""
    record = results["peers"]
    return f"{record.get('history', '')} {record.get('cpu', {}).get('history', '')}".strip()


def held_out(results: Results, net: str) -> str:
    """What every variant reached on held-out samples; the chosen one in bold."""
    record = results["peers"]
    rows = []
    for name in (n for n in ORDER if n in record["nets"][net]["arms"]):
        arm = record["nets"][net]["arms"][name]
        for variant, got in arm["held_out"].items():
            bold = "**" if variant == arm["variant"] else ""
            cells = variant, f"{100 * got['accuracy']:.2f}", f"{got['seconds']:.3f}"
            rows.append([f"`{name}`", *(f"{bold}{text}{bold}" for text in cells)])
    head = ("arm", "variant", "held-out accuracy %", "seconds")
    return f"{table(head, rows)}\n\n{origin(record)}"


def accuracy(results: Results, net: str, arm: str, where: str = "gpu") -> str:
    """Test accuracy, for a sentence."""
    return f"{percent(_arm(results, net, arm, where)['accuracies'], 2)} %"


def seconds(results: Results, net: str, arm: str, where: str = "gpu") -> str:
    """Median seconds, for a sentence."""
    value = _arm(results, net, arm, where)["seconds"]
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def memory(results: Results, net: str, arm: str) -> str:
    """Peak memory on the CPU, for a sentence."""
    return size(_arm(results, net, arm, "cpu")["peak_bytes"])


def _arm(results: Results, net: str, arm: str, where: str = "gpu") -> Record:
    record = results["peers"]
    nets = (record.get("cpu", {}) if where == "cpu" else record).get("nets", {})
    found = nets.get(net, {}).get("arms", {}).get(arm)
    if found is None:
        raise Missing("peers")
    return found


def _time(arm: Record | None, base: Record | None) -> str:
    if not arm or not base or arm.get("busy"):
        return "–"
    seconds = arm["seconds"]
    written = f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.{2 if seconds >= 1 else 3}f}"
    return f"{written} (×{seconds / base['seconds']:.2f})"


def _peak(arm: Record | None) -> str:
    return size(arm["peak_bytes"]) if arm else "–"


def _kept(there: Record) -> str:
    kept = max((a["kept_bytes"] for a in there.get("arms", {}).values()), default=0)
    return f"{size(kept)} at most"


def _restarts(found: Record, there: Record) -> str:
    most, arms = found["restarts"], there.get("arms", {}) | found["arms"]
    few = {n: len(a["accuracies"]) for n, a in arms.items()}
    fewer = [f"{n}: {k}" for n, k in few.items() if k < most]
    return count(most, "restart") + (f" ({'; '.join(fewer)})" if fewer else "")


def _cpu(record: Record) -> str:
    if "cpu" not in record:
        return ""
    restarts = {
        len(a["accuracies"]) for n in record["cpu"]["nets"].values() for a in n["arms"].values()
    }
    return f"CPU: {count(max(restarts), 'restart')}; {origin(record['cpu'])}"
