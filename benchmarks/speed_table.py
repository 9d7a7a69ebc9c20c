"""The printed table of `speed.py`: a line for every net and rule."""

from speed_turns import FIT_BACKPROP, PLAIN, WRITTEN_OUT, Row

ORDERS = ("sequential", "simultaneous")
PAIRS = ("ratio", "goal", "memory")
WIDTHS = "{:24}{:18}{:>7}{:>7}{:>6}" + "  {:>5}{:>5}" * len(PAIRS)


def table(speed: dict[str, Row], goals: dict[str, dict[str, Row]]) -> str:
    """Every net: its fastest peer's seconds, and ratios to those under both orders."""
    top = WIDTHS.format("", "", "peer's", "fit_bp", "by", *(w for p in PAIRS for w in (p, "")))
    title = WIDTHS.format("net", "rule", "s", "/plain", "hand", *("seq.", "sim.") * len(PAIRS))
    lines = [top, title]
    for net, measured in speed.items():
        lines += rows(net, measured["arms"], goals.get(net, {}))
    return "\n".join(line.rstrip() for line in lines)


def rows(net: str, arms: dict[str, Row], goals: dict[str, Row]) -> list[str]:
    """The lines of one net, a rule each; the figures of its peers stand in the first."""
    fastest = min(row["seconds"] / row["ratio"] for row in arms.values())
    over_plain = arms.get(FIT_BACKPROP, {}).get("over", {}).get(PLAIN)
    by_hand = arms.get(WRITTEN_OUT, {}).get("ratio")
    first = [net, f"{fastest:.3g}", ratio(over_plain), ratio(by_hand)]
    lines = []
    for rule in dict.fromkeys(a.rpartition(", ")[0] for a in arms if a.endswith(ORDERS)):
        both = [f"{rule}, {order}" for order in ORDERS]
        cells = [arms.get(arm, {}).get("ratio") for arm in both]
        cells += [goals.get(arm, {}).get("ratio") for arm in both]
        cells += [arms.get(arm, {}).get("memory_ratio") for arm in both]
        name, *peers = first if not lines else [""] * 4
        lines.append(WIDTHS.format(name, rule, *peers, *map(ratio, cells)))
    return lines


def ratio(value: float | None) -> str:
    """Two digits, or a dash for what was not measured."""
    return "–" if value is None else f"{value:.2f}"
