"""Losses of rows of classes, one of which is right: of logits, cosines and log-probabilities, and of a router."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from lossforge.bench.record import (
    BF16,
    ELEMENTS,
    FP32,
    HIDDEN,
    IMAGENET,
    Call,
    Case,
    F,
    Fused,
    Others,
    Target,
    Tensor,
    cases,
    enter,
    layers,
    loss,
    losses,
    of_layer,
    of_module,
    of_timm,
    reduced,
    summed,
    torch,
    whole,
    wide,
)

ROWS = "row-wise"
VOCABULARY, HEAD, SEGMENTATION = "llm-vocabulary", "timm-head", "segmentation-512"
TOKENS, MAPS, HEADS, FACES = (8192, 32000), (8, 21, 512, 512), (16384, 1000), (2048, 85742)
LLAMA, GEMMA, QWEN = (8192, 4096, 128256), (8192, 2304, 256000), (8192, 1024, 151936)
LANGUAGE = {"llama3-8b": LLAMA, "gemma2-2b": GEMMA, "qwen3-0.6b": QWEN}
"""Language models, and tokens, hidden size and classes of a product that computes their logits."""
QUACK = ("quack", "quack-plain")
THREE, FOUR, WEIGHT = "its three products", "its four products", "the weight's gradient + {} GiB"
QUACK_LINEAR = ("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
CUT = ("cut_cross_entropy", "linear_cross_entropy")
LIGER_SM90 = "liger_kernel.ops.cutedsl.ops"
OF_QUACK: dict[str, Any] = {"of": QUACK, "said": "QuACK's better form", "optional": True}
WHOLE = {"said": WEIGHT.format(1.25), "plus": "weight"}
ENGINES: tuple[dict[str, Any], ...] = (
    {"figure": "ms", "limit": 1.05, "of": "products", "said": THREE},
    {"figure": "peak_mib", "limit": 1280.0} | WHOLE,
    {"figure": "ms", "limit": 1.05, "of": "products-weight", "said": THREE, "contender": "lossforge-weight"},
    {"figure": "peak_mib", "limit": 1280.0, "contender": "lossforge-weight"} | WHOLE,
    {"figure": "ms", "limit": 1.0, "of": "torch.compile", "said": "torch.compile", "optional": True},
    {"figure": "ms", "limit": 1.0} | OF_QUACK,
    {"figure": "ms", "limit": 1.08, "of": "products-backward", "said": FOUR, "contender": "lossforge-backward"},
    {"figure": "peak_mib", "limit": 768.0, "said": WEIGHT.format(0.75), "plus": "weight", "contender": "lossforge-backward"},
)
"""Targets of cross entropy at the vocabularies of language models: time alone and against peers, memory."""
SMOOTHING: dict[str, Any] = {"options": {"label_smoothing": 0.1}, "other": {"label_smoothing": 0.2}}


def _timm(case: Case) -> Call | None:
    soft = of_timm("SoftTargetCrossEntropy")(case)

    def smoothed(x: Tensor, target: Tensor, *, label_smoothing: float) -> Tensor:
        return of_timm("LabelSmoothingCrossEntropy", smoothing=label_smoothing)(case)(x, target)

    def mixup(x: Tensor, target: Tensor, *, target_b: Tensor, lam: float) -> Tensor:
        """Turn the two classes into a dense target, as timm's mixup does."""
        ones = (F.one_hot(t, x.shape[1]).to(x.dtype) for t in (target, target_b))
        return soft(x, lam * next(ones) + (1 - lam) * next(ones))

    forms: dict[str, Call] = {"label smoothing": smoothed, "soft targets": soft, "mixup pair": mixup}
    return forms.get(case.variant)


def _rows_of_a_language_model(case: Case) -> bool:
    """Return whether a case is (N, C) logits with class indices, which the kernels of language models compute."""
    return len(case.shape) == 2 and case.inputs in ("classes", "class weights", "ignored")


def _liger(case: Case) -> Call | None:
    return of_module("liger_kernel.transformers.functional", "liger_cross_entropy") if _rows_of_a_language_model(case) else None


def _quack(case: Case) -> Call | None:
    plain = _rows_of_a_language_model(case) and "label_smoothing" not in case.options
    return of_module("quack.cross_entropy", "cross_entropy") if plain else None


