"""Compile every kernel variant that the losses launch, for GPUs that need not be there. test_ahead_of_time.py runs this on its own.

The interpreter accepts much that the compiler refuses. Here the kernels are real: the host code runs on CPU tensors as far as
each launch, which is recorded with the specialisation that Triton's own launcher would choose, and compiled instead of started.
"""

import functools
import inspect
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from lossforge.kernels.call import Head
from lossforge.kernels.classes.calls import DivergenceCall, RowwiseCall
from lossforge.kernels.classes.divergence import launch as divergence_launch
from lossforge.kernels.classes.rowwise import launch as row_launch
from lossforge.kernels.features import sinkhorn
from lossforge.kernels.linear import launch as linear_launch
from lossforge.kernels.math import hold
from lossforge.kernels.plans import PLANS
from lossforge.kernels.tiles import product_tiles
from lossforge.losses import (
    CrossEntropyOutput,
    LinearTeacher,
    TokenLogps,
    box_iou,
    circle_loss,
    clip_loss,
    clip_loss_from_features,
    complete_box_iou,
    cross_entropy,
    dino_loss,
    dist_loss,
    distance_box_iou,
    dkd_loss,
    fuse_linear,
    generalized_box_iou,
    gist_embed_loss,
    hungarian_assign,
    info_nce_loss,
    jsd_cross_entropy,
    linear_cross_entropy,
    linear_draft_loss,
    linear_js_div,
    linear_kl_div,
    linear_objective,
    load_balancing_loss,
    matching_cost,
    mcc_loss,
    multi_similarity_loss,
    nt_xent_loss,
    prototype_mask_loss,
    proxy_anchor_loss,
    rowwise,
    seesaw_loss,
    selective_log_softmax,
    siglip_loss_from_features,
    sigmoid_focal_loss,
    signed_distance_map,
    sinkhorn_center,
    supervised_contrastive_loss,
    task_aligned_assign,
    two_way_loss,
    zlpr_loss,
)
from lossforge.losses.base import state
from lossforge.losses.definitions.classes import noise_model
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.testing import Sample, offered, samples, third_argument

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOPPER, AMPERE, BLACKWELL = (GPUTarget("cuda", arch, 32) for arch in (90, 80, 100))
SMALL = [GPUTarget("cuda", arch, 32) for arch in (86, 89, 120)]
"""GPUs with half the shared memory, on which the host chooses no kernel that keeps rows or products there."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Variant(NamedTuple):
    """A kernel with all that it is specialised on."""

    kernel: JITFunction
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    def source(self) -> ASTSource:
        made = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return made(self.kernel, self.signature, self.constants, self.attributes)


class Recorder:
    """Takes the place of Triton's launcher: keeps each variant once, under the first call that launched it."""

    def __init__(self) -> None:
        self.variants: dict[str, tuple[str, Variant]] = {}
        self.case = ""
        self.backend = make_backend(HOPPER)
        self.binders: dict[JITFunction, Any] = {}

    def __call__(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, options = self.binders[kernel](*args, **kwargs)
        _, signature, constants, attributes = kernel._pack_args(self.backend, kwargs, bound, specialization, options)
        variant = Variant(kernel, signature, constants, attributes, options)
        self.variants.setdefault(f"{kernel.__name__} {variant.source().hash()} {options}", (self.case, variant))


@rowwise(hyper={"q": 0.7})
@triton.jit
def every_operation(z, q):
    """All of triton.language that a formula may hold, in a row's loss: two of its kernels are written in two languages."""
    a = tl.exp(-z) + tl.exp2(-z) + tl.log(1.0 + z) + tl.log2(2.0 + z) + tl.sqrt(1.0 + z) + tl.sqrt_rn(2.0 + z) + tl.rsqrt(1.0 + z)
    b = tl.sin(z) + tl.cos(q * z) + tl.sigmoid(z) + tl.erf(z) + tl.abs(z - q) + tl.fdiv(z, 1.0 + z) + tl.div_rn(z, 2.0 + z)
    c = tl.maximum(z, q) + tl.minimum(z, 1.0) + tl.where(z > q, z, 0.5 * z) + tl.clamp(z, 0.1, 5.0) + tl.fma(z, z, q)
    return a + b + hold(b) * c + tl.cast(z, tl.float32) + tl.floor(z) + tl.ceil(z) + tl.zeros_like(z)


@rowwise(hyper={"k": 2.0, "a": 0.5}, power="k")
@triton.jit
def of_powers(z, s, k, a):
    """A loss that takes the sum Σ p^k of its row, and perhaps a number of its class."""
    return a * z * s + tl.log(s) / k


ALWAYS = "always:"
"""Names of samples that are compiled on every run begin so: Triton's compiler refused them, or spilled their registers, once."""

MATRICES = {"box_iou": box_iou, "giou_matrix": generalized_box_iou, "diou_matrix": distance_box_iou, "ciou_matrix": complete_box_iou}
MODES: dict[str, dict[str, Any]] = {
    "value": {"reduction": "mean"},
    "forward": {"reduction": "mean", "gradient": "forward"},
    "backward": {"reduction": "mean", "gradient": "backward"},
    "none": {"reduction": "none"},
    "zero": {"reduction": "sum", "gradient": "forward", "empty": "zero", "normalizer": torch.tensor(2.0)},
}


def large(loss: Loss, dtype: torch.dtype) -> Iterator[Sample]:
    """Sizes at which tiles, warps, alignment and integer widths differ from the small samples'. No entry is computed."""
    if loss.template.name == "divergence":
        yield from large_divergence(dtype)
        return
    if loss.template.name == "topk":
        yield from large_topk(dtype)
        return
    if loss.template.name == "elementwise":
        yield Sample("aligned", torch.zeros(64, 64, dtype=dtype), torch.zeros(64, 64, dtype=dtype))
        yield Sample("big tiles", torch.zeros(1).to(dtype).expand(2**11, 2**10), torch.zeros(2**11, dtype=torch.int64))
        yield Sample("several tiles a program", torch.zeros(2**13, 2**11, dtype=dtype), torch.zeros(2**13, dtype=torch.int64))
        yield Sample("64-bit", torch.zeros(1).to(dtype).expand(2**16, 2**15, 2), torch.zeros(1).to(dtype).expand(2**16, 2**15, 2))
        yield Sample("pixels", torch.zeros(2, 32, 16, 16, dtype=dtype), torch.zeros(2, 16, 16, dtype=torch.int64), {"dim": 1})
        long, index = torch.zeros(1).to(dtype).expand(64, 21841), torch.zeros(64, dtype=torch.int64)
        yield Sample("always: rows longer than a tile", long, index, {"reduction": "sum"})
        rows = 2**14
        x, names = torch.zeros(rows, 80, dtype=dtype), inspect.signature(loss.definition).parameters
        if "score" in names:
            yield Sample("boxes", x, torch.zeros(rows, dtype=torch.int64), {"score": torch.zeros(rows)})
        if "negative_only" in names:
            yield Sample("64-bit", torch.zeros(1).to(dtype).expand(2**14, 2**18), None)
            yield Sample("pairs", torch.zeros(2**10, 2**12, dtype=dtype), None, {"offset": 2**10})
        return
    if loss.template.name == "boxes":
        packed, fields = torch.zeros(4096, 4, dtype=dtype), torch.zeros(4, 4096, dtype=dtype).t()
        one = torch.zeros(1).to(dtype)
        yield Sample("aligned", packed, packed.clone())
        yield Sample("both differentiated", packed, packed.clone().requires_grad_())
        yield Sample("aligned, coordinates first", fields, packed)
        yield Sample("many tiles a program", torch.zeros(2**21, 4, dtype=dtype), torch.zeros(2**21, 4, dtype=dtype))
        yield Sample("64-bit", one.expand(2**30, 4), one.expand(2**30, 4))
        return
    if loss.template.name == "rotated":
        packed, one = torch.ones(4096, 5, dtype=dtype), torch.zeros(1).to(dtype)
        yield Sample("aligned", packed, packed.clone())
        yield Sample("both differentiated", packed, packed.clone().requires_grad_())
        yield Sample("64-bit", one.expand(2**30, 5), one.expand(2**30, 5))
        return
    if loss.template.name == "pointwise":
        yield from large_pointwise(loss, dtype)
        return
    if loss.template.name == "vectors":
        third = third_argument(loss)
        for rows, count in ((64, 16), (4096, 128), (64, 768), (64, 1001), (64, 2048), (64, 8192)):
            x = torch.ones(rows, count, dtype=dtype)
            leaves = [x.clone().requires_grad_() for _ in range(2)]
            last = torch.ones(rows) if third == "target" else leaves[1]
            yield Sample(f"{count} elements", x, x.clone(), {third: last.detach()})
            yield Sample(f"{count} elements, all differentiated", x, leaves[0], {third: last})
        if dtype == torch.float16:  # untouched pages take no memory
            far = torch.empty(2**31, dtype=dtype).as_strided((64, 16), (1, 2**27))
            yield Sample("64-bit", far, far, {third: torch.ones(64) if third == "target" else far})
        return
    if loss.template.name in ("margins", "margin_lists"):
        lists = loss.template.name == "margin_lists"
        for classes in (16, 1000, 4096, *((16384,) if lists else (10_000, 128_256))):
            x = torch.zeros(64, classes, dtype=dtype)
            yield Sample(f"{classes} classes", x, torch.zeros(x.shape if lists else 64, dtype=torch.int64))
        if dtype == torch.float16:  # untouched pages take no memory
            far = torch.empty(2**31, dtype=dtype).as_strided((64, 16), (1, 2**27))
            yield Sample("64-bit", far, torch.zeros(far.shape if lists else 64, dtype=torch.int64))
        return
    if loss.template.name == "overlap":
        if loss.formula != "dice":  # the others differ in what a region's few numbers become
            return
        for classes in (1, 2, 24, 64, 150, 512):
            x, index = torch.zeros(2, classes, 64, 128, dtype=dtype), torch.zeros(2, 64, 128, dtype=torch.int64)
            if classes > 1:  # of one class a softmax is refused
                yield Sample(f"{classes} classes", x, index)
                yield Sample(f"{classes} classes, channels last", x.to(memory_format=torch.channels_last), index.byte(), {"batch": True})
                yield Sample(f"{classes} classes, dense", x, x)
            yield Sample(f"{classes} classes, sigmoid", x, index, {"activation": "sigmoid"})
            yield Sample(f"{classes} classes, sigmoid, dense", x, x, {"activation": "sigmoid"})
        if dtype == torch.float16:  # untouched pages take no memory
            far = torch.empty(2**31 + 2**12, dtype=dtype).as_strided((2, 3, 64), (64, 2**30, 1))
            yield Sample("64-bit", far, torch.zeros(2, 64, dtype=torch.int64))
            yield Sample("64-bit, dense", far.unflatten(2, (8, 8))[..., :4], torch.zeros(2, 3, 8, 4), {"activation": "sigmoid"})
        return
    if loss.template.name == "lovasz":
        hinge = loss.name == "lovasz_hinge"
        for classes in (1,) if hinge else (2, 21, 150):
            x, index = torch.zeros(2, classes, 64, 128, dtype=dtype), torch.zeros(2, 64, 128, dtype=torch.int64)
            yield Sample(f"{classes} classes", x, index)
            yield Sample(f"{classes} classes, channels last", x.to(memory_format=torch.channels_last), index.byte(), {"per_image": True})
        if dtype == torch.float16:  # untouched pages take no memory
            far = torch.empty(2**31 + 2**12, dtype=dtype).as_strided((2, 3, 64), (64, 2**30, 1))
            yield Sample("64-bit", far[:, :1] if hinge else far, torch.zeros(2, 64, dtype=torch.int64))
        return
    if loss.template.name != "rowwise":
        return
    sizes = (16, 1000, 4096, 8192, 9000, 32000, 50257, 65536, 128256)
    for classes in sizes if loss.name == "ce" else sizes[::4]:  # the others' kernels differ from its by a row's formula
        yield Sample(f"{classes} classes", torch.zeros(32, classes, dtype=dtype), torch.zeros(32, dtype=torch.int64))
    wide = torch.zeros(4, 32000, dtype=dtype)
    index = torch.zeros(4, dtype=torch.int64)
    names = inspect.signature(loss.definition).parameters
    outputs = {"outputs": CrossEntropyOutput.names[1:]} if "outputs" in names else {}
    yield Sample("all outputs", torch.zeros(32, 128, dtype=dtype), torch.zeros(32, dtype=torch.int64), {**outputs, "z_loss": 1e-4})
    yield Sample("all outputs, many classes", wide, index, {**outputs, "z_loss": 1e-4})
    if loss.name == "ldam":
        for x in (torch.zeros(32, 128, dtype=dtype), wide):
            yield Sample("margins", x, torch.zeros(len(x), dtype=torch.int64), {"margin": torch.zeros(x.shape[1])})
    if "log_prior" in names:
        for x in (torch.zeros(32, 128, dtype=dtype), wide, wide[:, :31999].contiguous(), torch.zeros(2, 21, 32, 32, dtype=dtype)):
            rows = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.int64)
            yield Sample(f"log prior, {x.shape[1]} classes", x, rows, {"log_prior": torch.zeros(x.shape[1]), "label_smoothing": 0.1})
        return
    yield Sample("all options, many classes", wide, index, {"weight": wide[0], "label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4})
    yield Sample("pair, many classes", wide, index, {"target_b": index, "lam": 0.5, "label_smoothing": 0.1, "z_loss": 1e-4})
    yield Sample("pair, classes that do not fit", torch.zeros(4, 150_001, dtype=dtype), index, {"target_b": index, "lam": 0.5})
    yield Sample("probabilities, many classes, weights", wide, wide, {"weight": wide[0], "label_smoothing": 0.1})
    for classes in (16, 32, 64, 128) if loss.name == "ce" else ():
        index = torch.zeros(32, dtype=torch.int64)
        pair = {"target_b": index, "lam": 0.5, "gradient": "backward", "reduction": "mean"}
        yield Sample(f"{ALWAYS} pair, {classes} classes", torch.zeros(32, classes, dtype=dtype), index, pair)
    for classes in (1, 2, 21, 150):
        x, pixels = torch.zeros(2, classes, 32, 32, dtype=dtype), torch.zeros(2, 32, 32, dtype=torch.int64)
        yield Sample(f"{ALWAYS if classes < 3 else ''} pixels, {classes} classes", x, pixels)
        yield Sample(f"pixels, {classes} classes, smoothing", x, pixels, {"label_smoothing": 0.1, "weight": x[0, :, 0, 0].contiguous()})
        yield Sample(f"pixels, {classes} classes, probabilities", x, x)


def large_pointwise(loss: Loss, dtype: torch.dtype) -> Iterator[Sample]:
    third, one = third_argument(loss), torch.ones(1).to(dtype)
    for name, x in (
        ("aligned", torch.ones(64, 64, dtype=dtype)),
        ("several tiles a program", torch.ones(2**13, 2**11, dtype=dtype)),
        ("64-bit", one.expand(2**16, 2**15, 2)),
    ):
        yield Sample(name, x, x, {third: x} if third else {})
        if name != "64-bit" and "gradient of target" not in loss.without:
            leaf = x.clone().requires_grad_()
            yield Sample(f"{name}, all differentiated", x, leaf, {third: leaf.detach().requires_grad_()} if third else {})


def large_divergence(dtype: torch.dtype) -> Iterator[Sample]:
    """As large, for a teacher of the same dtype and of another, with labels and weights; classes that fit a tile and that do not."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    for classes in (16, 1000, 8192, 8200, 20000, 32000, 50257, 57344):
        name = f"{ALWAYS if classes == 8200 else ''} {classes} classes"
        yield Sample(name, torch.zeros(32, classes, dtype=dtype), torch.zeros(32, classes, dtype=dtype))
    for classes in (1000, 32000):
        x, teacher = torch.zeros(32, classes, dtype=dtype), torch.zeros(32, classes, dtype=other)
        yield Sample(f"{classes} classes, another dtype", x, teacher, {"weight": torch.ones(32)})
    forward = {"gradient": "forward", "reduction": "mean"}
    for classes in (10000, 20000, 28672, 32000) if dtype == torch.float32 else (9000, 20000, 32000, 57344):  # that stay on chip
        name = f"{ALWAYS} {classes} classes, resident"
        yield Sample(name, torch.zeros(4, classes, dtype=dtype), torch.zeros(4, classes, dtype=dtype), forward)
    wide = torch.zeros(4, 32000, dtype=dtype)
    yield Sample("labels, many classes", wide, wide.clone(), {"labels": torch.zeros(4, dtype=torch.int64)})
    yield Sample("mask, many classes", wide, wide.clone(), {"weight": torch.ones(4, dtype=torch.bool)})
    for classes in (21, 150):
        x, pixels = torch.zeros(2, classes, 32, 32, dtype=dtype), torch.zeros(2, 32, 32, dtype=torch.int64)
        yield Sample(f"pixels, {classes} classes", x, x.clone(), {"labels": pixels})
        yield Sample(f"pixels, {classes} classes, another dtype", x, x.to(other), {"weight": torch.ones(2, 32, 32)})


def large_topk(dtype: torch.dtype) -> Iterator[Sample]:
    for classes, k in ((16, 4), (1000, 10), (8192, 20), (32000, 64), (50257, 256)):
        x, values, index = (
            torch.zeros(32, classes, dtype=dtype),
            torch.full((32, k), -9.0, dtype=dtype),
            torch.zeros(32, k, dtype=torch.int32),
        )
        yield Sample(f"{classes} classes", x, values, {"indices": index})
        yield Sample(f"{classes} classes, capped", x, values, {"indices": index, "softcap": 5.0, "scale": 0.7})
        yield Sample(f"{classes} classes, tail", torch.zeros_like(x), values, {"indices": index.long(), "tail": True})
    for classes in (21, 150):
        x, index = torch.zeros(2, classes, 32, 32, dtype=dtype), torch.zeros(2, 4, 32, 32, dtype=torch.int64)
        values = torch.full(index.shape, -9.0, dtype=dtype)
        yield Sample(f"pixels, {classes} classes", x, values, {"indices": index, "labels": index[:, 0].contiguous()})


def named(extra: dict[str, Any]) -> str:
    """What the call of one of `extras` is called."""
    said = f"with {', '.join(extra)}"
    return f"{ALWAYS} {said}" if {"pos_weight", "alpha"} & set(extra) else said


def extras(loss: Loss, x: Tensor) -> Iterator[dict[str, Any]]:
    """Tensors that the function's signature offers beside the target, by name."""
    names = inspect.signature(loss.definition).parameters
    for name in ("weight", "preference", "pos_weight"):
        if name in names and loss.template.name == "elementwise":
            yield {name: x[:1].detach()}
    if loss.name in ("bce", "focal", "poisson_nll"):  # masks are read in the same way by every loss of these templates
        yield {"mask": torch.ones(x.shape, dtype=torch.bool)}
        yield {"mask": x[:1].detach()}
    if loss.template.name in ("boxes", "rotated"):
        yield {"weight": x[..., 0].detach()}
    if "alpha" in names and loss.template.name == "elementwise" and Tensor in get_args(names["alpha"].annotation):
        yield {"alpha": x[0].detach()}
    if "group_weight" in names:
        yield {"group": torch.zeros(x.shape, dtype=torch.int64), "group_weight": torch.ones(3, dtype=x.dtype)}
        yield {"group": torch.zeros(x.shape[0], 1, dtype=torch.int32), "group_weight": torch.ones(3), "preference": x.detach()}


def in_dtypes(few: bool) -> Iterator[tuple[Loss, torch.dtype]]:
    """Yield each loss with a kernel in every dtype. few: in one dtype, or in both in which kernels of its template are written in Gluon."""
    for loss in [loss for loss in LOSSES.values() if loss.has_kernel]:
        of_gluon = loss.template.name in ("rowwise", "divergence")
        first = zlib.crc32(loss.name.encode()) % 3
        for dtype in DTYPES if not few else DTYPES[:2] if of_gluon else DTYPES[first:][:1]:
            yield loss, dtype


def record(few: bool = False) -> Recorder:
    """Walk the public functions with every kind of argument; the launches are only noted. few: each loss in one dtype."""
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **kwargs: recorder(kernel, *args, **kwargs)
    state.INTERPRETED = True  # CPU tensors go through the kernels
    row_launch.chip = divergence_launch.chip = lambda device: (132, 232448)  # as on an H200: long rows stay on chip
    linear_launch.programs, linear_launch.WORK = lambda device: 132, 0  # so that the product computes the loss
    noise_model._not_negative = lambda var, validate, mask: None  # whose mask of 2³² variances takes 20 s
    for loss, dtype in in_dtypes(few):
        i = zlib.crc32(loss.name.encode())  # its own number, so that a new loss leaves the others their variants
        calls = [*samples(loss, "cpu", dtype), *offered(loss, large(loss, dtype))]
        calls += [Sample(named(e), s.x, s.target, e) for s in calls[:1] for e in extras(loss, s.x)]
        indexed = [s for s in calls if s.name == "class index"]
        calls += [Sample(f"class index {named(e)}", s.x, s.target, e) for s in indexed for e in extras(loss, s.x)]
        for j, sample in enumerate(calls):
            # every sample in float32 and one half dtype, each in one mode; the first of a loss in all: pairs, not the product
            modes = list(MODES)
            chosen = {modes[(i + j + DTYPES.index(dtype)) % 5]} if dtype == torch.float32 or (i + j + DTYPES.index(dtype)) % 2 else set()
            if j == 0:
                chosen = set(modes)
            for mode in sorted(chosen):
                options = {**MODES[mode], **sample.kwargs}
                if options["reduction"] not in loss.reductions:
                    continue
                if loss.name == "dice_ce":  # what a mean over two losses would divide is not defined
                    options.pop("normalizer", None)
                if mode == "none" and "normalizer" in sample.kwargs:
                    continue
                recorder.case = f"{loss.name} {dtype} {sample.name} {mode}"
                x = sample.x.detach().requires_grad_((mode != "value" or "gradient" in sample.kwargs) and sample.name != "64-bit")
                differentiated(loss.function(x, sample.target, **options), x)
    similarities(recorder)
    matrices(recorder)
    assignments(recorder)
    matchings(recorder)
    features(recorder)
    self_distillation(recorder)
    routers(recorder)
    seesaws(recorder)
    prototypes(recorder)
    distances(recorder)
    sums_of_regions(recorder)
    decoupled(recorder)
    relations(recorder)
    label_sets(recorder)
    views(recorder)
    token_weights(recorder)
    temperatures(recorder)
    sums_of_divergences(recorder)
    sharded_rows(recorder)
    linear_losses(recorder)
    formulas_of_rows(recorder)
    return recorder


def formulas_of_rows(recorder: Recorder) -> None:
    """Users' formulas of rows: every operation, a number of each class, sums of powers; in one tile, in several, on chip, and fused."""
    target = torch.zeros(4, dtype=torch.int64)
    for classes, dtype in itertools.product((16, 8192, 32000), DTYPES[:2]):
        recorder.case = f"every_operation {dtype} {ALWAYS} {classes} classes forward"
        x = torch.zeros(4, classes, dtype=dtype, requires_grad=True)
        differentiated(every_operation(x, target), x)
    for classes, mode in itertools.product((16, 32000), ("forward", "backward")):
        x, each = torch.zeros(4, classes, dtype=torch.bfloat16, requires_grad=True), torch.ones(classes)
        recorder.case = f"every_operation {x.dtype} {ALWAYS} numbers of {classes} classes {mode}"
        differentiated(every_operation(x, target, q=each, **MODES[mode]), x)
        recorder.case = f"of_powers {x.dtype} {ALWAYS} {classes} classes {mode}"
        differentiated(of_powers(x, target, a=each, class_bias=each, class_margin=each, **MODES[mode]), x)
        recorder.case = f"of_powers {x.dtype} {ALWAYS} a pair of {classes} classes {mode}"
        pair = {"target_b": target, "lam": torch.ones(4), "weight": each, "z_loss": 0.1}
        differentiated(of_powers(x, target, **pair, **MODES[mode]), x)
    for loss, mode in itertools.product((every_operation, of_powers), ("forward", "backward")):
        x, weight, each = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((300, 128), (1000, 128), (1000,)))
        recorder.case = f"{loss.__name__} {x.dtype} {ALWAYS} fused {mode}"
        last = {next(reversed(loss.hyper)): each}
        differentiated(fuse_linear(loss)(x.requires_grad_(), weight, torch.zeros(300, dtype=torch.int64), **last, **MODES[mode]), x)


def differentiated(out: Any, x: Tensor) -> None:
    if x.requires_grad:
        outs = [out] if isinstance(out, Tensor) else [t for t in out if t is not None and t.requires_grad]
        torch.autograd.grad(outs, x, [torch.ones_like(t) for t in outs])


def similarities(recorder: Recorder) -> None:
    """The contrastive losses: sizes of tiles, alignment, orders of memory, options."""
    shapes = ((64, 64, 0), (37, 50, 1), (1, 1, 0), (2048, 4096, 16))
    for (j, (rows, columns, offset)), (k, dtype) in itertools.product(enumerate(shapes), enumerate(DTYPES)):
        for mode, options in list(MODES.items())[(j + k) % 2 if j else 0 :: 2 if j else 1]:
            recorder.case = f"clip {dtype} {rows}x{columns} {mode}"
            x = torch.zeros(columns, rows, dtype=dtype).T if k == 1 else torch.zeros(rows, columns, dtype=dtype)
            x.requires_grad_(mode != "value")
            differentiated(clip_loss(x, offset, **options, **({"scale": 2.0} if j % 2 else {})), x)


def matrices(recorder: Recorder) -> None:
    """Matrices of pairs of boxes: formats, strides, few and many."""
    for (name, function), dtype in itertools.product(MATRICES.items(), DTYPES):
        few, many = torch.zeros(7, 4, dtype=dtype), torch.zeros(4, 8400, dtype=dtype).t()
        for boxes1, boxes2, fmt in ((many, few, "xyxy"), (few, many, "cxcywh"), (many.contiguous(), few.expand(3, 7, 4), "xyxy")):
            recorder.case = f"{name} {dtype} {fmt} backward"
            leaf = boxes1.detach().requires_grad_()
            differentiated(function(leaf, boxes2.requires_grad_(), fmt=fmt), leaf)


def assignments(recorder: Recorder) -> None:
    """Task-aligned assignment: both styles, rotated boxes, logits with the classes first in memory, few and many classes and choices."""
    cases = itertools.product(("yolo", "tood"), ((80, 10, "ciou"), (5, 1, "iou"), (1203, 40, "giou"), (15, 10, "probiou")), DTYPES)
    for style, (classes, topk, iou), dtype in cases:
        recorder.case = f"task_aligned {dtype} {classes} {topk} {iou} {style}"
        scores = torch.zeros(2, classes, 84, dtype=dtype).mT if style == "yolo" else torch.zeros(2, 84, classes, dtype=dtype)
        width = 5 if iou == "probiou" else 4
        boxes, anchors, targets = torch.zeros(2, 84, width, dtype=dtype), torch.zeros(84, 2), torch.zeros(2, 7, width)
        labels = torch.zeros(2, 7, 1, dtype=torch.int64)
        options = {"topk": topk, "topk2": topk // 10 or 64, "iou": iou, "style": style}
        options |= {"from_logits": style == "yolo", "dense": classes < 1000}
        task_aligned_assign(scores, boxes, anchors, labels, targets, **options)


def matchings(recorder: Recorder) -> None:
    """Costs of DETR's matching and the Hungarian method: few and many images, groups of queries, both formats and orders of memory."""
    for (images, format), dtype in itertools.product(((1, "xyxy"), (16, "cxcywh"), (96, "cxcywh")), DTYPES):
        recorder.case = f"matching {dtype} {images} {format}"
        logits, boxes = torch.zeros(images, 300, 80, dtype=dtype), torch.zeros(images, 300, 4, dtype=dtype)
        labels, targets = torch.zeros(2 * images, dtype=torch.int64), torch.zeros(2 * images, 4)
        matching_cost(logits, boxes, labels, targets, [2] * images, format=format)
        recorder.case = f"hungarian {dtype} {images}"
        cost = torch.zeros(1, 300, 2 * images, dtype=dtype) if images == 1 else torch.zeros(3, 2 * images, 900, dtype=dtype).mT
        hungarian_assign(cost, [2] * images)


def features(recorder: Recorder) -> None:
    """The losses of features: each kind, with gradients of scale and bias, and features that fill a tile and that do not."""
    for (k, dtype), depth in itertools.product(enumerate(DTYPES), (512, 7)):
        a, b = (torch.zeros(n, depth, dtype=dtype, requires_grad=True) for n in (200, 264))
        scale, labels = torch.ones((), requires_grad=k != 1), torch.zeros(200, dtype=torch.int64)
        queue = functools.partial(info_nce_loss, a, a, b, in_batch=False, normalize=False)
        calls = {
            "info_nce": functools.partial(info_nce_loss, a, b, temperature=scale, normalize=False),
            "info_nce_queue": queue,
            **chosen_negatives(a, b, scale, labels),
            "supcon": functools.partial(supervised_contrastive_loss, a, labels, normalize=False),
            "multi_similarity": functools.partial(multi_similarity_loss, a, labels, normalize=False),
            "multi_similarity_mined": functools.partial(multi_similarity_loss, a, labels, epsilon=0.1, normalize=False),
            "circle": functools.partial(circle_loss, a, labels, normalize=False),
            "proxy_anchor": functools.partial(proxy_anchor_loss, a, b, labels, normalize=False),
            "clip_features": functools.partial(clip_loss_from_features, a, b, scale, offset=3),
            "siglip_features": functools.partial(siglip_loss_from_features, a, b, scale, scale),
        }
        for (loss, call), (mode, options) in itertools.product(calls.items(), list(MODES.items())[k % 2 :: 1 if depth == 512 else 3]):
            recorder.case = f"{loss} {dtype} {depth} features {mode}"
            differentiated(call(**options), a)


def chosen_negatives(a: Tensor, b: Tensor, scale: Tensor, labels: Tensor) -> dict[str, Any]:
    """Return calls whose negatives are left out or weighed."""
    pair, beside = (a[:200], b[:200]), {"normalize": False}
    guides = [torch.zeros(200, 40, dtype=a.dtype) for _ in range(2)]
    return {
        "info_nce_equals": functools.partial(info_nce_loss, *pair, temperature=scale, labels=labels, symmetric=True, **beside),
        "info_nce_decoupled": functools.partial(info_nce_loss, *pair, decoupled=True, symmetric=True, **beside),
        "info_nce_hard": functools.partial(info_nce_loss, *pair, hardness=2.0, **beside),
        "nt_xent_decoupled": functools.partial(nt_xent_loss, *pair, decoupled=True, **beside),
        "gist_embed": functools.partial(gist_embed_loss, *pair, *guides, **beside),
        "gist_embed_of_pairs": functools.partial(
            gist_embed_loss, *pair, *guides, contrast_anchors=False, contrast_positives=False, **beside
        ),
    }


def self_distillation(recorder: Recorder) -> None:
    """Sinkhorn-Knopp of scores in both orders of memory; DINO with a centre, of rows in one tile and of longer ones."""
    for dtype in DTYPES:
        recorder.case = f"sinkhorn {dtype} value"
        sinkhorn_center(torch.zeros(200, 1000, dtype=dtype))
        sinkhorn_center(torch.zeros(1001, 200, dtype=dtype).T, iterations=1)
        sinkhorn.of_rows(torch.zeros(200, 1000, dtype=dtype), torch.zeros(1000), 0.05)
        for classes, mode in ((96, "forward"), (65_536, "forward"), (65_537, "backward")):
            recorder.case = f"dino_center {dtype} {classes} classes {mode}"
            x, teacher = torch.zeros(4, classes, dtype=dtype, requires_grad=True), torch.zeros(4, classes, dtype=dtype)
            differentiated(dino_loss(x, teacher, center=torch.zeros(classes), gradient=mode), x)


def routers(recorder: Recorder) -> None:
    """The load balancing of experts: sizes of tiles, masks, orders of memory."""
    for (j, (tokens, experts, top_k)), dtype in itertools.product(
        enumerate(((4096, 8, 2), (300, 60, 4), (70, 256, 8), (9, 4096, 1))), DTYPES
    ):
        for mode in ("value", "forward", "backward"):
            recorder.case = f"load_balancing {dtype} {tokens}x{experts} {mode}"
            x = torch.zeros(experts, tokens, dtype=dtype).T if j == 1 else torch.zeros(tokens, experts, dtype=dtype)
            mask = torch.ones(tokens) if j % 2 else None
            gradient = None if mode == "value" else mode
            x.requires_grad_(mode != "value")
            differentiated(load_balancing_loss(x, top_k, mask, z_loss=1e-3, gradient=gradient), x)


def seesaws(recorder: Recorder) -> None:
    """The logits of the seesaw loss: classes that fit a tile and that do not."""
    for classes, dtype in itertools.product((11, 1204, 9605), DTYPES):
        recorder.case = f"seesaw {dtype} {classes} classes"
        seesaw_loss(torch.zeros(32, classes, dtype=dtype), torch.zeros(32, dtype=torch.int64), torch.ones(classes))


def prototypes(recorder: Recorder) -> None:
    """The masks of prototypes: types of masks and maps of labels, numbers of prototypes."""
    for dtype, count, label in zip(DTYPES, (32, 5, 64), (None, torch.zeros(3, dtype=torch.int64), None), strict=True):
        recorder.case = f"prototype_mask {dtype} {count} backward"
        coefficients, maps = (
            torch.zeros(3, count, dtype=dtype).requires_grad_(),
            torch.zeros(2, count, 40, 48, dtype=dtype).requires_grad_(),
        )
        target = torch.zeros(3, 40, 48, dtype=torch.bool) if label is None else torch.zeros(2, 40, 48, dtype=torch.uint8)
        index = torch.zeros(3, dtype=torch.int64) if count == 64 else None
        prototype_mask_loss(coefficients, maps, target, torch.zeros(3, 4), [2, 1], target_index=index, label=label).backward()


def distances(recorder: Recorder) -> None:
    """The distance transform: its first, middle and last dimension."""
    for shape in ((1, 2, 64, 40), (1, 2, 16, 16, 16)):
        recorder.case = f"distance_transform {torch.float32} {len(shape)} value"
        signed_distance_map(torch.zeros(shape, dtype=torch.bool))


def sums_of_regions(recorder: Recorder) -> None:
    """The sums of regions: activations and targets. Their kernels are those of the overlap template."""
    for dtype, activation in zip(DTYPES, ("softmax", "sigmoid", None), strict=True):
        recorder.case = f"mcc {dtype} {activation} backward"
        x = torch.zeros(2, 5, 32, 32, dtype=dtype).requires_grad_()
        mcc_loss(x, torch.zeros(2, 32, 32, dtype=torch.int64), activation=activation).backward()
    for classes, batch in ((21, True), (600, False)):  # several tiles; a softmax in two sweeps
        recorder.case = f"mcc torch.float32 {classes} classes backward"
        x = torch.zeros(2, classes, 8, 8).requires_grad_()
        mcc_loss(x, torch.zeros(2, classes, 8, 8), batch=batch).backward()


def decoupled(recorder: Recorder) -> None:
    """Decoupled distillation: classes that a tile holds and that it does not, vectors, the gradient of the teacher."""
    for (classes, of_teacher), dtype in itertools.product(((10, True), (1000, False), (5001, True), (100_000, False)), DTYPES):
        recorder.case = f"dkd {dtype} {classes} classes backward"
        x, teacher = torch.zeros(8, classes, dtype=dtype, requires_grad=True), torch.zeros(8, classes, dtype=dtype)
        dkd_loss(x, teacher.requires_grad_(of_teacher), torch.zeros(8, dtype=torch.int64)).backward()


def relations(recorder: Recorder) -> None:
    """Relations of a teacher's softmaxes: several rows in a tile, rows of whole vectors and of others, and the most classes."""
    for classes, dtype in itertools.product((10, 1000, 1001, 4096), DTYPES):
        recorder.case = f"dist {dtype} {classes} classes backward"
        dist_loss(torch.zeros(300, classes, dtype=dtype, requires_grad=True), torch.zeros(300, classes, dtype=dtype)).backward()


def label_sets(recorder: Recorder) -> None:
    """The losses of samples with several labels: sizes of tiles, orders of memory, types of targets."""
    for (rows, classes), (j, dtype) in itertools.product(((300, 20), (300, 80), (16, 5000)), enumerate(DTYPES)):
        for mode in ("value", "forward", "backward"):
            recorder.case = f"zlpr {dtype} {rows}x{classes} {mode}"
            x = torch.zeros(rows, classes, dtype=dtype).requires_grad_(mode != "value")
            target = torch.zeros(rows, classes, dtype=(torch.bool, dtype, torch.int64)[j])
            gradient = None if mode == "value" else mode
            differentiated(zlpr_loss(x, target, "none" if mode == "backward" else "mean", gradient=gradient), x)
            recorder.case = f"two_way {dtype} {rows}x{classes} {mode}"
            differentiated(two_way_loss(x, target, gradient=gradient), x)
            mask = torch.ones(rows, classes, dtype=torch.bool) if j else torch.ones(classes)
            recorder.case = f"zlpr {dtype} {rows}x{classes}, mask {mode}"
            differentiated(zlpr_loss(x, target, gradient=gradient, mask=mask), x)


def views(recorder: Recorder) -> None:
    """The divergence of several views: sizes of tiles."""
    for (rows, splits, classes), dtype in itertools.product(((64, 3, 10), (64, 2, 1000), (16, 3, 21_841)), DTYPES):
        for mode in ("value", "forward", "backward"):
            recorder.case = f"jsd_cross_entropy {dtype} {splits}x{classes} {mode}"
            x = torch.zeros(splits * rows, classes, dtype=dtype).requires_grad_(mode != "value")
            target = torch.zeros(rows, dtype=torch.int64)
            differentiated(jsd_cross_entropy(x, target, splits, gradient=None if mode == "value" else mode), x)


def sums_of_divergences(recorder: Recorder) -> None:
    """Divergences whose statistics are known: rows that would fit a tile, and longer ones of float32 logits."""
    for (loss, hyper), classes in itertools.product(
        (("kl", []), ("js", [0.3]), ("total_variation", []), ("draft_overlap", [])), (1000, 32_000)
    ):
        recorder.case = f"{loss} {torch.float32} {ALWAYS} sums over {classes} of more classes none"
        call = DivergenceCall(loss, *torch.zeros(2, 64, classes), hyper=hyper, reduction="none")
        divergence_launch.sums_of(call, FORMULAS[loss].kernels, torch.zeros(5, 64))
        if loss == "js":
            recorder.case = f"{loss} {torch.float32} {ALWAYS} sums and labels over {classes} of more classes none"
            call = call._replace(labels=torch.zeros(64, dtype=torch.int64), hard_weight=0.5, some_classes=True, temperature=2.0)
            divergence_launch.sums_of(call._replace(logit_scale=0.5), FORMULAS[loss].kernels, torch.zeros(6, 64))
            recorder.case = f"{loss} {torch.float32} {ALWAYS} gradient with labels over {classes} of more classes backward"
            known = None, torch.zeros(6, 64)
            divergence_launch.backward(call, FORMULAS[loss].kernels, known, [torch.ones(64)], [torch.zeros(64, classes)])


def sharded_rows(recorder: Recorder) -> None:
    """Cross entropy of classes that are spread over processes: the rows after the exchange."""
    for name, given in {
        "plain": {},
        "everything": {"z_loss": 0.1, "softcap": 30.0, "logit_scale": 0.5, "lam": torch.ones(300), "normalizer": torch.ones(())},
    }.items():
        layer = Head(torch.zeros(300, 128, dtype=torch.bfloat16), torch.zeros(1000, 128, dtype=torch.bfloat16), None)
        call = RowwiseCall("cross_entropy", layer, torch.zeros(300, dtype=torch.int64), **given)
        for held in (False, True):
            recorder.case = f"linear_ce {torch.bfloat16} {ALWAYS} sharded, {name}, held: {held} forward"
            exponentials = torch.zeros(300, 1000, dtype=torch.bfloat16)
            linear_launch.sharded_rows_of(call, FORMULAS["cross_entropy"].kernels, torch.zeros(4, 3, 300), exponentials, 1, held)


def token_weights(recorder: Recorder) -> None:
    """A weight a row of cross entropy: of rows in one tile, in several, and on chip."""
    for classes, mode in itertools.product((1000, 9001, 32_000), ("forward", "backward")):
        recorder.case = f"ce {torch.bfloat16} {ALWAYS} token weights, {classes} classes {mode}"
        x = torch.zeros(64, classes, dtype=torch.bfloat16, requires_grad=True)
        target = torch.zeros(64, dtype=torch.int64)
        differentiated(cross_entropy(x, target, token_weight=torch.ones(64), **MODES[mode]), x)
        if classes == 9001:
            recorder.case = f"ce {torch.bfloat16} {ALWAYS} weights by entropy, {classes} classes {mode}"
            differentiated(cross_entropy(x, target, token_weight="entropy", **MODES[mode]), x)


def temperatures(recorder: Recorder) -> None:
    """A temperature a row: of rows in one tile and in several, with a cap and every further output, and of chunks of a layer's logits."""
    x, weight = torch.zeros(300, 8, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1000, 8, dtype=torch.bfloat16)
    for classes, given in itertools.product((1000, 9001), ({}, {"softcap": 3.0, "scale": 0.5, "outputs": TokenLogps.names[1:]})):
        recorder.case = f"ce {torch.bfloat16} {ALWAYS} temperatures, {classes} classes, {len(given)} options none"
        logits = torch.zeros(64, classes, dtype=torch.bfloat16, requires_grad=True)
        found = selective_log_softmax(logits, torch.zeros(64, dtype=torch.int64), temperature=torch.ones(64), **given)
        differentiated(found, logits)
    recorder.case = f"linear_ce {torch.bfloat16} {ALWAYS} temperatures forward"
    target = torch.zeros(300, dtype=torch.int64)
    linear_objective(x, weight, target, Tensor.sum, independent="tokens", temperature=torch.ones(300), gradient="forward")


def linear_losses(recorder: Recorder) -> None:
    """The product in which a loss of rows is computed: further results, and what changes the logits."""
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "entropy": {"outputs": ("entropy",)},
        "all results": {"label_smoothing": 0.1, "z_loss": 1e-3, "outputs": CrossEntropyOutput.names[1:]},
        "softcap": {"softcap": 30.0, "scale": 0.5, "outputs": ("entropy",)},
        "weights": {"loss_weight": torch.ones(1000)},
        "token weights": {"token_weight": torch.ones(300)},
    }
    for (name, given), dtype, mode in itertools.product(options.items(), DTYPES[1:], ("backward", "none")):
        loss = "linear_ce_with_all_results" if name == "all results" else "linear_ce"
        recorder.case = f"{loss} {dtype} {ALWAYS} {name} {mode}"
        x, weight = (torch.zeros(rows, 128, dtype=dtype) for rows in (300, 1000))
        bias = None if name == "plain" else torch.zeros(1000, dtype=dtype)
        x.requires_grad_()
        found = linear_cross_entropy(x, weight, torch.zeros(300, dtype=torch.int64), bias, **MODES[mode], **given)
        differentiated(found, x)
    options["all results"] = {"outputs": ("z_loss", "lse", "entropy", "correct", "argmax", "mean_logit"), "z_loss": 1e-3}
    options["softcap"] = {"softcap": 30.0, "scale": 0.5}
    target = torch.zeros(300, dtype=torch.int64)
    for name, given in options.items():  # by exponentials
        x, weight = (torch.zeros(rows, 128, dtype=torch.bfloat16, requires_grad=True) for rows in (300, 1000))
        bias = None if name == "plain" else torch.zeros(1000, dtype=torch.bfloat16)
        loss = {"all results": "linear_ce_with_all_results", "softcap": "linear_ce_capped"}.get(name, "linear_ce")
        recorder.case = f"{loss} {torch.bfloat16} {ALWAYS} {name} forward"
        differentiated(linear_cross_entropy(x, weight, target, bias, **MODES["forward"], **given), x)
    for classes in (1000, 32_000):  # by chunks: logits in float32, their gradient in bfloat16
        x, weight, teacher = (torch.zeros(n, 8, dtype=torch.bfloat16, requires_grad=n == 300) for n in (300, classes, 300))
        recorder.case = f"linear_ce {torch.bfloat16} {ALWAYS} smoothing, {classes} classes forward"
        differentiated(linear_cross_entropy(x, weight, target, label_smoothing=0.1, **MODES["forward"]), x)
        hard = {"labels": target, "hard_weight": 0.5, "temperature": 2.0, "outputs": ("entropy",)}
        for loss, mode in (("kl", "forward"), ("js", "forward"), ("js", "none")):
            recorder.case = f"linear_{loss} {torch.bfloat16} {ALWAYS} hard labels, {classes} classes {mode}"
            function = {"kl": linear_kl_div, "js": linear_js_div}[loss]
            differentiated(function(x, weight, LinearTeacher(teacher.detach(), weight), **MODES[mode], **hard), x)
        recorder.case = f"linear_kl {torch.bfloat16} {ALWAYS} {classes} classes forward"
        differentiated(linear_kl_div(x, weight, LinearTeacher(teacher.detach(), weight), **MODES["forward"]), x)
        of_all = {"teacher_lse": torch.zeros(300), "outputs": ("entropy", "acceptance")}
        for kind, mode in (("lk", "forward"), ("log_tv", "forward"), ("kl", "forward"), ("lk", "none")):
            recorder.case = f"linear_draft {torch.bfloat16} {ALWAYS} {kind}, {classes} classes {mode}"
            more = hard | of_all if kind == "log_tv" or mode == "none" else of_all
            differentiated(linear_draft_loss(x, weight, LinearTeacher(teacher.detach(), weight), kind=kind, **MODES[mode], **more), x)
        recorder.case = f"linear_focal {torch.bfloat16} {ALWAYS} {classes} classes forward"
        differentiated(fuse_linear(sigmoid_focal_loss)(x, weight, target, **MODES["forward"]), x)


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK and SHARED of a kernel; STACK is memory that registers did not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED):(\d+)", text)}


