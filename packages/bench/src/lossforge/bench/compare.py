"""`python -m lossforge.bench.compare OLD NEW`: what became faster or slower between two reports, beyond their noise.

Exit status 1 where something of ours regressed: slower by more than the threshold, more memory, or no longer right.
"""

import argparse
import fnmatch
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lossforge.bench.report import Report, Row, SchemaError, load, spread_of

FLOOR = 0.01
"""Two runs of the same code differ by about this share, even if their spreads are smaller."""
THRESHOLD = 0.08
"""Between two machines with the same GPU model, kernels that compute much differed by 6 %, and kernels that only move bytes by 1 %."""
MEMORY = 1.01
FIGURES = ("ms", "idle_ms", "forward_ms", "host_us")


@dataclass(frozen=True)
class Change:
    """A figure in both reports.

    Attributes:
        label: the case.
        contender: who computed it.
        figure: a name of FIGURES, "peak_mib" or "status".
        old: the figure in the old report.
        new: the figure in the new report.
        ratio: new over old.
        noise: the ratio's relative uncertainty, from the spreads of both.
        verdict: faster, slower, more, less, same, or a change of status.
        regression: whether the change is for the worse and beyond the threshold.
    """

    label: str
    contender: str
    figure: str
    old: float | None
    new: float | None
    ratio: float | None
    noise: float
    verdict: str
    regression: bool = False


def verdict(ratio: float, noise: float) -> str:
    if abs(math.log(ratio)) <= noise:
        return "same"
    return "slower" if ratio > 1 else "faster"


def spread(row: Row, figure: str) -> float:
    """Return half of the distance between the 20 % and 80 % quantiles, relative to the median."""
    low, high = (getattr(row, name) for name in spread_of(figure))
    median = getattr(row, figure)
    return (high - low) / 2 / median if low is not None and high is not None else 0.0


def compare(old: Report, new: Report, threshold: float) -> list[Change]:
    """Compare every figure that both reports have, and list the rows that lost or gained a speed."""
    before, changes = {(*r.case, r.suite, r.contender): r for r in old.rows}, []
    for row in new.rows:
        earlier = before.pop((*row.case, row.suite, row.contender), None)
        if earlier is None:
            changes.append(Change(row.label, row.contender, "", None, None, None, 0.0, "only in the new report"))
        elif earlier.status != row.status:
            lost = earlier.status == "ok"
            changes.append(Change(row.label, row.contender, "status", None, None, None, 0.0, f"{earlier.status} → {row.status}", lost))
        else:
            changes += _figures(earlier, row, threshold)
    for row in before.values():
        changes.append(Change(row.label, row.contender, "", None, None, None, 0.0, "only in the old report"))
    return changes


def _figures(old: Row, new: Row, threshold: float) -> list[Change]:
    changes = []
    for figure in FIGURES:
        a, b = getattr(old, figure), getattr(new, figure)
        if a is None or b is None:
            continue
        ratio, noise = b / a, FLOOR + math.hypot(spread(old, figure), spread(new, figure))
        found = verdict(ratio, noise)
        changes.append(Change(new.label, new.contender, figure, a, b, ratio, noise, found, found == "slower" and ratio > 1 + threshold))
    if old.peak_mib and new.peak_mib:
        ratio = new.peak_mib / old.peak_mib
        found = "more" if ratio > MEMORY else "less" if ratio < 1 / MEMORY else "same"
        changes.append(Change(new.label, new.contender, "peak_mib", old.peak_mib, new.peak_mib, ratio, 0.0, found, found == "more"))
    return changes


def text(change: Change) -> str:
    what = f"{change.label:<44} {change.contender:<20} {change.figure:<11}"
    if change.ratio is None:
        return f"{what} {change.verdict}"
    mark = "  REGRESSION" if change.regression else ""
    return f"{what} {change.old:>10.4g} {change.new:>10.4g}  ×{change.ratio:.3f} ± {change.noise:.3f}  {change.verdict}{mark}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m lossforge.bench.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help=f"a slowdown beyond the noise counts from this share on ({THRESHOLD})"
    )
    parser.add_argument("--contenders", default="lossforge*", help="whose regressions count (a glob; lossforge*)")
    parser.add_argument("--all", action="store_true", help="show what is the same, too")
    given = parser.parse_args(argv)
    try:
        old, new = load(given.old), load(given.new)
    except SchemaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if old.gpu != new.gpu:
        print(f"error: times of different machines say nothing: {old.gpu}, {new.gpu}", file=sys.stderr)
        return 2
    if old.timing != new.timing:
        print(f"error: times were measured in two ways: {old.timing}; {new.timing}", file=sys.stderr)
        return 2
    changes = compare(old, new, given.threshold)
    regressions = [c for c in changes if c.regression and fnmatch.fnmatchcase(c.contender, given.contenders)]
    for change in changes:
        if given.all or change.verdict != "same":
            print(text(change))
    one_sided = sum(c.verdict.startswith("only in") for c in changes)
    same = sum(c.verdict == "same" for c in changes)
    others = [c.ratio for c in changes if c.figure == "ms" and c.ratio and not fnmatch.fnmatchcase(c.contender, given.contenders)]
    if others:
        print(f"others' times changed by ×{sorted(others)[len(others) // 2]:.3f} in the median: the machine's share in every ratio")
    changed = len(changes) - same - one_sided
    print(f"{same} same, {changed} changed, {one_sided} in one only, {len(regressions)} regressions ({old.commit} → {new.commit})")
    return int(bool(regressions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
