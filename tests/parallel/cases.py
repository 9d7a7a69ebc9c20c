"""What is trained on one process and on several: each case is a net, data and settings of `fit`."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from helpers import images, mlp, points, quartic, seeded, sequences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import EarlyStopping, Memory, Recurrent, rules
from tpsgd.nets.diagonal import Diagonal

momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
EPOCHS = {"epochs": 2, "batch_size": 11, "seed": 3}  # of 30 samples: batches of 11, 11 and 8


class Case(NamedTuple):
    """A training run that must give the same weights on any number of ranks."""

    make: Callable[[], nn.Module]
    data: Callable[[], Any]
    settings: dict[str, Any]
    backprop: bool = False
    dtype: torch.dtype = torch.float64

    def train(self, **more: Any) -> tuple[dict[str, torch.Tensor], tpsgd.Run]:
        """The weights after training, and the record."""
        model = seeded(lambda: self.make().to(self.dtype))
        fit = tpsgd.fit_backprop if self.backprop else tpsgd.fit
        memory = {} if "memory" in self.settings else {"memory": Memory(measure=False)}
        torch.manual_seed(0)  # from which a loader takes its order
        run = fit(model, self.data(), **(EPOCHS | memory | self.settings | more))
        return {name: t.detach().clone() for name, t in model.state_dict().items()}, run


def net(*layers: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[make() for make in layers])


def doubled(data: tuple) -> tuple:
    return data[0].double(), data[1]


MLP = partial(mlp, 6, 9, 7, 3)
POINTS = lambda n=30: doubled(points(n))  # noqa: E731
CNN = net(
    lambda: nn.Conv2d(2, 5, 3, padding=1), nn.Tanh, lambda: nn.MaxPool2d(2),
    lambda: nn.Conv2d(5, 4, 2), nn.LeakyReLU, nn.Flatten, lambda: nn.Linear(16, 3),
)  # fmt: skip
RNN = net(lambda: Recurrent(4, 6, sequence=True), lambda: Recurrent(6, 5), lambda: nn.Linear(5, 3))
DIAGONAL = net(lambda: Diagonal(4, 6), lambda: nn.Linear(6, 3))
RULES = {
    "tpsgd_l1": rules.tpsgd_l1(),
    "tpsgd_l2": rules.tpsgd_l2(),
    "quartic": rules.tpsgd(quartic),
    "drtp": rules.drtp(),
    "readout": rules.readout(),
    "readout learned": rules.readout(True),
}


class TwoInputs(nn.Module):
    """A net of a class, traced: its second input is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9 + 2, 7)
        self.head = nn.Linear(7 + 2, 3)

    def forward(self, points: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(points))
        x = torch.tanh(self.second(torch.cat([x, marks], 1)))
        return self.head(torch.cat([x, marks], 1))


def two_inputs(n: int = 30) -> tuple:
    x, y = POINTS(n)
    return (x, x[:, :2] ** 2), y


def numbers(n: int = 30) -> tuple:
    x = POINTS(n)[0]
    return x, 200 + 40 * x[:, :2] @ x.new_tensor([[1.0, -0.5], [2.0, 3.0]])


def steps(n: int = 30) -> tuple:
    """Sequences with a label for every step but the second."""
    x = torch.randn(n, 5, 6, generator=torch.Generator().manual_seed(2)).double()
    y = (x[..., 0] > 0).long() + (x[..., 1] > 0)
    y[:, 1] = -100
    return x, y


def loader(n: int = 30, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*POINTS(n)), batch_size=11, shuffle=True, **options)


def drawing() -> nn.Module:
    """A net that takes random numbers from torch's generator, on every rank another amount."""
    model = MLP()
    count = 1 + int(os.environ.get("RANK", "0"))

    def draw(module: nn.Module, *_: Any) -> None:
        if module.training:
            torch.rand(count)

    model[0].register_forward_hook(draw)
    return model


def sgd_case(make: Any, data: Any, rule: Any, order: Any, **more: Any) -> Case:
    settings = {"rule": rule, "order": order, "optimizer": momentum}
    return Case(make, data, settings | more)


def nets_and_rules() -> dict[str, Case]:
    cases = {}
    for name, rule in RULES.items():
        for order in (tpsgd.sequential, tpsgd.simultaneous):
            cases[f"{name} {order.__name__}"] = sgd_case(MLP, POINTS, rule, order)
    for name, rule in (("dfa", rules.dfa()), ("sdfa", rules.sdfa())):
        cases[name] = sgd_case(MLP, POINTS, rule, None)
    images_30, steps_30 = (lambda: doubled(images(30))), (lambda: sequences(30, 3))
    for name in ("readout", "drtp"):
        cases[f"cnn {name}"] = sgd_case(CNN, images_30, RULES[name], tpsgd.simultaneous)
        cases[f"rnn {name}"] = sgd_case(RNN, steps_30, RULES[name], tpsgd.simultaneous)
        cases[f"diagonal {name}"] = sgd_case(DIAGONAL, steps_30, RULES[name], tpsgd.sequential)
    cases["cnn sequential"] = sgd_case(CNN, images_30, RULES["readout"], tpsgd.sequential)
    return cases


