"""The server: it averages the weights of the devices and tests the model after every round."""

from fleet_app import task
from tpsgd import fleet

app = fleet.server(task.model, configure=task.serving)
