"""What torchrun tells a process that it has started; without torch, for the command line."""

import os

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether this process is one of the ranks that torchrun has started."""
    return all(name in os.environ for name in ENVIRONMENT)


def rank() -> int:
    """The number of this process among them; 0 if it is alone."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def command_words() -> list[str]:
    """The words by which `tpsgd` is started: by itself, or as the ranks of torchrun.

    After `--` torchrun takes no option as its own.
    """
    if not under_torchrun():
        return ["tpsgd"]
    ranks = int(os.environ["WORLD_SIZE"])
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    machines = [] if on_machine == ranks else ["--nnodes", str(ranks // on_machine)]
    return ["torchrun", *machines, "--nproc-per-node", str(on_machine), "-m", "--", "tpsgd"]


def speaks(text: str) -> bool:
    """Whether it is this rank that prints: rank 0, or the next one if rank 0 has died."""
    return rank() == 0 or (rank() == 1 and text.startswith("rank 0 died"))