def serialized(ptx: str) -> bool:
    """Return whether ptxas lets each product on the tensor cores wait for the one before, which it only tells."""
    if "wgmma.mma_async" not in ptx:
        return False
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        nvidia = triton.knobs.nvidia  # its programs, or those that the environment names
        # the second is the newer, which Triton 3.9 takes for Hopper, too
        for program in (nvidia.ptxas, getattr(nvidia, "ptxas_blackwell", nvidia.ptxas)):
            command = [program.path, "-arch=sm_90a", "-v", file.name, "-o", os.devnull]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return "are serialized" in done.stderr
        raise RuntimeError(done.stderr)


def compiled(number: int) -> dict[str, Any]:
    """Compile one variant; the reason where the compiler refuses it."""
    case, variant, target = WORK[number]
    found: dict[str, Any] = {"kernel": variant.kernel.__name__, "case": case, "arch": target.arch, "options": variant.options}
    try:
        kernel = triton.compile(variant.source(), target=target, options=variant.options)
    except Exception as error:
        reasons = [str(error)]
        while error.__cause__ is not None:
            error = error.__cause__
            reasons.append(str(error))
        return {**found, "error": "\n".join(reasons)}
    used = {"dynamic_shared": kernel.metadata.shared, "shared_stores": kernel.asm["ptx"].count("st.shared")}
    used["serialized"] = serialized(kernel.asm["ptx"])
    return {**found, **resources(kernel.asm["cubin"]), **used}


