"""What the blocks of a net represent while it learns: measures as a callback of `fit`.

    watch = tpsgd.probes.Probes(x, y, [tpsgd.probes.linear_probe(), tpsgd.probes.alignment()])
    tpsgd.fit(model, data, callbacks=[watch])

A measure is a function of a `Moment`: the model, the batch, and the outputs of its blocks. The rows
go to TensorBoard or to wandb as well, by `to=`.
"""

from tpsgd_probes.alignment import alignment, degrees
from tpsgd_probes.measures import (
    cka,
    effective_rank,
    halves,
    linear_cka,
    linear_probe,
    probe_accuracy,
    rank_of,
)
from tpsgd_probes.probes import Moment, Probes, block_outputs
from tpsgd_probes.sinks import tensorboard, wandb

__all__ = [
    "Moment",
    "Probes",
    "alignment",
    "block_outputs",
    "cka",
    "degrees",
    "effective_rank",
    "halves",
    "linear_cka",
    "linear_probe",
    "probe_accuracy",
    "rank_of",
    "tensorboard",
    "wandb",
]
