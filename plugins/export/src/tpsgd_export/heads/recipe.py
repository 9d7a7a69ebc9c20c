"""The sizes and constants of a head that learns in one pass, and the bytes that they take."""

from dataclasses import dataclass
from zlib import crc32

from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes
from tpsgd_export.to_c.memory import FLOAT, MemoryMap
from tpsgd_export.to_c.names import check_name

GOLDEN = 0x9E3779B9
COUNTERS = 16  # bytes of a state: fingerprint, classes, samples, checksum
MOST_FEATURES, MOST_CLASSES = 4096, 65_535
MOST_NUMBERS = 1 << 20  # of a sample


@dataclass(frozen=True)
class HeadRecipe:
    """A head on numbers that a sensor or a frozen encoder gives.

    Args:
        inputs: numbers that the head reads.
        features: random features of them; 0: the head reads the numbers themselves.
        classes: at first.
        spare: classes that may come later.
        ridge: the penalty on the squares of the weights.
        forgetting: what older samples count after a sample whose scores are all wrong; 1: all
            samples count the same.
        bound: of a factor D of the triangle, in multiples of its first value.
        scale: what a sum of signed inputs is multiplied by.
        seed: of the signs.
        name: what the names of the C begin with.
    """

    inputs: int
    features: int
    classes: int
    spare: int = 0
    ridge: float = 1.0
    forgetting: float = 1.0
    bound: float = 1.0
    scale: float = 1.0
    seed: int = 0
    name: str = "head"

    def __post_init__(self) -> None:
        _check_whole("inputs", self.inputs, 1, MOST_NUMBERS)
        _check_whole("features", self.features, 0, MOST_FEATURES)
        _check_whole("classes", self.classes, 1, MOST_CLASSES)
        _check_whole("spare", self.spare, 0, MOST_CLASSES - self.classes)
        _check_whole("seed", self.seed, 0, (1 << 32) - 1)
        _check_number("ridge", self.ridge, 1e-6, 1e6)
        _check_number("forgetting", self.forgetting, 0.5, 1.0)
        _check_number("bound", self.bound, 1.0, 1e6)
        _check_number("scale", self.scale, 1e-9, 1e9)
        check_name(self.name)
        if self.name in ("net", "tpsgd"):
            raise TpsgdError(f"name={self.name!r} is that of the net's own files: take another")
        if self.units > MOST_FEATURES + 1:
            raise TpsgdError(
                f"a head on {self.inputs:,} numbers themselves is not exported, on up to "
                f"{MOST_FEATURES:,} it is: pass features="
            )

    @property
    def outputs(self) -> int:
        """Classes, spare ones included."""
        return self.classes + self.spare

    @property
    def units(self) -> int:
        """Features, and the 1."""
        return (self.features or self.inputs) + 1

    @property
    def triangle(self) -> int:
        """Numbers of the triangle and its diagonal."""
        return self.units * (self.units + 1) // 2

    @property
    def stream(self) -> int:
        """Where the hash of the signs begins."""
        return self.seed * GOLDEN % (1 << 32)

    @property
    def start(self) -> float:
        """What the diagonal begins with."""
        return 1 / self.ridge

    @property
    def most(self) -> float:
        """What no number of the diagonal grows beyond."""
        return self.bound * self.start

    @property
    def fingerprint(self) -> int:
        """Of what the numbers of a state depend on, but for forgetting."""
        sizes = (self.inputs, self.features, self.classes, self.spare, self.seed)
        return crc32(repr((*sizes, float(self.scale), float(self.ridge))).encode())

    @property
    def memory(self) -> MemoryMap:
        """Bytes and multiply-adds, without an encoder."""
        ram = {
            "triangle": FLOAT * self.triangle,
            "weights": FLOAT * self.outputs * self.units,
            "counters and checksum": COUNTERS,
            "arena: features, gain, errors": FLOAT * (2 * self.units + self.outputs),
        }
        signed = self.inputs * self.features
        triangle = 3 * self.units * (self.units - 1) // 2
        return MemoryMap(ram, {}, signed + triangle + 2 * self.outputs * self.units)


def unit_scale(inputs: int, features: int, samples: Tensor | None = None) -> float:
    """The scale with which features have about unit size.

    That of the inputs is measured on some samples, or 1, as that of standardised inputs.
    """
    size = 1.0 if samples is None else float(samples.double().square().mean().sqrt())
    return (inputs**-0.5 if features else 1.0) / (size or 1.0)


def most_features(budget: str | int, classes: int, fixed: int = 0) -> int:
    """The most features whose head fits into a budget of RAM; `fixed` bytes are an encoder's."""
    limit = as_bytes(budget) - fixed
    fits = [n for n in range(1, MOST_FEATURES) if _bytes(n, classes) <= limit]
    features = max(fits, default=0)
    if not features:
        raise TpsgdError(f"ram={budget} does not hold a head of one feature and {classes} classes")
    return features


def _bytes(features: int, classes: int) -> int:
    return HeadRecipe(1, features, classes).memory.ram_bytes


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise TpsgdError(f"{name} must be a whole number from {low} to {high:,}, got {value}")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise TpsgdError(f"{name} must be a number from {low:g} to {high:g}, got {value}")
