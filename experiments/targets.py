"""Labels that are numbers, or come for every step or pixel: local rules against backprop.

    python -m experiments.targets --out results [--only friction] [--arms backprop frozen]

Every arm of a task has the same epochs per block, batches, `one_cycle` and search of its rate on a
held-out fifth of the training samples. Seconds are those of the processor, on one thread.
"""

from functools import partial

import torch
from torch import Tensor, nn

import tpsgd
from experiments import targets_data as data
from experiments.common import arguments, is_complete, origin, program, result_file
from experiments.nets.pixels import Hourglass
from experiments.nets.sequences import CharacterModel, Tagger
from experiments.targets_arms import (
    BACKPROP,
    CONTROLS_OF_NUMBERS,
    LOCAL,
    Arm,
    Task,
    by_rule,
    measured,
    of_characters,
    of_classes,
    of_numbers,
    of_pixels,
)
from tpsgd import rules, sequential, simultaneous
from tpsgd.zoo.words import mlp

STEPS, WIDTH = 64, 64  # of the character model
ARMS_OF_NUMBERS = {
    "backprop": BACKPROP,
    **{name: Arm(rule) for name, rule in LOCAL.items()},
    "tpsgd-l2": Arm("tpsgd-l2"),
    **CONTROLS_OF_NUMBERS,
}
ARMS_OF_PERCEPTRONS = {
    **ARMS_OF_NUMBERS,
    "readout-learned, 2 blocks": by_rule("readout-learned", blocks=2),
}
ARMS_OF_STEPS = {
    "backprop": BACKPROP,
    **{name: Arm(rule) for name, rule in LOCAL.items()},
    "frozen": Arm("frozen"),
}
ARMS_OF_CHARACTERS = {
    "backprop": BACKPROP,
    "auxiliary, 2 blocks": by_rule("auxiliary", blocks=2, order=sequential),
    "auxiliary, 4 blocks": by_rule("auxiliary", blocks=4, order=sequential),
    "auxiliary, 4 blocks, simultaneous": by_rule("auxiliary", blocks=4, order=simultaneous),
    "readout-learned, 4 blocks": by_rule("readout-learned", blocks=4, order=sequential),
    "frozen": Arm("frozen", {"blocks": "layers"}),
}
ARMS_OF_DEEP_CHARACTERS = {
    "backprop": BACKPROP,
    "auxiliary, 4 blocks": by_rule("auxiliary", blocks=4, order=sequential),
    "auxiliary, a layer per block": by_rule("auxiliary", blocks=7, order=sequential),
    "frozen": Arm("frozen", {"blocks": "layers"}),
}
TWO_LAYERS = rules.auxiliary(kernels=(1, 1))
ARMS_OF_PIXELS = {
    "backprop": BACKPROP,
    "readout-learned": by_rule("readout-learned", blocks=3, order=sequential),
    "auxiliary": by_rule("auxiliary", blocks=3, order=sequential),
    "auxiliary, 2 hidden layers": Arm(TWO_LAYERS, {"blocks": 3, "order": sequential}),
    "frozen": Arm("frozen", {"blocks": "layers"}),
}


