"""What the ranks of a pipeline train in the tests, and what one process trains beside them.

`python pipeline_cases.py FOLDER COUNT PORT CASES` forks COUNT ranks, once torch is loaded. Each
trains the cases and writes the weights, the record or the error of each into FOLDER.
"""

import io
import os
import shutil
import sys
import time
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path

import torch
from helpers import Residual, images, mlp, points, seeded
from parallel.forked import forked
from torch import nn
from torch.utils.data import BatchSampler, RandomSampler

import tpsgd
from tpsgd import EarlyStopping, Memory, rules
from tpsgd.cli import app
from tpsgd.data import load
from tpsgd.engine.learners.optimizers import adam
from tpsgd_parallel import handover
from tpsgd_parallel.ranks import joined

LOCAL = [word for word, entry in rules.ALL.items() if word not in ("dfa", "sdfa", "random")]
STEPPED = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)


def deep():
    """Four blocks of different widths."""
    return mlp(6, 16, 12, 8, 3)


def cnn():
    """Four blocks with feature maps, batch norm and pooling."""
    return seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(54, 10), nn.Tanh(), nn.Linear(10, 3)),
        )
    )


def custom():
    """Modules that the library does not know."""
    return seeded(
        lambda: nn.Sequential(
            *(Residual(6), nn.Tanh(), Residual(6), nn.LayerNorm(6), nn.Tanh()), nn.Linear(6, 3)
        )
    )


class Rows(torch.utils.data.Dataset):
    """Samples one by one, which `fit` shuffles."""

    def __init__(self):
        self.x, self.y = points(50)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def stop_block_two(epoch):
    """A callback."""
    return epoch.block == 2 and epoch.epoch == 1


def multi_label():
    """Rows of yes-or-no labels."""
    x, y = points(50)
    return x, nn.functional.one_hot(y, 3).float()


POINTS, IMAGES = partial(points, 50), partial(images, 40)
CASES = {word: (deep, POINTS, {"rule": rules.ALL[word].make()}) for word in LOCAL} | {
    "cnn": (cnn, IMAGES, {}),
    "cnn, l2": (cnn, IMAGES, {"rule": rules.tpsgd_l2()}),
    "cnn, augmented": (cnn, IMAGES, {"augment": tpsgd.augment.flip(), "optimizer": tpsgd.sgd}),
    "blocks of two layers": (cnn, IMAGES, {"blocks": 2}),
    "wide": (partial(mlp, 64, 256, 256, 128, 3), partial(points, 50, 64), {}),
    "a small second batch": (deep, partial(points, 20), {}),
    "custom modules": (custom, POINTS, {}),
    "validation": (cnn, IMAGES, {"validation": images(24, seed=1)}),
    "early stopping": (
        deep,
        POINTS,
        {
            "early_stopping": [None, EarlyStopping(0), EarlyStopping(1, 0.5), None],
            "validation": points(20, seed=1),
            "epochs": 4,
        },
    ),
    "all blocks stop early": (
        deep,
        POINTS,
        {"early_stopping": [EarlyStopping(n, 9.0) for n in (0, 1, 0, 2)], "epochs": 6},
    ),
    "epochs by block": (deep, POINTS, {"epochs": [1, 3, 2, 0]}),
    "stopped by a callback": (deep, POINTS, {"callbacks": [stop_block_two]}),
    "one cycle": (deep, POINTS, {"lr_schedule": tpsgd.one_cycle()}),
    "decay and clip": (deep, POINTS, {"weight_decay": 0.1, "clip": 0.05}),
    "rate by epoch": (deep, POINTS, {"lr_schedule": STEPPED, "optimizer": tpsgd.sgd}),
    "micro-batches": (deep, POINTS, {"memory": Memory(micro_batch=5)}),
    "recursive head": (
        deep,
        POINTS,
        {"rule": rules.frozen(), "optimizer": [adam, adam, adam, tpsgd.rls()]},
    ),
    "bfloat16": (cnn, IMAGES, {"precision": torch.bfloat16}),
    "several labels": (deep, multi_label, {"loss": tpsgd.bce}),
    "data set": (deep, Rows, {"validation": Rows()}),
    "ordered loader": (deep, lambda: torch.utils.data.DataLoader(Rows(), batch_size=16), {}),
}


