"""Blocks that learn in turn in a rehearsal; what equal blocks take is counted once."""

from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.fast.cuda_graphs import library_modules_only
from tpsgd.engine.sources.batches import ThroughBlocks, depth, stored_samples
from tpsgd.engine.spec import RunSpec
from tpsgd.rules import Place
from tpsgd.train import Net, train

LEFT_OVER = 0  # a storage's number, in place of the few bytes that learned blocks leave


def in_turn(net: Net, meter: Any) -> None:
    """`tpsgd.sequential`; a block like one before it, with inputs like its, need not learn.

    Its multiplications are then those of the other, which may have recomputed fewer blocks.
    """
    spec: RunSpec = net.spec
    source, live, counted = net.source, meter.counted, {}
    kinds: list[Any] = []
    left_over: list[Tensor] = []
    for i, learner in enumerate(net.learners):
        kinds.append(_kind(i, learner, spec))
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
    """All that the memory of a block depends on, its inputs left out."""
    if learner.whole_net or learner.block.recurrent or not library_modules_only(learner):
        return i
    size = spec.sizes[i]
    return (
        *(
            type(learner.updater),
            repr(learner.settings),
            id(spec.rules[i]),
            learner.trains,
            learner.widest,
        ),
        *(getattr(learner.updater, name, None) for name in ("slices", "codes_first")),
        tuple(size.items()),
        tuple(spec.sizes[i - 1][Place.END]) if i else None,
        tuple((k, p.shape, p.stride(), p.dtype) for k, p in learner.params.items()),
        repr(learner.block.layers),
        i == len(spec.blocks) - 1,
    )


def _inputs(source: Any, kinds: list[Any]) -> Any:
    """Where a block's inputs come from: samples in memory, and the frozen blocks above them."""
    below: Any = stored_samples(source)
    x, count = below.x, depth(source)
    through = kinds[len(kinds) - count :]
    at_a_time = source.at_a_time if isinstance(source, ThroughBlocks) else None
    return tuple(x.shape), x.stride(), x.dtype, frozenset(through), tuple(through[-1:]), at_a_time
