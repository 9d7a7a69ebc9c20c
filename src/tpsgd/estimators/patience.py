"""Early stopping of a stream of samples, of which some are held out."""

from tpsgd.engine.learner import EarlyStopping
from tpsgd.engine.record import Patience


class StreamPatience:
    """The mean loss of held-out samples over the latest calls, and whether it still improves."""

    def __init__(self) -> None:
        self.mean_loss: float | None = None
        self.patience: Patience | None = None
        self.spent = False

    def watch(self, loss: float, stopping: EarlyStopping) -> None:
        """Stop if the mean loss of held-out samples has not improved for long enough.

        It is an exponential mean over about as many calls as the patience has.
        """
        self.patience = self.patience or Patience(stopping)
        before = loss if self.mean_loss is None else self.mean_loss
        self.mean_loss = before + (loss - before) * 2 / (stopping.patience + 1)
        self.spent = self.patience.spent(self.mean_loss)