CHECKPOINTED = "early stopping"


def train(name, **more):
    """Train a case; every case has a last batch that is smaller than the others."""
    make, data, settings = CASES[name]
    return tpsgd.fit(make(), data(), **{"epochs": 2, "batch_size": 16, **settings, **more})


def train_in_stages(name, ranks):
    """Train a case in a pipeline; three cases let the plan choose the stages."""
    stages = None if name in ("readout", "cnn", "wide") else STAGES[ranks]
    blocks = {"blocks of two layers": 2, "custom modules": 3}.get(name, 4)
    if stages is not None and blocks < 4:
        stages = [1] * (ranks - 1) + [blocks - ranks + 1]
    return train(name, parallel=tpsgd.pipeline(stages))


STAGES = {2: [2, 2], 4: [1, 1, 1, 1]}
ON_TWO_RANKS = (  # in make test; the others in make test-all
    *("readout", "readout-learned", "auxiliary", "cnn, l2", "cnn, augmented"),
    *("blocks of two layers", "wide", "a small second batch", "custom modules", "validation"),
    *("early stopping", "all blocks stop early", "epochs by block", "micro-batches"),
    *("one cycle", "decay and clip", "recursive head", "data set", "ordered loader"),
)
ON_FOUR_RANKS = ("readout", "cnn", "validation", "early stopping", "stopped by a callback")


def train_and_copy(folder, **more):
    """Train with a checkpoint after every epoch; a copy of the one after the second stays."""

    def copy(epoch):
        if (epoch.epoch, epoch.block) == (3, 1):
            shutil.copytree(folder / "checkpoint", folder / "after two epochs")

    checkpoint = tpsgd.Checkpoint(folder / "checkpoint", every=0)
    return train(CHECKPOINTED, callbacks=[copy], checkpoint=checkpoint, **more)


def resume(folder, **more):
    """Go on from the checkpoint in a folder."""
    return train(CHECKPOINTED, checkpoint=tpsgd.Checkpoint(folder, 0, resume=True), **more)


class Told:
    """A callback that notes the epochs of the run that it goes on with."""

    def __init__(self):
        self.epochs = []

    def __call__(self, epoch):
        """Let it go on."""

    def resumed(self, history):
        """Note the epochs so far."""
        self.epochs += [(e.epoch, e.block) for e in history]


def recurrent():
    """A net that no pipeline can train."""
    return nn.Sequential(tpsgd.Recurrent(4, 6), nn.Linear(6, 3))


def shuffled():
    """A loader that chooses its order by itself."""
    return torch.utils.data.DataLoader(Rows(), batch_size=16, shuffle=True)


def shuffled_batches():
    """A loader whose batches are chosen by a sampler of their own."""
    rows = Rows()
    sampler = BatchSampler(RandomSampler(rows), 16, drop_last=False)
    return torch.utils.data.DataLoader(rows, batch_sampler=sampler)


def differing(name, *values, **others):
    """Settings of which every rank has another."""
    return lambda: {name: values[int(os.environ["RANK"])]} | others


REFUSALS = {
    "dfa": (deep, POINTS, {"rule": rules.dfa()}),
    "sequential": (deep, POINTS, {"order": tpsgd.sequential}),
    "too few blocks": (lambda: nn.Sequential(nn.Linear(6, 3)), POINTS, {}),
    "stages": (deep, POINTS, {"parallel": tpsgd.pipeline([2, 1])}),
    "recurrent": (recurrent, lambda: (torch.zeros(8, 5, 4), torch.arange(8) % 3), {}),
    "shuffled loader": (deep, shuffled, {}),
    "shuffled batches": (deep, shuffled_batches, {}),
    "ridge": (deep, POINTS, {"optimizer": [adam, adam, adam, tpsgd.ridge()]}),
    "backprop": (deep, POINTS, {"method": tpsgd.fit_backprop}),
    "other epochs": (deep, POINTS, differing("epochs", 2, 3)),
    "other batches": (deep, POINTS, differing("batch_size", 16, 8, epochs=1)),
    "other stages": (deep, POINTS, differing("parallel", tpsgd.pipeline([2, 2]), tpsgd.pipeline())),
    "other validation": (deep, POINTS, differing("validation", points(16), points(20))),
    "other labels": (deep, lambda: points(50, seed=int(os.environ["RANK"])), {}),
}


