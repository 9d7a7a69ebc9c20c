"""Where the rows of `Probes` go as well: TensorBoard and wandb, if they are installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpsgd import TpsgdError

Row = dict[str, Any]


def tensorboard(folder: str | Path) -> Callable[[Row], None]:
    """A function for `Probes(to=[...])`: a scalar for each measure and block, by epoch.

    Args:
        folder: of the event files, as for `tensorboard --logdir`.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]
    except ImportError as error:
        raise TpsgdError("to send probes to TensorBoard, run: pip install tensorboard") from error
    writer = SummaryWriter(str(folder))

    def write(row: Row) -> None:
        for name, value in _figures(row).items():
            writer.add_scalar(f"{name}/block {row['block']}", value, row["epoch"])
        writer.flush()

    return write


def wandb(**settings: Any) -> Callable[[Row], None]:
    """A function for `Probes(to=[...])`: a row for each block and epoch in a run of wandb.

    Args:
        **settings: of `wandb.init`; an active run is used if there is one.
    """
    try:
        import wandb as client  # type: ignore[import-not-found]
    except ImportError as error:
        raise TpsgdError("to send probes to Weights & Biases, run: pip install wandb") from error
    run = client.run or client.init(**settings)

    def write(row: Row) -> None:
        named = {f"block {row['block']}/{k}": v for k, v in _figures(row).items()}
        run.log({"epoch": row["epoch"], **named})

    return write


def _figures(row: Row) -> Row:
    return {k: v for k, v in row.items() if k not in ("block", "epoch") and v is not None}
