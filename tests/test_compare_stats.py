"""Statistics of comparisons: worked out by hand, and beside scipy's."""

import numpy as np
import pytest
from scipy import stats

from lab.comparison.stats import holm, mean_of, paired_difference


@pytest.mark.parametrize(("n", "confidence"), [(2, 0.95), (3, 0.9), (5, 0.99), (30, 0.95)])
def test_agrees_with_scipy(n, confidence):
    rng = np.random.default_rng(n)
    ours, baseline = rng.normal(0.96, 0.01, n), rng.normal(0.955, 0.01, n)
    mean = mean_of(list(ours), confidence)
    low, high = stats.t.interval(confidence, n - 1, ours.mean(), stats.sem(ours))
    assert (mean.low, mean.high) == (pytest.approx(low), pytest.approx(high))
    assert (mean.least, mean.most, mean.sd) == (ours.min(), ours.max(), pytest.approx(ours.std(ddof=1)))
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(baseline)), confidence)
    tested = stats.ttest_rel(ours, baseline)
    assert (found.t, found.p) == (pytest.approx(tested.statistic), pytest.approx(tested.pvalue))
    interval = tested.confidence_interval(confidence)
    assert (found.of.low, found.of.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_what_cannot_be_tested_is_not():
    one = paired_difference({0: 0.9}, {0: 0.8}, 0.95)
    assert (one.p, one.untested) == (None, "a single pair of seeds")
    assert one.of.mean == pytest.approx(0.1)
    equal = paired_difference({0: 0.3, 1: 0.6, 2: 0.7}, {0: 0.2, 1: 0.5, 2: 0.6}, 0.95)  # equal but for their last bits
    assert (equal.p, equal.untested) == (None, "the differences are all equal")
    same = paired_difference({0: 0.3, 1: 0.6}, {0: 0.3, 1: 0.6}, 0.95)
    assert (same.of.mean, same.p) == (0, None)
    with pytest.raises(ValueError, match="no values"):
        mean_of([], 0.95)


def test_holm_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1 is 0.02, 0.03, 0.06, 0.04; no value is below the one before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.6]) == [1.0, 1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