def _of_library(module: str, name: str, inputs: Any, **options: Any) -> Tensor:
    return of_module(module, name)(inputs.x, inputs.head, inputs.others["target"], **options)


def _torch_linear(inputs: Any) -> Tensor:
    return _of_library("torch.nn.functional", "linear_cross_entropy", inputs, options=of_module("torch.nn", "LinearCrossEntropyOptions")())


def _trl_cross_entropy(inputs: Any) -> Tensor:
    """Compute it as TRL's fused head does: of the targets that are not ignored."""
    target, x = inputs.others["target"], inputs.x
    counted = target != -100
    return -_of_trl(x[counted], inputs.head, target[counted], ("log_probs",))[0].sum() / counted.sum()


def _of_trl(x: Tensor, head: Tensor, target: Tensor, outputs: Sequence[str]) -> Any:
    return import_module("trl.kernels").ChunkedLogProbFunction.apply(x, head, None, target, 1.0, 32_768, None, 1.0, outputs)


def cross_entropy_of_rows(x: Tensor, others: Others) -> Tensor:
    return wide(F.cross_entropy(x, others["target"], reduction="none"))


@loss(
    "ce",
    "cross entropy",
    *(
        cases("table", use, shape, "classes", dtypes=[dtype])
        for shape, dtype, use in (
            (HEADS, FP32, HEAD),
            (HEADS, BF16, HEAD),
            ((16384, 1001), FP32, "timm-head-odd"),
            (TOKENS, BF16, VOCABULARY),
            ((8192, 50304), FP32, VOCABULARY),
            ((8192, 50304), BF16, VOCABULARY),
            ((8192, 50257), BF16, "llm-vocabulary-odd"),
            ((8192, 128256), BF16, VOCABULARY),
            ((4096, 262144), BF16, VOCABULARY),
            (MAPS, FP32, SEGMENTATION),
            (MAPS, BF16, SEGMENTATION),
        )
    ),
    *(
        cases("variants", VOCABULARY, TOKENS, inputs, variant, options, other, [BF16])
        for variant, inputs, options, other in (
            ("label smoothing", "classes", *SMOOTHING.values()),
            ("class weights", "class weights", {}, {}),
            ("soft targets", "probabilities", {}, {}),
            ("mixup pair", "pair", {"lam": 0.7}, {"lam": 0.4}),
            ("ignored rows", "ignored", {}, {}),
            ("per row", "classes", {"reduction": "none"}, {}),
        )
    ),
    cases("small", "classifier", (256, 1000), "classes", dtypes=[FP32]),
    cases("small", "classifier", (256, 1000), "classes", "label smoothing", **SMOOTHING, dtypes=[FP32]),
    cases("small", "digits", (64, 10), "classes", dtypes=[FP32]),
    *(cases("scaling", "over-N", (rows, 32000), "classes", "over-N", dtypes=[BF16]) for rows in (16, 64, 256, 1024, 4096, 16384)),
    *(
        cases("scaling", "over-V", (4096, classes), "classes", "over-V", dtypes=[BF16])
        for classes in (64, 256, 1000, 4096, 16384, 65536, 262144)
    ),
    *(layers("linear", use, shape, "classes") for use, shape in LANGUAGE.items()),
    *(
        layers("linear", use, shape, "classes")
        for use, shape in (
            ("llama3-8b", (4096, 4096, 128256)),
            ("llama3-1b", (8192, 2048, 128256)),
            ("llama3-1b", (16384, 2048, 128256)),
            ("llama2", (4096, 2048, 32000)),
        )
    ),
    layers("linear", "llama3-8b", LLAMA, "half ignored", "half ignored"),
    layers("linear", IMAGENET, HIDDEN, "classes"),
    *(
        layers("exact", use, shape, "large logits")  # of a standard deviation of 32, at which rounding them shows
        for shape, use in (
            (LLAMA, "llama3-8b"),
            ((2048, 4096, 128256), "llama3-8b"),
            ((4096, 2048, 32000), "llama2"),
            ((8192, 2048, 50304), "gpt2"),
            ((16384, 2048, 128256), "llama3-1b"),
            ((1024, 1024, 32000), "llama2"),
            ((8192, 5120, 151936), "qwen3-14b"),
            (QWEN, "qwen3-0.6b"),
        )
    ),
    template=ROWS,
    peers={"timm": _timm, "liger": _liger, "quack": _quack},
    targets=(
        Target("16384x1000 fp32", "ms", 0.036),
        Target("8192x32000 bf16", "ms", 0.29),
        Target("8192x50304 fp32", "ms", 0.90),
        Target("8192x128256 bf16", "ms", 1.15),
        Target("4096x262144 bf16", "ms", 1.25),
        *(Target(key, "forward_share", 0.95) for key in ("8192x32000 bf16", "8192x50304 fp32", "8192x128256 bf16", "4096x262144 bf16")),
        *(
            Target(f"{variant} 8192x32000 bf16", "ms", 1.1, "8192x32000 bf16", "the plain case")
            for variant in ("label smoothing", "class weights", "mixup pair")
        ),
        Target("8192x50257 bf16", "ms", 1.1, "8192x50304 bf16", "8192×50304's"),
        Target("16384x1001 fp32", "ms", 1.1, "16384x1000 fp32", "16384×1000's"),
        Target("256x1000 fp32", "host_us", 1.0, "torch", "torch"),
        Target("64x10 fp32", "host_us", 1.0, "torch", "torch"),
        *(Target("linear", use=tuple(LANGUAGE), **what) for what in ENGINES),
        Target("linear half ignored", "ms", 0.6, "{size} bf16", "with no token ignored", "lossforge-skip"),
        Target("exact", "ms", 1.03, "lossforge-rounded", "rounded logits", below=(2.0, 1.1)),
        Target("exact", "gradient_error", 1.5, "lossforge-float32", 'logits="float32"'),
        Target("exact", "weight_error", 1.5, "lossforge-float32", 'logits="float32"'),
        Target("exact", "ms", 1.0, use=("qwen3-0.6b",), **OF_QUACK),
    ),
    fused=Fused(
        rows=cross_entropy_of_rows,
        total=lambda rows, others: rows.sum() / (others["target"] != -100).sum(),
        ours=of_layer("ce"),
        peers={
            "torch-linear": _torch_linear,
            "liger": partial(_of_library, "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
            "liger-sm90": partial(_of_library, f"{LIGER_SM90}.fused_linear_cross_entropy_sm90", "liger_fused_linear_cross_entropy_sm90"),
            "cut-cross-entropy": partial(_of_library, *CUT),
            "cut-cross-entropy-exact": partial(_of_library, *CUT, filter_eps=None),
            "quack": partial(_of_library, *QUACK_LINEAR),
            "quack-plain": partial(_of_library, *QUACK_LINEAR, use_scaled_exp=False, tuned=False),  # tuning takes minutes a shape
            "trl": _trl_cross_entropy,
        },
    ),
)
def ce(
    x: Tensor, target: Tensor, *, target_b: Tensor | None = None, lam: float = 1.0, weight: Tensor | None = None, **options: Any
) -> Tensor:
    value = F.cross_entropy(x, target, weight, **options)
    return value if target_b is None else lam * value + (1 - lam) * F.cross_entropy(x, target_b, weight, **options)


enter(
    "weighted_ce",
    "cross entropy with a weight a token",
    layers("objectives", "llama3-1b", (8192, 2048, 128256), "tokens"),
    targets=(Target("objectives", "ms", 1.05, "products", THREE),),
    fused=Fused(
        rows=cross_entropy_of_rows,
        total=lambda rows, others: (rows * others["factor"].flatten()).mean(),
        ours=lambda inputs, **how: losses.linear_cross_entropy(
            inputs.x, inputs.head, inputs.others["target"], token_weight=inputs.others["factor"], **how
        ),
    ),
)


def log_p(x: Tensor, target: Tensor) -> Tensor:
    return x.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)