WORK: list[tuple[str, Variant, GPUTarget]] = []

EVERY = os.environ.get("LOSSFORGE_COMPILE_ALL") == "1"
HOPPER_ON = ("linear_product_kernel",)
"""Kernels that no older GPU runs."""
OTHERS = 2 if "few" in sys.argv else 6
"""Variants for each GPU that nobody measured, evenly over all that were recorded."""
SPREAD = 4
"""Variants of a kernel, evenly over all that were recorded, beside the first of each loss and mode, and of each loss and dtype."""


SAME_KERNEL = {name: "dice" for name, loss in LOSSES.items() if loss.template.name == "overlap" and loss.formula != "dice"}
"""Losses whose kernels differ in what a region's few numbers become: one variant of each, and modes and dtypes between them."""


def few(variants: dict[str, tuple[str, Variant]]) -> list[tuple[str, Variant]]:
    """Few variants that together have every loss, kernel, dtype and mode, and every loss of each kernel in Gluon: a minute's work.

    The hash spreads dtypes and modes over the losses.
    """
    of = []
    for case, variant in sorted(variants.values(), key=lambda found: zlib.crc32(f"{found[1].kernel.__name__} {found[0]}".encode())):
        loss, dtype, *_, mode = case.split()
        gluon = {(variant.kernel.__name__, loss)} if variant.kernel.is_gluon() else set()
        of.append(({loss, dtype, mode, variant.kernel.__name__, *gluon}, case, variant))
    taken, missing = [], set().union(*[values for values, _, _ in of])
    while missing:
        values, case, variant = max(of, key=lambda found: len(found[0] & missing))
        taken.append((case, variant))
        missing -= values
    return taken


