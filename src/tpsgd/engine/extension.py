"""What goes around a run: the one hook through which features reach training.

A memory budget, checkpoints, the last good weights, the memory meter, progress bars and parallel
training are extensions. The loop and the assembly of a net know none of them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from tpsgd.engine.settings import Settings
from tpsgd.engine.spec import RunRequest
from tpsgd.train import Net

if TYPE_CHECKING:
    from tpsgd.engine.record import Run


class Extension:
    """Is called around a run. Override what you need.

    Examples:
        >>> class Announced(Extension):
        ...     def prepare(self, request):
        ...         print(f"batches of {request.settings.batch_size}")
        ...         return request
    """

    def enter(self, settings: Settings) -> AbstractContextManager[Settings]:
        """A context around all of the run, with the settings for it."""
        return nullcontext(settings)

    def prepare(self, request: RunRequest) -> RunRequest:
        """The request with other settings, or an error, before the model is moved or run."""
        return request

    def around(self, net: Net) -> AbstractContextManager[None]:
        """A context around the training of a net, whose observers, sources and steps it may wrap.

        `net.spec` is the specification of the run, `net.recorder` writes its records.
        """
        return nullcontext()

    def finish(self, net: Net, runs: "list[Run]") -> "list[Run]":
        """The records of the run, once it is trained."""
        return runs
