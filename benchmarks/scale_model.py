"""Seconds and bytes of a training step on many ranks, for local learning and for backprop.

The net is cut into stages of consecutive blocks, one rank each; such a pipeline is there once or
several times (replicas), each with its share of the batch. One stage is data-parallel training.

Local learning: a block reads a batch, learns and passes it on. The sum of its gradients over the
replicas begins at once (small blocks share a message), and is waited for when the block reads its
next batch.
Backprop: micro-batches go forward through the stages and come back (GPipe: all forward, then all
back; 1F1B: in turns). Gradients are summed in buckets during the last backward pass, as
DistributedDataParallel does, and the next batch begins when the optimizer has ended.

Every rank has a core, which computes, and a link, which sends one message after another to the
ranks before and after, and beside them one sum after another. All replicas are equal, so one is
simulated (`scale_events.py`). Ranks do not get into each other's way on the net.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from scale_events import Name, Task, simulate

from tpsgd_parallel.gradient_sums import MESSAGE_BYTES

NUMBER = 4  # bytes
BUCKET, FIRST_BUCKET = 25 << 20, 1 << 20  # bytes, the defaults of DistributedDataParallel


@dataclass(frozen=True)
class Block:
    """What a block takes; multiplications and bytes of outputs are those of one sample."""

    forward: float  # multiplications
    backward: float  # in backprop: the gradients of its weights and of its inputs
    local: float  # forward pass and gradients of a block that learns by itself
    weights: int  # numbers that have gradients
    outputs: int  # bytes


@dataclass(frozen=True)
class Machine:
    """How fast a rank computes."""

    products: float  # multiplications per second
    weights: float  # numbers that the optimizer updates per second
    overhead: float = 0.0  # seconds for a block and a batch, whatever their size

    def local(self, block: Block, samples: float) -> float:
        """Seconds in which a block learns from a batch, the optimizer's step included."""
        return samples * block.local / self.products + self.optimizer(block) + self.overhead

    def forward(self, block: Block, samples: float) -> float:
        """Seconds of a forward pass in backprop."""
        return samples * block.forward / self.products + self.overhead / 2

    def backward(self, block: Block, samples: float) -> float:
        """Seconds of a backward pass."""
        return samples * block.backward / self.products + self.overhead / 2

    def optimizer(self, block: Block) -> float:
        """Seconds of the optimizer's step."""
        return block.weights / self.weights


@dataclass(frozen=True)
class Link:
    """How fast a rank sends, and how much of its core that takes."""

    latency: float  # seconds
    bandwidth: float  # bytes per second
    host: float = 0.0  # the share of the core that is busy while the link is

    def send(self, count: float) -> float:
        """Seconds until a message of this many bytes has arrived."""
        return self.latency + count / self.bandwidth

    def sum(self, count: float, ranks: int) -> float:
        """Seconds of an all-reduce of this many bytes, by recursive halving and doubling.

        A ring sends as many bytes, in 2 (ranks - 1) messages.
        """
        if ranks == 1:
            return 0.0
        messages = 2 * math.ceil(math.log2(ranks))
        return messages * self.latency + sum_bytes(count, ranks) / self.bandwidth


def sum_bytes(count: float, ranks: int) -> float:
    """The bytes that each rank sends in an all-reduce."""
    return 2 * (ranks - 1) / ranks * count


@dataclass(frozen=True)
class Layout:
    """How ranks share a net and a batch."""

    stages: tuple[int, ...]  # the number of blocks on each rank of a pipeline
    replicas: int = 1  # of the pipeline
    micro_batches: int = 1  # of the batch of a replica, in backprop
    in_turns: bool = False  # 1F1B rather than GPipe

    def of(self, blocks: Sequence[Block]) -> list[list[tuple[int, Block]]]:
        """The numbered blocks of every stage."""
        numbered = list(enumerate(blocks))
        ends = list(accumulate(self.stages))
        return [numbered[end - n : end] for end, n in zip(ends, self.stages, strict=True)]