def chosen(variants: dict[str, tuple[str, Variant]]) -> list[tuple[str, Variant]]:
    """All of them, half an hour's work on two cores, where LOSSFORGE_COMPILE_ALL=1; else some minutes' worth."""
    if EVERY:
        return list(variants.values())
    taken: dict[str, tuple[str, Variant]] = {}
    kernels: dict[str, list[str]] = {}
    seen = set()
    for least in (2, 1):  # first those that are both the first of their mode and of their dtype
        for key, (case, variant) in variants.items():
            loss, dtype, *_, mode = case.split()
            kernel = SAME_KERNEL.get(loss, loss)
            always = ALWAYS in case and dtype != str(torch.float16)  # of the half dtypes one
            if always or (loss,) not in seen or len({(kernel, dtype), (kernel, mode)} - seen) >= least:
                taken[key] = case, variant
                seen |= {(loss,), (kernel, dtype), (kernel, mode)}
    for key, (_, variant) in variants.items():
        kernels.setdefault(variant.kernel.__name__, []).append(key)
    for keys in kernels.values():
        taken |= {key: variants[key] for key in keys[:: max(1, len(keys) // SPREAD)]}
    return list(taken.values())


def products_of_blackwell() -> list[tuple[str, Variant]]:
    """Return the products that take the most shared memory, as a GPU of sm_100 launches them: of all results, and of a gradient."""
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **kwargs: recorder(kernel, *args, **kwargs)
    linear_launch.tiles_of = lambda weight: product_tiles(narrow=True)
    PLANS.clear()  # which have the tiles of sm_90
    linear_losses(recorder)
    found = [found for found in recorder.variants.values() if found[1].kernel.__name__ in HOPPER_ON]
    cases = [f"{torch.bfloat16} {ALWAYS} {case}" for case in ("all results backward", "all results forward", "entropy backward")]
    return [each for each in found if each[0].endswith(tuple(cases))]


if __name__ == "__main__":
    variants = record("few" in sys.argv).variants
    recorded = few(variants) if "few" in sys.argv else chosen(variants)
    WORK += [(case, variant, HOPPER) for case, variant in recorded]
    older = [found for found in recorded if found[1].kernel.__name__ not in HOPPER_ON]
    small = [found for found in older if not found[1].kernel.is_gluon()]
    WORK += [(case, variant, AMPERE) for case, variant in older if zlib.crc32(case.encode()) % 20 == 0]
    for place, target in enumerate((BLACKWELL, *SMALL)):
        spread = (small if target in SMALL else older)[place :: max(1, len(small) // OTHERS)]
        WORK += [(case, variant, target) for case, variant in (*spread, *(products_of_blackwell() if target is BLACKWELL else []))]
    with multiprocessing.get_context("fork").Pool(int(sys.argv[1])) as pool:
        json.dump(pool.map(compiled, range(len(WORK)), chunksize=4), sys.stdout)
