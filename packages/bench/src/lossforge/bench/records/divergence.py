"""Distillation: how far a student's rows of classes are from a teacher's."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from lossforge.bench.record import (
    ELEMENTS,
    LARGE,
    Call,
    Case,
    F,
    Fused,
    Others,
    Target,
    Tensor,
    enter,
    layers,
    loss,
    losses,
    mean_of_rows,
    reduced,
    summed,
    torch,
    whole,
    wide,
)
from lossforge.bench.records.classes import FOUR, HEAD, HEADS, MAPS, SEGMENTATION, THREE, TOKENS, VOCABULARY, WEIGHT

DIVERGENCE = "divergence"
DISTILLED = (8192, 4096, 151936)
DRAFTS = layers("drafts", "qwen3-8b", DISTILLED, "near linear teacher")
TOP = layers("drafts", "qwen3-8b", DISTILLED, "top classes of a teacher")
HARD = layers("objectives", "llama3-1b", (8192, 2048, 128256), "labelled linear teacher")
COMPILED: dict[str, Any] = {"of": "torch.compile", "said": "torch.compile", "optional": True}
OF_DRAFTS = (
    Target("drafts", "ms", 1.06, "products", FOUR),
    Target("drafts", "ms", 1.0, **COMPILED),
    Target("drafts", "peak_mib", 1024.0, said=WEIGHT.format(1), plus="weight"),
)
OF_TOP = Target("drafts", "ms", 1.06, "products", THREE), Target("drafts", "ms", 1.0, **COMPILED)


def log_probabilities(x: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of student and teacher, in float32 at least. In bfloat16 those of 32000 classes are off by 3e-2, and
    gradients by 5e-2."""
    student, teacher = ((t / temperature).log_softmax(1, torch.promote_types(t.dtype, torch.float32)) for t in (x, target))
    return student, teacher


def _liger(case: Case) -> Call | None:
    """Return Liger's function with log-probabilities or probabilities that torch computes from the logits."""

    def functional() -> Any:
        return import_module("liger_kernel.transformers.functional")

    def kl(x: Tensor, target: Tensor, *, temperature: float, reduction: str) -> Tensor:
        return functional().liger_kl_div(*log_probabilities(x, target, temperature), reduction=reduction, log_target=True) * temperature**2

    def js(x: Tensor, target: Tensor, *, beta: float, temperature: float = 1.0, reduction: str) -> Tensor:
        assert reduction == "batchmean"
        return functional().liger_jsd(*log_probabilities(x, target, temperature), beta=beta)

    def total_variation(x: Tensor, target: Tensor, *, temperature: float = 1.0, reduction: str) -> Tensor:
        p, q = (log_p.exp() for log_p in log_probabilities(x, target, temperature))
        return functional().liger_tvd(p, q, reduction=reduction)

    forms: dict[str, Call] = {"kl": kl, "js": js, "total_variation": total_variation}
    return None if "reverse" in case.options else forms[case.loss]


def _kl_of_liger(inputs: Any) -> Tensor:
    functional, others = import_module("liger_kernel.transformers.functional"), inputs.others
    if "teacher" in others:
        return functional.liger_fused_linear_kl_div(inputs.x, inputs.head, others["teacher"].softmax(-1))
    return functional.liger_fused_linear_jsd(inputs.x, inputs.head, others["teacher_input"], others["teacher_head"], jsd_beta=0.0)


def teacher_of(others: Others) -> Any:
    return others["teacher"] if "teacher" in others else losses.LinearTeacher(others["teacher_input"], others["teacher_head"])


def _kl_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)


def _js_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (_kl_of(middle, log_p) + _kl_of(middle, log_q))