@dataclass(frozen=True)
class Place:
    """A machine, and its link to the others."""

    machine: Machine
    link: Link

    def message(self, name: Name, rank: int, count: float, after: Name) -> Task:
        """Bytes that a rank sends to another when a task has ended."""
        return self._sent(name, ("messages", rank), self.link.send(count), after)

    def sum(self, name: Name, rank: int, count: float, after: Name, replicas: int) -> Task:
        """Bytes of gradients that are summed over the replicas when a task has ended."""
        return self._sent(name, ("sums", rank), self.link.sum(count, replicas), after)

    def _sent(self, name: Name, link: tuple[str, int], seconds: float, after: Name) -> Task:
        core = "core", link[1]
        return Task(name, link, seconds, (after,), slows=core, share=self.link.host)


# ---- local learning ------------------------------------------------------------------------------


def messages(stage: Sequence[tuple[int, Block]]) -> dict[int, list[int]]:
    """Which blocks' gradients are summed together, by the last of them, as tpsgd does it."""
    filled, waiting, count = {}, [], 0
    for i, block in stage:
        waiting.append(i)
        count += NUMBER * block.weights
        if count >= MESSAGE_BYTES or i == stage[-1][0]:
            filled[i], waiting, count = waiting, [], 0
    return filled


def local_tasks(
    blocks: Sequence[Block], layout: Layout, samples: float, place: Place, batches: int
) -> Iterator[Task]:
    """What the ranks of a replica do when blocks learn by themselves."""
    stages, shared = layout.of(blocks), layout.replicas > 1
    message_of = {i: last for stage in stages for last, of in messages(stage).items() for i in of}
    for batch in range(batches):
        for rank, stage in enumerate(stages):
            arrived = (("send", rank - 1, batch),) if rank else ()
            for i, block in stage:
                seconds = place.machine.local(block, samples)
                after = arrived if (i, block) == stage[0] else ()
                if batch and shared:
                    after += (("sum", message_of[i], batch - 1),)
                yield Task(("learn", i, batch), ("core", rank), seconds, after)
                if shared and message_of[i] == i:
                    count = sum(NUMBER * blocks[k].weights for k in messages(stage)[i])
                    learned = "learn", i, batch
                    yield place.sum(("sum", i, batch), rank, count, learned, layout.replicas)
            if rank < len(stages) - 1:
                last, block = stage[-1]
                count, learned = samples * block.outputs, ("learn", last, batch)
                yield place.message(("send", rank, batch), rank, count, learned)


def local_total(
    blocks: Sequence[Block], layout: Layout, samples: float, place: Place, batches: int
) -> float:
    """Seconds for some batches, the filling of the pipeline included."""
    return max(simulate(local_tasks(blocks, layout, samples, place, batches)).values())


def local_seconds(blocks: Sequence[Block], layout: Layout, samples: float, place: Place) -> float:
    """Seconds of a step of a pipeline that is full: those of the core or link that takes longest.

    A core may run ahead of a slower link for some batches, until it has to wait for it.
    """
    few = 8
    batches = 2 * few + 2 * len(layout.stages)  # the first ones fill the pipeline and the links
    ends = simulate(local_tasks(blocks, layout, samples, place, batches))
    last = batches - 1
    steps = [end - ends[kind, i, last - few] for (kind, i, n), end in ends.items() if n == last]
    return max(steps) / few


# ---- backprop ------------------------------------------------------------------------------------


def order(rank: int, layout: Layout) -> Iterator[tuple[str, int]]:
    """The passes of a rank: whether forward or back, and the micro-batch."""
    count, after = layout.micro_batches, len(layout.stages) - 1 - rank
    ahead = min(count, after + 1) if layout.in_turns else count
    yield from (("forward", m) for m in range(ahead))
    for m in range(count):
        yield "backward", m
        if ahead + m < count:
            yield "forward", ahead + m


