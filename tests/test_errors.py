"""Every mistake gets one sentence, and leaves the model as it was."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scipy.sparse
import torch
from helpers import mlp, points, same, state
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tpsgd
from tpsgd import TpsgdError, bce, cross_entropy, mse, rules

X, Y = points(n=30, features=6, classes=3)
FITS = {"fit": tpsgd.fit, "fit_backprop": tpsgd.fit_backprop}
EXPLODES = partial(torch.optim.SGD, lr=1e9)


def refuses(match, model, data=(X, Y), fit=tpsgd.fit, **settings):
    """`fit` raises one sentence that says `match`; weights, modes and gradients are untouched."""
    before = state(model) if isinstance(model, nn.Module) else None
    with pytest.raises(TpsgdError, match=match) as caught:
        fit(model, data, **settings)
    assert "\n" not in str(caught.value)
    if before is not None:
        assert same(state(model), before)
        assert all(m.training for m in model.modules())
        assert all(p.grad is None for p in model.parameters())


def test_the_one_exception_is_a_value_error():
    assert issubclass(TpsgdError, ValueError)


# ---- data ----------------------------------------------------------------------------------------

NAN = X.clone()
NAN[7, 2] = math.nan
INF = X.clone()
INF[3, 0] = -math.inf


class Uncounted(Dataset):
    def __getitem__(self, i):
        return X[i], Y[i]


BAD_DATA = {
    "x of another width": (
        (X[:, :5], Y),
        r"block 1 \(.*\) cannot take .*\(batch, 5\): nn\.Linear takes 6 features, got 5$",
    ),
    "x of one dimension": (
        (X[:, 0], Y),
        r"block 1 .*\(batch,\): x must have shape \(samples, feat",
    ),
    "x and y swapped": ((Y, X), r"is data \(y, x\) in place of \(x, y\)\?"),
    "label beyond the classes": (
        (X, Y + 1),
        "label 3 is out of range.* 3 outputs.* 0 to 2; give it 4 outputs, .* from 0: y - 1$",
    ),
    "labels with gaps": (
        (X, 4 * Y + 1),
        r"label 9 .* give it 10 outputs, or number .*: np.unique\(y, return_inverse=True\)\[1\]$",
    ),
    "too many classes": ((X, torch.arange(30) % 5), "label 4 is out .*; give it 5 outputs$"),
    "negative label": ((X, Y - 1), "label -1 is out of range"),
    "nan": ((NAN, Y), r"NaN or infinity \(first in sample 7\)"),
    "infinity": ((INF, Y), r"NaN or infinity \(first in sample 3\)"),
    "no samples": ((X[:0], Y[:0]), "empty"),
    "fewer labels": ((X, Y[:-1]), "30 samples but y has 29 labels"),
    "more labels": ((X[:-1], Y), "29 samples but y has 30 labels"),
    "class rows as whole numbers": (
        (X, nn.functional.one_hot(Y, 3)),
        r"shape \(samples,\), got \(30, 3\)",
    ),
    "float indices": ((X, Y.float()), "class labels must be whole numbers .an integer type"),
    "yes and no": ((X, (Y > 0).float()), r"got \(30,\); for yes and no choose loss='bce'"),
    "float rows of another width": ((X, torch.ones(30, 4)), r"\(samples, 3\), got \(30, 4\)"),
    "soft rows that do not sum to one": ((X, torch.ones(30, 3)), "sum to 1.*bce"),
    "soft rows below zero": (
        (X, torch.tensor([[0.5, 0.25, 0.1]]).expand(30, 3)),
        "must sum to 1",
    ),
    "labels of nan": ((X, torch.full((30, 3), math.nan)), "labels contain NaN"),
    "labels in three dimensions": ((X, Y.view(30, 1, 1)), r"got \(30, 1, 1\)"),
    "three arrays": ((X, Y, Y), r"data must be \(x, y\).*tuple of 3"),
    "one array": (X, r"data must be \(x, y\).*Tensor"),
    "a dictionary": ({"x": X, "z": Y}, r"data must be \(x, y\).*dict"),
    "nothing": (None, r"data must be \(x, y\).*NoneType"),
    "words": ((np.array(["a"] * 30), Y), "x must be numbers"),
    "words for labels": ((X, np.array(["cat"] * 30)), "y must be .* such as 'cat': .*unique"),
    "a list of words for labels": (
        (X, ["cat", "dog"] * 15),
        "y must be .* such as 'cat': .*unique",
    ),
    "objects for labels": ((X, np.array([None] * 30)), "y must be numbers, got an array of object"),
    "a number": ((3.0, Y), "x must have samples"),
    "sparse": ((X.to_sparse(), Y), r"x is sparse: give x\.to_dense\(\)"),
    "complex": ((X + 1j, Y), r"x is complex.*torch\.view_as_real\(x\)"),
    "complex labels": ((X, Y + 1j), "y is complex"),
    "sparse of scipy": (
        (scipy.sparse.csr_matrix(X.numpy()), Y),
        r"x is sparse: give x\.toarray\(\)",
    ),
    "sparse labels": ((X, Y.to_sparse()), "y is sparse"),
    "no numbers": ((X.to("meta"), Y), "x is on the meta device"),
    "no labels": ((X, Y.to("meta")), "y is on the meta device"),
    "samples of two shapes": (([np.ones((6, 2)), np.ones((6, 3))] * 15, Y), "different shapes"),
    "samples of two lengths": (
        ([torch.ones(6), torch.ones(5)] * 15, Y),
        "differ in length, and the model has no recurrent layer",
    ),
    "a data set of unknown size": (Uncounted(), "Uncounted has no __len__.*IterableDataset"),
    "a number for labels": ((X, 1), "y must have samples"),
}


@pytest.mark.parametrize("case", BAD_DATA)
@pytest.mark.parametrize("fit", FITS)
def test_bad_data(fit, case):
    data, match = BAD_DATA[case]
    refuses(match, mlp(6, 5, 3), data, FITS[fit])


@pytest.mark.parametrize("case", [case for case in BAD_DATA if case != "nothing"])
def test_bad_validation_data_is_refused_before_training(case):
    data, match = BAD_DATA[case]
    refuses(match, mlp(6, 5, 3), validation=data)


def test_validation_samples_of_another_size():
    """A convolution takes images of any size, its projection does not."""
    model = nn.Sequential(
        nn.Conv1d(1, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2, 3)
    )
    train, held_out = (X[:, None], Y), (torch.randn(30, 1, 9), Y)
    refuses(r"validation data's samples, of shape \(1, 9\)", model, train, validation=held_out)


def test_class_rows_beyond_one_for_bce():
    refuses("between 0 and 1", mlp(6, 5, 3), (X, torch.full((30, 3), 2.0)), loss=bce)


def test_yes_or_no_labels_beyond_one():
    refuses("between 0 and 1", mlp(6, 5, 1), (X, Y), loss=bce)


def test_several_labels_for_one_yes_or_no_output():
    refuses(r"\(30, 2\)", mlp(6, 5, 1), (X, torch.ones(30, 2)), loss=bce)


def test_one_output_and_two_classes_without_bce_says_what_to_do():
    refuses("label 1 is out of range.* 1 output, which .*bce", mlp(6, 5, 1), (X, Y % 2))


def test_an_empty_loader():
    empty = DataLoader(TensorDataset(X[:0], Y[:0]))
    refuses("empty", mlp(6, 5, 3), empty)


def test_an_empty_stream():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    refuses("empty", mlp(6, 5, 3), Nothing())


def test_a_loader_of_something_else():
    refuses(r"data must be \(x, y\)", mlp(6, 5, 3), DataLoader(TensorDataset(X)))


@pytest.mark.parametrize("bad", [(NAN, Y), (X, Y + 1), (X, Y - 1)])
def test_a_loaders_first_bad_batch_is_refused(bad):
    loader = DataLoader(TensorDataset(*bad), batch_size=30)
    refuses("NaN|out of range", mlp(6, 5, 3), loader)


def test_a_class_without_samples_is_a_warning():
    with pytest.warns(UserWarning, match="1 of 3 classes have no samples: 1"):
        tpsgd.fit(mlp(6, 5, 3), (X[Y != 1], Y[Y != 1]), epochs=1)


def test_many_classes_without_samples_are_not_all_listed():
    with pytest.warns(UserWarning, match=r"17 of 20 classes have no samples: 3, 4, 5, 6, 7 \.\.\."):
        tpsgd.fit(mlp(6, 5, 20), (X, Y), epochs=1)


# ---- models --------------------------------------------------------------------------------------


ATTENTION = {
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2), "several inputs"),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(6, 2, 8), "several inputs"),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(6, 2, 8), "batch_first=True"),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 8), 2, enable_nested_tensor=False
        ),
        "batch_first=True",
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_that_cannot_be_a_layer_is_refused_by_name(name):
    make, advice = ATTENTION[name]
    refuses(rf"^{name} \(module '0'\) .*{advice}", nn.Sequential(make(), nn.Linear(6, 3)))


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_torchs_recurrent_layers_want_samples_first(name):
    layer = getattr(nn, name)(2, 4)
    model = nn.Sequential(layer, nn.Linear(4, 3))
    refuses(
        rf"samples come first.*nn\.{name}\(\.\.\., batch_first=True", model, (X.view(30, 3, 2), Y)
    )


def test_a_cell_that_gives_two_states_is_refused():
    refuses("must give one tensor, but gives a tuple", nn.Sequential(nn.LSTMCell(6, 6)))


# ---- sequences -----------------------------------------------------------------------------------

S = X.view(30, 3, 2)
TOKENS = torch.arange(90).view(30, 3) % 7
NEGATIVE = TOKENS.clone()
NEGATIVE[9, 1] = -1


def rnn(inputs=2, **options):
    return nn.Sequential(tpsgd.Recurrent(inputs, 4, **options), nn.Linear(4, 3))


def nan_at(i):
    bad = S.clone()
    bad[i, 1, 1] = math.nan
    return bad


BAD_SEQUENCES = {
    "other features": (
        rnn,
        (X.view(30, 2, 3), Y),
        r"block 1 \(.*\) cannot take.* steps, 2\).* got \(batch, 2, 3\)",
    ),
    "no time": (rnn, (X, Y), r"takes \(batch, steps, 2\)"),
    "one dimension more": (rnn, (S[:, None], Y), r"got \(batch, 1, 3, 2\)"),
    "no steps": (rnn, (S[:, :0], Y), r"got \(batch, 0, 2\)"),
    "no tokens": (lambda: rnn(7), (TOKENS[:, :0], Y), r"got \(batch, 0\)"),
    "a token too large": (lambda: rnn(6), (TOKENS, Y), "token 6 is out of range.* 0 to 5"),
    "a negative token": (lambda: rnn(7), (NEGATIVE, Y), "token -1 is out of range.* 0 to 6"),
    "nan": (rnn, (nan_at(7), Y), r"NaN or infinity \(first in sample 7\)"),
    "a loader with a bad token": (
        lambda: rnn(6),
        DataLoader(TensorDataset(TOKENS, Y), batch_size=30),
        "token 6 is out of range",
    ),
}


@pytest.mark.parametrize("case", BAD_SEQUENCES)
@pytest.mark.parametrize("fit", FITS)
def test_bad_sequences(fit, case):
    make, data, match = BAD_SEQUENCES[case]
    if fit == "fit_backprop":
        match = match.replace(r"block 1 \(.*\) ", "")
    refuses(match, make(), data, FITS[fit])


@pytest.mark.parametrize("case", BAD_SEQUENCES)
def test_bad_sequences_in_chunks(case):
    make, data, match = BAD_SEQUENCES[case]
    refuses(match, make(), data, window=2)


@pytest.mark.parametrize("fit", FITS)
def test_a_bad_token_in_the_first_sample(fit):
    refuses("token -1 is out of range", rnn(7), (TOKENS - 1, Y), FITS[fit])


def test_a_second_recurrent_layer_needs_the_sequence():
    model = nn.Sequential(tpsgd.Recurrent(2, 4), tpsgd.Recurrent(4, 4), nn.Linear(4, 3))
    refuses(r"block 2 .*got \(batch, 4\); the layer before it needs sequence=True", model, (S, Y))


def test_a_model_that_ends_with_a_recurrent_layer():
    for last in (tpsgd.Recurrent(2, 3), nn.RNN(2, 3, batch_first=True)):
        model = nn.Sequential(last)
        refuses(r"the model ends with 0: Recurrent.*add a classifier, nn\.Linear", model, (S, Y))
    model = nn.Sequential(tpsgd.Recurrent(2, 3, sequence=True))
    refuses(r"one number per class.* \(batch, 3, 3\)", model, (S, Y))


def test_a_diagonal_layer_has_its_loss_at_its_output():
    model = nn.Sequential(tpsgd.Recurrent.diagonal(2, 4), nn.Linear(4, 3))
    early = tpsgd.rules.readout(at=tpsgd.Place.BEFORE)
    refuses(r"leave out at=Place\.BEFORE", model, (S, Y), partial(tpsgd.fit, rule=early))


def test_a_sequence_straight_into_a_classifier():
    refuses(r"\(batch, 3, 3\)", rnn(sequence=True), (S, Y))


@pytest.mark.parametrize("name", ["dfa", "sdfa"])
def test_dfa_and_recurrent_layers(name):
    rule = getattr(rules, name)()
    one_by_one = {"rule": rule, "order": tpsgd.sequential}
    refuses(f"^{name} cannot learn block by block", rnn(), (S, Y), **one_by_one)
    run = tpsgd.fit(rnn(), (S, Y), rule=rule, epochs=1)
    assert [b.learning for b in run.blocks] == ["closed form"] * 2


def test_codes_that_are_learned_must_be_the_same_at_each_step():
    rule = replace(rules.readout(learned=True), per_step=True)
    refuses("readout-learned learns its codes.* the same at each step", rnn(), (S, Y), rule=rule)


def test_a_recurrent_layer_that_stands_twice():
    layer = tpsgd.Recurrent(2, 2, sequence=True)
    model = nn.Sequential(layer, layer, nn.Flatten(), nn.Linear(6, 3))
    refuses("blocks 1 .* and 2 .* share a parameter", model, (S, Y))


def test_a_loss_that_explodes_over_time():
    model = rnn(activation=nn.ReLU, leak=1.0)
    with pytest.raises(TpsgdError, match=r"loss of block 1 .*Recurrent.* became (inf|nan)"):
        tpsgd.fit(model, (S, Y), rule=rules.tpsgd_l2(), optimizer=EXPLODES)


def test_backprop_takes_what_local_rules_refuse():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.rnn(x.view(-1, 3, 2))[0][:, -1])

    run = tpsgd.fit_backprop(Last(), (X, Y), epochs=1)
    assert math.isfinite(run.loss)


class DependsOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        if x.sum() > 0:
            y = y * 2
        return y


def test_a_model_that_cannot_be_cut_is_named_with_the_line():
    code = DependsOnData.forward.__code__
    line = code.co_firstlineno + 2
    words = rf"cannot cut DependsOnData into blocks.*line {line} of test_errors\.py.*fit_backprop"
    refuses(words, DependsOnData())


def test_something_that_is_no_model():
    refuses("a model is an nn.Module, got a str", "mlp:8")


@pytest.mark.parametrize("fit", FITS)
def test_no_parameters(fit):
    refuses("parameters", nn.Sequential(nn.Flatten(), nn.ReLU()), fit=FITS[fit])


@pytest.mark.parametrize("fit", FITS)
def test_every_parameter_frozen(fit):
    model = mlp(6, 5, 3).requires_grad_(False)
    refuses(r"no parameters that may learn.*requires_grad_\(True\)", model, fit=FITS[fit])
    with pytest.raises(TpsgdError, match="no parameters that may learn"):
        tpsgd.plan(model, (6,), samples=30)


WRONG_LINKS = {
    "softmax after relu": ([nn.ReLU(), nn.Softmax(1)], cross_entropy, "applies a softmax itself"),
    "softmax for bce": ([nn.Softmax(1)], bce, "sigmoid itself.*use loss=tpsgd.cross_entropy"),
    "log-softmax for bce": ([nn.LogSoftmax(1)], bce, "sigmoid itself"),
    "log-softmax for mse": ([nn.LogSoftmax(1)], mse, "with 0 and 1.*loss=tpsgd.cross_entropy"),
    "sigmoid for cross entropy": ([nn.Sigmoid()], cross_entropy, "softmax itself.*loss=tpsgd.bce"),
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("case", WRONG_LINKS)
def test_a_link_function_that_the_loss_has_no_use_for(case, fit):
    links, loss, cause = WRONG_LINKS[case]
    model = nn.Sequential(*mlp(6, 5, 3), *links)
    if fit == "fit_backprop" and len(links) > 1:
        model = nn.Sequential(model)  # its last module is hidden in a Sequential
    name = type(links[-1]).__name__
    with pytest.warns(UserWarning, match=f"ends in nn.{name}.*{cause}") as caught:
        FITS[fit](model, (X, Y), loss=loss, epochs=1)
    assert len(caught) == 1


@pytest.mark.parametrize("links", [[nn.LogSoftmax(1)], [nn.Dropout(0.1), nn.Softmax(1)]])
def test_link_functions_that_the_loss_looks_past_are_no_mistake(links):
    tpsgd.fit(nn.Sequential(*mlp(6, 5, 3), *links), (X, Y), epochs=1)


def test_more_outputs_than_classes_says_how_many_are_needed():
    with pytest.warns(UserWarning, match="2 of 5 classes.*end at 2, so 3 outputs are enough"):
        tpsgd.fit(mlp(6, 5, 5), (X, Y), epochs=1)


def test_a_layer_that_stands_twice():
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 3))
    refuses(r"1 \(0: .* and 2 \(2: Linear\) share a parameter \(weight\)", model)


def test_a_layer_that_stands_twice_in_nested_parts():
    layer = nn.Linear(6, 6)
    model = nn.Sequential(nn.Sequential(layer, nn.ReLU()), nn.Sequential(layer, nn.Linear(6, 3)))
    refuses(r"blocks 1 \(0\.0: .* and 2 \(1\.0: .* share a parameter", model)


@pytest.mark.parametrize("shared", [nn.PReLU(), nn.BatchNorm1d(6)])
def test_other_modules_with_parameters_may_not_stand_twice_either(shared):
    model = nn.Sequential(nn.Linear(6, 6), shared, nn.Linear(6, 6), shared, nn.Linear(6, 3))
    refuses("two blocks", model)


def test_tied_weights():
    model = mlp(6, 6, 6, 3)
    model[2].weight = model[0].weight
    refuses("two blocks", model)


def test_a_lazy_layer():
    refuses(
        "'2' is lazy: run one batch", nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.LazyLinear(3))
    )


def test_layers_that_do_not_fit_each_other_are_named():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(4, 3))
    refuses(r"block 2 \(2: Linear\) cannot take .*\(batch, 5\): nn\.Linear takes 4 feat", model)


class Reshaped(nn.Module):
    def forward(self, x):
        return x.view(-1, 4)


MISFITS = {  # the batch of two samples that was tried is not shown as if it were the user's
    "flat rows": (
        [nn.Conv1d(1, 2, 3)],
        r"takes \(batch, 1, width\), got \(batch, 6\); .*Unflatten",
    ),
    "channels": (
        [nn.Unflatten(1, (3, 2, 1)), nn.Conv2d(1, 2, 1)],
        r"\(batch, 1, height, width\), got",
    ),
    "a large kernel": (
        [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 7)],
        r"Kernel size.*tried with 2 samp",
    ),
    "images": (
        [nn.Unflatten(1, (3, 2)), nn.Linear(6, 5)],
        r"nn.Linear takes 6 features, got 2; put nn.Flatten before it",
    ),
    "a module of one's own": (
        [nn.Linear(6, 5), Reshaped()],
        r"turns 2 samples, \(2, 6\)|tried with 2",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("fit", FITS)
def test_samples_that_do_not_fit_say_what_was_expected(fit, case):
    modules, match = MISFITS[case]
    refuses(match, nn.Sequential(*modules, nn.Flatten(), nn.Linear(5, 3)), fit=FITS[fit])


@pytest.mark.parametrize("fit", FITS)
def test_an_output_with_space(fit):
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3))
    refuses(r"one number per class.* \(batch, 3, 4\).*nn.Flatten", model, fit=FITS[fit])


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x), x


def test_a_block_that_gives_two_things():
    refuses("block 1 .*Pair.* must give one tensor.*tuple", nn.Sequential(Pair(), nn.Linear(6, 3)))


def test_a_block_that_loses_the_batch():
    model = nn.Sequential(nn.Linear(6, 4), nn.Flatten(0), nn.Linear(8, 3))
    refuses("block 1 .* batch", model)


# ---- settings ------------------------------------------------------------------------------------


def sgd_then(other):
    return [partial(torch.optim.SGD, lr=0.1), other]


def mine():
    return rules.drtp()


BAD_SETTINGS = {
    "too few rules": ({"rule": [rules.drtp()]}, "a list of 2.*got 1.*the blocks are"),
    "too many rules": ({"rule": [rules.drtp()] * 3}, "a list of 2.*got 3"),
    "no rule's name": ({"rule": "drpt"}, "unknown rule 'drpt': did you mean 'drtp'"),
    "a rule not called": ({"rule": rules.drtp}, r"write tpsgd\.rules\.drtp\(\), not the function"),
    "a rule in a list not called": (
        {"rule": [mine, rules.drtp()]},
        r"write mine\(\), not the func",
    ),
    "a share for validation": ({"validation": 0.2}, r"validation must be .*\(x, y\).* got 0\.2"),
    "too many names": ({"rule": ["drtp"] * 3}, "a list of 2.*got 3"),
    "epochs per block": ({"epochs": [1, 2, 3]}, "epochs has 3 entries.* 2 blocks"),
    "lr per block": ({"lr": [0.1]}, "lr has 1 entries.* 2 blocks"),
    "optimizer per block": ({"optimizer": sgd_then(None)[:1]}, "optimizer has 1 entries"),
    "early stopping per block": (
        {"early_stopping": [tpsgd.EarlyStopping()]},
        "early_stopping has 1 entries",
    ),
    "negative epochs": ({"epochs": -1}, "epochs must be .* 0 or more, got -1"),
    "negative epochs of a block": ({"epochs": [1, -2]}, "epochs must be .* got -2"),
    "half an epoch": ({"epochs": 1.5}, "epochs must be a whole number.* got 1.5"),
    "no batch": ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
    "no window": ({"window": 0}, "window must be 1 time step or more, got 0"),
    "half a window": ({"window": 2.5}, "window must be .* got 2.5"),
    "half a batch": ({"batch_size": 2.5}, "batch_size must be .* got 2.5"),
    "a negative rate": ({"lr": -0.1}, "lr must be .* got -0.1"),
    "a rate of nan": ({"lr": [0.1, math.nan]}, "lr must be .* got nan"),
    "a rate that is too large": ({"lr": 1e9}, "lr must be .* to 1000, got 1000000000"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    "LBFGS for the second block": ({"optimizer": sgd_then(torch.optim.LBFGS)}, "LBFGS"),
    "an optimizer's name": ({"optimizer": "adam"}, "optimizer must be a factory.*str"),
    "a factory of something else": ({"optimizer": list}, "must be a factory.* gave list"),
    "no factory for the second block": ({"optimizer": sgd_then("adam")}, "must be a factory"),
    "an optimizer itself": (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
        "optimizer must be a factory.*SGD",
    ),
    "a number for callbacks": ({"callbacks": 5}, "callbacks must be a list of functions.* got 5"),
    "a callback alone": ({"callbacks": print}, "callbacks must be a list of functions"),
    "a number among callbacks": ({"callbacks": [print, 5]}, "callbacks must be a list"),
    "a number for progress": ({"progress": 5}, "progress must be a function, True or False, got 5"),
    "a seed of 64 bits": ({"seed": 2**63}, "seed must be .* 63 bits, got 9223372036854775808"),
    "a negative seed of 64 bits": ({"seed": -(2**63) - 1}, "seed must be .* 63 bits"),
    "no loss's name": ({"loss": "msee"}, "loss must be .*'msee'"),
    "torch's function": ({"loss": nn.functional.mse_loss}, "loss must be .*mse_loss"),
    "torch's mean over outputs": ({"loss": nn.KLDivLoss()}, "loss must be .*sums over outputs"),
    "smoothed labels": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "smoothing"),
    "a batch that is true": ({"batch_size": True}, "batch_size must be 1 or more, got True"),
    "an endless batch": ({"batch_size": 10**400}, "batch_size must be 1 or more, got 1000"),
    "an endless rate": ({"lr": 10**400}, "lr must be a number from 0 to 1000, got 1000"),
    "an endless norm": ({"clip": 10**400}, "clip must be a positive number, .* got 1000"),
    "an endless amount": ({"memory": "1e400GB"}, "'1e400GB' is no amount of memory"),
    "endless bytes": ({"memory": 10**400}, "000 is no amount of memory: write 64MB"),
    "an endless device": ({"device": 10**400}, "unknown device '1000"),
    "an order's name": ({"order": "sequential"}, "order must be .*'sequential'"),
    "an order that waits for a metric": (
        {"lr_schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
        "ReduceLROnPlateau",
    ),
}
FOR_BACKPROP = (
    *("negative epochs", "no batch", "LBFGS", "an optimizer's name", "no loss's name"),
    *("a number for callbacks", "a seed of 64 bits"),
)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case):
    settings, match = BAD_SETTINGS[case]
    refuses(match, mlp(6, 5, 3), **settings)


ENDLESS = {  # numbers that no float and no 64 bits hold
    "scale": lambda n: rules.readout(scale=n),
    "features": lambda n: rules.readout(features=n),
    "std": lambda n: tpsgd.projections.normal(n),
    "alpha": lambda n: tpsgd.ridge(n),
    "gamma": lambda n: tpsgd.rls(n),
    "patience": lambda n: tpsgd.EarlyStopping(n),
    "min_delta": lambda n: tpsgd.EarlyStopping(1, n),
    "padding": lambda n: tpsgd.augment.crop(n),
    "size": lambda n: tpsgd.augment.cutout(n),
    "contrast": lambda n: tpsgd.augment.jitter(n),
    "brightness": lambda n: tpsgd.augment.jitter(0.2, n),
    "ratio": lambda n: tpsgd.augment.resized_crop(ratio=(1, n)),
    "input_shape": lambda n: tpsgd.plan(mlp(6, 3), (n,)),
    "samples": lambda n: tpsgd.plan(mlp(6, 3), (6,), samples=n),
    "batch_size": lambda n: tpsgd.evaluate(mlp(6, 3), (X, Y), batch_size=n),
    "shape": lambda n: tpsgd.export.c(mlp(6, 3), "none", shape=(n,)),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("number", [10**400, "a", math.nan], ids=["endless", "word", "nan"])
def test_numbers_without_an_end_are_one_sentence(name, number):
    with pytest.raises(TpsgdError, match=rf"\b{name}\b.* must be ") as caught:
        ENDLESS[name](number)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", FOR_BACKPROP)
def test_bad_settings_for_backprop(case):
    settings, match = BAD_SETTINGS[case]
    refuses(match, mlp(6, 5, 3), fit=tpsgd.fit_backprop, **settings)


@pytest.mark.parametrize("rule", [rules.dfa(), rules.sdfa()], ids=lambda r: r.name)
def test_sequential_refuses_rules_that_need_the_output(rule):
    asked = {"order": tpsgd.sequential}
    says = f"^{rule.name} cannot learn block by block.*simultaneous"
    refuses(says, mlp(6, 5, 3), rule=rule, **asked)
    refuses(says, mlp(6, 5, 5, 3), rule=[rules.drtp(), rule, rules.drtp()], **asked)


def test_the_last_rule_of_a_list_lends_its_loss_alone():
    """DFA there projects nothing, so `sequential` takes it."""
    run = tpsgd.fit(mlp(6, 5, 3), (X, Y), rule=[rules.drtp(), rules.dfa()], epochs=1)
    assert run.settings["loss"] == cross_entropy.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("fit", FITS)
def test_a_device_that_is_not_there(fit):
    refuses("cuda was asked for, but torch sees no GPU", mlp(6, 5, 3), fit=FITS[fit], device="cuda")


@pytest.mark.parametrize("loss", [mse, cross_entropy])
@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_a_loss_that_explodes_names_the_block_and_what_to_do(loss, order):
    model = mlp(6, 5, 3, activation=nn.ReLU)
    with pytest.raises(
        TpsgdError, match=r"loss of block 1 .*Linear.* became (inf|nan) in epoch"
    ) as e:
        tpsgd.fit(
            model,
            (X, Y),
            rule=rules.tpsgd_l2(),
            loss=loss,
            order=order,
            optimizer=EXPLODES,
            epochs=20,
            batch_size=8,
        )
    assert "lower its learning rate" in str(e.value) and "\n" not in str(e.value)


def test_batch_norm_and_batches_of_one_say_what_to_do():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    refuses("batch_size", model, batch_size=1)


# ---- restarts and evaluation ---------------------------------------------------------------------


def test_no_restarts():
    with pytest.raises(TpsgdError, match="restarts must be 1 or more, got 0"):
        tpsgd.fit_many(lambda: mlp(6, 3), (X, Y), restarts=0)


def test_restarts_with_an_unknown_setting():
    with pytest.raises(TpsgdError, match=r"fit_many has no argument 'momentum'"):
        tpsgd.fit_many(lambda: mlp(6, 3), (X, Y), momentum=0.9)


def test_restarts_of_a_model_without_parameters():
    with pytest.raises(TpsgdError, match="parameters"):
        tpsgd.fit_many(nn.Flatten, (X, Y), restarts=2, backprop=True)


def test_restarts_without_a_factory():
    with pytest.raises(TpsgdError, match="factory"):
        tpsgd.fit_many(mlp(6, 3), (X, Y), restarts=2)


BAD_FOR_EVALUATE = {
    "no samples": ((X[:0], Y[:0]), "empty"),
    "fewer labels": ((X, Y[:-1]), "30 samples but y has 29"),
    "negative label": ((X, Y - 1), "label -1 is out of range"),
    "nan": ((NAN, Y), "NaN"),
    "rows of another width": ((X, torch.ones(30, 4)), r"\(samples, 3\), got \(30, 4\)"),
    "label beyond the classes": ((X, Y + 1), "label 3 is out of range.* 3 outputs"),
    "x of another width": ((X[:, :5], Y), r"\(batch, 5\): nn\.Linear takes 6 features, got 5"),
    "x and y swapped": ((Y, X), r"is data \(y, x\) in place of \(x, y\)\?"),
}


@pytest.mark.parametrize("case", BAD_FOR_EVALUATE)
def test_bad_data_for_evaluate(case):
    data, match = BAD_FOR_EVALUATE[case]
    model = mlp(6, 5, 3)
    with pytest.raises(TpsgdError, match=match) as caught:
        tpsgd.evaluate(model, data)
    assert "\n" not in str(caught.value) and "None" not in str(caught.value)
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("device", ["meta", "cuda:77", "nowhere"])
def test_a_device_that_cannot_be_used(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    data = torch.randn(8, 4), torch.arange(8) % 2
    with pytest.raises(tpsgd.TpsgdError, match="device"):
        tpsgd.fit(model, data, device=device)


def test_a_class_without_samples_among_rows_of_several_labels():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    rows = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    with pytest.warns(UserWarning, match="1 of 3 classes have no samples: 2"):
        tpsgd.fit(model, (torch.randn(2, 4), rows), loss=tpsgd.bce, epochs=1)


class Items(torch.utils.data.Dataset):
    """Samples one by one, of which one has NaN."""

    def __init__(self, broken):
        self.x = X.clone()
        self.x[broken, 2] = math.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], Y[i]


@pytest.mark.parametrize("broken", [7, 29])
@pytest.mark.parametrize("batch_size", [4, 30])
def test_nan_in_a_data_set_names_the_item_whatever_the_order(broken, batch_size):
    items = Items(broken)
    with pytest.raises(TpsgdError, match=rf"first in item {broken} of the data set\)"):
        tpsgd.fit(mlp(6, 3), items, epochs=1, batch_size=batch_size)
    place = rf"first in sample {broken % 4} of batch {broken // 4}\)"
    with pytest.raises(TpsgdError, match=place):
        tpsgd.fit(mlp(6, 3), torch.utils.data.DataLoader(items, 4), epochs=1)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_model_whose_weights_are_broken_already_is_not_trained(number):
    model = mlp(6, 4, 3)
    with torch.no_grad():
        model[2].weight[1, 1] = number
    with pytest.raises(TpsgdError, match=r"NaN or infinity in 2\.weight before training: make"):
        tpsgd.fit(model, (X, Y), epochs=1)
