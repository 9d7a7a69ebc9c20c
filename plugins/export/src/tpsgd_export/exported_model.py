"""What `tpsgd export` writes: a fresh model, or a saved one with all that it was saved with."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import setting
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.samples import CalibrationData, calibration_samples, data_for
from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.common.names import safe

if TYPE_CHECKING:
    from torch import nn

LOSSES = ("mse", "cross_entropy", "bce", "l1", "huber")
FIXED = "readout"
READOUTS = (FIXED, "readout-learned")
BACKPROP = "backprop"  # the control, which is exported as C only


@dataclass(frozen=True)
class ExportData(CalibrationData):
    """Samples that readouts are calibrated with, and their labels."""

    task: str | None = setting(
        None, "Labels are classes, or numbers to predict.",
        choices=("classification", "regression"), show_default="classification, or a saved model's",
    )  # fmt: skip
    label: str | None = setting(
        None, "FILE.csv: the label column; of --task regression, perhaps several: price,area.",
        show_default="label, y, class, target, or the last",
    )  # fmt: skip

    def load(self, seed: int = 0, **choices: Any) -> "tpsgd.data.Data":
        """The data set; the choices replace the options."""
        return super().load(seed, **({"task": self.task, "label": self.label} | choices))


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

    @property
    def gives_numbers(self) -> bool:
        """Whether labels are numbers, not classes."""
        return "targets" in self.inputs


@dataclass(frozen=True)
class NetToExport:
    """The net that leaves, and how it learns."""

    TITLE = "Net"

    model: str = setting("mlp:32", options.MODELS + " Or a folder of: tpsgd train --save.")
    factory_file: str | None = setting(
        None, "--model FOLDER: the FILE.py:FUNCTION that made it, if it was your own.", "--factory"
    )
    activation: str = setting("leaky-relu", "leaky-relu, relu, tanh, sigmoid.")
    loss_at: str | None = setting(
        None, "lru: where in time the local loss looks: last or every.", choices=("last", "every")
    )
    optimizer: str = setting(
        "sgd", "sgd, momentum (0.9) or adam.", choices=("sgd", "momentum", "adam")
    )
    readout_scale: float | None = setting(
        None, "readout: factor of the logits, not measured.", min=0
    )
    seed: int | None = setting(
        None, "Of the class codes and of fresh weights.", min=0,
        show_default="0, or a saved model's",
    )  # fmt: skip

    def read(
        self,
        samples: ExportData,
        rule: str | None,
        split: bool = False,
        learned_codes: bool = True,
    ) -> ModelToExport:
        """The model and its samples; with `split`, the data set of a page.

        Where codes cannot learn, `readout` replaces `readout-learned`, unless it was asked for.
        """
        if Path(self.model).expanduser().is_dir():
            if samples.task or samples.label or self.loss_at:
                raise TpsgdError(
                    "--task, --label and --loss-at are for a fresh model: a saved one has its own"
                )
            return self._saved(samples, rule, split, learned_codes)
        if self.factory_file is not None:
            raise TpsgdError("--factory is for a saved model: add --model FOLDER")
        if ":" not in self.model:
            raise TpsgdError(
                f"there is no folder {self.model}: --model takes a folder of tpsgd train --save, "
                "or words such as mlp:32"
            )
        import torch

        seed = self.seed or 0
        data = samples.load(seed)
        torch.manual_seed(seed)
        fresh = options.Model(self.model, self.activation, loss_at=self.loss_at)
        factory, _ = fresh.factory_for(data)
        word = rule or (DEFAULT if learned_codes else FIXED)
        settings = self._settings(word, seed)
        train, inputs = data.train, data.inputs
        return ModelToExport(
            factory(), data.shape, train, inputs, data.classes, settings, data=data
        )

    def _saved(
        self, samples: ExportData, rule: str | None, split: bool, learned_codes: bool
    ) -> ModelToExport:
        from tpsgd import rules

        trained = tpsgd.load(self.model, factory=self.factory_file)
        run, inputs = trained.run, trained.inputs
        seed = run.seed if self.seed is None else self.seed
        word = rule or (run.rule if run.rule in rules.ALL else DEFAULT)
        if rule is None and word == DEFAULT and not learned_codes:
            rule = word = FIXED
        loss = str(run.settings.get("loss")).replace("-", "_")
        loss = loss if loss in LOSSES else None
        settings = self._settings(word, seed, loss)
        if rule is None and (self.readout_scale is None or word not in READOUTS):
            settings["rule"] = _saved_rule(self.model, run, settings["rule"])
        note = f"from {self.model}: rule {word}, loss {loss or 'of the rule'}, seed {seed}"
        if word != run.rule:
            note += f" (it was trained by {safe(run.rule)})"
        if split and samples.data is None:
            raise TpsgdError(f"a page has samples in it: name the data of {self.model} with --data")
        data = data_for(trained, samples, self.model) if split else None
        x, y = data.train if data else calibration_samples(trained, samples, self.model)
        if trained.gives_numbers and y is None:
            raise TpsgdError(
                f"the model in {self.model} gives numbers: name its data with --data, whose labels "
                "say their mean and deviation"
            )
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

    def _settings(self, rule: str, seed: int, loss: str | None = None) -> dict[str, Any]:
        """The arguments that all three exports take."""
        from tpsgd import rules
        from tpsgd.comparison.arms import entry

        make, scaled = entry(rule).make, rule in READOUTS and self.readout_scale is not None
        if rule == BACKPROP:
            return {"rule": rule, "optimizer": self.optimizer, "loss": loss, "seed": seed}
        chosen = make(scale=self.readout_scale) if scaled else make()
        if not isinstance(chosen, rules.Rule):
            raise TpsgdError(f"{rule} is no local rule with a step: choose readout or tpsgd-l2")
        return {"rule": chosen, "optimizer": self.optimizer, "loss": loss, "seed": seed}


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
