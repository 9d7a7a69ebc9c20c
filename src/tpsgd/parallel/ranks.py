"""The ranks of a job: how a process joins the others, and what they tell one another.

A rank is one process. `torchrun` starts all of them and says in the environment which rank each of
them is; torch.distributed carries the tensors, with gloo between CPUs and with NCCL between GPUs.
"""

import atexit
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tpsgd.errors import TpsgdError
from tpsgd.parallel.failures import Watch
from tpsgd.parallel.launch import ENVIRONMENT, under_torchrun

ALONE = (
    "parallel needs the ranks that torchrun starts: torchrun --nproc-per-node 2 FILE.py, or "
    "torchrun --nproc-per-node 2 -m tpsgd train ..."
)


class Ranks:
    """This process among the others of its job: its number, and their collective operations."""

    def __init__(self, number: int, count: int, watch: Watch) -> None:
        self.number, self.count, self.watch = number, count, watch

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and shows progress."""
        return self.number == 0

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank; plain values and tensors on the CPU."""
        import torch.distributed as dist

        values = [value if self.first else None]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def send_first(self, tensor: Tensor) -> None:
        """Write rank 0's numbers into the same tensor of every rank."""
        self.send_from(0, tensor)

    def send_from(self, rank: int, tensor: Tensor) -> None:
        """Write a rank's numbers into the same tensor of every rank."""
        import torch.distributed as dist

        numbers = tensor.detach().contiguous()
        dist.broadcast(numbers, src=rank)
        if numbers.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(numbers)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor, in place."""
        import torch.distributed as dist

        dist.all_reduce(tensor)
        return tensor

    def begin_sum(self, tensor: Tensor) -> Any:
        """Begin to sum every rank's tensor in place; the result's `wait` ends it."""
        import torch.distributed as dist

        return dist.all_reduce(tensor, async_op=True)

    def device_of(self, tensors: Mapping[str, Tensor]) -> torch.device:
        """Where some tensors are; the CPU if there are none."""
        return next((t.device for t in tensors.values()), torch.device("cpu"))

    def check_same(self, name: str, value: Any) -> None:
        """Refuse ranks that were started with different data or settings."""
        values = self.from_all(value)
        for number, other in enumerate(values):
            if other != values[0]:
                raise unlike(name, values[0], number, other)


def unlike(name: str, first: Any, rank: int, other: Any) -> TpsgdError:
    """What refuses a rank that differs from rank 0."""
    return TpsgdError(
        f"every rank must have the same {name}: rank 0 has {first}, rank {rank} has {other}"
    )


_joined: list[Ranks] = []  # the job that this process is in
_groups: list[Any] = []  # the process group, if this module has joined it
_meetings: list[Any] = []  # store, rank and number of ranks, where torchrun lets them meet
_numbers = itertools.count()  # of the process groups that this module has joined


def local_device(device: Any) -> Any:
    """The device of this rank: each rank of a machine has a GPU of its own."""
    if torch.device(device or "cpu").type != "cuda" or not torch.cuda.device_count():
        return device
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", number)


def check_gpus(device: Any) -> None:
    """Refuse more ranks than GPUs on a machine, where NCCL would wait or fail without a reason."""
    count, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.device(device or "cpu").type != "cuda" or not 0 < count < ranks:
        return
    import torch.distributed as dist

    if "nccl" in dist.get_backend_config():
        raise TpsgdError(
            f"{ranks} ranks on this machine need a GPU each, and it has {count}: start torchrun "
            f"with --nproc-per-node {count}, or train with device='cpu'"
        )


@contextmanager
def joined() -> Iterator[Ranks]:
    """A context in which this process is a rank.

    It joins the process group, unless the caller has done so, and leaves it when the process ends.

    A rank that raises says so to the others. What torch raises on them because a rank failed or
    died is then one sentence, which names that rank.
    """
    if _joined:  # by the command line, say
        yield _joined[-1]
        return
    import torch.distributed as dist

    if not dist.is_available():
        raise TpsgdError("this build of torch has no torch.distributed: parallel needs it")
    if not dist.is_initialized():
        _join(dist)
    store = dist.distributed_c10d._get_default_store()
    watch = Watch(store, dist.get_rank(), dist.get_world_size(), _leave)
    ranks = Ranks(watch.rank, watch.count, watch)
    _joined.append(ranks)
    try:
        with watch:
            yield ranks
            dist.barrier()  # a rank that fails at the end still finds the others
    finally:
        _joined.pop()


def _join(dist: Any) -> None:
    """Join the ranks that torchrun has started."""
    if not under_torchrun():
        raise TpsgdError(ALONE)
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        torch.cuda.set_device(local_device("cuda"))
        backend = "cpu:gloo,cuda:nccl"
    try:
        if not _meetings:
            _meetings.append(next(dist.rendezvous("env://")))
        store, rank, count = _meetings[0]
        place = dist.PrefixStore(f"tpsgd/{next(_numbers)}", store)  # without addresses of before
        dist.init_process_group(backend, store=place, rank=rank, world_size=count)
        _groups.append(dist.group.WORLD)
        atexit.register(_leave)
    except (RuntimeError, ValueError) as error:
        place = ":".join(os.environ[name] for name in ENVIRONMENT[2:])
        reason = str(error).strip().partition("\n")[0]
        raise TpsgdError(
            f"rank {os.environ['RANK']} cannot join the others at {place}: {reason}"
        ) from error


def _leave() -> None:
    """Leave the process group, if this module has joined it."""
    if not _groups:
        return
    import torch.distributed as dist

    if dist.is_initialized() and dist.group.WORLD is _groups.pop():
        dist.destroy_process_group()