@loss("softmax_focal", "softmax focal", summed(VOCABULARY, TOKENS, "classes", {"gamma": 2.0}, {"gamma": 1.5}), template=ROWS)
def softmax_focal(x: Tensor, target: Tensor, *, gamma: float, reduction: str) -> Tensor:
    """Compute arXiv 1708.02002 with a softmax's p_t."""
    ln = log_p(x, target)
    return reduced(-((1 - ln.exp()) ** gamma) * ln, reduction)


@loss(
    "poly_ce",
    "Poly-1 cross entropy",
    summed(VOCABULARY, TOKENS, "classes", {"epsilon": 2.0}, {"epsilon": 1.0}),
    template=ROWS,
    peers={"timm": of_timm("PolyCrossEntropy")},
)
def poly_ce(x: Tensor, target: Tensor, *, epsilon: float, reduction: str) -> Tensor:
    """arXiv 2204.12511."""
    ln = log_p(x, target)
    return reduced(-ln + epsilon * (1 - ln.exp()), reduction)


@loss(
    "asymmetric_single_label",
    "asymmetric, one class",
    summed(VOCABULARY, TOKENS, "classes", {"gamma_pos": 1.0, "gamma_neg": 4.0, "eps": 0.1}, {"gamma_neg": 3.0}),
    template=ROWS,
)
def asymmetric_single_label(x: Tensor, target: Tensor, *, gamma_pos: float, gamma_neg: float, eps: float, reduction: str) -> Tensor:
    ln_p = x.log_softmax(1)
    p, hit = ln_p.exp(), torch.zeros_like(ln_p, dtype=torch.bool).scatter_(1, target.unsqueeze(1), True)
    weight = torch.where(hit, (1 - p) ** gamma_pos, p**gamma_neg)
    return reduced(-((hit * (1 - eps) + eps / x.shape[1]) * weight * ln_p).sum(1), reduction)