def refusal(name):
    """The sentence by which a case is refused."""
    make, data, settings = REFUSALS[name]
    more = settings() if callable(settings) else settings
    settings = {"parallel": tpsgd.pipeline([2, 2])} | more
    try:
        settings.pop("method", tpsgd.fit)(make(), data(), **settings)
    except tpsgd.TpsgdError as error:
        return str(error)
    return "trained"


class Slow(nn.Tanh):
    """A layer that takes its time."""

    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


@contextmanager
def noted_sends():
    """A list of how many batches wait to be received after each send."""
    waiting, send = [], handover.Outbox.send

    def noted(outbox, x):
        send(outbox, x)
        waiting.append(len(outbox.sent))

    handover.Outbox.send = noted
    yield waiting
    handover.Outbox.send = send


def flights():
    """How many batches wait after each send to a rank that is slow, and the ranks' figures."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Slow(), nn.Linear(8, 3))
    with noted_sends() as waiting:
        run = tpsgd.fit(model, points(160), batch_size=16, parallel=tpsgd.pipeline([1, 2]))
    return waiting, run.settings["pipeline"]


def sends_until_all_have_stopped():
    """How many batches are sent until early stopping has ended the last block."""
    with noted_sends() as waiting:
        train("all blocks stop early", parallel=tpsgd.pipeline(STAGES[2]))
    return len(waiting)


COMMAND = ["train", "--data", "digits", "--model", "mlp:16,16", "--epochs", "1", "--out"]


def command_line(folder):
    """Train from the command line."""
    sys.argv = ["tpsgd", *COMMAND, str(folder / "command"), "--pipeline"]
    with suppress(SystemExit), redirect_stdout(io.StringIO()):
        app.main()


class Deadly(nn.Tanh):
    """A layer that ends its process when it has been called a few times while training."""

    calls = 0

    def forward(self, x):
        Deadly.calls += self.training and os.environ["RANK"] == "2"
        if Deadly.calls == 5:
            os._exit(1)
        return super().forward(x)


def death():
    """The sentence on other ranks when rank 2 dies."""
    model = mlp(6, 6, 6, 6, 3, activation=Deadly)
    try:
        tpsgd.fit(model, points(160), batch_size=16, parallel=tpsgd.pipeline(STAGES[4]))
    except tpsgd.TpsgdError as error:
        return str(error)
    return "trained"


def main(folder: Path, names: list[str]) -> None:
    """Train these cases on this rank."""
    results, rank, count = {}, os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    with joined():
        for name in names:
            run = train_in_stages(name, count)
            results[name] = run.model.state_dict(), run.as_dict()
        told, parallel = Told(), tpsgd.pipeline(STAGES[count])
        run = resume(folder / "after two epochs", parallel=parallel, callbacks=[told])
        results["told"] = told.epochs
        results["resumed"] = run.model.state_dict(), run.as_dict()
        if count == 2 and CHECKPOINTED in names:
            results["refusals"] = {name: refusal(name) for name in REFUSALS}
            command_line(folder)
            results["flights"] = flights()
            results["sends"] = sends_until_all_have_stopped()
            train_and_copy(folder / "left", parallel=tpsgd.pipeline([3, 1]))
        torch.save(results, folder / f"{rank}.pt")
    if count == 4:
        (folder / f"{rank}.txt").write_text(death())


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, count, port, names = sys.argv[1:]
    tpsgd.plan(deep(), (6,), ranks=2, others=False)  # loads what torch loads when it is needed
    load("digits")  # and scikit-learn
    if not forked(int(count), port):
        main(Path(folder), names.split(";"))
