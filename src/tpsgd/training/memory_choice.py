"""How a run kept its memory below backprop's, in a sentence for its record."""

from typing import Any

from torch import nn

from tpsgd.engine.meter import tensor_bytes
from tpsgd.engine.record import Run
from tpsgd.engine.reuse import InputReuse
from tpsgd.engine.settings import Memory, Settings
from tpsgd.rules import Signal
from tpsgd.train import Net, sequential
from tpsgd.units import size

COUNTED = "backprop's memory, or more; tpsgd.plan counts both"


def memory_choice(run: Run, model: nn.Module, net: Net, settings: Settings) -> str:
    """What was chosen by default, and why it may take more than backprop; "" if nothing was."""
    chosen = settings.memory == Memory(measure=settings.memory.measure)
    if not chosen or not run.peak_bytes or net.learners[0].whole_net or settings.parallel:
        return ""
    if settings.schedule is not sequential:
        waits = any(x.signal is not Signal.LABEL for x in net.learners)
        why = "the rule waits for the net's output" if waits else "all blocks have class codes"
        return f"all blocks learn together, no inputs are kept; {why}: {COUNTED}"
    if len(net.learners) == 1:
        return ""
    how = [_inputs(run, net)]
    if slices := max(getattr(x, "slices", 1) for x in net.learners) - 1:
        how.append(f"gradients of large weights in up to {slices + 1} slices")
    line = net.pass_on.line if isinstance(net.pass_on, InputReuse) else None
    if any(x.penalties for x in net.learners):
        how.append(f"a solved layer's sums are in memory: {COUNTED}")
    elif line is not None:
        limit = tensor_bytes(model) + line.backprop
        under = run.total_bytes <= limit
        how.append(f"backprop takes at least {size(limit)}" if under else f"about {COUNTED}")
    return "; ".join(how)


def _inputs(run: Run, net: Net) -> str:
    """Where the inputs of blocks came from."""
    if run.kept_bytes:
        return "inputs of a block are kept where they fit"
    read: Any = net.learners[-1].settings.epochs
    return "inputs are recomputed (memory='fast' keeps them)" if read > 1 else "no inputs are kept"
