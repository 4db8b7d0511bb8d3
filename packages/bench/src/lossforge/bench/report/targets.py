"""Targets for ours: times on an H200 whose copy rate was 4.30 TB/s, shares of the floor, and other libraries' times."""

from collections.abc import Iterable
from dataclasses import dataclass

from lossforge.bench.cases import CASES, OVERLAP, Case
from lossforge.bench.report import Report, Row

H200_COPY_RATE = 4.30e12


Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class Target:
    """A limit on one figure of ours.

    Attributes:
        case: (loss, variant, size, dtype).
        figure: device_ms, share, forward_share, or host_us.
        limit: a number (ms at H200_COPY_RATE; a share; µs), or a factor on another figure, if `of` or `template` is given.
        of: the factor is on this contender's figure for the same case, or on ours for this other case.
        template: the factor is on the best figure among the cases of TEMPLATES[template] in the same dtype.
    """

    case: Key
    figure: str
    limit: float
    of: str | Key | None = None
    template: str | None = None

    @property
    def at_least(self) -> bool:
        return self.figure in ("share", "forward_share")


@dataclass(frozen=True)
class Verdict:
    target: Target
    found: float | None
    wanted: float | None

    @property
    def met(self) -> bool:
        if self.found is None or self.wanted is None:
            return False
        return self.found >= self.wanted if self.target.at_least else self.found <= self.wanted


def _ce(size: str, dtype: str, variant: str = "") -> Key:
    return "ce", variant, size, dtype


TEMPLATES: dict[str, tuple[str, ...]] = {
    "element-wise": (
        *("mae", "mse", "huber", "smooth_l1", "bce", "preference_bce", "preference_bce_probability", "bce_smoothed", "focal"),
        *("asymmetric", "poly_bce", "quality_focal", "varifocal", "mal", "ia_bce", "gaussian_focal", "siglip", "bce_probability"),
        "kl_div",
        *("multilabel_soft_margin", "log_cosh", "quantile", "general_robust", "total_variation_probability"),
    ),
    "pointwise": ("gaussian_nll", "poisson_nll", "soft_margin", "hinge_embedding", "margin_ranking"),
    "row-wise": (
        "ce",
        "softmax_focal",
        "poly_ce",
        "asymmetric_single_label",
        "generalized_ce",
        "logit_adjusted_ce",
        "selective_log_softmax",
        "topk_kl",
        "arcface",
        "cosface",
        "taylor_ce",
        "symmetric_ce",
    ),
    "boxes": ("iou", "giou", "diou", "ciou", "eiou", "siou", "box_l1", "box_smooth_l1"),
    "rotated": ("probiou", "gwd", "kld", "kfiou", "rotated_iou"),
    "overlap": OVERLAP,
    "divergence": ("kl", "js", "total_variation", "dino", "channel_wise_kl_div"),
}
"""Losses with the same passes over memory.

The similarity loss, the distribution focal loss, the losses of margins, of vectors, of several labels, of views and of routers are not
among them: few have the same passes. Nor are the losses of features and of depths, and distillation with labels or by relations, because
these are several launches; the boundary loss reads maps as large as its logits. nll and the distribution-balanced loss have no kernel,
Seesaw makes a tensor of shifted logits first; the cross entropy of hard rows reads all of them to choose, and the Lovász losses sort.
"""


def _key(case: Case) -> Key:
    return case.loss, case.variant, case.size, case.dtype


def _same_template(template: str, dtype: str) -> list[Key]:
    """Return the cases among which a template's best is found. All are large enough to measure shares of the floor."""
    return [_key(c) for c in CASES if c.suite in ("table", "losses") and c.loss in TEMPLATES[template] and c.dtype == dtype]


def _near_the_best() -> Iterable[Target]:
    """Yield a target for each loss of suite "losses": at least 0.9 of the best share of the floor in its template."""
    for template, losses in TEMPLATES.items():
        for case in CASES:
            if case.suite == "losses" and case.loss in losses:
                yield Target(_key(case), "share", 0.9, template=template)


