"""One byte of a saved file is another one: it is refused in a sentence, or nothing is different."""

import random
import shutil

import pytest
import torch
from helpers import mlp, points, state
from torch import nn

import tpsgd
from tpsgd import Checkpoint, TpsgdError
from tpsgd.data import Data

POINTS = points(32)
DATA = Data("points", POINTS, POINTS, ("a", "b", "c"), (6,), "")
pytestmark = pytest.mark.usefixtures("unwatched")


class Stopped(Exception):
    """A run ends in the middle."""


def stop_at(block: int, epoch: int):
    def callback(record):
        if (record.block, record.epoch) == (block, epoch):
            raise Stopped

    return callback


def values(model: nn.Module) -> list[list[float]]:
    return [t.flatten().tolist() for t in state(model).values()]


class SavedModel:
    """A model that `Run.save` wrote."""

    def write(self, folder):
        run = tpsgd.fit(mlp(6, 4, 3), POINTS, epochs=1)
        run.save(folder, classes=["a", "b", "c"], inputs={"shape": [6]})

    def read(self, folder):
        trained = tpsgd.load(folder)
        return values(trained.model), trained.classes, trained.inputs, trained.run.as_dict()


class InterruptedRun:
    """The checkpoint of a run that goes on to its end."""

    def fit(self, folder, *callbacks):
        model, saved = mlp(6, 4, 3), Checkpoint(folder, every=0, resume=True)
        tpsgd.fit(
            model, POINTS, epochs=2, batch_size=16, checkpoint=saved, callbacks=callbacks,
            memory=tpsgd.Memory(measure=False),
        )  # fmt: skip
        return values(model)

    def write(self, folder):
        with pytest.raises(Stopped):
            self.fit(folder, stop_at(2, 2))

    def read(self, folder):
        return self.fit(folder)


class FinishedComparison:
    """The folder of a comparison all of whose runs have finished."""

    def read(self, folder):
        record = tpsgd.compare(
            DATA, lambda: mlp(6, 4, 3), ["readout"], restarts=2, epochs=1,
            checkpoint=Checkpoint(folder, resume=True),
        )  # fmt: skip
        runs = [(r.arm.name, run.history) for r in record.results for run in r.runs]
        # without seconds: a run whose line is cut off is trained again
        losses = [(name, [epoch.loss for epoch in history]) for name, history in runs]
        return losses, [r.accuracies for r in record.results]

    write = read


class FinishedSearch:
    """The trials of a search."""

    def read(self, folder):
        result = tpsgd.search(
            DATA, lambda: mlp(6, 4, 3), "drtp", rates=[0.01, 0.1], epochs=1,
            checkpoint=Checkpoint(folder, resume=True),
        )  # fmt: skip
        return [(trial.values, trial.accuracies) for trial in result.trials]

    write = read


class SavedAdaptor:
    """An adaptor on a backbone that is made anew."""

    def backbone(self):
        return tpsgd.adapt.Backbone(mlp(6, 5, 3), ["1"])

    def write(self, folder):
        tpsgd.adapt.fit(self.backbone(), POINTS, taps="1", epochs=1, seed=1).save(folder)

    def read(self, folder):
        adaptor = tpsgd.adapt.load(folder, self.backbone())
        return values(adaptor), adaptor.classes


KINDS = [SavedModel, InterruptedRun, FinishedComparison, FinishedSearch, SavedAdaptor]


def flip(kind, count: int, place, seed: int = 0) -> tuple[int, int]:
    """How many of so many flips were refused, and how many changed nothing."""
    case, draw = kind(), random.Random(seed)
    torch.manual_seed(0)
    case.write(place / "whole")
    shutil.copytree(place / "whole", place / "copy")
    expected = repr(case.read(place / "copy"))
    files = sorted(f.relative_to(place / "whole") for f in (place / "whole").rglob("*.*"))
    refused = 0
    for number in range(count):
        shutil.rmtree(place / "copy")
        shutil.copytree(place / "whole", place / "copy")
        file = place / "copy" / files[number % len(files)]
        content = bytearray(file.read_bytes())
        change = draw.choice([1 << draw.randrange(8), draw.randrange(1, 256)])  # a bit, or more
        content[draw.randrange(len(content))] ^= change
        file.write_bytes(content)
        try:
            assert repr(case.read(place / "copy")) == expected, (file, content)
        except TpsgdError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            refused += 1
    return refused, count - refused


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_is_refused_or_means_nothing(kind, tmp_path):
    refused, _ = flip(kind, 8, tmp_path)
    assert refused >= 5


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_flipped_bytes(kind, tmp_path):
    refused, _ = flip(kind, 500, tmp_path, seed=1)
    assert refused >= 400
