"""`pipeline`: consecutive blocks on different ranks; a batch flows forward only.

Each rank trains its own blocks with the ordinary loop (`train.train`) and sends their outputs to
the next rank (`stage_net.py`). Blocks learn from labels alone, so no rank waits for anything to
come back.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings, listed
from tpsgd.engine.sources.batches import stored_samples
from tpsgd.engine.sources.loaders import LoaderSource, count_samples, first_samples
from tpsgd.engine.spec import RunRequest, rules_for
from tpsgd.memory.rehearse import Inputs
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net, sequential, simultaneous, train
from tpsgd_parallel.job import Parallel
from tpsgd_parallel.pipeline_checkpoint import PipelineCheckpoint, joined_record
from tpsgd_parallel.stage_net import StageNet
from tpsgd_parallel.stages import checked_stages, plan_pipeline, refuse_unsuited


def pipeline(stages: Sequence[int] | None = None) -> "Pipeline":
    """Train consecutive blocks on different ranks, for `fit(..., parallel=tpsgd.pipeline())`.

    A batch flows forward through the ranks, and each of them learns as it passes: nothing ever
    comes back. The weights are those of `order=tpsgd.simultaneous` in one process. Every rank
    calls `fit` with the same arguments, and ends with the whole trained model and the same record.
    `run.settings["pipeline"]` tells how long each rank was busy.

    Args:
        stages: the number of blocks on each rank, `[2, 3, 1]`. Default: chosen from the plan, so
            that multiplications and bytes balance (`tpsgd.plan(..., ranks=3)` shows them).
    """
    return Pipeline(stages)


class Pipeline(Parallel):
    """A net cut into stages of consecutive blocks, one for each rank."""

    plan = staticmethod(plan_pipeline)  # for `tpsgd.plan(ranks=...)`

    def __init__(self, stages: Sequence[int] | None = None) -> None:
        self.asked = stages
        self.stages: list[int] = []
        self.learners: list[Any] = []  # of all ranks
        self.micro_batch: int | None = None
        self.busy = self.seconds = 0.0

    def __str__(self) -> str:
        return "pipeline" if self.asked is None else f"pipeline {self.asked}"

    @contextmanager
    def enter(self, settings: Settings) -> Iterator[Settings]:
        """A context in which this process is a rank; all blocks learn from every batch."""
        if settings.order is sequential:
            raise TpsgdError(
                "a pipeline trains all blocks at the same time: sequential trains one after "
                "another; leave order out, or take order=tpsgd.simultaneous"
            )
        with super().enter(replace(settings, order=simultaneous)) as settings:
            if isinstance(settings.checkpoint, Checkpoint):
                checkpoint = PipelineCheckpoint.of_pipeline(settings.checkpoint, self)
                settings = replace(settings, checkpoint=checkpoint)
            self.micro_batch = settings.memory.micro_batch
            yield settings

    def prepare(self, request: RunRequest) -> RunRequest:
        """Choose the stages; refuse what cannot learn in a pipeline."""
        if not request.local:
            raise TpsgdError(
                "backprop is no pipeline of blocks that learn by themselves: its gradients come "
                "back; take tpsgd.data_parallel(), or fit"
            )
        settings, count = request.settings, self.ranks.count
        blocks = request.blocks
        rules: Any = rules_for(request.method, blocks, None)  # type: ignore[arg-type]
        refuse_unsuited(blocks, rules, listed(settings.optimizer), count)
        if self.asked is not None:
            self.stages = checked_stages(self.asked, len(blocks), count)
        elif len(blocks) == count:
            self.stages = [1] * count
        else:
            stages = _chosen(request, count) if self.ranks.first else None
            self.stages = self.ranks.from_first(stages)
        return request

    def spans(self) -> list[range]:
        """The numbers of the blocks on each rank."""
        ends = accumulate(self.stages)
        return [range(end - n, end) for end, n in zip(ends, self.stages, strict=True)]

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """A context in which all ranks have the weights of rank 0."""
        self.check_ranks(net)
        if len(net.models) > 1:
            raise TpsgdError("a pipeline trains one model: leave stacked=None")
        for source in filter(None, (net.source, net.validation)):
            _check_order(stored_samples(source))
        self.send_weights(net.models)
        net.order = self.train  # in place of `simultaneous`, which trains all blocks on one rank
        yield

    def train(self, net: Net) -> None:
        """Train the blocks of this rank; afterwards every rank has the weights of all blocks."""
        blocks = self.spans()[self.ranks.number]
        stage = StageNet(self.ranks, blocks, net, self.micro_batch)
        self.learners = net.learners
        self.ranks.from_all(None)  # all begin at the same time
        began = time.perf_counter()
        train(stage.net, stage.net.learners, stage.net.source, stage.net.validation)
        waited = stage.end()
        self.seconds = time.perf_counter() - began
        self.busy = self.seconds - waited
        self.spread_weights()
        self.learners = []

    def spread_weights(self) -> None:
        """Give every rank the weights of the blocks that others have trained."""
        for rank, span in enumerate(self.spans()):
            for i in span:
                for module in self.learners[i].block.modules:
                    for tensor in (*module.parameters(), *module.buffers()):
                        self.ranks.send(tensor, rank)

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        """One record of all ranks: each has the epochs of its own blocks."""
        (run,) = runs
        each = self.ranks.from_all((run.as_dict(), self.busy, self.seconds))
        records, spans = [record for record, _, _ in each], self.spans()
        values = joined_record(records, spans)
        values["blocks"] = [records[r]["blocks"][i] for r, span in enumerate(spans) for i in span]
        for name in ("seconds", "setup_seconds", "peak_bytes", "resident_bytes"):
            values[name] = max(record[name] for record in records)
        vars(run).update(vars(Run.of(values, run.model)))
        seconds = max(seconds for _, _, seconds in each)
        run.settings["pipeline"] = {
            "stages": self.stages,
            "seconds": seconds,
            "busy_seconds": [busy for _, busy, _ in each],
            "utilisation": [busy / seconds for _, busy, _ in each],
            "peak_bytes": [record["peak_bytes"] for record in records],
        }
        return runs


def _chosen(request: RunRequest, ranks: int) -> list[int]:
    """The stages that the plan balances."""
    with torch.random.fork_rng():
        x = first_samples(request.data)
    inputs = Inputs.of(x, count_samples(request.data), request.target)
    return plan_pipeline(request.model, inputs, request.method, request.settings, ranks).stages


def _check_order(source: Any) -> None:
    """Refuse a loader whose order may differ from rank to rank: each reads the labels itself.

    A loader that was given a `batch_sampler` does not use its own `sampler`.
    """
    if not isinstance(source, LoaderSource) or source.reshuffled:
        return
    batches, sampler = source.loader.batch_sampler, source.loader.sampler
    plain = batches is None or type(batches) is BatchSampler
    if not plain or not isinstance(getattr(batches, "sampler", sampler), SequentialSampler):
        raise TpsgdError(
            "every rank of a pipeline reads the labels in the same order, and a DataLoader that "
            "shuffles, or has no data set with numbers, chooses its order by itself: give arrays "
            "or a Dataset, which fit shuffles by its seed"
        )
