"""How a run kept its memory below backprop's, in a sentence for its record."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from tpsgd.common.units import size
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.record import COUNTED, Run
from tpsgd.engine.settings import Memory, Settings
from tpsgd.engine.sources.batches import stored_samples
from tpsgd.engine.sources.loaders import LoaderSource
from tpsgd.engine.sources.reuse import InputReuse
from tpsgd.engine.spec import RunSpec
from tpsgd.memory.meter import Meter, tensor_bytes
from tpsgd.memory.rehearse import Inputs, rehearse, settings_of_backprop
from tpsgd.objectives import Signal
from tpsgd.train import Net, sequential


def memory_choice(run: Run, model: nn.Module, net: Net) -> tuple[str, Callable[[], str] | None]:
    """The choices made by default, "" if there were none; and what counts backprop's bytes.

    Counting them loads torch's compiler, which takes seconds: `Run.memory_choice` asks for it.
    """
    settings: Settings = net.spec.settings
    chosen = settings.memory == Memory(measure=settings.memory.measure)
    measured = isinstance(net.measured, Meter)
    if not chosen or not measured or net.learners[0].whole_net or settings.parallel:
        return "", None
    in_turn = settings.order is sequential
    if in_turn and len(net.learners) == 1:
        return "", None
    words = [_inputs(run, net) if in_turn else "all blocks learn together, no inputs are kept"]
    if in_turn and (slices := max(getattr(x.updater, "slices", 1) for x in net.learners)) > 1:
        words.append(f"gradients of large weights in up to {slices} slices")
    line = net.pass_on.line if in_turn and isinstance(net.pass_on, InputReuse) else None
    limit, count = 0 if line is None else tensor_bytes(model) + line.backprop, None
    if run.total_bytes <= limit:
        words.append(f"backprop takes at least {size(limit)}")
    elif case := _case(net, settings):
        count = partial(_compared, model, *case, run.total_bytes, _why(net, in_turn, settings))
    elif not net.spec.restarts:
        words.append(COUNTED)
    return "; ".join(words), count


def _compared(model: nn.Module, inputs: Inputs, settings: Settings, total: int, reason: str) -> str:
    """What backprop would take, and why a run took more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count = rehearse(model, inputs, Backprop(), settings).peak
    except Exception:  # whatever a user's module may raise; the model is trained
        return COUNTED
    share = round(100 * (1 - count / total))
    less = f", {share or 'under 1'} % less: {reason}" if count < total else ""
    return f"backprop would take {size(count)}{less}"


def _inputs(run: Run, net: Net) -> str:
    if run.kept_bytes:
        return "inputs of a block are kept where they fit"
    several = net.learners[-1].settings.epochs > 1
    return "inputs are recomputed (memory='fast' keeps them)" if several else "no inputs are kept"


def _case(net: Net, settings: Settings) -> tuple[Inputs, Settings] | None:
    """The inputs and settings that backprop's bytes depend on; None where `plan` counts none.

    That is on a GPU, whose convolutions would have to run, for restarts that are stacked, and for
    samples or batches of different lengths.
    """
    spec: RunSpec = net.spec
    if spec.form.device.type == "cuda" or spec.restarts or spec.sample is None:
        return None
    samples = sum(s.samples for s in (net.source, net.validation) if s is not None)
    below = stored_samples(net.source)
    if isinstance(below, LoaderSource):  # which makes no order of samples
        batch_size = below.loader.batch_size
        if batch_size is None:
            return None
        settings, samples = replace(settings, batch_size=batch_size), 2 * batch_size
    plain = replace(settings, validation=None, callbacks=(), progress=None, checkpoint=None)
    inputs = Inputs(*spec.sample, samples, spec.several, spec.target)
    return inputs, settings_of_backprop(plain)


def _why(net: Net, in_turn: bool, settings: Settings) -> str:
    """Why a run took more memory than backprop, by the block that learned at its peak."""
    if not in_turn:
        waits = any(x.signal is not Signal.LABEL for x in net.learners)
        return "the rule waits for the net's output" if waits else "all blocks have class codes"
    blocks = max(net.measured.stages, key=lambda stage: stage.peak).blocks
    if not blocks:
        return "its peak came before the checkpoint that it goes on from"
    number = blocks[0]
    learner = next(x for x in net.learners if x.block.index == number)
    if learner.updater.penalties:
        return "a solved layer's sums are in memory"
    if learner.block.recurrent:
        return f"block {number + 1} has class codes, and derivatives of several time steps"
    earlier_blocks = settings.checkpoint and number
    more = "; a checkpoint keeps the state of earlier blocks" if earlier_blocks else ""
    state = ", and their optimizer state" if learner.objective.learned else ""
    return f"block {number + 1} has class codes{state}{more}"