enter(
    "generalized_ce",
    "generalised cross entropy",
    summed(VOCABULARY, TOKENS, "classes", {"q": 0.7}, {"q": 0.5}),
    eager=lambda x, target, *, q, reduction: reduced((1 - log_p(x, target).exp() ** q) / q, reduction),  # arXiv 1805.07836
    template=ROWS,
)


@loss("taylor_ce", "Taylor cross entropy", summed(VOCABULARY, TOKENS, "classes", {"order": 2}), template=ROWS)
def taylor_ce(x: Tensor, target: Tensor, *, order: int, reduction: str) -> Tensor:
    miss = 1 - log_p(x, target).exp()
    return reduced(sum((miss**k / k for k in range(2, order + 1)), start=miss), reduction)


@loss(
    "symmetric_ce",
    "symmetric cross entropy",
    summed(VOCABULARY, TOKENS, "classes", {"alpha": 0.1, "beta": 1.0, "log_zero": -4.0}, {"alpha": 0.5}),
    template=ROWS,
)
def symmetric_ce(x: Tensor, target: Tensor, *, alpha: float, beta: float, log_zero: float, reduction: str) -> Tensor:
    """arXiv 1908.06112."""
    ln = log_p(x, target)
    return reduced(-alpha * ln - beta * log_zero * (1 - ln.exp()), reduction)


enter(
    "logit_adjusted_ce",
    "logit-adjusted cross entropy",
    summed(IMAGENET, (4096, 21841), "class prior", {"tau": 1.0}, {"tau": 0.5}),
    eager=lambda x, target, *, log_prior, tau, **options: F.cross_entropy(x + tau * log_prior, target, **options),  # arXiv 2007.07314
    template=ROWS,
)


@loss("seesaw", "Seesaw", summed("lvis", (16384, 1203), "counted classes", {"p": 0.8, "q": 2.0}, {"q": 1.0}), function="seesaw_loss")
def seesaw(x: Tensor, target: Tensor, *, class_counts: Tensor, p: float, q: float, reduction: str) -> Tensor:
    """Compute as mmdetection's seesaw_ce_loss does."""
    x, index = wide(x), target.unsqueeze(1)
    rarer = (class_counts / class_counts[index]).clamp(max=1) ** p
    scores = x.detach().softmax(1)
    surer = (scores / scores.gather(1, index).clamp(min=1e-2)).clamp(min=1) ** q
    return F.cross_entropy(x + (rarer * surer).log().scatter(1, index, 0.0), target, reduction=reduction)


@loss("arcface", "ArcFace", summed("ms1mv2", FACES, "cosines", {"margin": 0.5, "scale": 64.0}, {"margin": 0.4}), template=ROWS)
def arcface(x: Tensor, target: Tensor, *, margin: float, scale: float, reduction: str) -> Tensor:
    """Compute as the authors' code does, with one cosine a row in a copy of all."""
    own = x.gather(1, target.unsqueeze(1))
    moved = own * math.cos(margin) - (1 - own.square()).clamp(0, 1).sqrt() * math.sin(margin)
    moved = torch.where(own > -math.cos(margin), moved, own - margin * math.sin(margin))
    return F.cross_entropy(scale * x.scatter(1, target.unsqueeze(1), moved), target, reduction=reduction)


