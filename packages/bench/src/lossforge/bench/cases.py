"""What is measured: losses on realistic shapes. Plain data, read without torch, so that a wrong name is answered at once."""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FP32, BF16 = "fp32", "bf16"
DTYPES = (FP32, BF16)
SUITES = ("table", "losses", "variants", "small", "scaling", "linear", "precision")
FUSED = ("linear", "precision")
"""Suites of losses fused with the linear layer that gives their logits: shapes are (…, hidden, classes)."""
CONTENDERS = {
    "lossforge": "ours as it is called",
    "lossforge-backward": 'gradient="backward": the gradient is computed when backward asks for it',
    "lossforge-inplace": "inplace=True: the gradient takes the memory of the logits",
    "lossforge-weight": 'accumulate="weight": the gradient of a layer\'s weight is summed in its own dtype',
    "lossforge-skip": "skip_ignored=True: ignored rows are left out of a layer's products",
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
}
CPU_ELEMENTS = 2**18
"""Of a case on a machine without a GPU."""


@dataclass(frozen=True)
class Case:
    """A loss on one shape and dtype.

    loss: its name in lossforge.losses.registry, contenders.UNREGISTERED or linear.losses. use: what has that shape.
    inputs: how lossforge.bench.inputs, or linear.inputs, makes targets and weights.
    variant: what differs from the plain loss. options: keyword arguments of the loss. other: other values of some of them, with which a
    second call should compile nothing anew. whole: samples do not add up to the loss, so that it is judged as it is, not part by part.
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
        """A name that no other case of the suite has."""
        return " ".join(filter(None, (self.loss, self.variant, self.size, self.dtype)))

    def cut(self, elements: int) -> "Case":
        """The case with leading dimensions shortened to at most `elements`, for a machine without a GPU."""
        shape = list(self.shape)
        for d in range(len(shape) if len(shape) == 1 else len(shape) - 1):
            if d != 1 or len(shape) != 4 or self.suite in FUSED:  # (N, C, H, W) keeps its classes
                least = 2 if self.inputs == "pairs" and d == 0 else 1
                shape[d] = max(least, min(shape[d], shape[d] * elements // math.prod(shape)))
        return replace(self, shape=tuple(shape))


SMOOTHING: dict[str, Any] = {"label_smoothing": 0.1}
FOCAL: dict[str, Any] = {"alpha": 0.25, "gamma": 2.0, "reduction": "sum"}
OVERLAP = ("dice", "jaccard", "tversky", "focal_tversky", "dice_ce")
WHOLE = ("siglip", "clip", *OVERLAP)
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
    """Every loss of the registry that the table does not have, and others, where its floor is long enough to measure."""
    anchors, large, labels, many = (16, 120087, 80), (2**28,), (4096, 9605), (4096, 21841)
    softened = {"temperature": 2.0, "reduction": "batchmean"}
    mean = {"reduction": "mean"}
    cases: tuple[tuple[str, str, tuple[int, ...], str, dict[str, Any], dict[str, Any]], ...] = (
        ("mse", "large", large, "dense", {}, {}),
        ("huber", "large", large, "dense", {"delta": 1.0}, {"delta": 0.5}),
        ("smooth_l1", "large", large, "dense", {"beta": 1.0}, {"beta": 0.1}),
        ("preference_bce_probability", "large", large, "preference of probabilities", {}, {}),
        ("bce_probability", "large", large, "dense of probabilities", {}, {}),
        ("kl_div", VOCABULARY, TOKENS, "log-probabilities", {}, {}),
        ("nll", VOCABULARY, TOKENS, "classes of log-probabilities", {}, {}),
        ("asymmetric", "open-images", labels, "multi-label", {"gamma_neg": 4.0, "gamma_pos": 1.0, "clip": 0.05}, {"gamma_neg": 3.0}),
        ("poly_bce", "open-images", labels, "multi-label", {"epsilon": 2.0}, {"epsilon": 1.0}),
        ("bce_smoothed", "imagenet-21k", many, "classes", {"smoothing": 0.1}, {"smoothing": 0.2}),
        ("quality_focal", "retinanet-800x1344", anchors, "scored", {"beta": 2.0}, {"beta": 1.5}),
        ("varifocal", "retinanet-800x1344", anchors, "scored", {"alpha": 0.75, "gamma": 2.0}, {"gamma": 1.5}),
        ("distribution_focal", "gfl-800x1344", (16, 89600, 17), "positions", {}, {}),
        ("distribution_focal", "yolo-640", (8, 33600, 16), "positions", {}, {}),
        ("siglip", CLIP, SIMILARITIES, "nothing", {}, {}),
        ("clip", CLIP, SIMILARITIES, "nothing", mean, {}),
        ("softmax_focal", VOCABULARY, TOKENS, "classes", {"gamma": 2.0}, {"gamma": 1.5}),
        ("poly_ce", VOCABULARY, TOKENS, "classes", {"epsilon": 2.0}, {"epsilon": 1.0}),
        ("asymmetric_single_label", VOCABULARY, TOKENS, "classes", {"gamma_pos": 1.0, "gamma_neg": 4.0, "eps": 0.1}, {"gamma_neg": 3.0}),
        ("generalized_ce", VOCABULARY, TOKENS, "classes", {"q": 0.7}, {"q": 0.5}),
        ("logit_adjusted_ce", "imagenet-21k", many, "class prior", {"tau": 1.0}, {"tau": 0.5}),
        ("selective_log_softmax", VOCABULARY, TOKENS, "classes", {"reduction": "none"}, {"temperature": 0.7}),
        ("kl", VOCABULARY, TOKENS, "teacher", softened, {"temperature": 3.0}),
        ("js", VOCABULARY, TOKENS, "teacher", {"beta": 0.5, "reduction": "batchmean"}, {"beta": 0.3}),
        ("total_variation", VOCABULARY, TOKENS, "distinct teacher", {"reduction": "batchmean"}, {"temperature": 2.0}),
        ("topk_kl", VOCABULARY, TOKENS, "top classes", softened, {"temperature": 3.0}),
        ("dice", SEGMENTATION, MAPS, "classes", mean, {}),
        ("jaccard", SEGMENTATION, MAPS, "classes", mean, {}),
        ("tversky", SEGMENTATION, MAPS, "classes", {"alpha": 0.3, "beta": 0.7} | mean, {"alpha": 0.5}),
        ("focal_tversky", SEGMENTATION, MAPS, "classes", {"alpha": 0.3, "beta": 0.7, "gamma": 0.75} | mean, {"gamma": 0.5}),
        ("dice_ce", SEGMENTATION, MAPS, "classes", {"lambda_dice": 1.0, "lambda_ce": 1.0} | mean, {"lambda_ce": 0.5}),
    )
    for loss, use, shape, inputs, options, other in cases:
        for dtype in DTYPES:
            yield Case("losses", loss, use, shape, dtype, inputs, "", {"reduction": "sum"} | options, other, loss in WHOLE)
    for dtype in DTYPES:
        yield Case("losses", "kl", VOCABULARY, TOKENS, dtype, "teacher", "reverse", softened | {"reverse": True})
        entropy = {"return_entropy": True, "reduction": "none"}
        yield Case("losses", "selective_log_softmax", VOCABULARY, TOKENS, dtype, "classes", "with entropy", entropy)
    for loss in ("iou", "giou", "diou", "ciou", "eiou", "box_l1", "box_smooth_l1"):
        beta = loss == "box_smooth_l1"
        options, other = ({"beta": 1.0}, {"beta": 0.5}) if beta else ({}, {})
        yield Case("losses", loss, "box-pairs", (2**22, 4), FP32, "boxes", "", {"reduction": "sum"} | options, other)


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
    distilled, tokens = (8192, 4096, 151936), "selective_log_softmax"
    for loss, use, shape, inputs, variant, options in (
        ("ce", "llama3-8b", llama, "classes", "", {}),
        ("ce", "gemma2-2b", (8192, 2304, 256000), "classes", "", {}),
        ("ce", "qwen3-0.6b", (8192, 1024, 151936), "classes", "", {}),
        ("ce", "llama3-8b", llama, "half ignored", "half ignored", {}),
        (tokens, "llama3-8b", llama, "tokens", "with entropy", {}),
        (tokens, "llama3-8b", llama, "tokens without gradient", "with entropy, forward only", {}),
        ("dpo", "llama3-1b", several, "pairs", "", {}),
        ("grpo", "llama3-1b", several, "rollouts", "", {}),
        ("focal", "imagenet-21k", wide, "classes", "class index", FOCAL),
        ("bce", "imagenet-21k", wide, "dense", "dense", {}),
        ("ce", "imagenet-21k", wide, "classes", "", {}),
        ("kl", "qwen3-8b", distilled, "linear teacher", "a teacher's layer", {}),
        ("kl", "qwen3-8b", distilled, "teacher", "a teacher's logits", {}),
    ):
        yield Case("linear", loss, use, shape, BF16, inputs, variant, options)


def _precision() -> Iterable[Case]:
    """Cross entropy fused with its layer in more and more chunks."""
    for classes in (32000, 262144):
        for chunks in (1, 2, 4, 16, 64):
            options = {"chunk": 2048 // chunks}
            yield Case("precision", "ce", "chunks", (2048, 512, classes), BF16, "classes", f"{chunks} chunks", options)


CASES: tuple[Case, ...] = (*_table(), *_losses(), *_variants(), *_small(), *_scaling(), *_linear(), *_precision())


class UnknownNameError(ValueError):
    """A name or glob that fits none of the choices."""

    def __init__(self, what: str, got: str, choices: Iterable[str]) -> None:
        self.what, self.got, self.choices = what, got, sorted(set(choices))
        super().__init__(f"{what}: {got!r} is not known. Choices: {', '.join(self.choices)}")


def matching(what: str, patterns: Sequence[str], choices: Iterable[str]) -> set[str]:
    """The choices that a name or glob fits; all of them without patterns.

    Raises:
        UnknownNameError: a pattern fits none.
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
    """The cases that every filter lets through, in their order. A shape is named by its size (8192x32000) or its use (retinanet*).

    Raises:
        UnknownNameError: a filter fits no case.
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