def settings_of_fit() -> dict[str, Case]:
    plain, together = partial(Case, MLP), {"order": tpsgd.simultaneous}
    return {
        "adam": plain(POINTS, together),
        "fewer samples than ranks": plain(partial(POINTS, 24), {"epochs": 1, "batch_size": 23}),
        "micro-batches": plain(POINTS, together | {"memory": Memory(micro_batch=4)}),
        "slices": plain(POINTS, together | {"memory": Memory(slices=3)}),
        "recomputed": plain(POINTS, {"memory": Memory(reuse=False)}),
        "measured": plain(POINTS, {"memory": Memory()}),
        "validation": plain(POINTS, {"validation": points(19, seed=1)}),
        "early stopping": plain(
            POINTS,
            {"validation": POINTS(19), "epochs": 9, "early_stopping": EarlyStopping(1, 0.1)},
        ),
        "one cycle": plain(POINTS, together | {"lr_schedule": tpsgd.one_cycle()}),
        "decay and clip": plain(POINTS, together | {"weight_decay": 0.1, "clip": 0.05}),
        "flips": Case(
            CNN, lambda: doubled(images(30)), together | {"augment": tpsgd.augment.flip()}
        ),
        "noise": plain(POINTS, {"augment": lambda x: x + 0.1 * torch.randn_like(x)}),
        "loader": plain(loader, together),
        "loader, sequential": plain(loader, {}),
        "loader, recomputed": plain(loader, {"memory": Memory(reuse=False)}),
        "loader, other numbers drawn": Case(drawing, loader, together),
        "loader, other numbers drawn, sequential": Case(drawing, loader, {}),
        "blocks of two layers": plain(POINTS, together | {"blocks": 2}),
        "float32": plain(points, together | {"optimizer": momentum}, dtype=torch.float32),
        "bce": plain(lambda: (POINTS()[0], nn.functional.one_hot(POINTS()[1], 3).double()),
                     {"loss": tpsgd.bce}),
    }  # fmt: skip


def solvers_and_backprop() -> dict[str, Case]:
    plain, solved_head = partial(Case, MLP), [momentum, momentum, tpsgd.ridge()]
    frozen = {"rule": rules.frozen(), "order": tpsgd.simultaneous}
    wide = partial(mlp, 6, 40, 3)
    return {
        "ridge head": plain(POINTS, {"optimizer": solved_head}),
        "ridge of few samples": Case(wide, POINTS, {"optimizer": [momentum, tpsgd.ridge()]}),
        "ridge of a convolution": Case(
            CNN,
            lambda: doubled(images(30)),
            {
                "rule": rules.tpsgd_l2(at=tpsgd.Place.BEFORE),
                "optimizer": [tpsgd.ridge(), momentum, tpsgd.ridge()],
            },
        ),
        "rls head": plain(POINTS, frozen | {"optimizer": [momentum, momentum, tpsgd.rls()]}),
        "backprop": plain(POINTS, {"optimizer": momentum}, backprop=True),
        "backprop in micro-batches": plain(
            POINTS, {"optimizer": momentum, "memory": Memory(micro_batch=4)}, backprop=True
        ),
    }


def labels_and_models() -> dict[str, Case]:
    """Labels that are numbers, or come for every step, and a model of a class."""
    together, solved = {"order": tpsgd.simultaneous}, {"optimizer": [momentum, tpsgd.ridge()]}
    of_numbers, penalised = partial(mlp, 6, 9, 2), [momentum, tpsgd.ridge(0.1)]
    return {
        "numbers": Case(of_numbers, numbers, together),
        "numbers, ridge head": Case(of_numbers, numbers, {"optimizer": penalised}),
        "two inputs of a class": Case(TwoInputs, two_inputs, {"validation": two_inputs(19)}),
        "two inputs, backprop": Case(TwoInputs, two_inputs, {}, backprop=True),
        "labels of steps": Case(partial(mlp, 6, 9, 3), steps, together),
        "labels of steps, ridge head": Case(partial(mlp, 6, 9, 3), steps, solved),
    }


def as_micro_batches() -> dict[str, Case]:
    """What sees the samples of its rank only: as in micro-batches of as many samples."""
    norm = net(lambda: nn.Linear(6, 9), lambda: nn.BatchNorm1d(9), nn.Tanh, lambda: nn.Linear(9, 3))
    settings = {"order": tpsgd.simultaneous, "optimizer": momentum, "batch_size": 12}
    of_24 = partial(POINTS, 24)
    return {
        "auxiliary": Case(MLP, of_24, settings | {"rule": rules.auxiliary()}),
        "predsim": Case(MLP, of_24, settings | {"rule": rules.predsim()}),
        "batch norm": Case(norm, of_24, settings | {"validation": POINTS(19)}),
    }


CASES = nets_and_rules() | settings_of_fit() | solvers_and_backprop() | labels_and_models()
OF_SAMPLES_TOGETHER = as_micro_batches()
ON_TWO_RANKS = [  # in make test; the others in make test-all
    "readout sequential", "readout learned simultaneous", "quartic sequential", "dfa",
    "cnn readout", "rnn drtp", "diagonal readout", "fewer samples than ranks", "micro-batches",
    "early stopping", "one cycle", "decay and clip", "flips", "loader, other numbers drawn",
    "loader, recomputed", "float32", "ridge head", "rls head", "backprop",
    *labels_and_models(), *OF_SAMPLES_TOGETHER,
]  # fmt: skip
ON_FOUR_RANKS = [
    "readout sequential", "readout learned simultaneous", "dfa", "cnn readout", "rnn drtp",
    "fewer samples than ranks", "micro-batches", "validation", "early stopping", "flips", "noise",
    "loader", "loader, recomputed", "ridge head", "ridge of few samples", "ridge of a convolution",
    "rls head", "backprop", "one cycle",
]  # fmt: skip
TO_RESUME = Case(MLP, POINTS, {"optimizer": momentum, "epochs": 3, "validation": POINTS(19)})
