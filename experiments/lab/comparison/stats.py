"""Means with Student's intervals, paired differences with their tests, and Holm's correction."""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Seed = TypeVar("Seed", bound=Hashable)


@dataclass(frozen=True)
class Mean:
    """Statistics of n values: mean, extremes, sample standard deviation, half width of the mean's confidence interval (None for n < 2)."""

    n: int
    mean: float
    least: float
    most: float
    sd: float | None
    half: float | None

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half


@dataclass(frozen=True)
class Point:
    """Mean, lowest and highest value over the seeds that were evaluated at this update."""

    step: int
    mean: float
    low: float
    high: float


@dataclass
class Difference:
    """Statistics of n pairs: the mean difference with its interval; t and the two-sided p of the paired t-test, or why it is `untested`.

    holm: p, adjusted for a family of tests. verdict: better, worse or "not shown"; empty where nothing was tested.
    """

    of: Mean
    t: float | None = None
    p: float | None = None
    untested: str = ""
    holm: float | None = None
    verdict: str = ""

    def as_ratio(self) -> tuple[float, float, float] | None:
        """Return the geometric mean of ratios and its interval, if this is of their logarithms; None for a single pair."""
        if self.of.low is None or self.of.high is None:
            return None
        return _exp(self.of.mean), _exp(self.of.low), _exp(self.of.high)


def mean_of(values: Sequence[float], confidence: float) -> Mean:
    """Return the mean and its interval, mean ± t · sd / √n with Student's t of n - 1 degrees of freedom at `confidence`.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to average")
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Mean(n, mean, mean, mean, None, None)
    from scipy.special import stdtrit

    sd = statistics.stdev(values)
    return Mean(n, mean, min(values), max(values), sd, float(stdtrit(n - 1, (1 + confidence) / 2)) * sd / math.sqrt(n))


def paired_difference(ours: Mapping[Seed, float], baseline: Mapping[Seed, float], confidence: float) -> Difference | None:
    """Return the difference ours - baseline over the seeds that both have; None if they share no seed.

    The test is Student's for paired samples: t = mean · √n / sd of the differences, n - 1 degrees of freedom, two-sided. Differences that
    are all equal have no spread and are not tested.
    """
    seeds = [seed for seed in ours if seed in baseline]
    if not seeds:
        return None
    differences = [ours[seed] - baseline[seed] for seed in seeds]
    of = mean_of(differences, confidence)
    if of.sd is None:
        return Difference(of, untested="a single pair of seeds")
    largest = max(abs(value) for seed in seeds for value in (ours[seed], baseline[seed]))
    if max(differences) - min(differences) <= 1e-12 * largest:  # equal up to rounding
        return Difference(of, untested="the differences are all equal")
    from scipy.stats import ttest_1samp

    tested = ttest_1samp(differences, 0)
    return Difference(of, float(tested.statistic), float(tested.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p values, in the order given: the k-th smallest of m times m - k + 1, at least the one before it, at most 1.

    Rejecting those below a level bounds the chance of any false rejection by this level, for any dependence between the tests
    (S. Holm, 1979, "A simple sequentially rejective multiple test procedure"). scipy has no Holm.
    """
    adjusted = [0.0] * len(p_values)
    reached = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = reached
    return adjusted


def write_verdicts(differences: Sequence[tuple[Difference, bool]], level: float) -> None:
    """Write Holm's p and the verdict of each tested difference, all as one family; the bool says whether higher is better."""
    tested = [(each, higher, each.p) for each, higher in differences if each.p is not None]
    for (each, higher, _), adjusted in zip(tested, holm([p for *_, p in tested]), strict=True):
        each.holm = adjusted
        each.verdict = "not shown" if adjusted >= level else "better" if (each.of.mean > 0) == higher else "worse"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
