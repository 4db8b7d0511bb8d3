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

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
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
}
MODULES = {
    "nn.CrossEntropyLoss": (losses.CrossEntropyLoss, nn.CrossEntropyLoss),
    "nn.L1Loss": (losses.L1Loss, nn.L1Loss),
    "nn.MSELoss": (losses.MSELoss, nn.MSELoss),
    "nn.HuberLoss": (losses.HuberLoss, nn.HuberLoss),
    "nn.SmoothL1Loss": (losses.SmoothL1Loss, nn.SmoothL1Loss),
    "nn.BCEWithLogitsLoss": (losses.BCEWithLogitsLoss, nn.BCEWithLogitsLoss),
    "nn.BCELoss": (PreferenceBCELoss, nn.BCELoss),
}


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
    inputs: tuple[Tensor, Tensor]
    kwargs: dict[str, Any]
    reduction: str


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
        for i, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=True)):
            assert len(sample.args) == 1
            yield Call(
                f"{i} {sample.kwargs}",
                lambda function, _: function,
                (sample.input, sample.args[0]),
                sample.kwargs,
                sample.kwargs.get("reduction", "mean"),
            )
    else:
        for sample in info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=True):
            made = sample.constructor_input

            def build(module: Callable[..., Any], change: Callable[[Tensor], Tensor], made: Any = made) -> Callable[..., Tensor]:
                return module(*changed(change, made.args), **changed(change, made.kwargs)).to(device)

            assert len(sample.forward_input.args) == 2
            yield Call(
                f"{sample.desc} {made.kwargs}",
                build,
                sample.forward_input.args,
                sample.forward_input.kwargs,
                made.kwargs.get("reduction", "mean"),
            )


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
    inputs = changed(lambda t: t.detach().double().requires_grad_(), call.inputs)

    def value_of(change: Callable[[Tensor], Tensor]) -> Tensor:
        return call.build(judge, change)(*inputs, **changed(change, call.kwargs))

    def noted(t: Tensor) -> Tensor:
        others.append(t)
        return t.detach().double()

    value = value_of(noted)
    size = value.detach().abs().amax()
    if value.ndim == 0:
        leaves = [t for t in inputs if t.requires_grad]
        gradients = torch.autograd.grad(value, leaves)
        size = size + sum((t.detach() * g).abs().sum() for t, g in zip(leaves, gradients, strict=True))
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


def check(got: Tensor, exact: Tensor, torchs: Tensor, where: tuple, size: Tensor, roundings: int = 1) -> None:
    """Each entry: at most torch's largest error, plus a few units of float32 (or float64), plus rounding to the result's dtype."""
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
        bound = bound + roundings * unit * (exact[finite].abs() + 2 * info.tiny)
    elif torchs.dtype == got_.dtype and torchs[finite].isfinite().all():
        bound = bound + (torchs - exact)[finite].abs().max()
    excess = (got_ - exact)[finite].abs() - bound
    assert (excess <= 0).all(), (*where, f"{excess.max().item():.3e} above the bound", got, exact)


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
        torchs = run(call, judge, dtype, upstream, every)
        before = sum(launch_counts().values())
        got = run(call, ours, dtype, upstream, every, gradient=mode)
        launched = sum(launch_counts().values()) > before
        soft = call.inputs[1].requires_grad
        scaled = launched and mode != "backward"  # the gradient of forward is rounded, scaled, and rounded again
        assert launched == (dtype != torch.float64 and not (every and soft)), where
        if got.value.dtype != torchs.value.dtype:
            assert (got.value.dtype, torchs.value.dtype) == (torch.float32, dtype), where
            assert dtype in HALF, where
            deviation = "result in float32"
        check(got.value, exact.value, torchs.value, (*where, "value"), size)
        assert len(got.gradients) == len(exact.gradients) == (1 + soft if every else 1), where
        for i, g in enumerate(got.gradients):
            assert g.dtype == dtype, where
            check(
                g,
                exact.gradients[i],
                torchs.gradients[i],
                (*where, f"gradient {i}"),
                exact.gradients[i].nan_to_num().abs().max(),
                2 if scaled else 1,
            )
    return deviation


def report(name: str, dtype: torch.dtype, total: int, tally: Counter[str | None]) -> None:
    """One line a loss and dtype; every sample ended as agreed or as a named deviation."""
    deviations = ", ".join(f"{n} {deviation}" for deviation, n in tally.items() if deviation) or "none"
    print(f"{name} {dtype}: {total} samples, {tally[None]} agreed, deviations: {deviations}")
    assert tally.total() == total > 0


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_every_sample(name, dtype, device, database):
    """torch lists no bfloat16 for its loss modules, nor float16 for most; their samples are run in both all the same."""
    ours, judge = {**FUNCTIONS, **MODULES}[name]
    samples = list(calls(database[name], device, dtype))
    if INTERPRETED and dtype in HALF and len(samples) > 100:
        samples = samples[::3]  # of the module whose function's samples all run
    report(name, dtype, len(samples), Counter(compare(call, ours, judge, dtype, device) for call in samples))


def test_every_dtype_is_known(device, database):
    """A dtype or a loss that a newer torch adds to its samples shows here."""
    assert set(database) == {*FUNCTIONS, *MODULES}
    for name, info in database.items():
        assert supported(info, device) <= {*FLOATS, *(COMPLEX if name == "nn.functional.l1_loss" else ())}, name


@pytest.mark.parametrize("dtype", COMPLEX, ids=lambda d: str(d).removeprefix("torch."))
def test_complex_samples_are_refused(dtype, device, database):
    """Deviation: torch takes |x - y| of complex numbers."""
    name = "nn.functional.l1_loss"
    tally: Counter[str | None] = Counter()
    samples = list(calls(database[name], device, dtype))
    for call in samples:
        with pytest.raises((TypeError, ValueError)):
            losses.l1_loss(*call.inputs, **call.kwargs)
        tally["complex refused"] += 1
    report(name, dtype, len(samples), tally)


ERRORS = {
    "nn.functional.l1_loss": {None: 1, "ValueError for shapes": 1},
    "nn.functional.huber_loss": {None: 1, "ValueError for delta": 2},
}
"""Per function: samples whose error ours raises too, and those where ours is a ValueError and torch's a RuntimeError."""


@pytest.mark.parametrize("name", ERRORS)
def test_error_samples(name, device, database):
    """What torch refuses, ours refuses too."""
    ours, judge = FUNCTIONS[name]
    deviations: Counter[str | None] = Counter()
    said = {"reduction must be one of": "reduction", "target must have the shape of input": "shapes", "delta must be": "delta"}
    for error in database[name].error_inputs(device):
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            judge(sample.input, *sample.args, **sample.kwargs)
        with pytest.raises(ValueError, match="|".join(said)) as raised:
            ours(sample.input, *sample.args, **sample.kwargs)
        (about,) = (subject for text, subject in said.items() if text in str(raised.value))
        deviations[None if isinstance(raised.value, error.error_type) else f"ValueError for {about}"] += 1
    assert deviations == ERRORS[name]


def test_every_error_sample_is_known(database):
    for name, info in database.items():
        listed = info.error_inputs_func if name in FUNCTIONS else info.module_error_inputs_func
        assert (listed is not None) == (name in ERRORS), name
