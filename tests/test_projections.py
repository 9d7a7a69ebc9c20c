"""Class codes: the same numbers everywhere, row by row, with the moments that they promise."""

from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpsgd import TpsgdError, projections
from tpsgd.maths.random import Key, shuffled, splitmix64, streams

MAKERS = {
    name: getattr(projections, name)
    for name in ("normal", "uniform", "binary", "orthogonal", "per_filter")
}
KEY = Key(seed=7, block=2, step=1)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
keys = st.builds(Key, st.integers(-(2**63), 2**64), st.integers(0, 99), st.integers(0, 99))
projection = st.sampled_from(sorted(MAKERS)).map(lambda name: MAKERS[name]())

# ---- the same on every machine -------------------------------------------------------------------

# Row 2 of 4, shape (3, 2), key (7, 2, 1); and row 0 of key (0, 0, 0) at deviation 0.3.
COMMITTED = {
    "normal": (
        "0x1.945948p-5 -0x1.2881f6p-2 -0x1.5bcccap-1 0x1.7d39d2p-1 -0x1.764cf6p-1 -0x1.10cb50p+0",
        "-0x1.29c65ep-2 -0x1.608436p-6 0x1.6ece8ep-3 -0x1.3cd920p-3 -0x1.321314p-3 0x1.ce7f3ap-2",
    ),
    "uniform": (
        "0x1.174666p-4 -0x1.941d34p-2 -0x1.be1c46p-1 0x1.e1f56ep-1 -0x1.daab50p-1 -0x1.3c52a4p+0",
        "-0x1.633a2ep-2 -0x1.e6c9a2p-6 0x1.de598cp-3 -0x1.a337d2p-3 -0x1.961fbap-3 0x1.cdbfdap-2",
    ),
    "binary": (
        "0x1p+0 -0x1p+0 -0x1p+0 0x1p+0 -0x1p+0 -0x1p+0",
        "-0x1.333334p-2 -0x1.333334p-2 0x1.333334p-2 -0x1.333334p-2 -0x1.333334p-2 0x1.333334p-2",
    ),
    "orthogonal": (
        "0x1.1d6c00p-4 -0x1.ac1200p-2 -0x1.00e080p+0 0x1.1b5080p+0 -0x1.120500p+0 -0x1.9021c0p+0",
        "-0x1.69059ap-2 -0x1.ab6334p-6 0x1.bcb79ap-3 -0x1.8025cep-3 -0x1.731568p-3 0x1.185da8p-1",
    ),
    "per_filter": (
        "0x1.0d90dcp-6 -0x1.8b57f4p-4 -0x1.cfbbb8p-2 0x1.fc4d18p-2 -0x1.764cf6p-1 -0x1.10cb50p+0",
        "-0x1.8d087ep-4 -0x1.d6059ep-8 0x1.e9136ap-4 -0x1.a676d4p-4 -0x1.321314p-3 0x1.ce7f3ap-2",
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_are_the_committed_ones(name):
    row, first = ([float.fromhex(v) for v in text.split()] for text in COMMITTED[name])
    assert MAKERS[name]()((3, 2), 4, KEY)[2].flatten().tolist() == row
    assert MAKERS[name](0.3)((3, 2), 1, Key()).flatten().tolist() == first


def test_the_hash_is_the_published_splitmix64():
    """The first outputs of the reference generator from the state 1234567."""
    wanted = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = splitmix64(torch.arange(1, 6), torch.tensor([[1234567]]))[0]
    assert [v % 2**64 for v in found.tolist()] == wanted


def hashes(start: int, n: int) -> list[int]:
    """The top 24 bits of splitmix64 at counters 0 to n - 1, in Python's own integers."""
    found = []
    for counter in range(n):
        z = (counter * 0x9E3779B97F4A7C15 + start) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append((z ^ (z >> 31)) >> 40)
    return found


@settings(max_examples=40)
@given(keys, st.integers(0, 50))
def test_uniform_and_binary_are_the_hash_written_out(key, label):
    u = hashes(int(streams(key, [label])), 9)
    flat = np.array([2 * v + 1 - 2**24 for v in u], dtype=np.float32)
    uniform = flat * np.float32(3**0.5 * 2.0**-24)
    assert projections.uniform()((9,), [label], key)[0].tolist() == uniform.tolist()
    signs = [1.0 if v >= 2**23 else -1.0 for v in u]
    assert projections.binary()((9,), [label], key)[0].tolist() == signs


@settings(max_examples=40)
@given(keys)
def test_normal_is_the_quantile_of_the_hash(key):
    u = hashes(int(streams(key, [0])), 20)
    found = projections.normal()((20,), 1, key)[0].tolist()
    for v, x in zip(u, found, strict=True):
        wanted = NormalDist().inv_cdf((v + 0.5) / 2**24)
        assert abs(x - wanted) < (1e-3 if abs(wanted) < 2.5 else 0.5)


def test_pieces_of_a_long_row_are_seamless():
    """Rows are filled in pieces; where they meet depends on how many rows are asked for."""
    whole = projections.normal()((70_000,), 2, KEY)
    assert torch.equal(whole[:1], projections.normal()((70_000,), [0], KEY))
    assert torch.equal(whole[:, :40_000], projections.normal()((40_000,), 2, KEY))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", MAKERS)
def test_the_numbers_are_the_same_on_a_gpu(name):
    for shape in ((3, 2), (70_000,)):
        found = MAKERS[name](0.3)(shape, 4, KEY, "cuda")
        assert found.is_cuda and torch.equal(found.cpu(), MAKERS[name](0.3)(shape, 4, KEY))
    assert torch.equal(shuffled(999, [KEY], "cuda").cpu(), shuffled(999, [KEY]))


# ---- a row is a function of (seed, block, step, class) -------------------------------------------


@settings(max_examples=40)
@given(projection, shapes, keys, st.integers(1, 8), st.integers(1, 8))
def test_a_new_class_changes_no_old_row(P, shape, key, classes, more):
    assert torch.equal(P(shape, classes + more, key)[:classes], P(shape, classes, key))


@settings(max_examples=40)
@given(projection, shapes, keys, st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_rows_do_not_depend_on_what_else_is_asked_or_in_what_order(P, shape, key, wanted):
    whole = P(shape, 10, key)
    assert torch.equal(P(shape, wanted, key), whole[wanted])


@settings(max_examples=40)
@given(projection, shapes, keys, st.integers(1, 8))
def test_the_shape_and_type_are_as_asked(P, shape, key, classes):
    found = P(shape, classes, key)
    assert found.shape == (classes, *shape) and found.dtype == torch.float32
    assert torch.isfinite(found).all() and found.abs().max() > 0


@settings(max_examples=40)
@given(projection, shapes, keys)
def test_the_same_key_gives_the_same_codes_and_the_global_generator_is_not_touched(P, shape, key):
    before = torch.get_rng_state()
    assert torch.equal(P(shape, 3, key), P(shape, 3, key))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("other", [Key(8, 2, 1), Key(7, 3, 1), Key(7, 2, 2), Key(-7, 2, 1)])
def test_another_seed_block_or_step_gives_other_codes(name, other):
    P = MAKERS[name]()
    assert not torch.equal(P((8, 3), 4, KEY), P((8, 3), 4, other))


@pytest.mark.parametrize("name", MAKERS)
def test_the_deviation_scales_the_codes(name):
    torch.testing.assert_close(
        MAKERS[name](2.5)((4, 3), 5, KEY), 2.5 * MAKERS[name]()((4, 3), 5, KEY)
    )


def test_rows_of_one_shape_are_those_of_another_with_as_many_units():
    P = projections.normal()
    assert torch.equal(P((2, 3, 4), 5, KEY).flatten(1), P((24,), 5, KEY))


@pytest.mark.parametrize("wrong", [((0,), 3), ((2, 0), 3), ((4,), 0), ((4,), [])])
def test_a_projection_of_nothing_is_an_error(wrong):
    with pytest.raises(TpsgdError, match="a projection needs a shape and classes"):
        projections.normal()(*wrong, KEY)


# ---- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["normal", "uniform", "binary"])
@pytest.mark.parametrize("std", [1.0, 0.2])
def test_mean_and_deviation(name, std):
    P = MAKERS[name](std)((40_000,), 5, KEY).double() / std
    assert abs(P.mean()) < 0.01
    assert P.std() == pytest.approx(1, abs=0.005)
    for row in P:
        assert abs(row.mean()) < 0.03 and row.std() == pytest.approx(1, abs=0.02)
    overlaps = P @ P.T / P.shape[1] - torch.eye(5)
    assert overlaps.abs().max() < 0.03  # rows are uncorrelated


@pytest.mark.parametrize(("name", "fourth"), [("normal", 3.0), ("uniform", 1.8), ("binary", 1.0)])
def test_the_fourth_moment_tells_them_apart(name, fourth):
    P = MAKERS[name]()((40_000,), 5, KEY).double()
    assert P.pow(4).mean() == pytest.approx(fourth, rel=0.02)


def test_ranges():
    assert projections.uniform(2.0)((10_000,), 3, KEY).abs().max() < 2 * 3**0.5
    assert set(projections.binary(0.5)((99,), 3, KEY).flatten().tolist()) == {-0.5, 0.5}
    assert projections.normal()((100_000,), 3, KEY).abs().max() <= 4


def test_normal_codes_follow_the_normal_distribution():
    P = projections.normal()((50_000,), 2, KEY).flatten().double()
    for x in (-2.0, -1.0, -0.3, 0.0, 0.5, 1.5, 2.5):
        below = P.less(x).double().mean()
        assert below == pytest.approx(NormalDist().cdf(x), abs=0.005)


@pytest.mark.parametrize("shape", [(5,), (8, 10, 10), (4, 500)])
def test_filter_i_of_nf_has_the_deviation_i_over_nf(shape):
    nf, plain = shape[0], projections.normal()(shape, 3, KEY)
    P = projections.per_filter()(shape, 3, KEY)
    for i in range(nf):
        torch.testing.assert_close(P[:, i], plain[:, i] * (i + 1) / nf)
    assert torch.equal(P[:, -1], plain[:, -1])  # sigma_nf = 1


def test_the_measured_deviation_of_a_filter():
    P = projections.per_filter()((4, 100, 100), 2, KEY)
    for i in range(4):
        assert P[:, i].std() == pytest.approx((i + 1) / 4, rel=0.02)


@pytest.mark.parametrize(("shape", "classes"), [((6,), 6), ((64,), 10), ((3, 5, 5), 40)])
def test_orthogonal_rows_are_orthogonal_and_of_the_right_length(shape, classes):
    P = projections.orthogonal()(shape, classes, KEY).flatten(1).double()
    units = P.shape[1]
    torch.testing.assert_close(
        P @ P.T, units * torch.eye(classes).double(), rtol=0, atol=2e-4 * units**0.5
    )


def test_with_more_classes_than_units_each_run_of_rows_is_orthogonal():
    P = projections.orthogonal()((4,), 10, KEY).double()
    for run in P.split(4):
        wanted = 4 * torch.eye(len(run)).double()
        torch.testing.assert_close(run @ run.T, wanted, rtol=0, atol=1e-4)
    assert torch.linalg.matrix_rank(P) == 4
    assert len({tuple(row) for row in P.tolist()}) == 10


@settings(max_examples=40)
@given(st.sampled_from(sorted(MAKERS)), keys)
def test_more_classes_than_units_is_no_error(name, key):
    P = MAKERS[name]()((1,), 5, key)
    assert P.shape == (5, 1) and torch.isfinite(P).all()


# ---- orders of samples ---------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 300), st.lists(keys, min_size=1, max_size=3))
def test_shuffled_is_a_permutation_for_any_n(n, several):
    orders = shuffled(n, several)
    assert orders.shape == (len(several), n)
    for order in orders:
        assert sorted(order.tolist()) == list(range(n))


@settings(max_examples=40)
@given(st.integers(1, 50), keys, keys)
def test_a_keys_order_does_not_depend_on_the_other_keys(n, a, b):
    assert torch.equal(shuffled(n, [a, b])[1], shuffled(n, [b])[0])


def test_the_order_is_the_committed_one():
    found = shuffled(10, [Key(), KEY]).tolist()
    assert found == [[7, 5, 9, 4, 1, 0, 6, 8, 2, 3], [2, 5, 7, 8, 0, 1, 4, 6, 3, 9]]


def test_every_sample_can_come_first():
    first = {int(shuffled(6, [Key(0, 0, epoch)])[0, 0]) for epoch in range(60)}
    assert first == set(range(6))
