"""What `python -m experiments` runs by name: programs, data sets, cost, files of results."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tpsgd.data import registry as data_sets

WEIGHTS = "vgg16 weights"


@dataclass(frozen=True)
class Experiment:
    """A name on the command line.

    `programs` are words after `python -m experiments.`; `files` are written into the folder of
    results; `minutes` is the cost on a GPU (an H200), or on a CPU where `gpu` is False.
    """

    shows: str
    programs: tuple[str, ...]
    files: tuple[str, ...]
    minutes: float
    data: tuple[str, ...] = ()
    gpu: bool = True
    of_paper: bool = True

    @property
    def missing(self) -> tuple[str, ...]:
        """The data sets that are not here."""
        return tuple(name for name in self.data if not is_here(name))

    @property
    def absent(self) -> tuple[str, ...]:
        """The programs that this checkout does not have."""
        modules = [f"experiments.{words.split()[0]}" for words in self.programs]
        return tuple(module for module in modules if find_spec(module) is None)

    @property
    def cost(self) -> str:
        """The machine and the time, in words."""
        time = f"{self.minutes:g} min" if self.minutes < 90 else f"{self.minutes / 60:.0f} h"
        return f"{'GPU' if self.gpu else 'CPU'}, {time}"


def is_here(name: str) -> bool:
    """Whether a data set, or VGG16's weights, can be read without the network."""
    if name != WEIGHTS:
        return data_sets.path(name) is not None
    file = Path(os.environ.get("TPSGD_DATA", "")) / "vgg16" / "vgg16_features.npz"
    return "TPSGD_DATA" in os.environ and file.is_file()


