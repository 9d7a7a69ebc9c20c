"""A loaded model predicts: in the order of the samples, with probabilities by its loss."""

import numpy as np
import pytest
import torch
from helpers import images, mlp, points, ragged, seeded, sequences
from torch import nn

import tpsgd
from tpsgd import TpsgdError, Trained

DATA = points(60)


def trained(model=None, **settings) -> Trained:
    model = model or mlp(6, 8, 3)
    return Trained(model, tpsgd.fit(model, DATA, epochs=3, **settings))


def test_predictions_agree_with_evaluate_whatever_the_batch_size():
    one = trained()
    predictions = one.predict(DATA[0])
    assert torch.equal(predictions, one.predict(DATA[0].numpy(), batch_size=7))
    assert (predictions == DATA[1]).float().mean().item() == pytest.approx(one.evaluate(DATA))


def test_sequences_of_different_lengths_keep_their_order():
    x, y = sequences(n=13)
    padded = ragged(x.float())
    model = seeded(lambda: nn.Sequential(tpsgd.Recurrent(4, 5), nn.Linear(5, 3)))
    one = Trained(model, tpsgd.fit(model, (padded, y), epochs=1))
    outputs = one.outputs(padded, batch_size=4)
    for i in range(13):
        steps = padded.data[i : i + 1, : padded.lengths[i]]
        torch.testing.assert_close(outputs[i : i + 1], model(steps))


def test_probabilities_are_the_link_of_the_loss():
    one = trained()
    torch.testing.assert_close(one.probabilities(DATA[0]), one.outputs(DATA[0]).softmax(1))
    one = trained(loss=tpsgd.bce)
    torch.testing.assert_close(one.probabilities(DATA[0]), one.outputs(DATA[0]).sigmoid())


HEAD = [torch.optim.Adam, tpsgd.ridge()]


@pytest.mark.parametrize("settings", [{"loss": tpsgd.mse}, {"optimizer": HEAD}])
def test_least_squares_estimates_probabilities(settings):
    one = trained(**settings)
    outputs, probabilities = one.outputs(DATA[0]), one.probabilities(DATA[0])
    torch.testing.assert_close(probabilities.sum(1), torch.ones(60))
    assert (probabilities >= 0).all() and (probabilities[outputs <= 0] == 0).all()
    assert torch.equal(probabilities.argmax(1), outputs.argmax(1))


def test_a_solved_yes_is_at_1_and_a_no_at_minus_1():
    one = trained(loss=tpsgd.bce, optimizer=HEAD)
    expected = ((one.outputs(DATA[0]) + 1) / 2).clamp(0, 1)
    torch.testing.assert_close(one.probabilities(DATA[0]), expected)
    assert torch.equal(one.predict(DATA[0]), one.outputs(DATA[0]).argmax(1))


def test_outputs_that_are_all_negative_have_probabilities_too():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([-3.0, -1.0, -2.0]))
    one = Trained(model, tpsgd.Run("x", 0, {"loss": "mse"}))
    probabilities = one.probabilities(torch.ones(1, 2))
    assert probabilities.argmax(1).item() == 1 and probabilities.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("last", [nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid()])
def test_a_link_in_the_model_is_not_applied_twice(last):
    model = nn.Sequential(nn.Linear(6, 3), last)
    one = Trained(model, tpsgd.Run("x", 0, {"loss": "cross_entropy"}))
    y = model(DATA[0]).detach()
    expected = y.exp() if isinstance(last, nn.LogSoftmax) else y
    torch.testing.assert_close(one.probabilities(DATA[0]), expected)


def test_one_output_is_no_or_yes():
    model = nn.Sequential(nn.Linear(6, 1))
    run = tpsgd.fit(model, (DATA[0], DATA[1] % 2), loss=tpsgd.bce, epochs=1)
    one = Trained(model, run, ("no", "yes"))
    torch.testing.assert_close(one.probabilities(DATA[0])[:, 1:], model(DATA[0]).sigmoid())
    assert torch.equal(one.predict(DATA[0]) == 1, model(DATA[0])[:, 0] > 0)


