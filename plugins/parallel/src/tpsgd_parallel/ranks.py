"""The ranks of a job: how a process joins the others, and what they tell one another.

A rank is one process. `torchrun` starts all of them and says in the environment which rank each of
them is; torch.distributed carries the tensors, with gloo between CPUs and with NCCL between GPUs.
"""

import atexit
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpsgd.cli.torchrun import ENVIRONMENT, under_torchrun
from tpsgd.common.errors import TpsgdError
from tpsgd.features.run_identity import IN_WORDS, differing, where_they_differ
from tpsgd_parallel.failures import Watch

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
        values = [value if self.first else None]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def from_all(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the ranks, on every rank."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def send(self, tensor: Tensor, rank: int = 0) -> None:
        """Write a rank's numbers into the same tensor of every rank."""
        numbers = tensor.detach().contiguous()
        dist.broadcast(numbers, src=rank)
        if numbers.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(numbers)

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor, in place."""
        dist.all_reduce(tensor)
        return tensor

    def begin_sum(self, tensor: Tensor) -> Any:
        """Begin to sum every rank's tensor in place; the result's `wait` ends it."""
        return dist.all_reduce(tensor, async_op=True)

    def check_same(self, name: str, value: Any) -> None:
        """Refuse ranks that were started with different data or settings."""
        values = self.from_all(value)
        for number, other in enumerate(values):
            if other != values[0]:
                raise unlike(name, values[0], number, other)


def check_same_on_ranks(identities: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks with different settings, models or data: they would wait for one another.

    Examples:
        >>> check_same_on_ranks([{"epochs": [2]}, {"epochs": [3]}])
        Traceback (most recent call last):
        ...
        tpsgd.TpsgdError: every rank must have the same epochs: rank 0 has 2, rank 1 has 3
    """
    for rank, identity in enumerate(identities):
        for name in differing(identities[0], identity):
            first, other = where_they_differ(identities[0].get(name), identity.get(name))
            words = IN_WORDS.get(name, name)
            noun = "" if words == name else f"{name.partition(' (')[0]} "
            raise unlike(words, noun + first, rank, noun + other)


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
    on_gpus = torch.device(device or "cpu").type == "cuda"
    if on_gpus and 0 < count < ranks and "nccl" in dist.get_backend_config():
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
    if not dist.is_available():
        raise TpsgdError("this build of torch has no torch.distributed: parallel needs it")
    if not dist.is_initialized():
        _join()
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


def _join() -> None:
    """Join the ranks that torchrun has started."""
    if not under_torchrun():
        raise TpsgdError(ALONE)
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        torch.cuda.set_device(local_device("cuda"))
        backend = "cpu:gloo,cuda:nccl"
    try:
        if not _meetings:
            _meetings.append(next(dist.rendezvous("env://")))  # type: ignore[attr-defined]
        store, rank, count = _meetings[0]
        without_old_addresses = f"tpsgd/{next(_numbers)}"
        place = dist.PrefixStore(without_old_addresses, store)  # type: ignore[attr-defined]
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
    if _groups and dist.is_initialized() and dist.group.WORLD is _groups.pop():
        dist.destroy_process_group()
