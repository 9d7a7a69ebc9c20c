"""Backprop in a pipeline, with torch's own schedules: GPipe and 1F1B, for `pipeline.py`.

Each rank has some blocks of the net, an optimizer for them, and a part of the graph. A batch is cut
into micro-batches, which go forward through the ranks; their gradients come back.
"""

import copy
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules
from torch.nn import functional as F

import tpsgd
from tpsgd.memory.meter import LiveBytes, tensor_bytes

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass
class Waiting:
    """The seconds that a rank waits for others inside torch's schedules, while it is active."""

    seconds: float = 0.0
    wait: Any = field(default=schedules._wait_batch_p2p)

    def __enter__(self) -> "Waiting":
        schedules._wait_batch_p2p = self._timed
        return self

    def __exit__(self, *_: Any) -> None:
        schedules._wait_batch_p2p = self.wait

    def _timed(self, work: Any) -> None:
        began = time.perf_counter()
        self.wait(work)
        self.seconds += time.perf_counter() - began


class BackpropRank:
    """The blocks of this rank, trained by backprop together with those of the others."""

    def __init__(self, model: nn.Module, stages: list[int], way: str, micro_batches: int) -> None:
        self.rank, self.stages, self.model = int(os.environ["RANK"]), stages, model
        self.first, self.last = self.rank == 0, self.rank == len(stages) - 1
        blocks, start = tpsgd.split(model), sum(stages[: self.rank])
        own = blocks[start : start + stages[self.rank]]
        self.module = nn.Sequential(*(m for block in own for m in block.modules)).train()
        device = torch.device("cpu")
        stage = PipelineStage(self.module, self.rank, len(stages), device)
        self.schedule = SCHEDULES[way](stage, micro_batches, F.cross_entropy)
        self.optimizer = torch.optim.Adam(self.module.parameters(), fused=True)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One batch: forward, backward, a step of the optimizer."""
        inputs = (x,) if self.first else ()
        target: dict[str, Any] = {"target": y} if self.last else {}
        self.schedule.step(*inputs, return_outputs=False, **target)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak_bytes(self, x: Tensor, y: Tensor) -> int:
        """The most bytes in a step, the weights of this rank included; it leaves no trace."""
        before = copy.deepcopy(self.module.state_dict())
        live = LiveBytes()
        with live:
            self.step(x, y)
            self.step(x, y)
        self.module.load_state_dict(before)
        self.optimizer.state.clear()
        return live.peak + tensor_bytes(self.module)

    def collect(self) -> None:
        """Give every rank the weights of all ranks."""
        for rank, span in enumerate(_spans(self.stages)):
            for block in tpsgd.split(self.model)[span]:
                for module in block.modules:
                    for tensor in (*module.parameters(), *module.buffers()):
                        dist.broadcast(tensor.detach(), src=rank)


def _spans(stages: list[int]) -> list[slice]:
    return [slice(sum(stages[:i]), sum(stages[: i + 1])) for i in range(len(stages))]


def train(way: str, model: nn.Module, data: Any, stages: list[int], options: Any) -> dict[str, Any]:
    """Train by backprop in a pipeline: what this rank has measured."""
    dist.init_process_group("gloo")
    rank = BackpropRank(model, stages, way, options.micro_batches)
    x, y = data
    size, order = options.batch_size, torch.Generator().manual_seed(options.seed)
    peak = rank.peak_bytes(x[:size], y[:size])
    dist.barrier()
    began, cpu = time.perf_counter(), time.thread_time()
    with Waiting() as waiting:
        for _ in range(options.epochs):
            for index in torch.randperm(len(y), generator=order).split(size):
                if len(index) == size:  # a smaller batch has no micro-batches of this size
                    rank.step(x[index] if rank.first else x[:0], y[index])
    seconds = time.perf_counter() - began
    row = {
        "seconds": seconds,
        "busy_seconds": seconds - waiting.seconds,
        "cpu_seconds": time.thread_time() - cpu,
        "peak_bytes": peak,
    }
    rank.collect()
    dist.destroy_process_group()
    return row