def test_predicting_leaves_modes_as_they_are():
    model = mlp(6, 8, 3).append(nn.Dropout(0.5))
    one = Trained(model, tpsgd.Run("x", 0, {}))
    model[0].eval()
    assert torch.equal(one.outputs(DATA[0]), one.outputs(DATA[0]))
    assert [m.training for m in (model, model[0], model[-1])] == [True, False, True]


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (torch.empty(0, 6), "there are no samples"),
        (torch.ones(4, 5), "cannot take an input of shape"),
        (torch.full((4, 6), torch.nan), "NaN or infinity"),
        ("words", "must be numbers|single number"),
    ],
)
def test_samples_that_cannot_be_predicted(x, said):
    with pytest.raises(TpsgdError, match=said):
        trained().predict(x)


def test_the_wrong_number_of_class_names_is_noticed():
    one = Trained(mlp(6, 3), tpsgd.Run("x", 0, {}), ("a", "b"))
    with pytest.raises(TpsgdError, match="tells 3 classes apart, but was saved with 2 names"):
        one.predict(DATA[0])


def test_images_keep_their_order():
    x, y = images(20)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    one = Trained(model, tpsgd.fit(model, (x, y), epochs=1))
    torch.testing.assert_close(one.outputs(x, batch_size=6), model(x).detach())


@pytest.mark.parametrize("method", ["standard", "minmax"])
def test_raw_samples_are_scaled_as_those_of_training(tmp_path, method):
    x, y = DATA[0].numpy() * [1, 10, 100, 1000, 1, 1] + 50, DATA[1].numpy()
    np.savez(tmp_path / "d.npz", x=x, y=y)
    data = tpsgd.data.load(str(tmp_path / "d.npz"), scale=method)
    model = mlp(6, 8, 3)
    tpsgd.fit(model, data.train, epochs=30, lr=0.05).save(tmp_path / "m", inputs=data.inputs)
    one = tpsgd.load(tmp_path / "m")
    read = tpsgd.data.read_new(str(tmp_path / "d.npz"), inputs=data.inputs, classes=data.classes)
    assert torch.equal(one.scaled(x), read.x)
    torch.testing.assert_close(one.scaled(x.astype("float32")), read.x, atol=1e-5, rtol=1e-4)
    assert one.evaluate((one.scaled(x), y)) > 0.9 > one.evaluate((x, y))


def test_bytes_are_scaled_and_what_was_not_scaled_stays():
    pixels = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    of_bytes = Trained(mlp(3, 3), tpsgd.Run("x", 0, {}), inputs={"scaling": {"method": "bytes"}})
    assert of_bytes.scaled(pixels).tolist() == [[0.0, pytest.approx(0.2), 1.0]]
    with pytest.raises(TpsgdError, match="trained on bytes"):
        of_bytes.scaled(pixels.float())
    assert torch.equal(trained().scaled(DATA[0]), DATA[0])


def test_padded_series_are_scaled_but_for_their_padding():
    series = ragged(sequences()[0].float())
    scaling = {"method": "standard", "shift": [1.0] * 4, "scale": [2.0] * 4}
    new = Trained(mlp(3, 3), tpsgd.Run("x", 0, {}), inputs={"scaling": scaling}).scaled(series)
    for i, steps in enumerate(series.lengths.tolist()):
        torch.testing.assert_close(new.data[i, :steps], (series.data[i, :steps] - 1) / 2)
        assert not new.data[i, steps:].any()


def test_it_is_shown_as_the_record_of_its_training():
    model = nn.Sequential(nn.Linear(2, 3))
    run = tpsgd.fit(model, (torch.zeros(6, 2), torch.arange(6) % 3), epochs=1)
    assert str(tpsgd.Trained(model, run)) == str(run)
