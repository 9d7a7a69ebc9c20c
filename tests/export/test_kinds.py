"""Layers of which no part is exported are refused by their names, wherever they are in a model."""

from typing import Any

import pytest
from helpers import mlp
from torch import Tensor, nn

import tpsgd
from tpsgd.common.errors import TpsgdError
from tpsgd.zoo.vit import vit


class LastStep(nn.Module):
    """A recurrent layer whose output at the last step is classified."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.reader, self.head = kind(3, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(x)[0][:, -1])


GATES = r"^{} is not exported; nn.RNN and tpsgd.Recurrent are$"
CASES = {
    "LSTM": (lambda: LastStep(nn.LSTM), GATES.format(r"LSTM \(reader\)"), (7, 3)),
    "GRU": (lambda: LastStep(nn.GRU), GATES.format(r"GRU \(reader\)"), (7, 3)),
    "LSTM in a row": (
        lambda: nn.Sequential(nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 2)),
        GATES.format(r"LSTM \(0\)"),
        (7, 3),
    ),
    "GRU alone": (lambda: nn.GRU(3, 8, batch_first=True), GATES.format("GRU"), (7, 3)),
    "transformer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 2)),
        r"^attention \(0\.self_attn\) is not exported; linear, convolutional and rec",
        (7, 8),
    ),
    "vit": (
        lambda: vit((1, 8, 8), 10, depth=1, width=8),
        r"^attention \(.*self_attn\) is not exported; linear, convolutional and rec",
        (1, 8, 8),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_of_other_kinds_are_refused_by_name(case, tmp_path):
    model, sentence, shape = CASES[case]
    with pytest.raises(TpsgdError, match=sentence):
        tpsgd.export.c(model(), tmp_path, shape=shape)
    assert not list(tmp_path.iterdir())


def test_what_is_no_module_is_refused_in_one_sentence(tmp_path):
    text: Any = "mlp"
    with pytest.raises(TpsgdError, match=r"a model is an nn.Module, got a str"):
        tpsgd.export.c(text, tmp_path, shape=(3,))


def test_hooks_are_refused_by_the_name_of_their_layer(tmp_path):
    model = mlp(6, 8, 3)
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(TpsgdError, match=r"^hooks, .*, are not exported: remove those of 0$"):
        tpsgd.export.c(model, tmp_path, shape=(6,))