SEQUENCES = ("seq-mnist-rows", "seq-mnist-pixels", "eeg", "tweets", "tweets-vectors")
EXPERIMENTS = {
    "table1": Experiment(
        "Table 1: every rule's update against its loss", ("table1",), ("table1",), 1, gpu=False
    ),
    "mlp": Experiment(
        "Table 2: a two-layer MLP on MNIST, ZORB and LM-KARnet",
        (
            "shallow --only mnist-mlp mnist-mlp-tanh",
            "peers --only mlp-256 mlp-256-steep --without dladmm",
        ),
        ("shallow", "peers"), 10, ("mnist",),
    ),
    "cnn": Experiment(
        "Table 3: a shallow CNN on MNIST and CIFAR-10",
        ("shallow --only mnist-cnn cifar10-cnn cifar10-cnn-short",),
        ("shallow",), 5, ("mnist", "cifar10"),
    ),
    "imagenette": Experiment(
        "Table 4: VGG11 from scratch, adaptors on a frozen VGG16",
        ("deep --only vgg11", "adaptors --only table"),
        ("deep", "adaptors"), 30, ("imagenette", WEIGHTS),
    ),
    "rnn": Experiment(
        "Table 5: one recurrent layer", ("recurrent --shapes single",), ("recurrent",), 40,
        SEQUENCES,
    ),
    "rnn-stacked": Experiment(
        "Table 6: two recurrent layers", ("recurrent --shapes stacked",), ("recurrent",), 40,
        SEQUENCES,
    ),
    "rnn-bidirectional": Experiment(
        "Table 7: both directions", ("recurrent --shapes bidirectional",), ("recurrent",), 40,
        SEQUENCES,
    ),
    "rnn-data": Experiment(
        "Table 8: the sequences' properties", ("sets",), ("sets",), 1, SEQUENCES, gpu=False
    ),
    "filter-sampling": Experiment(
        "accuracy by the number of filters, basic and filter-based sampling", ("filters",),
        ("filters",), 20, ("mnist", "cifar10"),
    ),
    "cifar-scaling": Experiment(
        "CIFAR-10: 0 to 4 convolutions and 0 to 4 dense layers", ("scaling",), ("scaling",), 60,
        ("cifar10",),
    ),
    "adaptor-search": Experiment(
        "layers for three taps of VGG16", ("search",), ("search",), 5, ("imagenette", WEIGHTS),
        gpu=False,
    ),
    "adaptor-combinations": Experiment(
        "adaptors at one, two and three taps", ("adaptors --only combinations",), ("adaptors",), 3,
        ("imagenette", WEIGHTS),
    ),
    "alignment": Experiment(
        "the angle between each rule's update and backprop's", ("alignment",), ("alignment",), 5,
        ("mnist",),
    ),
    "energy": Experiment(
        "operations and bytes moved for a sample, counted", ("energy",), ("energy",), 1, gpu=False
    ),
    "distributions": Experiment(
        "class codes of three distributions", ("distributions",), ("distributions",), 60,
        ("mnist",), gpu=False,
    ),
    "clips": Experiment(
        "motions that one frame does not show, read from encoded films", ("clips",), ("clips",), 3,
        gpu=False, of_paper=False,
    ),
    "deep": Experiment(
        "VGG11, VGG8 and ResNet18 without backpropagation", ("deep", "deep --clock"), ("deep",),
        120, ("imagenette", "cifar10"), of_paper=False,
    ),
    "deep-small": Experiment(
        "a ResNet and a vision transformer at a size for a CPU", ("deep --small --restarts 2",),
        ("deep_small",), 180, ("cifar10",), gpu=False, of_paper=False,
    ),
    "pixels": Experiment(
        "long sequences, by diagonal recurrences", ("pixels",), ("pixels",), 30,
        ("seq-mnist-pixels", "seq-mnist-rows", "mnist", "eeg", "tweets"), of_paper=False,
    ),
    "peers": Experiment(
        "ZORB, LM-KARnet, dlADMM and ELM on MNIST, three nets", ("peers",), ("peers",), 5,
        ("mnist",), of_paper=False,
    ),
    "adaptors": Experiment(
        "adaptors: few images, shifted images, lighter backbones", ("adaptors",), ("adaptors",), 10,
        ("imagenette", WEIGHTS), of_paper=False,
    ),
    "streams": Experiment(
        "classes that come one after another", ("streams",), ("streams",), 20,
        ("mnist", "imagenette", WEIGHTS), gpu=False, of_paper=False,
    ),
    "one-pass": Experiment(
        "random features and solved heads: each sample is read once", ("one_pass",), ("one_pass",),
        25, ("imagenette", WEIGHTS), gpu=False, of_paper=False,
    ),
    "edge-tail": Experiment(
        "a frozen body of bytes whose tail learns on a device", ("edge_tail",), ("edge_tail",), 90,
        ("cifar10",), gpu=False, of_paper=False,
    ),
    "calibration": Experiment(
        "scale and number of features of readout", ("calibration",), ("calibration",), 20,
        ("mnist", "cifar10", "imagenette", "seq-mnist-rows", "eeg-rows"), of_paper=False,
    ),
    "default-rule": Experiment(
        "fixed or learned codes: the default of readout", ("default_rule",), ("default_rule",), 5,
        ("mnist", "cifar10", "seq-mnist-rows", "eeg-rows", "digits"), of_paper=False,
    ),
    "small-data": Experiment(
        "how long to train on small data, by default", ("small_data",), ("small_data",), 15,
        gpu=False, of_paper=False,
    ),
    "models": Experiment(
        "nets of many classes, cut into blocks", ("models",), ("models",), 20,
        gpu=False, of_paper=False,
    ),
    "targets": Experiment(
        "labels that are numbers, or come for every step or pixel", ("targets",), ("targets",), 25,
        gpu=False, of_paper=False,
    ),
    "number_scale": Experiment(
        "the scale of readout for numbers", ("number_scale",), ("number_scale",), 3,
        gpu=False, of_paper=False,
    ),
    "family": Experiment(
        "published relatives: feedback alignment, Forward-Forward, PEPITA and others", ("family",),
        ("family",), 60, ("mnist",), gpu=False, of_paper=False,
    ),
    "cost": Experiment(
        "every rule on an MLP and a CNN: accuracy, time, memory", ("cost",), ("cost",), 15,
        ("mnist", "cifar10"), gpu=False, of_paper=False,
    ),
    "probes": Experiment(
        "what the blocks of an MLP represent: probes, rank, similarity, angles", ("probes",),
        ("probes",), 2, ("mnist",), gpu=False, of_paper=False,
    ),
    "equal": Experiment(
        "the same comparison at equal passes, reads and seconds, and at searched rates",
        ("equal",), ("equal",), 40, ("mnist", "cifar10"), gpu=False, of_paper=False,
    ),
    "schedules": Experiment(
        "both orders on every kind of net", ("schedules",), ("schedules-gpu",), 3,
        ("mnist", "cifar10", "seq-mnist-rows"), of_paper=False,
    ),
}  # fmt: skip