def _of_layers(x: Tensor, others: Others) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of rows of the student and of the teacher."""
    teacher = others["teacher"] if "teacher" in others else F.linear(others["teacher_input"], others["teacher_head"])
    return wide(x).log_softmax(-1), wide(teacher).log_softmax(-1)


def _with_hard_part(name: str, divergence: Callable[[Tensor, Tensor], Tensor]) -> Fused:
    """Return half of a divergence of student and teacher plus half of the cross entropy, a row."""

    def rows(x: Tensor, others: Others) -> Tensor:
        log_p, log_q = _of_layers(x, others)
        return 0.5 * divergence(log_p, log_q) + 0.5 * F.nll_loss(log_p, others["target"], reduction="none")

    def ours(inputs: Any, **how: Any) -> Tensor:
        given = {"labels": inputs.others["target"], "hard_weight": 0.5, "reduction": "mean"}
        found: Tensor = getattr(losses, name)(inputs.x, inputs.head, teacher_of(inputs.others), **given, **how)
        return found

    return Fused(rows, mean_of_rows, ours)


@loss(
    "kl",
    "KL divergence",
    summed(VOCABULARY, TOKENS, "teacher", {"temperature": 2.0, "reduction": "batchmean"}, {"temperature": 3.0}),
    summed(VOCABULARY, TOKENS, "teacher", {"temperature": 2.0, "reduction": "batchmean", "reverse": True}, variant="reverse"),
    layers("linear", "qwen3-8b", DISTILLED, "linear teacher", "a teacher's layer"),
    layers("linear", "qwen3-8b", DISTILLED, "teacher", "a teacher's logits"),
    template=DIVERGENCE,
    peers={"liger": _liger},
    targets=(Target("8192x32000 fp32", "ms", 0.92), Target("8192x32000 bf16", "ms", 0.46)),
    fused=Fused(
        rows=lambda x, others: _kl_of(*_of_layers(x, others)),
        total=mean_of_rows,
        ours=lambda inputs, **how: losses.linear_kl_div(inputs.x, inputs.head, teacher_of(inputs.others), **how),
        peers={"liger": _kl_of_liger},
    ),
)
def kl(x: Tensor, target: Tensor, *, temperature: float, reduction: str, reverse: bool = False) -> Tensor:
    """Compute arXiv 1503.02531, times T²."""
    log_p, log_q = log_probabilities(x, target, temperature)
    to, of = (log_q, log_p) if reverse else (log_p, log_q)
    return F.kl_div(to, of, reduction=reduction, log_target=True) * temperature**2


@loss(
    "js",
    "Jensen-Shannon",
    summed(VOCABULARY, TOKENS, "teacher", {"beta": 0.5, "reduction": "batchmean"}, {"beta": 0.3}),
    DRAFTS,
    template=DIVERGENCE,
    peers={"liger": _liger},
    targets=OF_DRAFTS,
    fused=Fused(
        rows=lambda x, others: _js_of(*_of_layers(x, others)),
        total=mean_of_rows,
        ours=lambda inputs, **how: losses.linear_js_div(inputs.x, inputs.head, teacher_of(inputs.others), **how),
    ),
)
def js(x: Tensor, target: Tensor, *, beta: float, reduction: str, temperature: float = 1.0) -> Tensor:
    """Compute arXiv 2306.13649, as TRL's GKD does."""
    log_p, log_q = log_probabilities(x, target, temperature)
    log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
    of_teacher, of_student = (F.kl_div(log_m, of, reduction=reduction, log_target=True) for of in (log_q, log_p))
    return beta * of_teacher + (1 - beta) * of_student


@loss(
    "total_variation",
    "total variation",
    summed(VOCABULARY, TOKENS, "distinct teacher", {"reduction": "batchmean"}, {"temperature": 2.0}),
    template=DIVERGENCE,
    peers={"liger": _liger},
)
def total_variation(x: Tensor, target: Tensor, *, reduction: str, temperature: float = 1.0) -> Tensor:
    p, q = (log_p.exp() for log_p in log_probabilities(x, target, temperature))
    return (p - q).abs().sum() / 2 / (len(x) if reduction == "batchmean" else 1)


