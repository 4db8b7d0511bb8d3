"""Judge the targets of the records: times on an H200 whose copy rate was 4.30 TB/s, shares of the floor, other contenders' figures."""

import math
from dataclasses import dataclass

from lossforge.bench.cases import CONTENDERS, FUSED, RECORDS, SUITES
from lossforge.bench.record import Target
from lossforge.bench.report import Report, Row

COPY_RATE = 4.30e12
NEAR = 0.9
"""The least share of the floor of a case of the suite `losses`, over the best of its template."""
TEMPLATES = ("element-wise", "pointwise", "row-wise", "boxes", "rotated", "overlap", "divergence")
"""Losses with the same passes over memory.

The similarity loss, the distribution focal loss, the losses of margins, of vectors, of several labels, of views and of routers are not
among them: few have the same passes. Nor are the losses of features and of depths, and distillation with labels or by relations, because
these are several launches; the boundary loss reads maps as large as its logits. nll and the distribution-balanced loss have no kernel,
Seesaw makes a tensor of shifted logits first; the cross entropy of hard rows reads all of them to choose, and the Lovász losses sort.
"""
By = dict[str, Row]
"""The rows of a case, by contender."""


@dataclass(frozen=True)
class Verdict:
    """A target that was measured.

    Attributes:
        target: what was wanted.
        row: a row of the case.
        found: the figure.
        wanted: the most that it may be in this run, or the least share.
        factor: on the figure that it is compared with.
        template: the losses whose best share it is compared with.
    """

    target: Target
    row: Row
    found: float | None
    wanted: float | None
    factor: float
    template: str = ""

    @property
    def met(self) -> bool:
        if self.found is None or self.wanted is None:
            return False
        return self.found >= self.wanted if self.target.at_least else self.found <= self.wanted


def figure(row: Row | None, name: str) -> float | None:
    if row is None or row.status != "ok":
        return None
    value = getattr(row, name)
    value = value() if callable(value) else value
    return value if value is None else float(value)


def verdicts(report: Report, fused: bool = False) -> list[Verdict]:
    """Judge every target whose case was measured, of the losses fused with their layer or of the others."""
    found = []
    for suites in [[suite] for suite in FUSED] if fused else [[suite for suite in SUITES if suite not in FUSED]]:
        cases = {row.label: by for by in report.by_case(*suites).values() for row in by.values()}
        for by in cases.values():
            first = next(iter(by.values()))
            case = f"{first.suite} {first.variant}".strip() if fused else first.label.removeprefix(f"{first.loss} ")
            for target in RECORDS[first.loss].targets:
                if target.case == case and (not target.use or first.use in target.use) and target.contender in by:
                    against = _against(target, first, by, cases)
                    factor = target.below[1] if (against or math.inf) < target.below[0] else target.limit
                    wanted = _wanted(target, factor, against, by, report)
                    if wanted is not None or not target.optional:
                        found.append(Verdict(target, first, figure(by[target.contender], target.figure), wanted, factor))
    if fused:
        return found
    losses = [*dict.fromkeys(row.loss for row in report.rows)]
    found.sort(key=lambda v: (_part(v.target), losses.index(v.row.loss), RECORDS[v.row.loss].targets.index(v.target)))
    return found + _near_the_best(report)


def _part(target: Target) -> int:
    """Return the part of the table that has a target: times and shares, those beside another case, the host's time."""
    return 2 if target.figure == "host_us" else 1 if target.of else 0


def _against(target: Target, first: Row, by: By, cases: dict[str, By]) -> float | None:
    """Return the figure that a limit is a factor on."""
    names = (target.of,) if isinstance(target.of, str) else target.of
    other = f"{first.loss} {names[0].format(size='x'.join(map(str, first.shape)))}"
    rows = [by.get(name) for name in names] if names[0] in CONTENDERS else [cases.get(other, {}).get("lossforge")]
    return min((value for row in rows if (value := figure(row, target.figure)) is not None), default=None)


def _wanted(target: Target, factor: float, against: float | None, by: By, report: Report) -> float | None:
    if not target.of and target.figure == "ms":
        against = COPY_RATE / report.copy_bytes_per_second if report.copy_bytes_per_second else None
    elif not target.of:
        against = 1.0
    plus = figure(by.get(target.plus), target.figure) if target.plus else 0.0
    if target.plus == "weight":
        plus = math.prod(next(iter(by.values())).shape[-2:]) * 2 / 2**20
    return None if against is None or plus is None else factor * against + plus


def _near_the_best(report: Report) -> list[Verdict]:
    """Judge each case of suite "losses" by the best share of the floor in its template and dtype."""
    shares: dict[tuple[str, str], list[float]] = {}
    held = []
    for by in report.by_case("table", "losses").values():
        row = by.get("lossforge", next(iter(by.values())))
        if template := RECORDS[row.loss].template:
            share = figure(by.get("lossforge"), "share")
            shares.setdefault((template, row.dtype), []).extend([] if share is None else [share])
            held += [(template, row, share)] if row.suite == "losses" else []
    found = []
    for template, row, share in sorted(held, key=lambda each: TEMPLATES.index(each[0])):
        best = max(shares[template, row.dtype], default=None)
        wanted = None if best is None else NEAR * best
        found.append(Verdict(Target(row.label, "share", NEAR), row, share, wanted, NEAR, template))
    return found
