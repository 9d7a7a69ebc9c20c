"""What `tpsgd export` writes: a fresh model, or a saved one with all that it was saved with."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import option, setting
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import waiting
from tpsgd.errors import TpsgdError, shortened
from tpsgd.names import safe

if TYPE_CHECKING:
    from torch import nn

OPTIMIZERS = ("sgd", "momentum", "adam")
FIXED = "readout"
READOUTS = (FIXED, "readout-learned")
RuleWord = Annotated[
    str | None,
    option("A rule; see: tpsgd rules.", "--rule", show_default=f"{DEFAULT}, or a saved model's"),
]


@dataclass(frozen=True)
class CalibrationData:
    """Samples that readouts are calibrated with; a saved model needs none."""

    TITLE = "Data"

    data: str | None = setting(None, options.DATA, show_default="digits; of a saved model, none")
    max_train: int | None = setting(None, "Use only this many training samples.", min=1)
    on_disk: Path | None = setting(None, "Keep the decoded data in this folder, not in memory.")  # noqa: RUF009
    scale: str | None = setting(
        None,
        "Features of tables and series: none, standard or minmax.",
        choices=options.SCALES,
        show_default="standard for .csv, else none; of a saved model, its own",
    )

    def load(self, seed: int, scale: str | None) -> "tpsgd.data.Data":
        """The data set."""
        return options.DataOptions(self.data or "digits", self.max_train, self.on_disk, scale).load(
            seed
        )


@dataclass(frozen=True)
class ModelToExport:
    """A model, its samples and how it learns."""

    model: "nn.Module"
    shape: tuple[int, ...]
    train: tuple[Any, Any] = field(repr=False)  # (None, None) without data
    inputs: dict[str, Any]
    classes: tuple[str, ...]
    settings: dict[str, Any]  # rule, optimizer, loss and seed of an export
    note: str = ""  # what was taken from the folder of a saved model
    data: "tpsgd.data.Data | None" = field(default=None, repr=False)


@dataclass(frozen=True)
class NetToExport:
    """The net that leaves, and how it learns."""

    TITLE = "Net"

    model: str = setting("mlp:32", options.MODELS + " Or a folder of: tpsgd train --save.")
    activation: str = setting("leaky-relu", "leaky-relu, relu, tanh, sigmoid.")
    optimizer: str = setting("sgd", "sgd, momentum (0.9) or adam.", choices=OPTIMIZERS)
    loss: str | None = setting(
        None, "Last layer: mse, cross-entropy or bce.", choices=options.LOSSES,
        show_default="the rule's, or a saved model's",
    )  # fmt: skip
    readout_scale: float | None = setting(
        None, "readout: factor of the logits, not measured.", min=0
    )
    seed: int | None = setting(
        None, "Of the class codes and of fresh weights.", min=0,
        show_default="0, or a saved model's",
    )  # fmt: skip

    def read(
        self,
        samples: CalibrationData,
        rule: str | None,
        split: bool = False,
        learned_codes: bool = True,
    ) -> ModelToExport:
        """The model and its samples; with `split`, the data set of a page.

        Where codes cannot learn, `readout` replaces `readout-learned`, unless it was asked for.
        """
        if Path(self.model).is_dir():
            return self._saved(samples, rule, split, learned_codes)
        if ":" not in self.model:
            raise TpsgdError(
                f"there is no folder {self.model}: --model takes a folder of tpsgd train --save, "
                "or words such as mlp:32"
            )
        import torch

        seed = self.seed or 0
        data = samples.load(seed, samples.scale)
        torch.manual_seed(seed)
        factory, _ = options.Model(self.model, self.activation).factory_for(data)
        word = rule or (DEFAULT if learned_codes else FIXED)
        settings = self._settings(word, seed, self.loss)
        train, inputs = data.train, data.inputs
        return ModelToExport(
            factory(), data.shape, train, inputs, data.classes, settings, data=data
        )

    def _saved(
        self, samples: CalibrationData, rule: str | None, split: bool, learned_codes: bool
    ) -> ModelToExport:
        from tpsgd import rules

        trained = tpsgd.load(self.model)
        run, inputs = trained.run, trained.inputs
        seed = run.seed if self.seed is None else self.seed
        word = rule or (run.rule if run.rule in rules.ALL else DEFAULT)
        if rule is None and word == DEFAULT and not learned_codes:
            rule = word = FIXED
        saved_loss = str(run.settings.get("loss")).replace("_", "-")
        loss = self.loss or (saved_loss if saved_loss in options.LOSSES else None)
        settings = self._settings(word, seed, loss)
        if rule is None and (self.readout_scale is None or word not in READOUTS):
            settings["rule"] = _saved_rule(self.model, run, settings["rule"])
        note = f"from {self.model}: rule {word}, loss {loss or 'of the rule'}, seed {seed}"
        if word != run.rule:
            note += f" (it was trained by {safe(run.rule)})"
        data, (x, y) = None, samples_for(trained, samples, self.model, split)
        if split:
            data, (x, y) = x, x.train
        shape = inputs.get("shape") or (x is not None and x.shape[1:])
        if x is None and word in READOUTS and not self.readout_scale:
            note += "; without --data its readouts are calibrated by the first samples they learn"
        if not shape:
            raise TpsgdError(
                f"the model in {self.model} was saved without inputs: name its data with --data"
            )
        return ModelToExport(
            trained.model, tuple(shape), (x, y), inputs, trained.classes, settings, note, data
        )

    def _settings(self, rule: str, seed: int, loss: str | None) -> dict[str, Any]:
        """The arguments that all three exports take."""
        from tpsgd import rules
        from tpsgd.comparison.arms import entry

        entry(rule)
        if rule not in rules.ALL:
            raise TpsgdError(f"{rule} is no local rule with a step: choose readout or tpsgd-l2")
        make, scaled = rules.ALL[rule].make, rule in READOUTS and self.readout_scale is not None
        chosen = make(scale=self.readout_scale) if scaled else make()
        function = None if loss is None else getattr(tpsgd, loss.replace("-", "_"))
        return {"rule": chosen, "optimizer": self.optimizer, "loss": function, "seed": seed}


def _saved_rule(folder: str, run: "tpsgd.Run", rule: "tpsgd.Rule") -> "tpsgd.Rule":
    """The rule with the options that it was trained with, as far as a record has them."""
    from tpsgd.engine.settings import listed
    from tpsgd.rules import scale_of, with_scale

    options = sorted({str(text) for text in listed(run.settings.get("options") or [])})
    number = re.search(r", scale (\d+(?:\.\d+)?(?:e[+-]?\d+)?),", options[0]) if options else None
    if scale_of(rule) and number:
        rule = with_scale(rule, float(number[1]))
    if not options or (run.rule == rule.name and options == [f"{rule.options}, {rule.at.value}"]):
        return rule  # without options, no hidden block had a local loss
    raise TpsgdError(
        f"the model in {folder} was trained by {run.rule} ({shortened('; '.join(options), 200)}), "
        f"which cannot be restored from its folder: --rule {rule.name} exports it with the usual "
        "options of that rule, and the functions of tpsgd.export take any rule"
    )


def samples_for(
    trained: "tpsgd.Trained", samples: CalibrationData, folder: str, split: bool
) -> Any:
    """Training samples in the form that a saved model takes; with `split`, a whole data set."""
    from tpsgd.data.new_samples import read_new
    from tpsgd.data.registry import DATASETS

    if samples.data is None and not split:
        return None, None
    if samples.data is None:
        raise TpsgdError(f"a page has samples in it: name the data of {folder} with --data")
    if samples.scale is not None:
        raise TpsgdError(f"the model in {folder} has its own scaling: leave --scale out")
    reads_table = samples.data.lower().endswith((".csv", ".tsv"))
    if not trained.inputs or samples.data in DATASETS or (split and not reads_table):
        data = _loaded(trained, samples, folder)
        return (data, None) if split else data.train
    with waiting(f"reading {samples.data}"):
        new = read_new(samples.data, inputs=trained.inputs, classes=trained.classes)
    if split:
        return _held_out(trained, samples, new), None
    return new.x[: samples.max_train], None if new.y is None else new.y[: samples.max_train]


def _loaded(trained: "tpsgd.Trained", samples: CalibrationData, folder: str) -> "tpsgd.data.Data":
    """A data set with the scaling of the model."""
    import torch

    from tpsgd.saved.scaling import scaled

    scaling = trained.inputs.get("scaling") or {}
    data = samples.load(trained.run.seed, "none" if trained.inputs else samples.scale)
    if trained.classes and tuple(trained.classes) != tuple(data.classes):
        raise TpsgdError(
            f"the model in {folder} tells {len(trained.classes)} classes apart, "
            f"{', '.join(map(str, trained.classes[:5]))}, ...; those of the data differ"
        )
    if "shift" not in scaling:
        return data
    train, test = (
        (torch.as_tensor(scaled(x, scaling)), y) for x, y in (data.train, data.test)
    )  # fmt: skip
    return replace(data, train=train, test=test, reading=data.reading | {"scaling": scaling})


def _held_out(trained: "tpsgd.Trained", samples: CalibrationData, new: Any) -> "tpsgd.data.Data":
    """A table with the columns, the scaling and the classes of the model, split in two."""
    import torch

    from tpsgd.data.split import hold_out_test, stratified

    spec, seed = str(samples.data), trained.run.seed
    if new.y is None:
        raise TpsgdError(f"{spec} has no labels to learn from")
    mask, note = hold_out_test(new.y.numpy(), seed, spec)
    train, test = map(torch.from_numpy, (mask, ~mask))
    if samples.max_train is not None and samples.max_train < int(train.sum()):
        train[mask] = torch.from_numpy(stratified(new.y[train].numpy(), samples.max_train, seed))
    reading = {name: value for name, value in trained.inputs.items() if name != "shape"}
    return tpsgd.data.Data(
        spec, (new.x[train], new.y[train]), (new.x[test], new.y[test]), trained.classes,
        tuple(new.x.shape[1:]), note, reading=reading,
    )  # fmt: skip
