"""Where the rows of `Probes` go as well: TensorBoard and wandb, if they are installed."""

from pathlib import Path
from typing import Any

from tpsgd import TpsgdError, logs

Row = dict[str, Any]
PLACE = ("arm", "seed", "block", "epoch")


class TensorBoard(logs.TensorBoard):
    """Rows in a folder of TensorBoard; each of several runs has a folder in it."""

    def __call__(self, row: Any) -> None:
        self.write(_figures(row), row["block"], row["epoch"])


def tensorboard(folder: str | Path) -> TensorBoard:
    """A function for `Probes(to=[...])`: a scalar for each measure and block, by epoch.

    Args:
        folder: of the event files, as for `tensorboard --logdir`.
    """
    return TensorBoard(folder)


class Wandb:
    """Rows in a run of wandb; each of several runs, as of a comparison, has its own."""

    def __init__(self, client: Any, settings: dict[str, Any], run: Any = None) -> None:
        self._client, self._settings, self._run = client, settings, run
        self._before: Wandb | None = None  # the last of several runs

    def of_run(self, arm: str, seed: int) -> "Wandb":
        """The same in a new run, beside one that is active."""
        tags = {"arm": arm, "seed": seed}
        config = {**self._settings.get("config", {}), **tags}
        own = {"name": f"{arm} seed {seed}", "config": config, "reinit": "create_new"}
        if self._before is not None and self._before._run is not None:
            self._before._run.finish()
        self._before = Wandb(self._client, self._settings | own)
        return self._before

    def __call__(self, row: Row) -> None:
        if self._run is None:
            self._run = self._client.init(**self._settings)
        named = {f"block {row['block']}/{k}": v for k, v in _figures(row).items()}
        self._run.log({"epoch": row["epoch"], **named})


def wandb(**settings: Any) -> Wandb:
    """A function for `Probes(to=[...])`: a row for each block and epoch in a run of wandb.

    Args:
        **settings: of `wandb.init`; an active run is used if there is one.
    """
    try:
        import wandb as client  # type: ignore[import-not-found]
    except ImportError as error:
        raise TpsgdError("to send probes to Weights & Biases, run: pip install wandb") from error
    return Wandb(client, settings, client.run)


def _figures(row: Row) -> Row:
    return {k: v for k, v in row.items() if k not in PLACE and v is not None}