@loss("cosface", "CosFace", summed("ms1mv2", FACES, "cosines", {"margin": 0.35, "scale": 64.0}, {"margin": 0.4}), template=ROWS)
def cosface(x: Tensor, target: Tensor, *, margin: float, scale: float, reduction: str) -> Tensor:
    """Compute as the authors' code does."""
    index = target.unsqueeze(1)
    return F.cross_entropy(scale * x.scatter(1, index, x.gather(1, index) - margin), target, reduction=reduction)


def _token_logps(function: Call) -> Call:
    """Subtract the entropy where it is asked for, so that one gradient a token reaches both outputs."""

    def call(x: Tensor, target: Tensor, *, reduction: str, **options: Any) -> Tensor:
        assert reduction == "none"
        found: Any = function(x, target, **options)
        logps: Tensor = found if isinstance(found, Tensor) else found.logps - found.entropy
        return logps

    return call


def _logps_and_entropies(x: Tensor, others: Others) -> Tensor:
    log_p = wide(x).log_softmax(-1)
    return torch.stack([log_p.gather(-1, others["target"].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)], -1)


def _weighted(others: Others, logps: Tensor, entropy: Tensor) -> Tensor:
    """Weight each token, so that each result has a different upstream gradient."""
    return (others["factor"].flatten() * (logps - entropy)).mean()


def _ours_of_tokens(inputs: Any, **how: Any) -> Tensor:
    found: Any = losses.linear_selective_log_softmax(inputs.x, inputs.head, inputs.others["target"], outputs=("entropy",), **how)
    return _weighted(inputs.others, found.logps, found.entropy)


def _trl(inputs: Any) -> Tensor:
    return _weighted(inputs.others, *_of_trl(inputs.x, inputs.head, inputs.others["target"], ("entropy",))[:2])


def _liger_sm90(inputs: Any) -> Tensor:
    function = import_module(f"{LIGER_SM90}.fused_scaled_cross_entropy_sm90").LigerFusedScaledCrossEntropySM90Function
    nll, entropy = function.apply(inputs.x, inputs.head, inputs.others["target"], 1.0, -100, 1, True)
    return _weighted(inputs.others, -nll, entropy)


def _verl(inputs: Any) -> Tensor:
    function = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return _weighted(inputs.others, *function(inputs.x, inputs.head, inputs.others["target"], 1.0))


@loss(
    "selective_log_softmax",
    "log-probability of tokens",
    summed(VOCABULARY, TOKENS, "classes", {"reduction": "none"}, {"temperature": 0.7}),
    summed(VOCABULARY, TOKENS, "classes", {"outputs": ("entropy",), "reduction": "none"}, variant="with entropy"),
    *(layers("linear", use, shape, "tokens", "with entropy") for use, shape in LANGUAGE.items()),
    *(layers("linear", use, shape, "tokens without gradient", "with entropy, forward only") for use, shape in LANGUAGE.items()),
    function="selective_log_softmax",
    adapt=_token_logps,
    template=ROWS,
    targets=(
        Target("linear with entropy, forward only", "ms", 1.05, "products", "the one product"),
        Target("linear with entropy, forward only", "peak_mib", 64.0),
        Target("linear with entropy", "ms", 1.04, "products", FOUR),
        Target("linear with entropy", "peak_mib", 768.0, said=WEIGHT.format(0.75), plus="weight"),
    ),
    fused=Fused(
        rows=_logps_and_entropies,
        total=lambda rows, others: _weighted(others, *rows.unbind(-1)),
        ours=_ours_of_tokens,
        backward=True,
        peers={"liger-sm90": _liger_sm90, "trl": _trl, "verl": _verl},
    ),
)
def selective_log_softmax(
    x: Tensor, target: Tensor, *, temperature: float = 1.0, outputs: Sequence[str] = (), reduction: str = "none"
) -> Tensor:
    """Compute as TRL's selective_log_softmax does, and with outputs ("entropy",) subtract its entropy_from_logits."""
    log_p = (x / temperature).log_softmax(1)
    values = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    return reduced(values + (log_p.exp() * log_p).sum(1) if outputs else values, reduction)


