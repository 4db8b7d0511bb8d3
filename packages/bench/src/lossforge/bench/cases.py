"""The cases to measure: losses on realistic shapes. This file does not import torch, so that a wrong name is reported at once."""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FP32, BF16 = "fp32", "bf16"
DTYPES = (FP32, BF16)
FUSED = ("linear", "features", "exact", "objectives")
"""Suites of losses fused with the product that computes their logits: shapes are (…, hidden, classes), or queries, features, keys."""
SUITES = ("table", "losses", "variants", "small", "scaling", *FUSED)
CONTENDERS = {
    "lossforge": "ours as it is called",
    "lossforge-backward": 'gradient="backward": the gradient is computed when backward asks for it',
    "lossforge-inplace": "inplace=True: the gradient takes the memory of the logits",
    "lossforge-weight": 'accumulate="weight": the gradient of a layer\'s weight is summed in its own dtype',
    "lossforge-skip": "skip_ignored=True: ignored rows are left out of a layer's products",
    "lossforge-rounded": 'logits="weight": logits may be rounded to the dtype of the weight',
    "lossforge-float32": 'logits="float32": logits are kept in float32',
    "objective": "an objective alone, from the log-probabilities of tokens",
    "products": "the matrix products that ours makes, alone and at the same chunks",
    "products-weight": "the same of lossforge-weight",
    "products-backward": "the same of lossforge-backward",
    "torch": "torch's function, eager",
    "torch.compile": "the same under torch.compile",
    "torch-linear": "torch's own fused function, where it has one",
    "torchvision": "torchvision.ops",
    "timm": "timm.loss",
    "liger": "Liger-Kernel; destroys the logits",
    "cut-cross-entropy": "cut-cross-entropy, its exact mode",
    "quack": "QuACK (CuTe DSL), its products not tuned",
    "quack-scaled": "the form of it that takes the row's sums in the first product",
    "trl": "TRL's kernel of log-probabilities and entropies",
    "verl": "verl's kernel of the same",
}
CPU_ELEMENTS = 2**18
"""Largest number of elements in a case on a machine without a GPU."""


