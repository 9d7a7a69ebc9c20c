"""What watches a run does not disturb it, and is not disturbed by the caller's functions."""

import pytest
import torch
from helpers import images, mlp, points
from torch import nn

import tpsgd
from tpsgd import Memory, TpsgdError, rules
from tpsgd.train import train

LARGE = 20 << 20  # bytes


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def allocate(*_):
    torch.zeros(LARGE, dtype=torch.uint8)


def test_a_callback_may_use_autograd():
    slopes = []

    def callback(epoch):
        x = torch.ones(2, requires_grad=True)
        x.square().sum().backward()
        slopes.append(x.grad)

    tpsgd.fit(mlp(6, 8, 3), points(), epochs=1, callbacks=[callback])
    assert len(slopes) == 2 and torch.equal(slopes[0], torch.full((2,), 2.0))


@pytest.mark.parametrize("watcher", [{"callbacks": [allocate]}, {"progress": allocate}])
@pytest.mark.parametrize("optimizer", [tpsgd.sgd, tpsgd.ridge()])
def test_the_memory_of_the_callers_functions_is_not_counted(watcher, optimizer):
    settings = {"epochs": 2, "batch_size": 48, "rule": rules.frozen(), "optimizer": optimizer}
    alone = tpsgd.fit(mlp(6, 8, 3), points(), **settings).peak_bytes
    assert tpsgd.fit(mlp(6, 8, 3), points(), **settings, **watcher).peak_bytes == alone


def test_validation_does_not_hide_the_second_step():
    """The first step that finds the optimizer's state is the second; here in another epoch."""
    settings = {"epochs": 3, "batch_size": 32}
    alone = tpsgd.fit_backprop(cnn(), images(), **settings).peak_bytes
    checked = tpsgd.fit_backprop(cnn(), images(), validation=images(4), **settings).peak_bytes
    assert checked == alone


def test_stacked_restarts_count_their_stacked_parameters():
    def make():
        return mlp(60, 80, 3)

    weights = 3 * sum(p.nbytes for p in make().parameters())
    data = points(16, 60)
    many = tpsgd.fit_many(make, data, restarts=3, stacked=True, epochs=1, optimizer=tpsgd.sgd)
    assert many.runs[0].peak_bytes > 2 * weights  # the models, and the stack of their parameters


def test_a_run_without_a_meter_says_that_nothing_was_measured():
    run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=1, memory=Memory(measure=False))
    assert "memory not measured" in str(run) and run.settings["measure"] is False
    digits = tpsgd.data.load("digits", max_train=100)
    record = tpsgd.compare(
        digits,
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        [],
        restarts=1,
        epochs=1,
        memory=Memory(measure=False),
    )
    assert "backprop" in str(record)


def test_backprop_records_only_what_it_does():
    settings = {"order": tpsgd.simultaneous, "memory": Memory(reuse=False, slices=3)}
    run = tpsgd.fit_backprop(mlp(6, 8, 3), points(), epochs=1, **settings)
    names = ("order", "reuse", "slices")
    assert [run.settings[name] for name in names] == ["sequential", None, None]


def test_a_wrong_rule_is_found_before_the_model_is_moved(monkeypatch):
    monkeypatch.setattr("tpsgd.engine.run.training_context", lambda *_: pytest.fail("moved"))
    with pytest.raises(TpsgdError, match="one per block"):
        tpsgd.fit(mlp(6, 8, 3), points(), rule=[rules.readout()])
    with pytest.raises(TpsgdError, match="epochs has 1 entries"):
        tpsgd.fit(mlp(6, 8, 3), points(), epochs=[1])


def test_progress_is_told_after_the_first_batch_of_every_block():
    calls = []
    tpsgd.fit(
        mlp(6, 8, 3), points(40), epochs=1, batch_size=8, progress=lambda *now: calls.append(now)
    )
    assert calls == [(8, 80), (40, 80), (48, 80), (80, 80)]


def test_a_block_that_is_trained_again_has_its_patience_back():
    def twice(net):
        for _ in range(2):
            train(net, [net.learners[0]], net.source)

    model = nn.Sequential(nn.Linear(6, 3))
    stopping = tpsgd.EarlyStopping(patience=2, min_delta=1e9)
    run = tpsgd.fit(model, points(), order=twice, epochs=9, early_stopping=stopping)
    assert [e.epoch for e in run.history] == [1, 2, 3, 1, 2, 3]
