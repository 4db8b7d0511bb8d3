"""PyTorch's own samples of each loss, through ours and through torch's in float64. None is filtered: what differs has a name."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lossforge import losses
from lossforge.kernels import INTERPRETED, launch_counts
from lossforge.losses.registry import LOSSES

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
HALF = (torch.bfloat16, torch.float16)
ULPS = 8.0  # of the largest entry: an exponential, a logarithm and a sum of at most a few hundred terms, in float32


def preference_bce(input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean", **options: Any) -> Tensor:
    return losses.preference_bce(input, target, weight, reduction=reduction, **options)


class PreferenceBCELoss(nn.Module):
    """Ours takes the weight with each call."""

    def __init__(self, weight: Tensor | None = None, reduction: str = "mean") -> None:
        super().__init__()
        self.weight, self.loss = weight, losses.PreferenceBCELoss(reduction=reduction)

    def forward(self, input: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.loss(input, target, preference=self.weight, **options)


FUNCTIONS = {
    "nn.functional.cross_entropy": (losses.cross_entropy, F.cross_entropy),
    "nn.functional.l1_loss": (losses.l1_loss, F.l1_loss),
    "nn.functional.mse_loss": (losses.mse_loss, F.mse_loss),
    "nn.functional.huber_loss": (losses.huber_loss, F.huber_loss),
    "nn.functional.smooth_l1_loss": (losses.smooth_l1_loss, F.smooth_l1_loss),
    "nn.functional.binary_cross_entropy_with_logits": (losses.binary_cross_entropy_with_logits, F.binary_cross_entropy_with_logits),
    "nn.functional.binary_cross_entropy": (preference_bce, F.binary_cross_entropy),
    **{
        f"nn.functional.{name}": (getattr(losses, name), getattr(F, name))
        for name in (
            *("gaussian_nll_loss", "poisson_nll_loss", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss"),
            *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "kl_div"),
            *("cosine_embedding_loss", "triplet_margin_loss"),
        )
    },
}
MODULES = {
    "nn.CrossEntropyLoss": (losses.CrossEntropyLoss, nn.CrossEntropyLoss),
    "nn.L1Loss": (losses.L1Loss, nn.L1Loss),
    "nn.MSELoss": (losses.MSELoss, nn.MSELoss),
    "nn.HuberLoss": (losses.HuberLoss, nn.HuberLoss),
    "nn.SmoothL1Loss": (losses.SmoothL1Loss, nn.SmoothL1Loss),
    "nn.BCEWithLogitsLoss": (losses.BCEWithLogitsLoss, nn.BCEWithLogitsLoss),
    "nn.BCELoss": (PreferenceBCELoss, nn.BCELoss),
    **{
        f"nn.{name}": (getattr(losses, name), getattr(nn, name))
        for name in (
            *("GaussianNLLLoss", "PoissonNLLLoss", "SoftMarginLoss", "HingeEmbeddingLoss", "MarginRankingLoss"),
            *("MultiMarginLoss", "MultiLabelMarginLoss", "MultiLabelSoftMarginLoss", "NLLLoss", "KLDivLoss"),
            "CosineEmbeddingLoss",
        )
    },
}
CONSTANT = ("nn.functional.soft_margin_loss", "nn.SoftMarginLoss")
"""Losses whose last tensor torch does not differentiate; ours does."""
LABELS = (
    *("nn.functional.hinge_embedding_loss", "nn.HingeEmbeddingLoss"),
    *("nn.functional.cosine_embedding_loss", "nn.CosineEmbeddingLoss"),
)
"""Losses whose last tensor holds labels, in which they have no gradient: ours refuses those that require one, torch's gives None."""
SEVERAL = {each for loss in LOSSES.values() if loss.template.name in ("pointwise", "vectors") for each in (loss.function, loss.module)}
"""Losses whose kernels differentiate every tensor. Of the others they differentiate the first, and the plain-torch reference the rest."""
PLAIN = {each for loss in LOSSES.values() if not loss.has_kernel for each in (loss.function, loss.module)}
"""Losses without a kernel."""


