"""`data_parallel`: each rank its share of every batch's samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DistributedSampler

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.learner import with_figures
from tpsgd.engine.learners.optimizers import follow_curve, has_curve
from tpsgd.engine.settings import Settings
from tpsgd.engine.sources.batches import stored_samples
from tpsgd.engine.sources.reuse import InputReuse
from tpsgd.nets.padded import Padded
from tpsgd.objectives import NetSignal
from tpsgd.train import Net, Source, Step
from tpsgd_parallel.gradient_sums import GradientSums
from tpsgd_parallel.job import Parallel
from tpsgd_parallel.ranks import Ranks
from tpsgd_parallel.shared_learners import shared_learner
from tpsgd_parallel.shares import RAGGED, share_random_state, shared, whole


def data_parallel(overlap: bool = True) -> "DataParallel":
    """Train on the processes that `torchrun` starts, each with its share of every batch.

    Every process has the whole model and the whole data set, and calls `fit` with the same
    arguments; `batch_size` is that of all processes together. A block's gradients are summed over
    the processes while the batch goes on to the next block. The weights are those of one process
    with the whole batch, up to the order of sums; `ridge` and `rls` solve the same equations. Batch
    norm, losses that are no mean over samples, and the mean over steps or pixels of which some have
    no label see the samples of their process only, as they do with micro-batches; dropout draws
    other numbers on every process, and a rule's objective draws the same.

    Args:
        overlap: sum gradients while later blocks compute. False waits for each block's sum at once,
            to measure what the overlap saves.

    Examples:
        In a file that `torchrun --nproc-per-node 4 FILE.py` runs:

            run = tpsgd.fit(model, data, parallel=tpsgd.data_parallel())
    """
    return DataParallel(overlap)


class DataParallel(Parallel):
    """A run whose ranks have their shares of every batch's samples."""

    def __init__(self, overlap: bool = True) -> None:
        self.overlap = overlap

    @contextmanager
    def enter(self, settings: Settings) -> Iterator[Settings]:
        """A context in which this process is a rank; a budget, planned for one, is refused."""
        if settings.memory.budget is not None:
            raise TpsgdError(
                "a memory budget is planned for one process, and data_parallel also keeps the "
                "gradients that are being summed: leave the budget out, or take tpsgd.pipeline()"
            )
        with super().enter(settings) as settings:
            yield settings

    def share(self, net: Net) -> None:
        """Let this rank learn from its share, and sum what it computes with the others."""
        ranks, pass_on = self.ranks, with_memory_of_all(net.pass_on, self.ranks)
        if len(net.models) > 1:
            raise TpsgdError("data_parallel trains one model at a time: leave stacked=None")
        for learner in net.learners:
            if isinstance(learner.signal, NetSignal):
                raise TpsgdError(
                    "data_parallel sums gradients block by block, and the rule's signal is "
                    f"{learner.signal.about}: choose a rule of labels or of the output's error"
                )
        for source in filter(None, (net.source, net.validation)):
            check_shareable(stored_samples(source))

        def passed_on(net: Net, learner: Any, source: Source) -> Source:
            share_random_state(ranks)  # a loader shuffles by it
            validation = None if net.validation is None else whole(net.validation)
            plain = replace(net, source=whole(net.source), validation=validation)
            return shared(pass_on(plain, learner, whole(source)), ranks)

        sums = GradientSums(ranks)
        net.learners = [shared_learner(x, sums, self.overlap) for x in net.learners]
        net.source = shared(net.source, ranks)
        if net.validation is not None:
            net.validation = shared(net.validation, ranks)
        net.wrap, net.pass_on = partial(_wrapped, sums), passed_on

    def __str__(self) -> str:
        return "data_parallel"


def check_shareable(source: Any) -> None:
    """Refuse samples that cannot be cut into shares, or that are shares already."""
    if isinstance(getattr(source, "x", None), Padded):
        raise TpsgdError(RAGGED)
    loader = getattr(source, "loader", None)
    batches = getattr(loader, "batch_sampler", None)
    samplers = batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise TpsgdError(
            "data_parallel gives each rank its share of every batch: the DataLoader must give all "
            "ranks the same batches, without a DistributedSampler"
        )


def with_memory_of_all(pass_on: Any, ranks: Ranks) -> Any:
    """What passes outputs on, with the free memory of the rank that has least.

    All ranks must keep them, or all compute them again: a loader gives them in another order.
    """
    if not isinstance(pass_on, InputReuse):
        return pass_on
    free_bytes = pass_on.free_bytes
    return replace(pass_on, free_bytes=lambda device: min(ranks.from_all(free_bytes(device))))


def _wrapped(sums: GradientSums, step: Step, learners: Sequence[Any], source: Source) -> Step:
    """The step on shares of batches, without tapes and graphs, which cannot wait for other ranks.

    An optimizer's step may wait until its block reads the next batch, unless its rate changes with
    every batch.
    """
    waits = any(has_curve(learner) for learner in learners)

    def on_shares(learners: Sequence[Any], batch: Any) -> None:
        for learner in learners:
            learner.updater.share, learner.last = batch.share, batch.last
        step(learners, batch)
        for learner in learners:
            learner.finish()
        sums.begin()
        if waits:
            for learner in learners:
                learner.settle()

    return with_figures(follow_curve(on_shares, learners, source))