def _acceptance_of(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def _blend_of(log_p: Tensor, log_q: Tensor, kl_scale: float = 1.0, eta: float = 3.0) -> Tensor:
    """Return arXiv 2602.23881's blend of KL and total variation a row, as speculators' lk_hybrid_loss has it."""
    acceptance = _acceptance_of(log_p, log_q)
    share = kl_scale * torch.exp(-eta * acceptance.detach())
    return share * _kl_of(log_p, log_q) + (1 - share) * (1 - acceptance)


def _of_draft(kind: Literal["lk", "tv", "kl"], divergence: Callable[[Tensor, Tensor], Tensor]) -> Fused:
    """Return a loss of draft models, of which ours also returns the acceptance of each token."""

    def ours(inputs: Any, **how: Any) -> Tensor:
        teacher = teacher_of(inputs.others)
        found: Tensor = losses.linear_draft_loss(inputs.x, inputs.head, teacher, kind=kind, outputs=("acceptance",), **how).loss
        return found

    return Fused(lambda x, others: divergence(*_of_layers(x, others)), mean_of_rows, ours)


@loss(
    "draft",
    "draft model",
    summed(VOCABULARY, TOKENS, "distinct teacher", {"eta": 3.0, "kl_scale": 1.0, "reduction": "batchmean"}, {"eta": 1.0}),
    DRAFTS,
    template=DIVERGENCE,
    targets=OF_DRAFTS,
    fused=_of_draft("lk", _blend_of),
)
def draft(x: Tensor, target: Tensor, *, eta: float, kl_scale: float, reduction: str) -> Tensor:
    return _blend_of(*log_probabilities(x, target, 1.0), kl_scale, eta).sum() / (len(x) if reduction == "batchmean" else 1)


enter(
    "draft_tv",
    "draft model, total variation",
    DRAFTS,
    targets=OF_DRAFTS,
    fused=_of_draft("tv", lambda log_p, log_q: 1 - _acceptance_of(log_p, log_q)),
)
enter("draft_kl", "draft model, KL", DRAFTS, targets=OF_DRAFTS, fused=_of_draft("kl", _kl_of))
enter(
    "total_variation_probability",
    "total variation of probabilities",
    summed("large", LARGE, "dense of probabilities"),
    eager=lambda x, target, *, reduction: reduced((x - target).abs() / 2, reduction),
    template=ELEMENTS,
)


def _of_top_classes(reverse: float = 0.0, tail: bool = False) -> Fused:
    """Return a divergence from a teacher of which the likeliest classes of each row are known."""

    def rows(x: Tensor, others: Others) -> Tensor:
        log_q = others["values"]
        log_p = wide(x).log_softmax(-1).gather(-1, others["indices"])
        if tail:
            least = 2.0**-24
            log_p, log_q = (torch.cat([t, (1 - t.exp().sum(-1, True)).clamp(min=least).log()], -1) for t in (log_p, log_q))
        return (1 - reverse) * (log_q.exp() * (log_q - log_p)).sum(-1) + reverse * (log_p.exp() * (log_p - log_q)).sum(-1)

    def ours(inputs: Any, **how: Any) -> Tensor:
        teacher = losses.TopKTeacher(inputs.others["values"], inputs.others["indices"])
        found: Tensor = losses.linear_kl_div(inputs.x, inputs.head, teacher, reverse=reverse, tail=tail, **how)
        return found

    return Fused(rows, mean_of_rows, ours)


@loss(
    "topk_kl",
    "KL of 64 classes",
    summed(VOCABULARY, TOKENS, "top classes", {"temperature": 2.0, "reduction": "batchmean"}, {"temperature": 3.0}),
    TOP,
    template="row-wise",
    targets=OF_TOP,
    fused=_of_top_classes(),
)
def topk_kl(x: Tensor, target: Tensor, *, indices: Tensor, temperature: float, reduction: str) -> Tensor:
    """Compute KL over the classes `indices`, which the teacher kept. target: their log-probabilities."""
    log_p = (x / temperature).log_softmax(1).gather(1, indices)
    return F.kl_div(log_p, target, reduction=reduction, log_target=True) * temperature**2


@loss(
    "dino",
    "DINO",
    summed(
        "prototypes-65536",
        (8192, 65536),
        "centred teacher",
        {"student_temperature": 0.1, "teacher_temperature": 0.04},
        {"student_temperature": 0.2},
    ),
    template=DIVERGENCE,
)
def dino(x: Tensor, target: Tensor, *, center: Tensor, student_temperature: float, teacher_temperature: float, reduction: str) -> Tensor:
    """Compute as the authors' DINOLoss does for one pair of crops (arXiv 2104.14294)."""
    q = ((wide(target) - center) / teacher_temperature).softmax(1)
    return reduced(-(q * (wide(x) / student_temperature).log_softmax(1)).sum(1), reduction)


@loss(
    "dkd",
    "decoupled distillation",
    summed(HEAD, HEADS, "labelled teacher", {"alpha": 1.0, "beta": 8.0, "temperature": 4.0}, {"beta": 4.0}),
    function="dkd_loss",
)
def dkd(x: Tensor, target: Tensor, label: Tensor, *, alpha: float, beta: float, temperature: float, reduction: str) -> Tensor:
    """Compute as the authors' code does (arXiv 2203.08679), which takes 1000 from the own class's logit."""
    own = F.one_hot(label, x.shape[1])
    pairs, others = [], []
    for logits in (wide(x) / temperature, wide(target) / temperature):
        p = (logits.softmax(1) * own).sum(1)
        pairs.append(torch.stack([p, 1 - p], 1).log())
        others.append((logits - 1000 * own).log_softmax(1))
    of_own, of_others = (F.kl_div(p, q, reduction="none", log_target=True).sum(1) for p, q in (pairs, others))
    return reduced(temperature**2 * (alpha * of_own + beta * of_others), reduction)


@loss(
    "channel_wise_kl_div",
    "channel-wise KL divergence",
    summed(SEGMENTATION, MAPS, "teacher", {"temperature": 4.0}, {"temperature": 2.0}),
    function="channel_wise_kl_div",
    template=DIVERGENCE,
)
def channel_wise_kl_div(x: Tensor, target: Tensor, *, temperature: float, reduction: str) -> Tensor:
    """arXiv 2011.13256."""
    log_p, log_q = ((wide(t).flatten(2) / temperature).log_softmax(2) for t in (x, target))
    return reduced(temperature**2 * F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(2), reduction)


@loss(
    "dist",
    "DIST",
    whole(HEAD, HEADS, "teacher", {"beta": 1.0, "gamma": 1.0, "temperature": 4.0}, {"beta": 2.0}),
    function="dist_loss",
    late=True,
)
def dist(x: Tensor, target: Tensor, *, beta: float, gamma: float, temperature: float) -> Tensor:
    """Compute as the authors' code does (arXiv 2205.10536). F.cosine_similarity has no + 1e-8, which 1,000 classes show."""
    p, q = ((wide(t) / temperature).softmax(1) for t in (x, target))

    def correlation(a: Tensor, b: Tensor) -> Tensor:
        a, b = (t - t.mean(1, keepdim=True) for t in (a, b))
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-8)).mean()

    return temperature**2 * (beta * (1 - correlation(p, q)) + gamma * (1 - correlation(p.T, q.T)))


enter("topk_mixed", "KL of 64 classes and a tail, both directions", TOP, targets=OF_TOP, fused=_of_top_classes(0.5, True))
enter("hard_kl", "KL divergence with a hard part", HARD, fused=_with_hard_part("linear_kl_div", _kl_of))
enter("hard_js", "Jensen-Shannon with a hard part", HARD, fused=_with_hard_part("linear_js_div", _js_of))
