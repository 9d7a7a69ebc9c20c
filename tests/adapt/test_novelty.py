"""Novelty: against numpy, scipy and scikit-learn, and a false alarm as often as promised."""

import io

import numpy as np
import pytest
import torch
from scipy import special, stats
from sklearn import covariance, metrics

from experiments.hyperdimensional import auroc, hyperdimensional
from tpsgd.common.errors import TpsgdError
from tpsgd.maths.random import Key
from tpsgd.projections import binary
from tpsgd_adapt.novelty import ledoit_wolf, mahalanobis, tail


def classes(n=90, d=6, of=3, seed=0, scale=3.0):
    """Samples about class means, correlated."""
    g = torch.Generator().manual_seed(100)
    means, mix = scale * torch.randn(of, d, generator=g), torch.randn(d, d, generator=g)
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % of
    return means[y] + torch.randn(n, d, generator=g) @ mix, y


def both(x, y, **options):
    return mahalanobis(x, y, **options), hyperdimensional(x, y, dimensions=500, **options)


@pytest.mark.parametrize("kind", [0, 1])
def test_weak_features_are_no_news_unless_they_point_elsewhere(kind):
    """Brought to unit length a sample's strength does not count; as it is, it does."""
    x, y = classes()
    detector = both(x, y)[kind]
    torch.testing.assert_close(detector.score(x / 10), detector.score(x), rtol=1e-4, atol=1e-5)
    plain = both(x, y, unit=False)[kind]
    assert not torch.allclose(plain.score(x / 10), plain.score(x), rtol=1e-2)


@pytest.mark.parametrize("n", [90, 9])
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("unit", [True, False])
def test_mahalanobis_is_what_numpy_and_scikit_learn_give(n, labelled, unit):
    x, y = classes(n, d=20 if n == 9 else 6)
    given = classes(17, d=x.shape[1], seed=1)[0]
    known, fresh = x.double().numpy(), given.double().numpy()
    if unit:
        known, fresh = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (known, fresh))
    groups = (y if labelled else torch.zeros_like(y)).numpy()
    means = np.stack([known[groups == c].mean(0) for c in np.unique(groups)])
    shared, _ = covariance.ledoit_wolf(known - means[groups], assume_centered=True)
    inverse = np.linalg.pinv(shared)
    wanted = [min((f - m) @ inverse @ (f - m) for m in means) for f in fresh]
    found = mahalanobis(x, y if labelled else None, unit=unit).score(given)
    np.testing.assert_allclose(found, wanted, rtol=1e-8)


def test_with_many_samples_the_scores_are_chi_squared():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(31_000, 6, generator=g) * torch.arange(1, 7)
    scores = mahalanobis(x[1000:], unit=False).score(x[:1000])
    assert stats.kstest(scores.numpy(), stats.chi2(6).cdf).pvalue > 0.01


def test_a_covariance_that_cannot_be_inverted_is_shrunk_a_little():
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)  # Ledoit and Wolf say 0
    wanted = (1 - 1e-6) * torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double() + 2.5e-6 * torch.eye(2)
    torch.testing.assert_close(ledoit_wolf(x), wanted.double())
    assert bool(mahalanobis(x, unit=False).score(x).isfinite().all())


def test_hyperdimensional_scores_are_one_less_the_largest_cosine():
    x, y = classes()
    detector = hyperdimensional(x, y, dimensions=300, seed=5, unit=False)
    codes, fresh = detector.encode({"": x}), classes(10, seed=2)[0]
    bundles = [codes[y == c].sum(0) for c in range(3)]
    asked = detector.encode({"": fresh})
    for score, one in zip(detector.score(fresh), asked, strict=True):
        wanted = 1 - max(float(torch.cosine_similarity(one, b, dim=0)) for b in bundles)
        assert float(score) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("unit", [True, False])
def test_cosines_are_nearly_those_of_the_features(unit):
    def scaled(x):
        return x / x.norm(dim=1, keepdim=True) if unit else x

    taps = {"a": classes()[0], "b": classes(d=4)[0]}
    y, fresh = classes()[1], {"a": classes(10, seed=3)[0], "b": classes(10, d=4, seed=3)[0]}

    def joined(some):
        return torch.cat([scaled(some[k]) - scaled(taps[k]).mean() for k in sorted(taps)], 1)

    means = torch.stack([joined(taps)[y == c].mean(0) for c in range(3)])
    wanted = 1 - torch.cosine_similarity(joined(fresh)[:, None], means[None], dim=2).amax(1)
    found = hyperdimensional(taps, y, dimensions=40_000, unit=unit).score(fresh)
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)