@loss(
    "ohem_ce",
    "cross entropy of hard rows",
    whole(SEGMENTATION, MAPS, "easy and hard classes", {"threshold": 0.7, "min_kept": 100_000}, {"threshold": 0.6}),
    late=True,
)
def ohem_ce(x: Tensor, target: Tensor, *, threshold: float, min_kept: int) -> Tensor:
    """Keep the pixels below the threshold, and at least so many, as segmentation libraries do, without waiting for their number."""
    values = F.cross_entropy(x, target, reduction="none")
    each = values.detach().flatten()
    least = each.topk(min(min_kept, len(each))).values[-1].clamp(max=-math.log(threshold))
    keep = values.detach() >= least
    return torch.where(keep, values, 0.0).sum() / keep.sum()


@loss(
    "jsd",
    "Jensen-Shannon of views + cross entropy",
    whole("augmix", (3 * 8192, 1000), "clean and augmented", {"num_splits": 3, "alpha": 12.0, "smoothing": 0.1}),
    function="jsd_cross_entropy",
    peers={"timm": of_timm("JsdCrossEntropy")},
)
def jsd(x: Tensor, target: Tensor, *, num_splits: int, alpha: float, smoothing: float) -> Tensor:
    """Compute as timm does."""
    views = wide(x).chunk(num_splits)
    p = [view.softmax(1) for view in views]
    mixture = torch.stack(p).mean(0).clamp(1e-7, 1).log()
    divergence = sum((F.kl_div(mixture, each, reduction="batchmean") for each in p), start=x.new_zeros(())) / num_splits
    return F.cross_entropy(views[0], target, label_smoothing=smoothing) + alpha * divergence


@loss(
    "load_balancing",
    "load balancing",
    whole("qwen3-30b-router", (48 * 16384, 128), "router", {"top_k": 8, "z_loss": 1e-3}, {"z_loss": 1e-2}),
    function="load_balancing_loss",
    late=True,
)
def load_balancing(x: Tensor, *, top_k: int, z_loss: float) -> Tensor:
    """Compute as transformers' load_balancing_loss_func does, and add the router z-loss."""
    x = wide(x)
    p = x.softmax(1)
    chosen = torch.zeros_like(p).scatter_(1, p.topk(top_k, 1).indices, 1.0)
    return x.shape[1] * (chosen.mean(0) * p.mean(0)).sum() + z_loss * x.logsumexp(1).square().mean()


enter("kl_div", "KL divergence of log-probabilities", summed(VOCABULARY, TOKENS, "log-probabilities"), template=ELEMENTS)
enter("nll", "negative log-likelihood", summed(VOCABULARY, TOKENS, "classes of log-probabilities"))


def narrow(x: Tensor) -> Tensor:
    """Return what torch's functions of margins take: on CPU no bfloat16."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


enter(
    "multi_margin",
    "multi-class margin",
    summed(HEAD, HEADS, "classes", {"p": 2, "margin": 1.0}, {"margin": 0.5}),
    eager=lambda x, target, **options: F.multi_margin_loss(narrow(x), target, **options),
)


@loss("multilabel_margin", "multi-label margin", summed(HEAD, HEADS, "lists of classes"))
def multilabel_margin(x: Tensor, target: Tensor, *, reduction: str) -> Tensor:
    """Call torch's function; compute in float64 by the formula.

    On an H100 the gradients of torch's kernel for float32 and of ours were each 11 % off that of its kernel for float64.
    """
    if x.dtype != torch.float64:
        return F.multilabel_margin_loss(narrow(x), target, reduction=reduction)
    listed = (target >= 0).cumprod(1).bool()
    index = target[:, : int(listed.sum(1).max())]
    listed = listed[:, : index.shape[1]]
    # what is not listed goes to a class beyond the last
    others = torch.ones(len(x), x.shape[1] + 1, dtype=torch.bool, device=x.device)
    others = others.scatter(1, index.where(listed, x.shape[1]), False)[:, :-1]
    margins = F.relu(1 - x.gather(1, index.clamp(min=0))[:, :, None] + x[:, None])
    return reduced((margins * (listed[:, :, None] & others[:, None])).sum((1, 2)) / x.shape[1], reduction)
