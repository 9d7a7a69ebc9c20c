"""A rehearsal of blocks that learn one after another; equal blocks are counted once."""

from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.fast.cuda_graphs import library_modules_only
from tpsgd.engine.sources.batches import ThroughBlocks, depth, stored_samples
from tpsgd.engine.spec import RunSpec
from tpsgd.objectives import Place
from tpsgd.train import Net, train

LEFT_OVER = 0  # a storage's number, in place of the few bytes that learned blocks leave


def in_turn(net: Net, meter: Any) -> None:
    """`tpsgd.sequential`; a block equal to an earlier one, with equal inputs, does not learn.

    It gets the multiplications of the earlier block, which may have recomputed fewer blocks.
    """
    source, live, counted = net.source, meter.live, {}
    kinds: list[Any] = []
    left_over: list[Tensor] = []
    for i, learner in enumerate(net.learners):
        kinds.append(_kind(i, learner, net.spec))
        case, start = (kinds[-1], _inputs(source, kinds[:-1])), live.live
        if case in counted:
            before, after, peak, at_peak, extra, multiplications = counted[case]
            meter.stage([learner])
            meter.stages[-1].multiplications = multiplications
            live.peak, live.extra_at_peak = peak + start - before, extra
            live.at_peak = {**at_peak, LEFT_OVER: start - before}
            left_over.append(torch.empty(max(0, after - before), dtype=torch.uint8))
        else:
            train(net, [learner], source)
            peak = live.peak, live.at_peak, live.extra_at_peak
            counted[case] = start, live.live, *peak, meter.stages[-1].multiplications
        if learner is not net.learners[-1]:
            source = net.pass_on(net, learner, source)


def _kind(i: int, learner: Any, spec: RunSpec) -> Any:
    """All that the memory of a block depends on, except for its inputs."""
    if learner.whole_net or learner.block.recurrent or not library_modules_only(learner):
        return i
    return (
        *(type(learner.updater), learner.trains, learner.widest),
        *(getattr(learner.updater, name, None) for name in ("slices", "codes_first")),
        *(repr(learner.settings), repr(learner.block.layers), id(spec.rules[i])),
        tuple(spec.sizes[i].items()),
        tuple(spec.sizes[i - 1][Place.END]) if i else None,
        tuple((k, p.shape, p.stride(), p.dtype) for k, p in learner.params.items()),
        i == len(spec.blocks) - 1,
    )


def _inputs(source: Any, kinds: list[Any]) -> Any:
    """Where a block's inputs come from: samples in memory, and frozen blocks that they pass."""
    x = stored_samples(source).x  # type: ignore[union-attr]
    through = kinds[len(kinds) - depth(source) :]
    at_a_time = source.at_a_time if isinstance(source, ThroughBlocks) else None
    return tuple(x.shape), x.stride(), x.dtype, frozenset(through), tuple(through[-1:]), at_a_time
