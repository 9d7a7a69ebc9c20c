"""What a shifted domain costs adaptors, and how much of it a few labelled images win back.

    python -m experiments.shifts --weights vgg16.pth --data photos@160 --tap pool5 \
        --shift edges,noise --shots 10 --out shifts

An adaptor of the rule, one of backprop, a frozen one and a linear probe learn the images, are
tested on shifted ones (grey, edges, blur, noise, invert, dim), go on learning from a few labelled
shifted images and, with `--replay`, some old ones, and are tested on both domains again. A detector
without labels says whether adapting is due. `shifts.json` is written after every arm, with a figure
for every shift.
"""

import argparse
from typing import Any

from torch import Tensor

import tpsgd
from experiments import stand_in
from experiments.common import Row, arguments, load, origin, program, result_file
from experiments.corruptions import SHIFTS
from experiments.hyperdimensional import auroc
from experiments.recovery import Domain, Recovery, draw_recovery, recover
from tpsgd import TpsgdError, adapt
from tpsgd.common.errors import suggestion
from tpsgd.common.files import writable_folder

LEAST_HELD_OUT = 19  # samples, to set a detector's threshold


def main() -> None:
    """Train every arm and adapt it to every shift."""
    options = parsed()
    backbone, taps = read_backbone(options)
    words, data = shift_words(options.shift), load(options.data, options)
    (x, y), (x_test, y_test) = data.train, data.test
    chosen = adapt.shots(y, options.shots, options.seed)
    adapt.shots(y, options.replay, options.seed)  # too few samples are an error before training
    few = {word: SHIFTS[word](x[chosen], first=len(x_test)) for word in words}

    def encode(x: Tensor, y: Tensor) -> adapt.Features:
        return adapt.encode(backbone, (x, y), taps)

    train, test = encode(x, y), encode(x_test, y_test)
    domains = {
        word: Domain(encode(few[word], y[chosen]), encode(SHIFTS[word](x_test), y_test))
        for word in words
    }
    folder = writable_folder(options.out)
    record, save = result_file(options, "shifts")
    old = f" and {options.replay} old ones" if options.replay else ""
    after = f"{options.shots} labelled samples{old} a class"
    detected = detect(train, test, domains, taps[-1], options.seed)
    record |= origin("shifts", options.device) | {"backbone": backbone.name, "taps": list(taps)}
    record |= {"shots": options.shots, "replay": options.replay, "after": after}
    record["shifts"] = {word: {"arms": [], "detector": detected[word]} for word in words}
    for word in words:
        print(f"{word}: {verdict(detected[word])}", flush=True)
    recoveries: list[Recovery] = []
    for arm, settings in arms_of(options).items():
        settings |= {"taps": taps, "classes": data.classes}
        recoveries += recover(
            backbone, train, test, domains, {arm: settings}, replay=options.replay,
            epochs=options.epochs, seed=options.seed,
        )  # fmt: skip
        for row in recoveries[-len(words) :]:
            record["shifts"][row.domain]["arms"].append(row.as_dict())
            print(line(row), flush=True)
        save()
        for word in words:
            rows = [row for row in recoveries if row.domain == word]
            draw_recovery(rows, folder / f"{word}.png", f"{word}: {after}")
    print(f"after: learned from {after}; figures and shifts.json: {folder}")


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--data", default="imagenette", help="a folder of images, FILE.npz, a set")
    parser.add_argument("--max-train", type=int, help="fewer training images")
    parser.add_argument("--backbone", default="vgg16", help="a name, or FILE.py:FUNCTION")
    parser.add_argument("--weights", help="FILE.pth, .safetensors or .npz")
    parser.add_argument("--tap", help="pool5, or several: pool4,pool5; default: the last")
    parser.add_argument("--rule", default="readout-learned")
    parser.add_argument("--epochs", type=int, help="per block; default: 8, more for few samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shift", default=",".join(SHIFTS), help="several: grey,blur")
    parser.add_argument("--shots", type=int, default=10, help="labelled samples per class")
    parser.add_argument("--replay", type=int, default=0, help="old samples per class to add")
    return parser.parse_args()


def shift_words(text: str) -> list[str]:
    """The names of the shifts."""
    words = text.split(",")
    for word in words:
        if word not in SHIFTS:
            raise TpsgdError(f"unknown shift {word!r}: {suggestion(word, SHIFTS)}")
    if len(set(words)) < len(words):
        raise TpsgdError(f"--shift {text}: name each shift once")
    return words


def read_backbone(options: argparse.Namespace) -> tuple[adapt.Backbone, tuple[str, ...]]:
    """The frozen net, and the taps to read."""
    taps = tuple(options.tap.split(",")) if options.tap else ()
    if options.smoke:
        backbone = stand_in.backbone()
    else:
        backbone = adapt.backbone(options.backbone, options.weights, taps)
    return backbone.to(options.device), taps or tuple(backbone.taps)[-1:]


def arms_of(options: argparse.Namespace) -> dict[str, Row]:
    """The settings of `adapt.fit` for the rule, the controls and a linear probe."""
    if options.rule not in tpsgd.rules.ALL:
        raise TpsgdError(f"unknown rule: {suggestion(options.rule, tpsgd.rules.ALL)}")
    rule, epochs = tpsgd.rules.ALL[options.rule].make(), {"epochs": options.epochs}
    return {
        options.rule: {"rule": rule, **epochs},
        "backprop": {"method": tpsgd.fit_backprop, **epochs},
        "frozen": {"rule": tpsgd.rules.frozen(), **epochs},
        "linear probe": {"layers": adapt.Probe(), "optimizer": tpsgd.ridge()},
    }


def detect(
    train: adapt.Features, test: adapt.Features, domains: dict[str, Domain], tap: str, seed: int
) -> dict[str, Any]:
    """Whether a detector without labels finds each new domain to be new."""
    seen, held_out = adapt.hold_out(train, seed)
    if len(held_out) < LEAST_HELD_OUT:
        return dict.fromkeys(domains)
    detector = adapt.novelty.mahalanobis(seen.at(tap)[0], seen.y).calibrate(held_out.at(tap)[0])
    scores = detector.score(test.at(tap)[0])
    verdicts = {}
    for word, domain in domains.items():
        features = domain.test.at(tap)[0]
        area = auroc(scores, detector.score(features))
        verdicts[word] = detector.due(features)._asdict() | {"auroc": area}
    return verdicts


def verdict(due: Row | None) -> str:
    """What a detector found, in words."""
    if due is None:
        return "too few samples to say whether it is new (190 are enough)"
    answer = "adaptation is due" if due["due"] else "adaptation is not due"
    shares = f"{due['share_new']:.0%} look new, {due['expected']:.0%} of known samples do"
    return f"{answer} (p {due['p_value']:.2g}): {shares}"


def line(row: Recovery) -> str:
    """A row for the terminal."""
    change = f"{row.new_before:.1%} to {row.new_after:.1%}"
    known = f"known {row.known_before:.1%} to {row.known_after:.1%}"
    return f"{row.domain:8} {row.arm:16} {change}, {known}, forgotten {row.forgotten:.1%}"


if __name__ == "__main__":
    program(main)
