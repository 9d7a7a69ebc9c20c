"""River's methods: single samples as dictionaries, and models in river's pipelines."""

from functools import partial

import pytest
import torch
from streams.nets import X, Y, mlp

import tpsgd
from tpsgd import OnePass, Stream, TpsgdError, rls

SAMPLES = [dict(enumerate(row)) for row in X.flatten(1).tolist()]
MODELS = {
    "one pass": partial(OnePass, 30, solver=rls(), classes=range(10)),
    "stream": lambda: Stream(mlp(), lr=0.01),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_one_by_one_is_a_batch_of_one(make):
    torch.manual_seed(0)
    single = make()
    torch.manual_seed(0)
    batches = make()
    assert single.predict_one(SAMPLES[0]) is None and single.predict_proba_one(SAMPLES[0]) == {}
    rows = X.flatten(1)
    for row, sample, label in zip(rows[:60], SAMPLES, Y.tolist(), strict=False):
        single.learn_one(sample, label)
        batches.partial_fit(row[None], torch.tensor([label]))
    assert single.samples == 60
    assert single.outputs(rows).equal(batches.outputs(rows))
    assert single.predict_one(SAMPLES[5]) == batches.predict(rows[5:6])[0]
    chances = single.predict_proba_one(SAMPLES[5])
    assert set(chances) == set(range(10)) and sum(chances.values()) == pytest.approx(1)
    assert max(chances, key=chances.__getitem__) == single.predict_one(SAMPLES[5])
    assert single.predict_one(rows[5]) == single.predict_one(SAMPLES[5])


def test_names_of_the_first_sample_are_settled_once_it_is_learned():
    model = OnePass(5, solver=rls())
    with pytest.raises(TpsgdError, match="must be numbers, got 'red' for 'b'"):
        model.learn_one({"a": 1, "b": "red"}, 0)
    with pytest.raises(TpsgdError, match="a new one needs a name, too: got None"):
        model.learn_one({"a": 1}, None)
    with pytest.raises(TpsgdError, match="must be text, or none of them, got 'x', 3"):
        model.partial_fit(torch.ones(2, 1), ["x", 3])
    with pytest.raises(TpsgdError, match="NaN"):
        model.learn_one({"a": float("nan")}, 0)
    model.learn_one({"b": 1, "c": 2}, "yes")
    model.learn_one({"c": 1, "b": 2}, "no")
    one = model.predict_proba_one({"b": 1})
    assert one == model.predict_proba_one({"c": 0, "b": 1}) != model.predict_proba_one({"c": 1})
    with pytest.raises(TpsgdError, match="'a' was not in the first sample, which had 'b', 'c'"):
        model.predict_one({"a": 1})


def test_rivers_pipelines_and_metrics():
    pytest.importorskip("river")
    from river import evaluate, metrics, preprocessing

    model = preprocessing.MinMaxScaler() | tpsgd.RiverClassifier(MODELS["one pass"])
    stream = list(zip(SAMPLES, Y.tolist(), strict=True))
    accuracy = evaluate.progressive_val_score(stream, model, metrics.Accuracy()).get()
    assert accuracy > 0.6
    learned = model["RiverClassifier"].model
    assert learned.samples == len(stream)
    assert model.clone()["RiverClassifier"].model.samples == 0
    assert metrics.LogLoss().works_with(model)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_order_of_the_names_goes_with_the_state(make):
    torch.manual_seed(0)
    first, second = make(), make()
    for sample, label in zip(SAMPLES[:20], Y.tolist(), strict=False):
        first.learn_one(sample, label)
    if isinstance(first, Stream):
        second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    turned = dict(reversed(SAMPLES[30].items()))
    assert second.predict_proba_one(turned) == first.predict_proba_one(SAMPLES[30])


def test_models_whose_names_have_another_order_are_not_merged():
    first, second, third = (OnePass(5, classes=["yes"]) for _ in range(3))
    first.learn_one({"a": 1, "b": 2}, "yes")
    second.learn_one({"b": 2, "a": 1}, "yes")
    with pytest.raises(TpsgdError, match=r"different names cannot be merged: \['a', 'b'\] and"):
        first.merge(second)
    third.merge(first)
    outputs = [model.outputs([[1.0, 2.0]]) for model in (first, third)]
    assert outputs[0].equal(outputs[1])
    assert third.predict_proba_one({"b": 2, "a": 1}) == first.predict_proba_one({"a": 1, "b": 2})