ANCHORS, LARGE, TOKENS, PAIRS = "16x120087x80", str(2**28), "8192x32000", f"{2**22}x4"
TARGETS = (
    *(
        Target(_ce(size, dtype), "device_ms", limit)
        for size, dtype, limit in (
            ("16384x1000", "fp32", 0.036),
            ("8192x32000", "bf16", 0.29),
            ("8192x50304", "fp32", 0.90),
            ("8192x128256", "bf16", 1.15),
            ("4096x262144", "bf16", 1.25),
        )
    ),
    *(
        Target(_ce(size, dtype), "forward_share", 0.95)
        for size, dtype in (("8192x32000", "bf16"), ("8192x50304", "fp32"), ("8192x128256", "bf16"), ("4096x262144", "bf16"))
    ),
    *(
        Target((loss, variant, size, dtype), "device_ms", limit)
        for loss, variant, size, dtype, limit in (
            ("focal", "class index", ANCHORS, "fp32", 0.33),
            ("focal", "class index", ANCHORS, "bf16", 0.23),
            ("focal", "dense", ANCHORS, "fp32", 0.46),
            ("focal", "dense", ANCHORS, "bf16", 0.29),
            ("mae", "", LARGE, "fp32", 0.79),
            ("mae", "", LARGE, "bf16", 0.40),
            ("preference_bce", "", LARGE, "fp32", 1.07),
            ("preference_bce", "", LARGE, "bf16", 0.56),
            ("kl", "", TOKENS, "fp32", 0.92),
            ("kl", "", TOKENS, "bf16", 0.46),
            ("giou", "", PAIRS, "fp32", 0.11),
            ("diou", "", PAIRS, "fp32", 0.11),
            ("ciou", "", PAIRS, "fp32", 0.11),
        )
    ),
    *(
        Target(_ce("8192x32000", "bf16", variant), "device_ms", 1.1, _ce("8192x32000", "bf16"))
        for variant in ("label smoothing", "class weights", "mixup pair")
    ),
    Target(_ce("8192x50257", "bf16"), "device_ms", 1.1, _ce("8192x50304", "bf16")),
    Target(_ce("16384x1001", "fp32"), "device_ms", 1.1, _ce("16384x1000", "fp32")),
    Target(_ce("256x1000", "fp32"), "host_us", 1.0, "torch"),
    Target(_ce("64x10", "fp32"), "host_us", 1.0, "torch"),
    Target(("focal", "", "8x900x256", "fp32"), "host_us", 110.0),
    *_near_the_best(),
)


def figure(row: Row | None, name: str) -> float | None:
    if row is None or row.status != "ok":
        return None
    value = getattr(row, name)
    value = value() if callable(value) else value
    return value if value is None else float(value)


def verdicts(report: Report) -> list[Verdict]:
    """Evaluate every target whose case was measured. A limit in ms is scaled by the run's copy rate."""
    rows, found = report.by_case(), []
    rate = H200_COPY_RATE / report.copy_bytes_per_second if report.copy_bytes_per_second else None
    for target in TARGETS:
        by = rows.get(target.case)
        if by is None:
            continue
        wanted: float | None = target.limit
        if target.of is not None:
            other = by.get(target.of) if isinstance(target.of, str) else rows.get(target.of, {}).get("lossforge")
            against = figure(other, target.figure)
            wanted = None if against is None else target.limit * against
        elif target.template is not None:
            others = [figure(rows.get(key, {}).get("lossforge"), target.figure) for key in _same_template(target.template, target.case[3])]
            best = max((f for f in others if f is not None), default=None)
            wanted = None if best is None else target.limit * best
        elif target.figure == "device_ms":
            wanted = None if rate is None else target.limit * rate
        found.append(Verdict(target, figure(by.get("lossforge"), target.figure), wanted))
    return found


def rivals(report: Report) -> list[tuple[Row, Row]]:
    """Return (ours, theirs) for each case where another contender's forward and backward takes less time on the device."""
    slower = []
    for by in report.by_case().values():
        ours = by.get("lossforge")
        if ours is None or ours.device_ms is None:
            continue
        theirs = [r for name, r in by.items() if not name.startswith(("lossforge", "products")) and r.device_ms is not None]
        best = min(theirs, key=lambda r: r.device_ms or 0.0, default=None)
        if best is not None and best.device_ms is not None and best.device_ms < ours.device_ms:
            slower.append((ours, best))
    return slower