def buckets(stage: Sequence[tuple[int, Block]]) -> dict[int, int]:
    """Bytes of gradients that are summed after the backward pass of a block, by its number."""
    filled, count, limit = {}, 0, FIRST_BUCKET
    for i, block in reversed(stage):
        count += NUMBER * block.weights
        if count >= limit or i == stage[0][0]:
            filled[i], count, limit = count, 0, BUCKET
    return filled


@dataclass(frozen=True)
class Pass:
    """A micro-batch in a stage of backprop."""

    stage: Sequence[tuple[int, Block]]
    rank: int
    batch: tuple[int, int]  # the numbers of the batch and of the micro-batch
    layout: Layout
    samples: float
    place: Place

    def forward(self) -> Iterator[Task]:
        """Through the stage, and on to the next one."""
        rank, name = self.rank, ("forward", self.rank, self.batch)
        seconds = sum(self.place.machine.forward(block, self.samples) for _, block in self.stage)
        after = (("send", rank - 1, self.batch),) if rank else ()
        yield Task(name, ("core", rank), seconds, after)
        if rank < len(self.layout.stages) - 1:
            count = self.samples * self.stage[-1][1].outputs
            yield self.place.message(("send", rank, self.batch), rank, count, name)

    def backward(self, inputs: float) -> Iterator[Task]:
        """Back through the stage; with the last micro-batch the gradients are summed."""
        rank, layout, place = self.rank, self.layout, self.place
        after = (("return", rank + 1, self.batch),) if rank < len(layout.stages) - 1 else ()
        summed = buckets(self.stage)
        sums = layout.replicas > 1 and self.batch[1] == layout.micro_batches - 1
        for i, block in reversed(self.stage):
            name = "backward", i, self.batch
            yield Task(name, ("core", rank), place.machine.backward(block, self.samples), after)
            after = ()
            if sums and i in summed:
                yield place.sum(("sum", i, self.batch[0]), rank, summed[i], name, layout.replicas)
        if rank:
            first = "backward", self.stage[0][0], self.batch
            count = self.samples * inputs
            yield place.message(("return", rank, self.batch), rank, count, first)


def backprop_tasks(
    blocks: Sequence[Block], layout: Layout, samples: float, place: Place, batches: int
) -> Iterator[Task]:
    """What the ranks of a replica do in backprop."""
    for batch in range(batches):
        for rank, stage in enumerate(layout.of(blocks)):
            for way, m in order(rank, layout):
                share = samples / layout.micro_batches
                passing = Pass(stage, rank, (batch, m), layout, share, place)
                if way == "forward":
                    yield from passing.forward()
                else:
                    inputs = blocks[stage[0][0] - 1].outputs if rank else 0
                    yield from passing.backward(inputs)
            sums = tuple(("sum", i, batch) for i in buckets(stage)) if layout.replicas > 1 else ()
            seconds = sum(place.machine.optimizer(block) for _, block in stage)
            yield Task(("step", rank, batch), ("core", rank), seconds, sums)


def backprop_seconds(
    blocks: Sequence[Block], layout: Layout, samples: float, place: Place
) -> float:
    """Seconds of a step."""
    batches = 3
    ends = simulate(backprop_tasks(blocks, layout, samples, place, batches))
    return ends["step", 0, batches - 1] - ends["step", 0, batches - 2]


# ---- bytes ---------------------------------------------------------------------------------------


def rank_bytes(blocks: Sequence[Block], layout: Layout, samples: float, backprop: bool) -> float:
    """The bytes that the rank which sends most sends in a step."""
    stages, sent = layout.of(blocks), []
    for rank, stage in enumerate(stages):
        gradients = NUMBER * sum(block.weights for _, block in stage)
        outputs = stage[-1][1].outputs if rank < len(stages) - 1 else 0
        inputs = blocks[stage[0][0] - 1].outputs if rank and backprop else 0
        sent.append(sum_bytes(gradients, layout.replicas) + samples * (outputs + inputs))
    return max(sent)
