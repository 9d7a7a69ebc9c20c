"""A rank that raises or dies ends the job with one sentence on the others, which names the rank.

Every rank counts upwards in the store of its process group, a few times a second. Once a collective
operation fails, a rank whose counter stands still is dead; one that raised has left its reason.
"""

import itertools
import re
import threading
import time
from typing import Any

from tpsgd.errors import TpsgdError, shortened

PAUSE = 0.25  # seconds between two beats
SILENCE = 1.5  # seconds without a beat, after which a rank is dead
OF_COLLECTIVES = re.compile(
    r"gloo|nccl|socket|connection|store|process ?group|broken pipe|timed? ?out", re.IGNORECASE
)
_numbers = itertools.count()  # of the jobs that this process was in


class Watch:
    """Says what became of the ranks of a job. Use it as a context manager around the job.

    `place` is where the job is, in words such as "in epoch 3", once there is something to say.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
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
            self._over.set()
            self._thread.join(SILENCE)

    def _explain(self, error: BaseException) -> None:
        """Tell the others of this rank's error; or raise what became of another rank."""
        text = f"{type(error).__name__}: {error}"
        of_another = isinstance(error, RuntimeError) and OF_COLLECTIVES.search(text)
        if of_another and (sentence := self._of_another()):
            raise TpsgdError(sentence) from error
        reason = str(error) if isinstance(error, TpsgdError) else text
        try:
            self.store.set(f"{self.key}/failed/{self.rank}", f"{self.place}|{shortened(reason)}")
        except RuntimeError:
            return  # rank 0, which has the store, is gone

    def _of_another(self) -> str:
        """What became of another rank, in a sentence; "" if all are alive and well."""
        try:
            before, end = self._beats(), time.monotonic() + SILENCE
            while time.monotonic() < end:
                for rank in self._others():
                    if self.store.check([key := f"{self.key}/failed/{rank}"]):
                        place, _, reason = self.store.get(key).decode().partition("|")
                        return f"rank {rank} failed{place and f' {place}'}: {reason}"
                time.sleep(PAUSE / 5)
            after = self._beats()
        except RuntimeError:
            return self._died(0)
        silent = [rank for rank in self._others() if before[rank] == after[rank]]
        return self._died(silent[0]) if silent else ""

    def _died(self, rank: int) -> str:
        place = self.place and f" {self.place}"
        return f"rank {rank} died{place}: the other ranks cannot go on without it"

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
