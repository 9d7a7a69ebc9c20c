"""The ranks of a job as forks of one process: torch is loaded once for all of them."""

import os


def forked(count: int, port: str) -> bool:
    """Become the ranks of a job; whether this is the process that has waited for them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    for rank in range(count):
        if not os.fork():
            os.environ |= place | {"RANK": str(rank)}
            return False
    for _ in range(count):
        os.wait()
    return True
