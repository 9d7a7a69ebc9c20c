"""A device: it learns from its own samples with the rule of the run, within its memory budget."""

from fleet_app import task
from tpsgd import fleet

app = fleet.client(task.model, task.client_data, configure=task.training)