@dataclass(frozen=True)
class Case:
    """A loss on one shape and dtype.

    Attributes:
        suite: one of SUITES.
        loss: its name in lossforge.losses.registry, contenders.UNREGISTERED or linear.losses.
        use: which model or task has that shape.
        shape: of the logits or boxes; of the input, then classes, in a suite of FUSED.
        dtype: "fp32" or "bf16".
        inputs: which function of lossforge.bench.inputs, or linear.inputs, makes targets and weights.
        variant: how it differs from the plain loss.
        options: keyword arguments of the loss.
        other: other values of some options; a second call with them should not compile again.
        whole: check the case in one piece, because the losses of its samples do not add up to its loss.
    """

    suite: str
    loss: str
    use: str
    shape: tuple[int, ...]
    dtype: str
    inputs: str
    variant: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    whole: bool = False

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def key(self) -> str:
        """Return a name that is unique within the suite."""
        return " ".join(filter(None, (self.loss, self.variant, self.size, self.dtype)))

    def cut(self, elements: int) -> "Case":
        """Shorten the leading dimensions to at most `elements` in all, for a machine without a GPU."""
        shape = list(self.shape)
        for d in range(len(shape) if len(shape) == 1 else len(shape) - 1):
            if d != 1 or len(shape) != 4 or self.suite in FUSED:  # (N, C, H, W) keeps its classes
                least = LEAST.get(self.inputs, 1) if d == 0 else 1
                shape[d] = max(least, min(shape[d], shape[d] * elements // math.prod(shape)))
        shape[0] -= shape[0] % GROUPED.get(self.inputs, 1)
        return replace(self, shape=tuple(shape))


GROUPED = {"clean and augmented": 3, "near rows": 2, "two halves": 2}
"""Inputs whose samples come in groups of so many."""
FEW = ("pairs", "easy and hard classes", "views", "labelled views", "labelled features", "guided features")
LEAST = dict.fromkeys(FEW, 2) | {"clean and augmented": 3, "near rows": 4, "two halves": 4}
"""The fewest samples that some inputs can be made for."""
SMOOTHING: dict[str, Any] = {"label_smoothing": 0.1}
FOCAL: dict[str, Any] = {"alpha": 0.25, "gamma": 2.0, "reduction": "sum"}
OVERLAP = ("dice", "jaccard", "tversky", "focal_tversky", "dice_ce", "generalized_dice", "mcc")
WHOLE = ("siglip", "clip", *OVERLAP)
LATE = ("clip", "two_way", "load_balancing", "ohem_ce", "lovasz_softmax", "lovasz_hinge", "silog", "dist", *OVERLAP)
"""Losses whose gradient is known only when the whole batch was read."""
VOCABULARY, HEAD, CLIP, SEGMENTATION = "llm-vocabulary", "timm-head", "clip-16384", "segmentation-512"
TOKENS, MAPS, SIMILARITIES = (8192, 32000), (8, 21, 512, 512), (16384, 16384)


def _table() -> Iterable[Case]:
    for shape, dtype, use in (
        ((16384, 1000), FP32, HEAD),
        ((16384, 1000), BF16, HEAD),
        ((16384, 1001), FP32, "timm-head-odd"),
        ((8192, 32000), BF16, VOCABULARY),
        ((8192, 50304), FP32, VOCABULARY),
        ((8192, 50304), BF16, VOCABULARY),
        ((8192, 50257), BF16, "llm-vocabulary-odd"),
        ((8192, 128256), BF16, VOCABULARY),
        ((4096, 262144), BF16, VOCABULARY),
        (MAPS, FP32, SEGMENTATION),
        (MAPS, BF16, SEGMENTATION),
    ):
        yield Case("table", "ce", use, shape, dtype, "classes")
    anchors, large = (16, 120087, 80), (2**28,)
    others: tuple[tuple[str, str, tuple[int, ...], str, str, dict[str, Any]], ...] = (
        ("focal", "retinanet-800x1344", anchors, "anchors", "class index", FOCAL),
        ("focal", "retinanet-800x1344", anchors, "dense", "dense", FOCAL),
        ("mae", "large", large, "dense", "", {}),
        ("bce", "large", large, "dense", "", {}),
        ("preference_bce", "large", large, "preference", "", {}),
    )
    for loss, use, size, inputs, variant, options in others:
        for dtype in DTYPES:
            yield Case("table", loss, use, size, dtype, inputs, variant, options)


def _losses() -> Iterable[Case]:
    """Return cases for losses that the table omits, at sizes whose floor is long enough to measure."""
    anchors, large, labels, many = (16, 120087, 80), (2**28,), (4096, 9605), (4096, 21841)
    faces, vectors, lvis = (2048, 85742), (65536, 768), (16384, 1203)
    softened = {"temperature": 2.0, "reduction": "batchmean"}
    mean, teachers = {"reduction": "mean"}, {"student_temperature": 0.1, "teacher_temperature": 0.04}
    cases: tuple[tuple[str, str, tuple[int, ...], str, dict[str, Any], dict[str, Any]], ...] = (
        ("mse", "large", large, "dense", {}, {}),
        ("huber", "large", large, "dense", {"delta": 1.0}, {"delta": 0.5}),
        ("smooth_l1", "large", large, "dense", {"beta": 1.0}, {"beta": 0.1}),
        ("log_cosh", "large", large, "dense", {}, {}),
        ("quantile", "large", large, "dense", {"quantile": 0.9}, {"quantile": 0.2}),
        ("general_robust", "large", large, "dense", {"alpha": 1.0, "scale": 0.5}, {"alpha": -2.0}),
        ("total_variation_probability", "large", large, "dense of probabilities", {}, {}),
        ("preference_bce_probability", "large", large, "preference of probabilities", {}, {}),
        ("bce_probability", "large", large, "dense of probabilities", {}, {}),
        ("kl_div", VOCABULARY, TOKENS, "log-probabilities", {}, {}),
        ("nll", VOCABULARY, TOKENS, "classes of log-probabilities", {}, {}),
        ("gaussian_nll", "large", (2**27,), "variances", {}, {"eps": 0.6}),
        ("poisson_nll", "large", large, "counts", {}, {"eps": 0.5}),
        ("soft_margin", "large", large, "signs", {}, {}),
        ("hinge_embedding", "large", large, "signs", {"margin": 1.0}, {"margin": 0.5}),
        ("margin_ranking", "large", (2**27,), "ranking", {"margin": 0.5}, {"margin": 0.25}),
        ("multi_margin", HEAD, (16384, 1000), "classes", {"p": 2, "margin": 1.0}, {"margin": 0.5}),
        ("multilabel_margin", HEAD, (16384, 1000), "lists of classes", {}, {}),
        ("multilabel_soft_margin", "open-images", labels, "multi-label", {}, {}),
        ("zlpr", "open-images", labels, "multi-label", {}, {}),
        ("distribution_balanced", "open-images", labels, "counted multi-label", {"num_samples": 2**20}, {"focal_gamma": 1.0}),
        ("triplet_margin", "embeddings", vectors, "triplets", {"margin": 1.0}, {"margin": 0.5}),
        ("cosine_embedding", "embeddings", vectors, "signed pairs", {"margin": 0.2}, {"margin": 0.1}),
        ("asymmetric", "open-images", labels, "multi-label", {"gamma_neg": 4.0, "gamma_pos": 1.0, "clip": 0.05}, {"gamma_neg": 3.0}),
        ("poly_bce", "open-images", labels, "multi-label", {"epsilon": 2.0}, {"epsilon": 1.0}),
        ("bce_smoothed", "imagenet-21k", many, "classes", {"smoothing": 0.1}, {"smoothing": 0.2}),
        ("quality_focal", "retinanet-800x1344", anchors, "scored", {"beta": 2.0}, {"beta": 1.5}),
        ("varifocal", "retinanet-800x1344", anchors, "scored", {"alpha": 0.75, "gamma": 2.0}, {"gamma": 1.5}),
        ("mal", "retinanet-800x1344", anchors, "scored", {"gamma": 1.5}, {"gamma": 2.0}),
        ("ia_bce", "retinanet-800x1344", anchors, "scored", {"alpha": 0.25, "gamma": 2.0}, {"gamma": 1.5}),
        ("gaussian_focal", "large", large, "heatmap", {"alpha": 2.0, "gamma": 4.0}, {"alpha": 1.5}),
        ("distribution_focal", "gfl-800x1344", (16, 89600, 17), "positions", {}, {}),
        ("distribution_focal", "yolo-640", (8, 33600, 16), "positions", {}, {}),
        ("siglip", CLIP, SIMILARITIES, "nothing", {}, {}),
        ("clip", CLIP, SIMILARITIES, "nothing", mean, {}),
        ("softmax_focal", VOCABULARY, TOKENS, "classes", {"gamma": 2.0}, {"gamma": 1.5}),
        ("poly_ce", VOCABULARY, TOKENS, "classes", {"epsilon": 2.0}, {"epsilon": 1.0}),
        ("asymmetric_single_label", VOCABULARY, TOKENS, "classes", {"gamma_pos": 1.0, "gamma_neg": 4.0, "eps": 0.1}, {"gamma_neg": 3.0}),
        ("generalized_ce", VOCABULARY, TOKENS, "classes", {"q": 0.7}, {"q": 0.5}),
        ("taylor_ce", VOCABULARY, TOKENS, "classes", {"order": 2}, {}),
        ("symmetric_ce", VOCABULARY, TOKENS, "classes", {"alpha": 0.1, "beta": 1.0, "log_zero": -4.0}, {"alpha": 0.5}),
        ("seesaw", "lvis", lvis, "counted classes", {"p": 0.8, "q": 2.0}, {"q": 1.0}),
        ("arcface", "ms1mv2", faces, "cosines", {"margin": 0.5, "scale": 64.0}, {"margin": 0.4}),
        ("cosface", "ms1mv2", faces, "cosines", {"margin": 0.35, "scale": 64.0}, {"margin": 0.4}),
        ("logit_adjusted_ce", "imagenet-21k", many, "class prior", {"tau": 1.0}, {"tau": 0.5}),
        ("selective_log_softmax", VOCABULARY, TOKENS, "classes", {"reduction": "none"}, {"temperature": 0.7}),
        ("kl", VOCABULARY, TOKENS, "teacher", softened, {"temperature": 3.0}),
        ("js", VOCABULARY, TOKENS, "teacher", {"beta": 0.5, "reduction": "batchmean"}, {"beta": 0.3}),
        ("total_variation", VOCABULARY, TOKENS, "distinct teacher", {"reduction": "batchmean"}, {"temperature": 2.0}),
        ("topk_kl", VOCABULARY, TOKENS, "top classes", softened, {"temperature": 3.0}),
        ("dino", "prototypes-65536", (8192, 65536), "centred teacher", teachers, {"student_temperature": 0.2}),
        ("dkd", HEAD, (16384, 1000), "labelled teacher", {"alpha": 1.0, "beta": 8.0, "temperature": 4.0}, {"beta": 4.0}),
        ("channel_wise_kl_div", SEGMENTATION, MAPS, "teacher", {"temperature": 4.0}, {"temperature": 2.0}),
        ("boundary", SEGMENTATION, MAPS, "distance maps", {}, {}),
        ("dice", SEGMENTATION, MAPS, "classes", mean, {}),
        ("jaccard", SEGMENTATION, MAPS, "classes", mean, {}),
        ("tversky", SEGMENTATION, MAPS, "classes", {"alpha": 0.3, "beta": 0.7} | mean, {"alpha": 0.5}),
        ("focal_tversky", SEGMENTATION, MAPS, "classes", {"alpha": 0.3, "beta": 0.7, "gamma": 0.75} | mean, {"gamma": 0.5}),
        ("dice_ce", SEGMENTATION, MAPS, "classes", {"lambda_dice": 1.0, "lambda_ce": 1.0} | mean, {"lambda_ce": 0.5}),
        ("generalized_dice", SEGMENTATION, MAPS, "classes", mean, {}),
        ("mcc", SEGMENTATION, MAPS, "classes", mean, {}),
    )
    for loss, use, shape, inputs, options, other in cases:
        for dtype in DTYPES:
            yield Case("losses", loss, use, shape, dtype, inputs, "", {"reduction": "sum"} | options, other, loss in WHOLE)
    for dtype in DTYPES:
        yield Case("losses", "kl", VOCABULARY, TOKENS, dtype, "teacher", "reverse", softened | {"reverse": True})
        entropy = {"outputs": ("entropy",), "reduction": "none"}
        yield Case("losses", "selective_log_softmax", VOCABULARY, TOKENS, dtype, "classes", "with entropy", entropy)
    for loss in ("iou", "giou", "diou", "ciou", "eiou", "siou", "box_l1", "box_smooth_l1"):
        beta = loss == "box_smooth_l1"
        options, other = ({"beta": 1.0}, {"beta": 0.5}) if beta else ({}, {})
        yield Case("losses", loss, "box-pairs", (2**22, 4), FP32, "boxes", "", {"reduction": "sum"} | options, other)
    for loss in ("probiou", "gwd", "kld", "kfiou", "rotated_iou"):
        yield Case("losses", loss, "rotated-box-pairs", (2**22, 5), FP32, "rotated", "", {"reduction": "sum"})
    yield Case("losses", "iou", "box-pairs", (2**22, 4), FP32, "boxes", "log", {"reduction": "sum", "log": True})


def _batches() -> Iterable[Case]:
    """Return losses in which the samples of a batch depend on one another."""
    hard = {"threshold": 0.7, "min_kept": 100_000}
    cases: tuple[tuple[str, str, tuple[int, ...], str, dict[str, Any], dict[str, Any]], ...] = (
        ("two_way", "open-images", (4096, 9605), "multi-label", {"tp": 4.0, "tn": 1.0}, {"tp": 2.0}),
        ("jsd", "augmix", (3 * 8192, 1000), "clean and augmented", {"num_splits": 3, "alpha": 12.0, "smoothing": 0.1}, {}),
        ("load_balancing", "qwen3-30b-router", (48 * 16384, 128), "router", {"top_k": 8, "z_loss": 1e-3}, {"z_loss": 1e-2}),
        ("ohem_ce", SEGMENTATION, MAPS, "easy and hard classes", hard, {"threshold": 0.6}),
        ("lovasz_softmax", SEGMENTATION, MAPS, "classes", {}, {}),
        ("lovasz_hinge", "masks-512", (32, 512, 512), "mask", {"per_image": True}, {}),
        ("dist", HEAD, (16384, 1000), "teacher", {"beta": 1.0, "gamma": 1.0, "temperature": 4.0}, {"beta": 2.0}),
        ("silog", "depths-1024", (16, 1, 1024, 1024), "depths", {"lambd": 0.5}, {"lambd": 0.85}),
        ("koleo", "features-8192", (8192, 1024), "near rows", {}, {}),
        ("vicreg", "projections-2048", (2 * 2048, 8192), "two halves", {}, {}),
        ("barlow_twins", "projections-2048", (2 * 2048, 8192), "two halves", {}, {}),
    )
    for loss, use, shape, inputs, options, other in cases:
        for dtype in DTYPES:
            yield Case("losses", loss, use, shape, dtype, inputs, "", options, other, whole=True)


def _variants() -> Iterable[Case]:
    shape = (8192, 32000)
    for variant, inputs, options, other in (
        ("label smoothing", "classes", SMOOTHING, {"label_smoothing": 0.2}),
        ("class weights", "class weights", {}, {}),
        ("soft targets", "probabilities", {}, {}),
        ("mixup pair", "pair", {"lam": 0.7}, {"lam": 0.4}),
        ("ignored rows", "ignored", {}, {}),
        ("per row", "classes", {"reduction": "none"}, {}),
    ):
        yield Case("variants", "ce", VOCABULARY, shape, BF16, inputs, variant, options, other)


def _small() -> Iterable[Case]:
    yield Case("small", "ce", "classifier", (256, 1000), FP32, "classes")
    yield Case("small", "ce", "classifier", (256, 1000), FP32, "classes", "label smoothing", SMOOTHING, {"label_smoothing": 0.2})
    yield Case("small", "ce", "digits", (64, 10), FP32, "classes")
    yield Case("small", "focal", "detr", (8, 900, 256), FP32, "dense", options=FOCAL, other={"gamma": 1.5, "alpha": 0.4})


def _scaling() -> Iterable[Case]:
    for rows in (16, 64, 256, 1024, 4096, 16384):
        yield Case("scaling", "ce", "over-N", (rows, 32000), BF16, "classes", "over-N")
    for classes in (64, 256, 1000, 4096, 16384, 65536, 262144):
        yield Case("scaling", "ce", "over-V", (4096, classes), BF16, "classes", "over-V")
    for anchors in (1000, 8000, 64000, 512000, 2000000):
        yield Case("scaling", "focal", "over-n", (anchors, 80), FP32, "anchors", "over-n", FOCAL)


def _linear() -> Iterable[Case]:
    llama, several, wide = (8192, 4096, 128256), (8, 1024, 2048, 128256), (4096, 1024, 21841)
    gemma, qwen = (8192, 2304, 256000), (8192, 1024, 151936)
    distilled, tokens = (8192, 4096, 151936), "selective_log_softmax"
    for loss, use, shape, inputs, variant, options in (
        ("ce", "llama3-8b", llama, "classes", "", {}),
        ("ce", "gemma2-2b", gemma, "classes", "", {}),
        ("ce", "qwen3-0.6b", qwen, "classes", "", {}),
        ("ce", "llama3-8b", llama, "half ignored", "half ignored", {}),
        (tokens, "llama3-8b", llama, "tokens", "with entropy", {}),
        (tokens, "gemma2-2b", gemma, "tokens", "with entropy", {}),
        (tokens, "qwen3-0.6b", qwen, "tokens", "with entropy", {}),
        (tokens, "llama3-8b", llama, "tokens without gradient", "with entropy, forward only", {}),
        (tokens, "gemma2-2b", gemma, "tokens without gradient", "with entropy, forward only", {}),
        (tokens, "qwen3-0.6b", qwen, "tokens without gradient", "with entropy, forward only", {}),
        ("dpo", "llama3-1b", several, "pairs", "", {}),
        ("grpo", "llama3-1b", several, "rollouts", "", {}),
        ("focal", "imagenet-21k", wide, "classes", "class index", FOCAL),
        ("bce", "imagenet-21k", wide, "dense", "dense", {}),
        ("ce", "imagenet-21k", wide, "classes", "", {}),
        ("kl", "qwen3-8b", distilled, "linear teacher", "a teacher's layer", {}),
        ("kl", "qwen3-8b", distilled, "teacher", "a teacher's logits", {}),
    ):
        yield Case("linear", loss, use, shape, BF16, inputs, variant, options)


def _features() -> Iterable[Case]:
    """Return contrastive losses of features; the matrix of the larger batch alone takes 8 GiB. Of two views there are twice as many."""
    for size, use in ((16384, "clip-16384"), (65536, "clip-65536")):
        for loss in ("info_nce", "clip_features", "siglip_features"):
            yield Case("features", loss, use, (size, 512, size), BF16, "features")
    yield Case("features", "info_nce_labels", "features-8192", (8192, 512, 8192), BF16, "labelled features")
    yield Case("features", "info_nce_decoupled", "features-8192", (8192, 512, 8192), BF16, "features")
    yield Case("features", "gist_embed", "features-8192", (8192, 512, 8192), BF16, "guided features")
    for size, use in ((8192, "views-8192"), (32768, "views-32768")):
        yield Case("features", "nt_xent", use, (size, 512, size), BF16, "views")
        for loss in ("supcon", "multi_similarity", "circle"):
            yield Case("features", loss, use, (size, 512, size), BF16, "labelled views")
    yield Case("features", "proxy_anchor", "online-products", (11318, 512, 8192), BF16, "proxies and features")


def _exact() -> Iterable[Case]:
    """Return cross entropies whose logits have a standard deviation of 32, at which rounding them shows."""
    for shape, use in (
        ((8192, 4096, 128256), "llama3-8b"),
        ((2048, 4096, 128256), "llama3-8b"),
        ((4096, 2048, 32000), "llama2"),
        ((8192, 2048, 50304), "gpt2"),
        ((16384, 2048, 128256), "llama3-1b"),
        ((1024, 1024, 32000), "llama2"),
        ((8192, 5120, 151936), "qwen3-14b"),
        ((8192, 1024, 151936), "qwen3-0.6b"),
    ):
        yield Case("exact", "ce", use, shape, BF16, "large logits")


def _objectives() -> Iterable[Case]:
    """Return objectives of the log-probabilities of tokens, and losses with a weight a token or a hard part."""
    several, rows = (8, 1024, 2048, 128256), (8192, 2048, 128256)
    for loss, shape, inputs in (
        ("grpo_on_policy", several, "rollouts"),
        ("grpo", several, "rollouts"),
        ("gspo", several, "rollouts"),
        ("dpo", several, "pairs"),
        ("weighted_ce", rows, "tokens"),
        ("hard_kl", rows, "labelled linear teacher"),
        ("hard_js", rows, "labelled linear teacher"),
    ):
        yield Case("objectives", loss, "llama3-1b", shape, BF16, inputs)


CASES: tuple[Case, ...] = (
    *_table(),
    *_losses(),
    *_batches(),
    *_variants(),
    *_small(),
    *_scaling(),
    *_linear(),
    *_features(),
    *_exact(),
    *_objectives(),
)


class UnknownNameError(ValueError):
    """A name or glob that matches none of the choices."""

    def __init__(self, what: str, got: str, choices: Iterable[str]) -> None:
        self.what, self.got, self.choices = what, got, sorted(set(choices))
        super().__init__(f"{what}: {got!r} is not known. Choices: {', '.join(self.choices)}")


def matching(what: str, patterns: Sequence[str], choices: Iterable[str]) -> set[str]:
    """Return the choices that match a name or glob; all of them if there are no patterns.

    Raises:
        UnknownNameError: a pattern matches none.
    """
    choices = set(choices)
    if not patterns:
        return choices
    found: set[str] = set()
    for pattern in patterns:
        fits = {c for c in choices if c == pattern or fnmatch.fnmatchcase(c, pattern)}
        if not fits:
            raise UnknownNameError(what, pattern, choices)
        found |= fits
    return found


def select(suite: Sequence[str] = (), loss: Sequence[str] = (), shape: Sequence[str] = (), dtype: Sequence[str] = ()) -> list[Case]:
    """Return the cases that match every filter, in their order. A shape is given by its size (8192x32000) or its use (retinanet*).

    Raises:
        UnknownNameError: a filter matches no case.
    """
    cases = [c for c in CASES if c.suite in matching("suite", suite, SUITES)]
    losses = matching("loss", loss, {c.loss for c in cases})
    shapes = matching("shape", shape, {name for c in cases for name in (c.size, c.use)})
    dtypes = matching("dtype", dtype, DTYPES)
    chosen = [c for c in cases if c.loss in losses and {c.size, c.use} & shapes and c.dtype in dtypes]
    if not chosen:
        wanted = ", ".join(f"{n}={','.join(v)}" for n, v in (("loss", loss), ("shape", shape), ("dtype", dtype)) if v)
        raise UnknownNameError("no case has all of it", wanted, {c.key for c in cases})
    return chosen
