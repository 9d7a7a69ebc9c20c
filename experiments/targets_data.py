"""Data whose labels are numbers, or come for every step or pixel: drawn, or of Python's libraries.

Each function takes a seed, which the diabetes alone depend on, and returns training and test
samples, `(x, y)` of tensors. Inputs are standardised by the training samples. Steps without a label
have -100.
"""

from functools import cache
from pydoc_data import topics

import numpy as np
import torch
from sklearn import datasets

from experiments.common import Samples

IGNORED = -100
Pair = tuple[Samples, Samples]


def tensors(x: np.ndarray, y: np.ndarray) -> Samples:
    """Numbers as float32, tokens and classes as whole numbers."""
    x, y = (a.astype(np.float32 if a.dtype.kind == "f" else np.int64) for a in (x, y))
    return torch.from_numpy(x), torch.from_numpy(y)


def split_and_scaled(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> Pair:
    """Standardised training and test samples; `test` says which are which."""
    mean, deviation = x[~test].mean(0), x[~test].std(0)
    x = (x - mean) / deviation
    return tensors(x[~test], y[~test]), tensors(x[test], y[test])


# ---- numbers -------------------------------------------------------------------------------------


def diabetes(seed: int) -> Pair:
    """Ten measurements of 442 patients and the progress of the disease; another fifth per seed."""
    x, y = datasets.load_diabetes(return_X_y=True)  # type: ignore[misc]
    test = np.random.default_rng(seed).permutation(len(y)) < len(y) // 5
    return split_and_scaled(x, y, test)


def friction(seed: int = 0, count: int = 4000) -> Pair:
    """Stribeck's friction force (N) of velocity (m/s), load (N) and temperature (°C), with noise.

    Dry friction falls from its static to its sliding value around the Stribeck velocity; the
    viscous part grows with velocity, and the lubricant is thinner when it is warm.
    """
    g = np.random.default_rng(0)
    v = g.uniform(-0.5, 0.5, count)
    load = g.uniform(20, 200, count)
    temperature = g.uniform(10, 80, count)
    viscosity = np.exp(-0.03 * (temperature - 40))
    stribeck = 0.05 * (1 + 0.5 * viscosity)
    dry = (0.1 + 0.12 * np.exp(-((v / stribeck) ** 2))) * load * np.tanh(v / 0.01)
    force = dry + 40 * viscosity * v
    force += g.normal(0, 0.05 * force.std(), count)
    x = np.stack([v, load, temperature], 1)
    return split_and_scaled(x, force, np.arange(count) >= count * 3 // 4)


def mackey_glass(seed: int = 0, steps: int = 48, count: int = 3000, apart: int = 6) -> Pair:
    """Windows of a chaotic series with noise, and the value after each window.

    dz/dt = 0.2 z(t - 17) / (1 + z(t - 17)^10) - 0.1 z(t), a value every 6 units of time. The test
    windows come after the training windows and share no value with them.
    """
    tenth, delay, settled = 10, 170, 5000  # steps of Euler's method, ten a unit of time
    z = [1.2] * (delay + 1)
    for t in range(delay, settled + (count + 2 * steps) * apart * tenth - 1):
        past = z[t - delay]
        z.append(z[t] + (0.2 * past / (1 + past**10) - 0.1 * z[t]) / tenth)
    series = np.array(z[settled :: apart * tenth])
    series = series + np.random.default_rng(0).normal(0, 0.05 * series.std(), len(series))
    windows = np.lib.stride_tricks.sliding_window_view(series, steps + 1)[: count + steps]
    order = np.arange(len(windows))
    last = count * 2 // 3
    used = (order < last) | (order >= last + steps)
    windows, test = windows[used], order[used] >= last
    return split_and_scaled(windows[:, :steps, None], windows[:, steps], test)


# ---- a label for each step -----------------------------------------------------------------------

TAGS = (
    *("determiner", "adjective", "noun, one", "noun, several", "preposition", "adverb"),
    *("verb, one", "verb, several", "stop"),
)
WORDS = {  # the numbers of the words of a kind; a stem is a noun or a verb, by its place
    "determiner, one": range(1, 3),
    "determiner, several": range(3, 5),
    "determiner, either": range(5, 7),
    "adjective": range(7, 17),
    "stem": range(17, 47),
    "preposition": range(47, 52),
    "adverb": range(52, 57),
    "stop": range(57, 58),
}
VOCABULARY = 58


@cache  # drawn once for all arms
def sentences(seed: int = 0, count: int = 2000, steps: int = 32) -> Pair:
    """Sentences of a small grammar: each word's tag depends on its neighbours and on agreement.

    A stem is a noun after a determiner or adjectives and a verb elsewhere. The number of a noun is
    that of its determiner; after a determiner of either number, it is that of the noun before. A
    verb agrees with its subject, the first noun of the clause, across phrases with other nouns.
    """
    g = np.random.default_rng(0)
    x, y = np.zeros((count, steps), int), np.full((count, steps), IGNORED)
    for i in range(count):
        words: list[tuple[int, int]] = []
        while len(following := words + clause(g)) <= steps:
            words = following
        for t, (word, tag) in enumerate(words):
            x[i, t], y[i, t] = word, tag
    test = np.arange(count) >= count // 2
    return tensors(x[~test], y[~test]), tensors(x[test], y[test])


def clause(g: np.random.Generator) -> list[tuple[int, int]]:
    """Words and tags: a subject, phrases behind it, a verb, an object or an adverb, a stop."""
    subject = int(g.integers(2))
    words = phrase(g, subject, None)
    number = subject
    for _ in range(int(g.integers(3))):
        before, number = number, int(g.integers(2))
        words += [word_of(g, "preposition", "preposition"), *phrase(g, number, before)]
    words.append(word_of(g, "stem", ("verb, one", "verb, several")[subject]))
    if g.random() < 0.3:
        words.append(word_of(g, "adverb", "adverb"))
    if g.random() < 0.5:
        words += phrase(g, int(g.integers(2)), number)
    return [*words, word_of(g, "stop", "stop")]


def phrase(g: np.random.Generator, number: int, before: int | None) -> list[tuple[int, int]]:
    """A determiner, adjectives and a noun."""
    either = before == number and g.random() < 0.7
    kind = "either" if either else ("one", "several")[number]
    words = [word_of(g, f"determiner, {kind}", "determiner")]
    words += [word_of(g, "adjective", "adjective") for _ in range(int(g.integers(3)))]
    return [*words, word_of(g, "stem", ("noun, one", "noun, several")[number])]


def word_of(g: np.random.Generator, kind: str, tag: str) -> tuple[int, int]:
    """A word of a kind, and its tag."""
    return int(g.choice(WORDS[kind])), TAGS.index(tag)


@cache
def characters() -> tuple[str, str, dict[str, int]]:
    """Python's own documentation, its last tenth of topics apart, and the characters' numbers.

    Characters that the first text does not have are 0.
    """
    texts = [text for _, text in sorted(topics.topics.items())]
    first = len(texts) * 9 // 10
    text, test = "".join(texts[:first]), "".join(texts[first:])
    return text, test, {c: i for i, c in enumerate(sorted(set(text)), 1)}


def documentation(seed: int = 0, steps: int = 64) -> Pair:
    """Characters of a documentation, and the next one at every step."""
    pairs, (*texts, numbers) = [], characters()
    for text in texts:
        codes = np.array([numbers.get(c, 0) for c in text])
        rows = (len(codes) - 1) // steps
        x, y = (codes[i : i + rows * steps].reshape(rows, steps) for i in (0, 1))
        pairs.append(tensors(x, y))
    return pairs[0], pairs[1]


# ---- a label for each pixel ----------------------------------------------------------------------

SHAPES = ("background", "disc", "square", "ring", "cross")


@cache
def shapes_on_noise(seed: int = 0, count: int = 1500, side: int = 32) -> Pair:
    """Pictures with two to four shapes of different brightness on noise; a shape hides others."""
    g = np.random.default_rng(0)
    x, y = np.zeros((count, 1, side, side)), np.zeros((count, side, side), int)
    for i in range(count):
        for _ in range(int(g.integers(2, 5))):
            kind = int(g.integers(1, len(SHAPES)))
            inside = shape_mask(g, kind, side)
            x[i, 0][inside], y[i][inside] = g.uniform(0.5, 1.5), kind
        x[i] += g.normal(0, 0.3, (1, side, side))
    test = np.arange(count) >= count * 2 // 3
    x = (x - x[~test].mean()) / x[~test].std()
    return tensors(x[~test], y[~test]), tensors(x[test], y[test])


def shape_mask(g: np.random.Generator, kind: int, side: int) -> np.ndarray:
    """Which pixels a shape of random size and place covers."""
    radius = g.uniform(3, 6.5)
    top, left = g.uniform(radius, side - radius, 2)
    rows, columns = np.mgrid[:side, :side]
    v, h = np.abs(rows - top), np.abs(columns - left)
    distance = np.hypot(v, h)
    if kind == 1:
        return distance < radius
    if kind == 2:
        return np.maximum(v, h) < 0.8 * radius
    if kind == 3:
        return (distance < radius) & (distance > 0.55 * radius)
    return (np.minimum(v, h) < 0.3 * radius) & (np.maximum(v, h) < radius)
