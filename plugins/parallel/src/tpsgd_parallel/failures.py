"""A rank that raises or dies ends the job with one sentence on the others, which names the rank.

Every rank counts upwards in the store of its process group, a few times a second. Once a collective
operation fails, a rank whose counter stands still is dead; one that raised has left its reason.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from tpsgd.common.errors import TpsgdError, shortened

PAUSE = 0.25  # seconds between two beats
SILENCE = 1.5  # seconds without a beat, after which a rank is dead
PATIENCE = 4.0  # seconds that the rank with the store waits for the others at most
LAST_BEAT = 10.0  # seconds to wait for a beat under way: torch aborts if Python ends within it
INTERRUPTED = "interrupted"  # in place of a sentence: nothing has failed
_numbers = itertools.count()  # of the jobs that this process was in


class Watch:
    """Says what became of the ranks of a job. Use it as a context manager around the job.

    `place` is where the job is, in words such as "in epoch 3", once there is something to say.
    """

    def __init__(self, store: Any, rank: int, count: int, leave: Callable[[], None]) -> None:
        self.leave = leave  # the process group, so that no other rank waits for this one
        self.store, self.rank, self.count, self.place = store, rank, count, ""
        self.key = f"tpsgd/{next(_numbers)}"  # jobs of one process group share its store
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store.clone(),), daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        try:
            if error is not None:
                self._explain(error)
        finally:
            if error is not None:
                self._end_with_others()
            self._over.set()
            self._thread.join(LAST_BEAT)

    def _explain(self, error: BaseException) -> None:
        """Tell the others of this rank's error; or raise what became of another rank.

        torchrun interrupts the other ranks once one has failed.
        """
        interrupted = isinstance(error, KeyboardInterrupt)
        collective = _of_collectives(error)
        if interrupted:
            self._tell(self.rank, INTERRUPTED)
        elif not collective:
            kind = "" if isinstance(error, TpsgdError) else f"{type(error).__name__}: "
            reason = shortened(f"{kind}{error}")
            self._tell(self.rank, f"rank {self.rank} failed{self._where()}: {reason}")
        self.leave()
        if interrupted or collective:
            with _not_terminated():
                if sentence := self._of_another():
                    raise TpsgdError(sentence) from error

    def _tell(self, rank: int, sentence: str) -> None:
        """Leave a sentence about a rank for the others."""
        with suppress(RuntimeError):  # the process that has the store may be gone
            self.store.set(f"{self.key}/failed/{rank}", sentence)

    def _end_with_others(self) -> None:
        """Let rank 0 stay until the others have read why the job ends, if it has the store."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return  # torchrun has it
        with suppress(RuntimeError):
            self.store.set(f"{self.key}/ended/{self.rank}", "")
            end = time.monotonic() + PATIENCE
            while self.rank == 0 and time.monotonic() < end and self._unread():
                time.sleep(PAUSE)

    def _unread(self) -> bool:
        """Whether a rank that has not died may still be waiting for this one."""
        return not all(
            self.store.check([f"{self.key}/ended/{rank}"])
            or self.store.check([f"{self.key}/failed/{rank}"])
            for rank in self._others()
        )

    def _of_another(self) -> str:
        """What became of another rank, in a sentence; "" if all are alive or interrupted."""
        try:
            before, end = self._beats(), time.monotonic() + SILENCE
            while time.monotonic() < end:
                for rank in self._others():
                    if self.store.check([key := f"{self.key}/failed/{rank}"]):
                        sentence = self.store.get(key).decode()
                        return "" if sentence == INTERRUPTED else sentence
                time.sleep(PAUSE / 5)
            after = self._beats()
        except RuntimeError:
            return self._died(0)
        for rank in (r for r in self._others() if before[r] == after[r]):
            self._tell(rank, self._died(rank))
            return self._died(rank)
        return ""

    def _died(self, rank: int) -> str:
        return f"rank {rank} died{self._where()}: the other ranks cannot go on without it"

    def _where(self) -> str:
        return self.place and f" {self.place}"

    def _others(self) -> list[int]:
        return [rank for rank in range(self.count) if rank != self.rank]

    def _beats(self) -> dict[int, int]:
        """How often each of the other ranks has counted."""
        return {rank: self.store.add(f"{self.key}/beats/{rank}", 0) for rank in self._others()}

    def _beat(self, store: Any) -> None:
        """Count until the job is over, on a connection of its own."""
        try:
            while not self._over.wait(PAUSE):
                store.add(f"{self.key}/beats/{self.rank}", 1)
        except RuntimeError:
            return  # the store is gone: the job is over


def _of_collectives(error: BaseException) -> bool:
    """Whether torch.distributed has raised an error; gloo's have no class of their own."""
    if isinstance(error, dist.DistError):
        return True
    backends = ("/gloo/", "ProcessGroupGloo", "ProcessGroupNCCL", "NCCL error")
    return isinstance(error, RuntimeError) and any(name in str(error) for name in backends)


@contextmanager
def _not_terminated() -> Iterator[None]:
    """A context that torchrun's SIGTERM does not end, while a rank finds out what to say."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
