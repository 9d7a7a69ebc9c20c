"""A run that was interrupted and resumed equals one that was not, bit for bit."""

import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import with_full
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import tpsgd
from tpsgd import Checkpoint, TpsgdError, rules
from tpsgd.saved import checkpoint

SEEN = torch.Generator().manual_seed(0)
POINTS = torch.randn(90, 6, generator=SEEN), torch.arange(90) % 3
IMAGES = torch.rand(40, 2, 8, 8, generator=SEEN), torch.arange(40) % 3
SEQUENCES = torch.randn(40, 7, 4, generator=SEEN), torch.arange(40) % 3


class Killed(Exception):
    """The run ends, as if the process had been killed."""


def mlp():
    return nn.Sequential(
        *(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 8), nn.Tanh()),
        nn.Linear(8, 3),
    )


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 3)),
    )


def plain():
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def leaky():
    return nn.Sequential(
        tpsgd.Recurrent(4, 6, sequence=True), tpsgd.Recurrent(6, 5), nn.Linear(5, 3)
    )


def diagonal():
    return tpsgd.zoo.words.factory("lru:6,5", (7, 4), 3)()


def step_rate(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.3)


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
TOGETHER = {"order": tpsgd.simultaneous}
RUNS = {
    "default": (mlp, POINTS, {}),
    "default, simultaneous": (mlp, POINTS, TOGETHER),
    "fixed codes": (mlp, POINTS, {"rule": rules.readout()}),
    "tpsgd-l2": (plain, POINTS, {"rule": rules.tpsgd_l2()}),
    "drtp, redrawn": (plain, POINTS, {"rule": rules.drtp(), "memory": tpsgd.Memory(redraw=True)}),
    "dfa": (mlp, POINTS, {"rule": rules.dfa()}),
    "predsim": (cnn, IMAGES, {"rule": rules.predsim()}),
    "auxiliary nets": (cnn, IMAGES, {"rule": rules.auxiliary(channels=4, side=2)}),
    "frozen": (mlp, POINTS, {"rule": rules.frozen()}),
    "cnn": (cnn, IMAGES, {}),
    "cnn, simultaneous, sgd": (cnn, IMAGES, {**TOGETHER, "optimizer": tpsgd.sgd}),
    "augmented": (cnn, IMAGES, {"augment": tpsgd.augment.crop(1)}),
    "own augmentation": (cnn, IMAGES, {"augment": lambda x: x + 0.1 * torch.rand_like(x)}),
    "blocks": (cnn, IMAGES, {"blocks": 2}),
    "momentum": (plain, POINTS, {"optimizer": MOMENTUM}),
    "one_cycle": (plain, POINTS, {"lr_schedule": tpsgd.one_cycle()}),
    "one_cycle, simultaneous": (
        plain, POINTS, {**TOGETHER, "lr_schedule": tpsgd.one_cycle(), "epochs": [2, 4, 3]}
    ),
    "step": (plain, POINTS, {"lr_schedule": step_rate, "optimizer": MOMENTUM}),
    "milestones": (plain, POINTS, {"lr_schedule": milestones}),
    "ridge head": (plain, POINTS, {"optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()]}),
    "rls head": (plain, POINTS, {"optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.rls()]}),
    "all ridge": (
        plain, POINTS,
        {"rule": rules.tpsgd_l2(at=tpsgd.Place.BEFORE), "optimizer": tpsgd.ridge()},
    ),
    "leaky": (leaky, SEQUENCES, {"optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()]}),
    "leaky, simultaneous": (leaky, SEQUENCES, TOGETHER),
    "diagonal": (diagonal, SEQUENCES, {}),
    "early stopping": (
        plain, POINTS,
        {
            "validation": (POINTS[0][:20], POINTS[1][:20]),
            "early_stopping": tpsgd.EarlyStopping(1, 0.02),
        },
    ),
    "micro-batches": (plain, POINTS, {"memory": tpsgd.Memory(micro_batch=5)}),
    "slices": (plain, POINTS, {"memory": tpsgd.Memory(slices=2)}),
    "recomputed": (mlp, POINTS, {"memory": tpsgd.Memory(reuse=False)}),
    "half precision": (cnn, IMAGES, {"precision": torch.bfloat16}),
    "dataset": (mlp, TensorDataset(*POINTS), {}),
    "shuffled loader": (mlp, DataLoader(TensorDataset(*POINTS), 16, shuffle=True), {}),
    "backprop": (mlp, POINTS, {"method": tpsgd.fit_backprop}),
}  # fmt: skip
for name, (make, data, settings) in RUNS.items():
    RUNS[name] = make, data, {"epochs": 3, "batch_size": 16, **settings}


class Rows(torch.utils.data.Dataset):
    """Samples one by one."""

    def __len__(self):
        return len(POINTS[1])

    def __getitem__(self, i):
        return POINTS[0][i], POINTS[1][i]


RUNS["own dataset"] = mlp, Rows(), {"epochs": 3, "batch_size": 16}


def train(make, data, settings, seed=5):
    """The tensors and the record of a run."""
    torch.manual_seed(seed)  # the initial weights
    model, settings = make(), dict(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = settings.pop("method", tpsgd.fit)(model, data, **settings)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}, run


def compared(run):
    """What must be equal in the records of two runs."""
    history = [replace(epoch, seconds=0.0) for epoch in run.history]
    return history, run.blocks, run.sample_passes, run.forward_passes, run.kept_bytes, run.settings


LONG = (  # only in make test-all: others are like them
    *("drtp, redrawn", "cnn, simultaneous, sgd", "own augmentation", "blocks"),
    *("slices", "recomputed", "dataset", "tpsgd-l2", "diagonal", "all ridge"),
)


@pytest.fixture
def killed_after_writing(monkeypatch):
    """Every checkpoint that is written is the last thing that a run does."""
    write = checkpoint.write

    def write_and_end(folder, state):
        write(folder, state)
        raise Killed

    monkeypatch.setattr(checkpoint, "write", write_and_end)


@pytest.mark.parametrize("name", with_full(RUNS, LONG))
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, tmp_path: Path, killed_after_writing: None
) -> None:
    tensors, run = train(*RUNS[name])
    make, data, settings = RUNS[name]
    settings = {**settings, "checkpoint": Checkpoint(tmp_path, every=0, resume=True)}
    kills = 0
    while True:  # ended after every epoch, and after the last one too
        try:
            resumed, record = train(make, data, settings, seed=5 + kills)  # other initial weights
            break
        except Killed:
            kills += 1
    for key, tensor in tensors.items():
        assert torch.equal(tensor, resumed[key]), key
    assert compared(record) == compared(run)
    assert kills >= max(epoch.epoch for epoch in run.history)
    assert record.peak_bytes == pytest.approx(run.peak_bytes, rel=0.02)


class OwnBatches:
    """Batches whose order a generator decides, with another one that orders the samples."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)
        own = torch.Generator().manual_seed(4)
        self.sampler = RandomSampler(range(len(POINTS[1])), generator=own)

    def __len__(self):
        return 6

    def __iter__(self):
        batches = list(BatchSampler(self.sampler, 16, drop_last=False))
        return (batches[i] for i in torch.randperm(6, generator=self.generator))


def test_generators_of_a_batch_sampler_are_resumed(
    tmp_path: Path, killed_after_writing: None
) -> None:
    def fit(**settings):
        loader = DataLoader(TensorDataset(*POINTS), batch_sampler=OwnBatches())
        return train(plain, loader, {"epochs": 3, **settings})

    (tensors, run), record = fit(), None
    while record is None:
        with suppress(Killed):
            resumed, record = fit(checkpoint=Checkpoint(tmp_path, every=0, resume=True))
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in tensors.items())
    assert compared(record) == compared(run)


def begun(folder: Path, monkeypatch, **settings) -> Checkpoint:
    """A checkpoint after the first epoch, to go on from."""
    with monkeypatch.context() as patch:
        write = checkpoint.write

        def write_and_end(folder, state):
            write(folder, state)
            raise Killed

        patch.setattr(checkpoint, "write", write_and_end)
        with pytest.raises(Killed):
            tpsgd.fit(plain(), POINTS, checkpoint=Checkpoint(folder, every=0), **settings)
    return Checkpoint(folder, every=0, resume=True)


@pytest.mark.parametrize(
    "name", ["default", "default, simultaneous", "ridge head", "backprop", "shuffled loader"]
)
def test_a_finished_run_takes_more_epochs(name, tmp_path, monkeypatch):
    make, data, settings = RUNS[name]
    first, short = train(make, data, settings | {"checkpoint": tmp_path})
    longer = settings | {"epochs": 5, "checkpoint": Checkpoint(tmp_path, every=0, resume=True)}
    with monkeypatch.context() as patch:  # the extended run is interrupted again and again
        write = checkpoint.write

        def write_and_end(folder, state):
            write(folder, state)
            raise Killed

        patch.setattr(checkpoint, "write", write_and_end)
        for _ in range(20):
            with suppress(Killed):
                tensors, run = train(make, data, longer, seed=9)
                break
    assert run.history[: len(short.history)] == short.history
    for block in {epoch.block for epoch in run.history}:
        numbers = [epoch.epoch for epoch in run.history if epoch.block == block]
        assert numbers in ([1, 2, 3, 4, 5], [1, 4])  # a solved layer is solved again
    assert run.sample_passes > short.sample_passes
    assert not all(torch.equal(first[n], tensors[n]) for n in first)
    again, repeated = train(make, data, longer, seed=3)
    assert compared(repeated)[0] == compared(run)[0]
    assert all(torch.equal(again[n], tensors[n]) for n in again)


def test_an_extension_that_is_interrupted_ends_as_one_that_is_not(tmp_path):
    make, data, settings = RUNS["default"]
    ended = []
    for folder, stop in (("whole", ()), ("twice", (4,))):
        saved = Checkpoint(tmp_path / folder, every=0, resume=True)
        train(make, data, settings | {"checkpoint": saved})

        def end(epoch, stop=stop):
            if epoch.block == 2 and epoch.epoch in stop:
                raise Killed

        longer = settings | {"epochs": 5, "checkpoint": saved}
        with suppress(Killed):
            train(make, data, longer | {"callbacks": [end]})
        ended.append(train(make, data, longer)[0])
    assert all(torch.equal(ended[0][n], ended[1][n]) for n in ended[0])


STOPS = {
    "validation": (POINTS[0][:20], POINTS[1][:20]),
    "early_stopping": tpsgd.EarlyStopping(2, 0.05),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("default, simultaneous", {}),
        ("leaky, simultaneous", {}),
        ("cnn, simultaneous, sgd", {"optimizer": MOMENTUM}),
        ("shuffled loader", TOGETHER),
        ("backprop", {}),
        ("slices", TOGETHER),
        ("default, simultaneous", {**STOPS, "epochs": 6}),
    ],
)
def test_more_epochs_under_simultaneous_equal_a_longer_run(name, settings, tmp_path):
    make, data, own = RUNS[name]
    settings = own | settings
    longer = settings | {"epochs": settings["epochs"] + 3}
    tensors, run = train(make, data, longer)
    train(make, data, settings | {"checkpoint": tmp_path})
    saved = Checkpoint(tmp_path, resume=True)
    extended, record = train(make, data, longer | {"checkpoint": saved}, seed=8)
    assert [replace(epoch, seconds=0.0) for epoch in record.history] == compared(run)[0]
    assert all(torch.equal(tensors[n], extended[n]) for n in tensors)


def test_more_epochs_begin_with_the_codes_the_gain_and_the_optimizer_of_each_block(tmp_path):
    digits = tpsgd.data.load("digits", max_train=500)
    make = tpsgd.zoo.words.factory("mlp:64", digits.shape, 10)
    settings = {"batch_size": 32, "order": tpsgd.sequential}
    accuracies = []
    for epochs in (30, 31):
        saved = Checkpoint(tmp_path, resume=True)
        torch.manual_seed(0)
        run = tpsgd.fit(make(), digits.train, epochs=epochs, checkpoint=saved, **settings)
        accuracies.append(tpsgd.evaluate(run.model, digits.test))
    losses = {(epoch.block, epoch.epoch): epoch.loss for epoch in run.history}
    for block in (1, 2):
        assert losses[block, 31] < 1.1 * losses[block, 30]
    assert accuracies[1] > accuracies[0] - 0.01


def test_a_block_that_had_stopped_early_goes_on_only_if_its_inputs_change(tmp_path):
    def first_block(epoch):
        return epoch.block == 1 and epoch.epoch == 2

    def second_block(epoch):
        return epoch.block == 2 and epoch.epoch == 2

    for stop, expected in ((first_block, [2, 5, 5]), (second_block, [5, 4, 5])):
        saved = Checkpoint(tmp_path / stop.__name__, resume=True)
        settings = {"batch_size": 16, "checkpoint": saved, "callbacks": [stop]}
        tpsgd.fit(plain(), POINTS, epochs=3, **settings)
        run = tpsgd.fit(plain(), POINTS, epochs=5, **settings)
        counts = [sum(epoch.block == block for epoch in run.history) for block in (1, 2, 3)]
        assert counts == expected


OTHERS = {
    "epochs": (plain, POINTS, {"epochs": 4}, r"began with 166 epochs, not 4: .*--epochs 166; once"),
    "rate": (plain, POINTS, {"lr": 0.1}, "its lr was not set, and now it is 0.1"),
    "rule": (
        plain, POINTS, {"rule": rules.drtp()}, "its rule was readout-learned, and now it is drtp",
    ),
    "seed": (plain, POINTS, {"seed": 1}, "its seed was 0, and now it is 1"),
    "clip": (plain, POINTS, {"clip": 1.0}, "its clip was not set, and now it is 1.0"),
    "decay": (plain, POINTS, {"weight_decay": 0.1}, "its weight_decay was not set, and now it is"),
    "order": (plain, POINTS, TOGETHER, "its order was sequential, and now it is simul"),
    "optimizer": (
        plain, POINTS, {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "its optimizer was",
    ),
    "model": (mlp, POINTS, {}, "its model was"),
    "width": (
        lambda: nn.Sequential(nn.Linear(6, 11), nn.ReLU(), nn.Linear(11, 8), nn.ReLU(),
                              nn.Linear(8, 3)),
        POINTS, {}, "out_features=10, bias=True., and now it is .*out_features=11",
    ),
    "size": (plain, (POINTS[0][:60], POINTS[1][:60]), {}, "number of samples .* was 90, and now"),
    "labels": (plain, (POINTS[0], POINTS[1].flip(0)), {}, "its checksum"),
    "samples": (plain, (POINTS[0] + 1, POINTS[1]), {}, "its checksum"),
    "validation": (plain, POINTS, {"validation": POINTS}, "its validation was False, and now"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_run_is_refused(name: str, tmp_path: Path, monkeypatch) -> None:
    saved = begun(tmp_path, monkeypatch)
    make, data, settings, message = OTHERS[name]
    model = make()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TpsgdError, match=message):
        tpsgd.fit(model, data, checkpoint=saved, **settings)
    assert all(map(torch.equal, before, model.parameters()))  # nothing was done to it


@pytest.mark.parametrize(
    ("epochs", "settings", "message"),
    [
        (1, {}, r"2 epochs, not 1: go on with --epochs 2; once it has finished it takes more"),
        ([2, 1, 1], {}, r"2 epochs, not \[2, 1, 1\]: go on with --epochs 2; "),
        (
            3,
            {"lr_schedule": tpsgd.one_cycle()},
            r"2 epochs, not 3: .* an lr_schedule",
        ),
    ],
)
def test_other_epochs_of_a_finished_run_are_refused_with_those_it_takes(
    tmp_path, epochs, settings, message
):
    settings = {"checkpoint": Checkpoint(tmp_path, resume=True), **settings}
    tpsgd.fit(plain(), POINTS, epochs=2, **settings)
    with pytest.raises(TpsgdError, match=message):
        tpsgd.fit(plain(), POINTS, epochs=epochs, **settings)


def test_of_several_differences_that_which_matters_most_is_named_first(tmp_path, monkeypatch):
    saved = begun(tmp_path, monkeypatch)
    data = POINTS[0][:60], POINTS[1][:60]
    expected = (
        r"of another run: its number of samples \(training data\) was 90, and now it is 60 "
        r"\(model, epochs, list of the rules' options, batch_size: different, too\); resume with"
    )
    settings = {"rule": rules.readout(True, scale=2.0), "epochs": 4, "batch_size": 7, "seed": 3}
    with pytest.raises(TpsgdError, match=expected):
        tpsgd.fit(mlp(), data, checkpoint=saved, **settings)


def test_an_optimizer_with_other_numbers_is_refused(tmp_path: Path, monkeypatch) -> None:
    def factory(rate):
        return lambda params: torch.optim.SGD(params, lr=rate)

    saved = begun(tmp_path, monkeypatch, optimizer=factory(0.1))
    with pytest.raises(TpsgdError, match=r"list of optimizers was .*0\.1.* now it is .*0\.2"):
        tpsgd.fit(plain(), POINTS, optimizer=factory(0.2), checkpoint=saved)


def test_a_folder_with_a_checkpoint_is_not_overwritten(tmp_path: Path, monkeypatch) -> None:
    begun(tmp_path, monkeypatch)
    with pytest.raises(TpsgdError, match=r"holds a checkpoint \(after epoch 1 of block 1\): go on"):
        tpsgd.fit(plain(), POINTS, checkpoint=tmp_path)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    messages = []

    def fit_beside(seed):
        try:
            tpsgd.fit(plain(), POINTS, seed=seed, checkpoint=Checkpoint(tmp_path, resume=True))
        except TpsgdError as error:
            messages.append(str(error))

    def start_another(epoch):
        if epoch.epoch == 2:
            thread = threading.Thread(target=fit_beside, args=(epoch.block,))
            thread.start()
            thread.join()

    saved = Checkpoint(tmp_path, every=0)
    tpsgd.fit(plain(), POINTS, epochs=2, checkpoint=saved, callbacks=[start_another])
    assert len(messages) == 3 and all("another thread is writing to" in m for m in messages)
    assert len(list(tmp_path.iterdir())) == 2  # and no lock is left


def interrupted_at_once(folder: Path, **settings) -> None:
    def interrupt(_):
        raise Killed

    with pytest.raises(Killed):
        tpsgd.fit(plain(), POINTS, checkpoint=folder, callbacks=[interrupt], **settings)


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    interrupted_at_once(tmp_path)
    assert checkpoint.position(tmp_path) == "before its first checkpoint"
    saved = Checkpoint(tmp_path, resume=True)
    with pytest.raises(TpsgdError, match="of another run: its seed was 0, and now it is 1"):
        tpsgd.fit(plain(), POINTS, seed=1, checkpoint=saved)
    interrupted_at_once(tmp_path, seed=1)  # without resume it is another run: nothing is lost
    torch.manual_seed(0)
    model, other = plain(), plain()
    other.load_state_dict(model.state_dict())
    run = tpsgd.fit(model, POINTS, seed=1, checkpoint=saved)
    tpsgd.fit(other, POINTS, seed=1)
    assert len(run.history) == 3 * run.settings["epochs"] == 498
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def damage(folder: Path, how: str) -> None:
    file = folder / "checkpoint.json"
    (tensors,) = folder.glob("*.safetensors")
    text = file.read_text()
    if how == "no tensors":
        tensors.unlink()
    elif how == "truncated tensors":
        tensors.write_bytes(tensors.read_bytes()[:-9])
    elif how == "truncated":
        file.write_text(text[: len(text) // 2])
    elif how == "edited":
        file.write_text(text.replace('"epoch": 1', '"epoch": 2'))
    elif how == "newer":
        file.write_text(text.replace('"format": 1', '"format": 2'))
    else:
        file.write_text("[]")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no tensors", "there is no checkpoint-"),
        ("truncated tensors", "is damaged"),
        ("truncated", "is not whole"),
        ("edited", "was edited or damaged"),
        ("newer", "install a newer tpsgd"),
        ("foreign", "describes no checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_refused(how, message, tmp_path: Path, monkeypatch) -> None:
    saved = begun(tmp_path, monkeypatch)
    damage(tmp_path, how)
    with pytest.raises(TpsgdError, match=message):
        tpsgd.fit(plain(), POINTS, checkpoint=saved)


@pytest.mark.parametrize("key", ["identity", "stages", "model", "record", "seconds", "peak"])
def test_a_state_that_lacks_something_is_refused(key: str, tmp_path: Path, monkeypatch) -> None:
    saved = begun(tmp_path, monkeypatch)
    state = checkpoint.read(tmp_path)
    del state[key]
    checkpoint.write(tmp_path, state)
    with pytest.raises(TpsgdError, match="makes no sense: KeyError"):
        tpsgd.fit(plain(), POINTS, checkpoint=saved)


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch) -> None:
    saved = begun(tmp_path, monkeypatch)
    for name in (".checkpoint.json.77.part", "checkpoint-0123456789abcdef.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    tpsgd.fit(plain(), POINTS, checkpoint=saved)
    names = {file.name.partition("-")[0] for file in tmp_path.iterdir()}
    assert (
        names == {"checkpoint.json", "checkpoint", "notes.txt"}
        and len(list(tmp_path.iterdir())) == 3
    )


def test_checkpoints_are_not_more_frequent_than_asked(tmp_path: Path, monkeypatch) -> None:
    folders = []
    write = checkpoint.write

    def counted(folder, state):
        folders.append(folder.name)
        write(folder, state)

    monkeypatch.setattr(checkpoint, "write", counted)
    for every, name in ((1e9, "seldom"), (0, "always")):
        tpsgd.fit(plain(), POINTS, epochs=2, checkpoint=Checkpoint(tmp_path / name, every=every))
    assert folders.count("seldom") == 1 and folders.count("always") == 6  # the end is written


@pytest.mark.parametrize("value", [3, {"folder": 1}, [Path("a")]], ids=str)
def test_something_else_is_no_folder(value) -> None:
    with pytest.raises(TpsgdError, match=r"checkpoint must be a folder or tpsgd\.Checkpoint"):
        tpsgd.fit(plain(), POINTS, checkpoint=value)


@pytest.mark.parametrize("every", [-1, float("nan"), "5", True, None], ids=str)
def test_the_time_between_checkpoints_is_a_number(every) -> None:
    with pytest.raises(TpsgdError, match="every must be"):
        Checkpoint("folder", every=every)


def test_restarts_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    first = tpsgd.fit_many(plain, POINTS, restarts=2, epochs=1, checkpoint=tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["seed-0", "seed-1"]
    saved = Checkpoint(tmp_path, resume=True)
    again = tpsgd.fit_many(plain, POINTS, restarts=2, epochs=1, checkpoint=saved)
    for model, other in zip(first.models, again.models, strict=True):
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    with pytest.raises(TpsgdError, match="cannot be stacked: a checkpoint holds one model"):
        tpsgd.fit_many(plain, POINTS, restarts=2, stacked=True, checkpoint=tmp_path)


def test_an_optimizer_whose_state_is_no_number_is_refused(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            self.state[self.param_groups[0]["params"][0]]["function"] = print
            return super().step(closure)

    with pytest.raises(TpsgdError, match=r"holds numbers, words and tensors, but .*function"):
        tpsgd.fit(plain(), POINTS, optimizer=Odd, checkpoint=Checkpoint(tmp_path, every=0))


@pytest.mark.full
def test_killed_processes_are_resumed_with_the_same_weights() -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "kill_and_resume.py"
    command = [sys.executable, str(script), "--kills", "10"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) >= 10 and ended.stdout.endswith("runs equal\n")


@pytest.mark.parametrize("reuse", with_full([True, False], [True]))
def test_a_resumed_adaptor_equals_an_uninterrupted_one(
    reuse: bool, tmp_path: Path, killed_after_writing: None
) -> None:
    def fit(**settings):
        torch.manual_seed(0)
        convolutions = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()
        net = tpsgd.adapt.Backbone(nn.Sequential(*convolutions), ["1", "3"])
        memory = tpsgd.Memory(reuse=reuse)
        layers = tpsgd.adapt.Layers(convs=1, dense=1, filters=3, kernel=3, width=6)
        return tpsgd.adapt.fit(
            net, IMAGES, taps=["1", "3"], layers=layers, combine=tpsgd.adapt.learned, epochs=2,
            memory=memory, **settings,
        )  # fmt: skip

    whole, resumed, kills = fit(), None, 0
    while resumed is None:
        try:
            resumed = fit(checkpoint=Checkpoint(tmp_path, every=0, resume=True))
        except Killed:
            kills += 1
    assert kills >= 12 and torch.equal(whole(IMAGES[0]), resumed(IMAGES[0]))
    for tap, head in whole.heads.items():
        assert all(map(torch.equal, head.parameters(), resumed.heads[tap].parameters()))


@pytest.mark.parametrize("reuse", [True, False])
def test_a_checkpoint_of_another_backbone_is_refused(reuse: bool, tmp_path: Path) -> None:
    def fit(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        tpsgd.adapt.fit(
            tpsgd.adapt.Backbone(net, ["2"]), IMAGES, epochs=1, memory=tpsgd.Memory(reuse=reuse),
            layers=tpsgd.adapt.Layers(convs=0, dense=1, width=6),
            checkpoint=Checkpoint(tmp_path, resume=True),
        )  # fmt: skip

    fit(0)
    name = "training data" if reuse else "checksum of the backbone"
    with pytest.raises(TpsgdError, match=f"of another run: its .*{name}.* was"):
        fit(1)


def test_a_budget_is_kept_with_a_checkpoint_too(tmp_path):
    digits = tpsgd.data.load("digits", max_train=500)
    taken = []
    for settings in ({}, {"checkpoint": Checkpoint(tmp_path, every=0)}):
        model = tpsgd.zoo.words.factory("mlp:64,64", digits.shape, 10)()
        run = tpsgd.fit(model, digits.train, epochs=2, memory="150KB", batch_size=32, **settings)
        taken.append(run.total_bytes)
    assert taken[1] == taken[0] <= 150 * 1024
