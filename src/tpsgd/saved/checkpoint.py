"""Checkpoints in a folder: where, how often, and the state of a run as plain values and tensors.

A state is nested dictionaries, lists and tuples of numbers, words and tensors. `pack` puts the
tensors aside under names and leaves values that JSON has; `unpack` joins the two again. They go
into the two files of `folder`, so that a checkpoint is replaced in one step and no code is run when
it is read.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.common.files import writable_folder
from tpsgd.common.output import output_folder
from tpsgd.saved import folder as folders
from tpsgd.saved.folder import FolderFormat

CHECKPOINT = FolderFormat("checkpoint", 1)
BEGUN = "before its first checkpoint"  # the position of a run that has begun
UNFIT = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
TENSOR, TUPLE, PAIRS = "tensor", "tuple", "pairs"  # keys of packed values


@dataclass(frozen=True)
class Checkpoint:
    """Where `fit` keeps the state of training after its epochs, and whether it goes on from there.

    `fit(checkpoint="folder")` is `fit(checkpoint=Checkpoint("folder"))`.

    Args:
        folder: made if it does not exist.
        every: seconds that pass at least between two checkpoints; 0: one after every epoch of a
            block. The end of a run is always written.
        resume: go on from the checkpoint in the folder; if it has none, begin. Without it, a
            folder with a checkpoint is refused. A run that has finished may be given more epochs:
            every block then goes on with its weights, its class codes and its optimizer.

    Examples:
        >>> Checkpoint("runs/digits", every=60).within("readout").folder.as_posix()
        'runs/digits/readout'
    """

    folder: Path
    every: float = 5.0
    resume: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, Path)) or self.folder == "":
            raise TpsgdError(
                f"checkpoint must be a folder or tpsgd.Checkpoint(folder), got {self.folder!r}"
            )
        if type(self.every) not in (int, float) or not self.every >= 0:
            raise TpsgdError(f"every must be a number of seconds, 0 or more, got {self.every!r}")
        object.__setattr__(self, "folder", Path(self.folder).expanduser())

    @classmethod
    def of(cls, checkpoint: "str | Path | Checkpoint") -> "Checkpoint":
        return checkpoint if isinstance(checkpoint, Checkpoint) else cls(checkpoint)  # type: ignore[arg-type]

    def within(self, name: str) -> "Checkpoint":
        """The same in a folder inside this one; characters that files cannot have are changed."""
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".")
        return replace(self, folder=self.folder / (safe or "-"))

    def claimed(self) -> AbstractContextManager[Path]:
        """The folder, for this run alone: two runs in one folder would destroy each other's."""
        return output_folder(self.folder)

    def open(self) -> dict[str, Any] | None:
        """The state to go on from, or None at the beginning; the folder can then be written to."""
        state = None
        if folders.holds(CHECKPOINT, self.folder):
            if self.resume:
                state = read(self.folder)
            elif (reached := position(self.folder)) != BEGUN:
                refuse_to_replace(self.folder, f"a checkpoint ({reached})")
        writable_folder(self.folder)
        if state is not None:
            folders.remove_leftovers(CHECKPOINT, self.folder)
        return state

    def begin(self, identity: dict[str, Any]) -> None:
        """Note that a run has begun in the folder: its results elsewhere are then its own."""
        state = {"position": BEGUN, "identity": identity, "stages": []}
        folders.write(CHECKPOINT, self.folder, {"state": state}, {})

    def write(self, state: dict[str, Any]) -> None:
        write(self.folder, state)

    def remove(self) -> None:
        """Remove a checkpoint that is not needed any more, and its folder if that is empty."""
        folders.remove(CHECKPOINT, self.folder)


def refuse_to_replace(folder: Path, content: str) -> None:
    """Refuse a folder that holds the state of a run that nobody has asked to go on with."""
    raise TpsgdError(
        f"{folder} holds {content}: go on from it with tpsgd.Checkpoint(folder, resume=True) "
        "(--resume), name another folder, or remove this one to begin anew"
    )


def write(folder: Path, state: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    folders.write(CHECKPOINT, folder, {"state": pack(state, tensors)}, tensors)


def read(folder: Path) -> dict[str, Any]:
    """The state in a folder, its tensors on the CPU."""
    description, tensors = folders.read(CHECKPOINT, folder)
    with readable(folder):
        return unpack(description["state"], tensors)


@contextmanager
def readable(folder: Path, noun: str = "checkpoint") -> Iterator[None]:
    """A context in which a state that lacks something is refused in one sentence."""
    try:
        yield
    except TpsgdError:
        raise
    except UNFIT as error:
        reason = shortened(f"{type(error).__name__}: {error}")
        raise TpsgdError(f"the {noun} in {folder} makes no sense: {reason}") from error


@contextmanager
def claimed(checkpoint: Any) -> Iterator[Checkpoint | None]:
    """A checkpoint whose folder is for this run alone; None where there is no checkpoint."""
    with nullcontext() if checkpoint is None else checkpoint.claimed():
        yield checkpoint


def position(folder: Path) -> str:
    """How far a run is by its checkpoint, in words; "" if there is no checkpoint."""
    if not folders.holds(CHECKPOINT, folder):
        return ""
    state = folders.read_description(CHECKPOINT, folder).get("state")
    return str(state.get("position", "")) if isinstance(state, dict) else ""


def pack(value: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """A value as JSON has it; tensors are put into `tensors`, under names that the value refers to.

    Examples:
        >>> import torch
        >>> pack({"step": (1, torch.ones(2))}, aside := {})
        {'step': {'tuple': [1, {'tensor': 'step.1'}]}}
        >>> unpack({"step": {"tuple": [1, {"tensor": "step.1"}]}}, aside)
        {'step': (1, tensor([1., 1.]))}
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    prefix = f"{name}." if name else ""
    if type(value) in (list, tuple):
        items = [pack(item, tensors, f"{prefix}{i}") for i, item in enumerate(value)]
        return items if type(value) is list else {TUPLE: items}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not value.keys() & {TENSOR, TUPLE, PAIRS}:
            return {key: pack(item, tensors, f"{prefix}{key}") for key, item in value.items()}
        pairs = enumerate(value.items())
        return {PAIRS: [pack(list(pair), tensors, f"{prefix}{i}") for i, pair in pairs]}
    kind = type(value).__name__
    raise TpsgdError(f"a checkpoint holds numbers, words and tensors, but {name} is a {kind}")


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `pack` has packed."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if TUPLE in value:
        return tuple(unpack(value[TUPLE], tensors))
    if PAIRS in value:
        return dict(unpack(value[PAIRS], tensors))
    return {key: unpack(item, tensors) for key, item in value.items()}
