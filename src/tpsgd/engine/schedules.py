"""When blocks learn."""

import torch

from tpsgd.engine.trainer import Trainer


def sequential(trainer: Trainer) -> None:
    """The paper's order: train a block, freeze it, hand its outputs to the next.

    Each block's inputs are computed once and reused for all its epochs where memory allows.
    """
    source, validation = trainer.source, trainer.validation
    for learner in trainer.learners:
        trainer.train([learner], source, validation)
        if learner is trainer.learners[-1]:
            return
        with torch.no_grad():
            source = trainer.pass_on(learner, source)
            validation = trainer.pass_on(learner, validation) if validation is not None else None


def simultaneous(trainer: Trainer) -> None:
    """Every batch updates every block as it passes: streaming, and what DFA and sDFA need."""
    trainer.train(trainer.learners, trainer.source, trainer.validation)