class Tokens(nn.Module):
    """Tokens and their places, embedded."""

    def __init__(self, vocabulary: int, steps: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(steps, width)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors `(batch, steps, width)`."""
        return self.token(x) + self.place.weight


def transformer(width: int = 48, layers: int = 3, steps: int = 32) -> nn.Module:
    """A small transformer that tags words."""
    hidden = [
        nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        for _ in range(layers)
    ]
    tokens = Tokens(data.VOCABULARY, steps, width)
    return nn.Sequential(tokens, *hidden, nn.Linear(width, len(data.TAGS)))


def forecaster(units: int = 32) -> nn.Module:
    """Two diagonal layers, whose local losses look at the last step, and a linear layer."""
    layer = tpsgd.Recurrent.diagonal
    return nn.Sequential(
        layer(1, units, sequence=True, loss_at="last"),
        layer(units, units, loss_at="last"),
        nn.Linear(units, 1),
    )


def character_model(layers: int = 4) -> nn.Module:
    """A causal transformer that predicts the next character."""
    return CharacterModel(1 + len(data.characters()[2]), STEPS, WIDTH, layers=layers)


TASKS = {
    "diabetes": Task(
        data.diabetes, lambda: mlp((10,), [32, 32], 1, nn.ReLU), of_numbers,
        ARMS_OF_PERCEPTRONS,
        rates=(1e-3, 3e-3, 1e-2, 3e-2), epochs=(3, 10, 30), restarts=5, searches=True,
    ),
    "friction": Task(
        data.friction, lambda: mlp((3,), [64, 64, 64], 1, nn.ReLU), of_numbers,
        ARMS_OF_PERCEPTRONS,
        rates=(3e-3, 1e-2, 3e-2), epochs=(120,),
    ),
    "forecast": Task(
        data.mackey_glass, forecaster, of_numbers, ARMS_OF_NUMBERS,
        rates=(8e-3, 1.6e-2, 3.2e-2), epochs=(30,),
    ),
    "tags, GRU": Task(
        data.sentences, lambda: Tagger(data.VOCABULARY, len(data.TAGS), 16, 32), of_classes,
        ARMS_OF_STEPS, rates=(4e-3, 1e-2, 2e-2), epochs=(6,),
    ),
    "tags, transformer": Task(
        data.sentences, transformer, of_classes,
        ARMS_OF_STEPS | {"auxiliary, 2 blocks": by_rule("auxiliary", blocks=2)},
        rates=(2e-3, 4e-3, 8e-3), epochs=(8,), longer=3,
    ),
    "characters": Task(
        data.documentation,
        character_model,
        of_characters, ARMS_OF_CHARACTERS,
        rates=(4e-3, 8e-3, 1.6e-2), epochs=(1,), longer=3, batch_size=16, restarts=2,
    ),
    "characters, 6 layers": Task(
        data.documentation, partial(character_model, layers=6), of_characters,
        ARMS_OF_DEEP_CHARACTERS,
        rates=(4e-3, 8e-3, 1.6e-2), epochs=(1,), longer=3, batch_size=16, restarts=2,
    ),
    "shapes": Task(
        data.shapes_on_noise, lambda: Hourglass(1, 16, len(data.SHAPES)), of_pixels,
        ARMS_OF_PIXELS, rates=(4e-3, 1e-2, 2e-2), epochs=(4,), longer=3, batch_size=16,
    ),
}  # fmt: skip


def main() -> None:
    """Run what is asked for; the file is written after every arm of a task."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(TASKS), nargs="*", default=list(TASKS))
    parser.add_argument("--arms", nargs="*", help="of the tasks that have them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record, save = result_file(options, "targets")
    record |= origin("targets", "cpu")
    tables = record.setdefault("tables", {})
    for name, arm in ((n, a) for n in options.only for a in TASKS[n].arms):
        task = TASKS[name]
        table = tables.setdefault(name, {"arms": {}})
        table["settings"] = {
            "rates": task.rates, "epochs": task.epochs, "longer": task.longer,
            "batch_size": task.batch_size, "restarts": task.restarts,
        }  # fmt: skip
        restarts = 1 if options.smoke else task.restarts
        left_out = options.arms is not None and arm not in options.arms
        if left_out or is_complete(table["arms"].get(arm), restarts, options):
            continue
        table["arms"][arm] = measured(task, task.arms[arm], options.smoke)
        row = table["arms"][arm]
        print(f"{name:18} {arm:34} {row['score']:.4f} ± {row['deviation']:.4f}, "
              f"{row['cpu_seconds']:.1f} s", flush=True)  # fmt: skip
        save()


if __name__ == "__main__":
    program(main)
