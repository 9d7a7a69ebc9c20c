"""The paper's search for an adaptor: convolutions and dense layers on three taps of a frozen VGG16.

    python -m experiments.search --out results [--max-train 400]

Held-out training images judge; the test images are not used. Layers that plan more memory than
the budget are not trained. Finished trials are kept in OUT/search, so that a search that was
stopped goes on.
"""

import shutil

from experiments import stand_in
from experiments.adaptors import TAPS
from experiments.common import arguments, load, origin, program, result_file
from tpsgd import adapt, rules
from tpsgd.comparison.provenance import describe

BUDGET = "100MB"


def main() -> None:
    """Search, write the file and draw the heatmaps."""
    parser = arguments(__doc__)
    parser.add_argument("--max-train", type=int, default=400)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--weights", help="VGG16's, unless they lie among the data sets")
    options = parser.parse_args()
    samples = load("imagenette", options)
    vgg16 = stand_in.backbone() if options.smoke else adapt.backbone("vgg16", options.weights)
    record, save = result_file(options, "search")
    trials = options.out / ("search" + "-smoke" * options.smoke)
    if options.again:
        shutil.rmtree(trials, ignore_errors=True)
    result = adapt.search(
        vgg16.to(options.device), samples.train, taps=tuple(TAPS.values()), classes=samples.classes,
        restarts=options.restarts, memory=BUDGET, folder=trials, rule=rules.tpsgd_l2(),
        batch_size=32, **({"epochs": 1, "convs": (0, 1), "dense": (0, 1)} if options.smoke else {}),
    )  # fmt: skip
    words = [f"--max-train {options.max_train}"]
    record |= origin("search", options.device, *words) | result.as_dict()
    record |= {"backbone": vgg16.name, "data": describe(samples)}
    save()
    result.plot(trials / "search.png")
    print(result, flush=True)


if __name__ == "__main__":
    program(main)
