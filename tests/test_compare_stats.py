"""Statistics of comparisons: worked out by hand, and beside scipy's."""

import math

import numpy as np
import pytest
from scipy import stats

from lab.comparison.stats import holm, mean_of, paired_difference


def test_mean_and_interval_by_hand():
    found = mean_of([1.0, 2.0, 3.0, 4.0], 0.95)
    assert (found.n, found.mean, found.least, found.most) == (4, 2.5, 1.0, 4.0)
    assert found.sd == pytest.approx(math.sqrt(5 / 3))  # Σ(x - 2.5)² = 5, over n - 1 = 3
    assert found.half == pytest.approx(3.182446305 * math.sqrt(5 / 3) / 2)  # tables of Student's t: 3.1824 for 3 degrees of freedom
    assert found.low == pytest.approx(2.5 - found.half)
    assert found.high == pytest.approx(2.5 + found.half)


def test_one_value_has_no_interval_and_none_has_no_mean():
    found = mean_of([0.25], 0.95)
    assert (found.n, found.mean, found.sd, found.half, found.low, found.high) == (1, 0.25, None, None, None, None)
    with pytest.raises(ValueError, match="no values"):
        mean_of([], 0.95)


def test_paired_difference_by_hand():
    ours, baseline = {0: 5.0, 1: 7.0, 2: 9.0}, {2: 6.0, 1: 5.0, 0: 4.0}
    found = paired_difference(ours, baseline, 0.95)
    assert (found.of.n, found.of.mean, found.of.sd) == (3, 2.0, 1.0)  # differences 1, 2, 3
    assert found.t == pytest.approx(2 * math.sqrt(3))
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))  # for 2 degrees of freedom p = 1 - |t| / √(t² + 2)
    assert found.of.half == pytest.approx(4.302652730 / math.sqrt(3))


@pytest.mark.parametrize(("n", "confidence"), [(2, 0.95), (3, 0.9), (5, 0.99), (30, 0.95)])
def test_agrees_with_scipy(n, confidence):
    rng = np.random.default_rng(n)
    ours, baseline = rng.normal(0.96, 0.01, n), rng.normal(0.955, 0.01, n)
    mean = mean_of(list(ours), confidence)
    low, high = stats.t.interval(confidence, n - 1, ours.mean(), stats.sem(ours))
    assert (mean.low, mean.high) == (pytest.approx(low), pytest.approx(high))
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(baseline)), confidence)
    tested = stats.ttest_rel(ours, baseline)
    assert (found.t, found.p) == (pytest.approx(tested.statistic), pytest.approx(tested.pvalue))
    interval = tested.confidence_interval(confidence)
    assert (found.of.low, found.of.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_only_shared_seeds_are_paired():
    found = paired_difference({0: 1.0, 1: 2.0, 5: 100.0}, {1: 1.0, 0: 0.5, 7: -100.0}, 0.95)
    assert (found.of.n, found.of.mean) == (2, 0.75)
    assert paired_difference({0: 1.0}, {1: 1.0}, 0.95) is None


def test_what_cannot_be_tested_is_not():
    one = paired_difference({0: 0.9}, {0: 0.8}, 0.95)
    assert (one.p, one.untested) == (None, "a single pair of seeds")
    assert one.of.mean == pytest.approx(0.1)
    equal = paired_difference({0: 0.3, 1: 0.6, 2: 0.7}, {0: 0.2, 1: 0.5, 2: 0.6}, 0.95)  # equal but for their last bits
    assert (equal.p, equal.untested) == (None, "the differences are all equal")
    same = paired_difference({0: 0.3, 1: 0.6}, {0: 0.3, 1: 0.6}, 0.95)
    assert (same.of.mean, same.p) == (0, None)


def test_holm_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; no value is below the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.6]) == [1.0, 1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_holm_bounds_false_alarms_where_single_tests_do_not():
    """20 comparisons of nothing, 500 times: some difference is found in 5 % of them with Holm, in most without."""
    rng = np.random.default_rng(0)
    p = stats.ttest_1samp(rng.normal(size=(500, 20, 5)), 0, axis=2).pvalue
    alone = np.mean(p.min(1) < 0.05)
    corrected = np.mean([min(holm(list(row))) < 0.05 for row in p])
    assert alone > 0.5
    assert corrected < 0.08