@pytest.fixture(scope="module")
def database() -> dict[str, Any]:
    """torch's OpInfo and ModuleInfo by name; imported here, since that takes seconds and imports triton."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in (*op_db, *module_db) if info.name in {**FUNCTIONS, **MODULES}}


def supported(info: Any, device: str) -> set[torch.dtype]:
    return set(info.supported_dtypes(device) if hasattr(info, "supported_dtypes") else info.dtypes)


class Call(NamedTuple):
    """One sample: how ours and torch's are made, and what both are called with."""

    name: str
    build: Callable[[Callable[..., Any], Callable[[Tensor], Tensor]], Callable[..., Tensor]]
    inputs: tuple[Tensor, ...]
    kwargs: dict[str, Any]
    reduction: str
    differentiable: int  # how many of the first tensors torch differentiates
    by_kernels: bool  # whether the kernels differentiate as many


def changed(change: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Every floating tensor within `values` changed."""
    if isinstance(values, Tensor):
        return change(values) if values.is_floating_point() or values.is_complex() else values
    if isinstance(values, dict):
        return {k: changed(change, v) for k, v in values.items()}
    if isinstance(values, (tuple, list)):
        return type(values)(changed(change, v) for v in values)
    return values


def calls(info: Any, device: str, dtype: torch.dtype) -> Iterator[Call]:
    torch.manual_seed(0)
    if info.name in FUNCTIONS:
        for i, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=dtype.is_floating_point or dtype.is_complex)):
            yield Call(
                f"{i} {sample.kwargs}",
                lambda function, _: function,
                without_gradients_of_labels(info.name, (sample.input, *sample.args)),
                sample.kwargs,
                sample.kwargs.get("reduction", "mean"),
                len(sample.args) + (info.name not in CONSTANT),
                {**FUNCTIONS, **MODULES}[info.name][0] in SEVERAL,
            )
    else:
        for sample in info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True):
            made = sample.constructor_input

            def build(module: Callable[..., Any], change: Callable[[Tensor], Tensor], made: Any = made) -> Callable[..., Tensor]:
                return module(*changed(change, made.args), **changed(change, made.kwargs)).to(device)

            yield Call(
                f"{sample.desc} {made.kwargs}",
                build,
                without_gradients_of_labels(info.name, sample.forward_input.args),
                sample.forward_input.kwargs,
                made.kwargs.get("reduction", "mean"),
                len(sample.forward_input.args) - (info.name in CONSTANT),
                {**FUNCTIONS, **MODULES}[info.name][0] in SEVERAL,
            )


def without_gradients_of_labels(name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*inputs[:-1], inputs[-1].detach()) if name in LABELS else inputs


class Result(NamedTuple):
    value: Tensor
    gradients: list[Tensor]


def run(call: Call, function: Callable[..., Any], dtype: torch.dtype, upstream: Tensor, every: bool, **options: Any) -> Result:
    """Value and gradients in `dtype`, of the input or of `every` tensor for which the sample asks one."""

    def cast(t: Tensor) -> Tensor:
        return t.detach().to(dtype)

    inputs = [
        cast(t).requires_grad_(t.requires_grad and (i == 0 or every)) if t.is_floating_point() else t for i, t in enumerate(call.inputs)
    ]
    value = call.build(function, cast)(*inputs, **changed(cast, call.kwargs), **options)
    wanted = [t for t in inputs if t.requires_grad]
    return Result(value.detach(), list(torch.autograd.grad(value, wanted, upstream.to(value.dtype))))


def exactly(call: Call, judge: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """The value in float64, and its size: what it would be if no term cancelled another.

    That is Σ |a ∂L/∂a| over the entries of every floating argument; torch samples class weights and probabilities of either sign.
    """
    others: list[Tensor] = []
    inputs = changed(lambda t: t.detach().double(), call.inputs)
    for t in inputs[: call.differentiable]:
        t.requires_grad_(t.is_floating_point())

    def value_of(change: Callable[[Tensor], Tensor]) -> Tensor:
        return call.build(judge, change)(*inputs, **changed(change, call.kwargs))

    def noted(t: Tensor) -> Tensor:
        others.append(t)
        return t.detach().double()

    value = value_of(noted)
    size = value.detach().abs().nan_to_num(0.0, 0.0).amax()
    if value.ndim == 0:
        leaves = [t for t in inputs if t.requires_grad]
        gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        size = size + sum((t.detach() * g).abs().nan_to_num(0.0, 0.0).sum() for t, g in zip(leaves, gradients, strict=True))
        step = 1e-6
        for k, i in ((k, i) for k, t in enumerate(others) for i in range(t.numel())):  # torch does not differentiate weights
            above, below = (value_of(nudge(k, i, 1 + change)) for change in (step, -step))
            size = size + (above - below).detach().abs() / (2 * step)
    return value.detach(), size


def nudge(which: int, entry: int, factor: float) -> Callable[[Tensor], Tensor]:
    """Multiply one entry of the `which`-th tensor that it is called with."""
    counter = itertools.count()

    def change(t: Tensor) -> Tensor:
        t = t.detach().double().clone()
        if next(counter) == which:
            t.view(-1)[entry] *= factor
        return t

    return change


def check(got: Tensor, exact: Tensor, torchs: Tensor, where: tuple, size: Tensor, rounded: Tensor) -> None:
    """Each entry: at most torch's largest error, plus a few units of float32 (or float64), plus rounding to the result's dtype.

    rounded: sizes of all that is rounded to that dtype.
    """
    assert got.shape == exact.shape, where
    got_, torchs = got.double(), torchs.double()
    assert torch.equal(got_.isnan(), exact.isnan()), where
    finite = exact.isfinite()
    assert torch.equal(got_[~finite].nan_to_num(), exact[~finite].nan_to_num()), where
    if not finite.any():
        return
    work = torch.finfo(torch.float64 if got.dtype == torch.float64 else torch.float32).eps
    bound = ULPS * work * size
    if got.dtype in HALF:
        info = torch.finfo(got.dtype)
        unit = info.eps if INTERPRETED else info.eps / 2  # the interpreter truncates
        bound = bound + unit * (rounded[finite] + 2 * info.tiny)
    elif torchs[finite].isfinite().all():
        bound = bound + (torchs - exact)[finite].abs().max()
    excess = (got_ - exact)[finite].abs() - bound
    assert (excess <= 0).all(), (*where, f"{excess.max().item():.3e} above the bound", got, exact)


def rounded(call: Call, judge: Callable[..., Any], upstream: Tensor, i: int, gradient: Tensor) -> Tensor:
    """Return the sizes of what is rounded for a gradient of tensor i: its own, and that of each element to which it was broadcast.

    Autograd adds those, in ours as in torch.
    """
    inputs = changed(lambda t: t.detach().double(), call.inputs)
    shape = torch.broadcast_shapes(*(t.shape for t in inputs if t.ndim == inputs[0].ndim))
    if gradient.shape == shape or i + 1 > call.differentiable:
        return gradient.abs()
    several = gradient.shape + (1,) * (len(shape) - gradient.ndim)  # gaussian_nll_loss takes variances without the last dimension
    inputs = [*inputs[:i], inputs[i].view(several).expand(shape).clone().requires_grad_(), *inputs[i + 1 :]]
    value = call.build(judge, lambda t: t.detach().double())(*inputs, **changed(lambda t: t.detach().double(), call.kwargs))
    (g,) = torch.autograd.grad(value, inputs[i], upstream.to(value.dtype))
    return gradient.abs() + g.abs().sum_to_size(several).view(gradient.shape)


def compare(call: Call, ours: Callable[..., Any], judge: Callable[..., Any], dtype: torch.dtype, device: str) -> str | None:
    """Assert agreement in every way to get the gradient; the name of the deviation in how the result is given, if there is one."""
    deviation = None
    value, size = exactly(call, judge)
    # in eighths, so that every dtype holds the same upstream gradient
    upstream = torch.tensor([1.25, -0.75, 2.0, 0.875], device=device).repeat(value.numel() // 4 + 1)[: value.numel()].view(value.shape)
    forward = () if call.reduction == "none" else ((False, "forward"),)
    for every, mode in ((True, None), (False, "backward"), *forward):
        where = (call.name, "all gradients" if every else mode)
        exact = run(call, judge, torch.float64, upstream, every)
        try:
            torchs = run(call, judge, dtype, upstream, every)
        except NotImplementedError:  # in half precision on CPU
            torchs = Result(exact.value.to(dtype), [g.to(dtype) for g in exact.gradients])
        before = sum(launch_counts().values())
        got = run(call, ours, dtype, upstream, every, gradient=mode)
        launched = sum(launch_counts().values()) > before
        places = [i for i, t in enumerate(call.inputs) if t.requires_grad]
        soft = len(places) - 1
        scaled = launched and mode != "backward"  # the gradient of forward is rounded, scaled, and rounded again
        expected = dtype != torch.float64 and (call.by_kernels or not (every and soft)) and call.inputs[0].numel() > 0
        assert launched == (expected and ours not in PLAIN), where
        if got.value.dtype != torchs.value.dtype:
            assert (got.value.dtype, torchs.value.dtype) == (torch.float32, dtype), where
            assert dtype in HALF, where
            deviation = "result in float32"
        check(got.value, exact.value, torchs.value, (*where, "value"), size, exact.value.abs())
        assert len(got.gradients) == len(exact.gradients) == (1 + soft if every else 1), where
        for i, g in enumerate(got.gradients):
            assert g.dtype == dtype, where
            check(
                g,
                exact.gradients[i],
                torchs.gradients[i],
                (*where, f"gradient {i}"),
                exact.gradients[i].nan_to_num().abs().max(),
                rounded(call, judge, upstream, places[i], exact.gradients[i]) * (2 if scaled else 1),
            )
    return deviation


def report(name: str, dtype: torch.dtype, total: int, tally: Counter[str | None]) -> None:
    """One line a loss and dtype; every sample ended as agreed or as a named deviation."""
    deviations = ", ".join(f"{n} {deviation}" for deviation, n in tally.items() if deviation) or "none"
    print(f"{name} {dtype}: {total} samples, {tally[None]} agreed, deviations: {deviations}")
    assert tally.total() == total > 0


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", [*FUNCTIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in MODULES)])
def test_every_sample(name, dtype, device, database):
    """torch lists no bfloat16 for its loss modules, nor float16 for most; their samples are run in both all the same."""
    ours, judge = {**FUNCTIONS, **MODULES}[name]
    samples = list(calls(database[name], device, dtype))
    if INTERPRETED and dtype in HALF and len(samples) > 100:
        samples = samples[::3]  # of the module whose function's samples all run
    report(name, dtype, len(samples), Counter(compare(call, ours, judge, dtype, device) for call in samples))


REFUSED = {
    **dict.fromkeys([("nn.functional.l1_loss", dtype) for dtype in COMPLEX], "torch takes |x - y| of complex numbers"),
    **dict.fromkeys([("nn.functional.margin_ranking_loss", dtype) for dtype in INTEGERS], "torch takes scores that are integers"),
    **dict.fromkeys([("nn.functional.poisson_nll_loss", dtype) for dtype in INTEGERS], "torch takes logarithms that are integers"),
    **dict.fromkeys([("nn.functional.triplet_margin_loss", dtype) for dtype in (*INTEGERS, *COMPLEX)], "torch takes such vectors"),
    **dict.fromkeys([("nn.functional.cosine_embedding_loss", dtype) for dtype in (*INTEGERS, torch.bool)], "torch takes such vectors"),
}
"""Deviations by function and dtype."""


def test_every_dtype_is_known(device, database):
    """A dtype or a loss that a newer torch adds to its samples shows here."""
    assert set(database) == {*FUNCTIONS, *MODULES}
    for name, info in database.items():
        assert supported(info, device) <= {*FLOATS, *(dtype for known, dtype in REFUSED if known == name)}, name


@pytest.mark.parametrize(("name", "dtype"), REFUSED, ids=lambda v: str(v).removeprefix("torch."))
def test_other_dtypes_are_refused(name, dtype, device, database):
    tally: Counter[str | None] = Counter()
    ours, _ = FUNCTIONS[name]
    samples = list(calls(database[name], device, dtype))
    for call in samples:
        with pytest.raises((TypeError, ValueError)):
            ours(*call.inputs, **call.kwargs)
        tally["refused"] += 1
    report(name, dtype, len(samples), tally)


REDUCTION = "reduction must be one of"
SHAPES = "target must have the shape of input"
ROWS = r"input must have shape \(C,\) or \(N, C\)"
INDICES = "target must be of an integer dtype"  # torch's samples of wrong shapes and weights hold such targets, which ours names first
ERRORS = {
    "nn.functional.l1_loss": (REDUCTION, SHAPES),
    "nn.functional.huber_loss": (REDUCTION, "delta must be", "delta must be"),
    "nn.functional.soft_margin_loss": (REDUCTION, SHAPES),
    "nn.functional.poisson_nll_loss": (REDUCTION, SHAPES),
    "nn.functional.hinge_embedding_loss": (REDUCTION,),
    "nn.functional.margin_ranking_loss": (REDUCTION, "must have the same number of dimensions"),
    "nn.functional.gaussian_nll_loss": (REDUCTION, "var must have the shape of input", SHAPES),
    "nn.functional.multi_margin_loss": (*(REDUCTION, ROWS, ROWS, *(INDICES,) * 5, "p must be one of 1, 2"),),
    "nn.functional.triplet_margin_loss": (
        *(REDUCTION, "margin must be", "positive must have the shape of anchor", "positive must have the shape of anchor"),
        *("negative must have the shape of anchor", *("must have the same number of dimensions",) * 3),
    ),
    "nn.functional.multilabel_margin_loss": (REDUCTION, ROWS, ROWS, INDICES, INDICES),
}
"""What ours says of each of torch's error samples, in their order: a TypeError of a dtype, else a ValueError, mostly for a RuntimeError."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ERRORS)
def test_error_samples(name, device, database):
    """What torch refuses, ours refuses too."""
    ours, judge = FUNCTIONS[name]
    for error, said in zip(database[name].error_inputs(device), ERRORS[name], strict=True):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            judge(sample.input, *sample.args, **sample.kwargs)
        with pytest.raises(TypeError if "dtype" in said else ValueError, match=said):
            ours(sample.input, *sample.args, **sample.kwargs)


def test_error_samples_of_modules(device, database):
    """NLLLoss alone has one. Deviation: torch refuses class weights of another dtype than the input's."""
    info = database["nn.NLLLoss"]
    (error,) = info.module_error_inputs_func(info, device=device, dtype=torch.float32, requires_grad=False, training=True)
    made, given = error.module_error_input.constructor_input, error.module_error_input.forward_input
    assert {t.dtype for t in (*made.kwargs.values(), *given.args)} == {torch.float16, torch.float32, torch.int64}
    with pytest.raises(error.error_type, match=error.error_regex):
        nn.NLLLoss(**made.kwargs)(*given.args)
    assert losses.NLLLoss(**made.kwargs)(*given.args).isnan()


def test_every_error_sample_is_known(database):
    for name, info in database.items():
        listed = info.error_inputs_func if name in FUNCTIONS else info.module_error_inputs_func
        assert (listed is not None) == (name in ERRORS or name == "nn.NLLLoss"), name