def test_taps_are_told_apart():
    taps, y = {"a": classes()[0], "b": classes(seed=1)[0]}, classes()[1]
    detector = hyperdimensional(taps, y, dimensions=1000)
    swapped = detector.score({"a": taps["b"], "b": taps["a"]})
    torch.testing.assert_close(detector.score(dict(reversed(taps.items()))), detector.score(taps))
    assert not torch.allclose(swapped, detector.score(taps), atol=1e-3)


def test_maps_are_averaged_over_space():
    x, y = classes()
    wave = torch.tensor([[-1.0, 1.0], [2.0, -2.0]])
    for flat, maps in zip(both(x, y), both(x[:, :, None, None] + wave, y), strict=True):
        torch.testing.assert_close(
            flat.score(x), maps.score(x[:, :, None, None] - wave), rtol=1e-4, atol=1e-5
        )


def test_scores_do_not_depend_on_the_batch():
    x, y = classes(1200)
    for detector in both(x, y):
        torch.testing.assert_close(
            detector.score(x)[700:705], detector.score(x[700:705]), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", [0, 1])
def test_a_calibrated_detector_flags_few_known_and_most_shifted_samples(kind):
    detector = both(*classes(600))[kind].calibrate(classes(999, seed=1)[0])
    fresh = classes(3000, seed=2)[0]
    assert float(detector.is_new(fresh).double().mean()) == pytest.approx(0.05, abs=0.02)
    known = detector.due(fresh)
    assert not known and not known.due and known.expected == pytest.approx(0.05)
    moved = detector.due(fresh.flip(1))
    assert moved and moved.share_new > 0.3 and moved.p_value < 1e-9
    assert auroc(detector.score(fresh), detector.score(fresh.flip(1))) > 0.8


def test_false_alarms_are_as_rare_as_the_level_even_if_few_samples_calibrated():
    """The binomial test, which takes the threshold as certain, would cry wolf."""
    g = torch.Generator().manual_seed(0)
    detector = mahalanobis(torch.randn(50, 2, generator=g), unit=False)
    alarms = naive = 0
    for _ in range(400):
        detector.calibrate(torch.randn(39, 2, generator=g))
        found = detector.due(torch.randn(400, 2, generator=g), share=0.0, level=0.05)
        hits = round(found.share_new * 400)
        alarms += found.due
        naive += stats.binom.sf(hits - 1, 400, found.expected) <= 0.05
    assert alarms <= stats.binom.isf(1e-4, 400, 0.05)
    assert naive > 2 * alarms and alarms > 2


def test_a_small_share_is_not_worth_it_and_a_small_batch_proves_nothing():
    detector = mahalanobis(classes(600)[0], unit=False)
    detector.calibrate(classes(999, seed=1)[0], quantile=0.99)
    fresh = classes(4000, seed=2)[0]
    fresh[:160] += 100
    found = detector.due(fresh)
    assert found.p_value < 1e-6 and not found and detector.due(fresh, share=0.04)
    few = detector.due(fresh[:1])
    assert (
        few.share_new == 1
        and few.p_value == pytest.approx(0.01)
        and not detector.due(fresh[:1], level=0.009)
    )


@pytest.mark.parametrize(("hits", "n"), [(0, 7), (1, 1), (3, 40), (40, 40), (900, 10_000)])
@pytest.mark.parametrize(("beyond", "known"), [(1, 19), (5, 99), (5000, 99_999)])
def test_the_tail_is_scipys_beta_binomial(hits, n, beyond, known):
    parts = stats.betabinom.logpmf(np.arange(hits, n + 1), n, beyond, known + 1 - beyond)
    wanted = np.exp(special.logsumexp(parts))
    assert tail(hits, n, beyond, known) == pytest.approx(wanted, rel=1e-6)


def test_the_tail_of_many_known_samples_is_binomial():
    assert tail(9, 60, 50_000, 999_999) == pytest.approx(stats.binom.sf(8, 60, 0.05), rel=1e-3)


def test_the_threshold_is_a_rank_worked_by_hand():
    detector = mahalanobis(torch.randn(50, 1), unit=False)
    x = torch.randn(19, 1)
    highest = detector.score(x).max()
    assert detector.calibrate(x).threshold == float(highest) and detector.beyond == 1
    assert detector.calibrate(x, quantile=0.5).beyond == 10
    with pytest.raises(TpsgdError, match="takes 19 samples or more, got 18"):
        detector.calibrate(x[:18])


@pytest.mark.parametrize("decimals", [1, 6])
def test_auroc_is_scikit_learns(decimals):
    g = torch.Generator().manual_seed(0)
    known, new = torch.randn(70, generator=g), torch.randn(40, generator=g) + 0.5
    known, new = known.round(decimals=decimals), new.round(decimals=decimals)
    wanted = metrics.roc_auc_score([0] * 70 + [1] * 40, torch.cat((known, new)))
    assert auroc(known, new) == pytest.approx(wanted)
    assert auroc(new, known) == pytest.approx(1 - wanted)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("calibrated", [True, False])
def test_a_saved_detector_is_the_same(kind, calibrated):
    taps, y = {"pool4": classes()[0], "pool5": classes(d=4)[0]}, classes()[1]
    detector = both(taps, y, unit=calibrated)[kind]
    if calibrated:
        detector.calibrate(taps)
    file = io.BytesIO()
    torch.save(vars(detector), file)
    file.seek(0)
    again = type(detector)(**torch.load(file, weights_only=True))
    assert torch.equal(again.score(taps), detector.score(taps))
    if calibrated:
        assert again.due(taps) == detector.due(taps) and again.threshold == detector.threshold
    else:
        with pytest.raises(TpsgdError, match="no threshold"):
            again.is_new(taps)


def test_codes_are_made_of_hashed_signs():
    """Whole numbers, so that no rounding hides a change: a saved detector must stay readable."""
    x = torch.tensor([[6.0, 0.0], [0.0, 2.0]])  # their mean is 2
    found = hyperdimensional(x, torch.tensor([0, 1]), dimensions=6, seed=1, unit=False)
    found = found.tensors["bundles"]
    P, s = binary()((6,), 2, Key(1, -3)), binary()((6,), 1, Key(1, -4))
    assert torch.equal(found, torch.tensor([[4.0, -2.0], [-2.0, 0.0]]) @ P * s)
    assert found.tolist() == [[-2, -2, -6, -2, -6, 2], [2, 2, 2, 2, 2, -2]]


@pytest.mark.parametrize(
    ("features", "match"),
    [
        (torch.zeros(0, 6), "not be empty"),
        ({}, "at least one"),
        (torch.full((5, 6), float("nan")), "NaN or infinite"),
        (torch.full((5, 6), float("inf")), "NaN or infinite"),
        (torch.zeros(5, 6, 2, 1, 1), r"\(n, c, h, w\), got torch.float32 \(5, 6, 2, 1, 1\)"),
        (torch.zeros(5, 6, dtype=torch.int64), "floats"),
        ([1.0, 2.0], "got list"),
        ({"a": torch.zeros(5, 6), "b": torch.zeros(4, 6)}, "equally many"),
    ],
)
def test_what_are_no_features_is_refused(features, match):
    y = torch.zeros(5, dtype=torch.long)
    for use in (mahalanobis(*classes()).score, mahalanobis, lambda f: hyperdimensional(f, y)):
        with pytest.raises(TpsgdError, match=match):
            use(features)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (torch.zeros(90, dtype=torch.long), "two classes or more"),
        (torch.zeros(80, dtype=torch.long), "90 whole numbers, got torch.int64 \\(80,\\)"),
        (torch.zeros(90), "90 whole numbers, got torch.float32"),
        ([0] * 90, "got list"),
    ],
)
def test_what_are_no_labels_is_refused(labels, match):
    for fit in (mahalanobis, hyperdimensional):
        with pytest.raises(TpsgdError, match=match):
            fit(classes()[0], labels)


def test_other_mistakes_are_named():
    x, y = classes()
    detector = mahalanobis(x, y)
    with pytest.raises(TpsgdError, match=r"fitted on features \{'': 6\}, got \{'': 5\}"):
        detector.score(x[:, :5])
    with pytest.raises(TpsgdError, match="no threshold"):
        detector.due(x)
    with pytest.raises(TpsgdError, match="between 0 and 1"):
        detector.calibrate(x, quantile=95)
    with pytest.raises(TpsgdError, match="do not vary"):
        mahalanobis(x[:3], y[:3])
