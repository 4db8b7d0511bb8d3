"""Check calls of a loss: its kernels against float64 in every layout, target, reduction, mode and dtype, and its edge cases."""

import itertools

import torch
from torch import Tensor

from lossforge.losses.check.report import Report
from lossforge.losses.registry import Loss
from lossforge.losses.testing import BOUNDS, error, plain_sample, run, samples

NAN = float("nan")


QUICK, SMALL = 6, 1000
"""A quick check takes this many samples, in float32 only, each with fewer elements than this."""


def check_values(loss: Loss, report: Report, device: str, seed: int, quick: bool = False) -> None:
    section = "kernels against float64"
    for dtype, bound in BOUNDS.items():
        if report.failures or (quick and dtype != torch.float32):
            return
        problem, count, worst = "", 0, 0.0
        calls = samples(loss, device, dtype, seed)
        for sample in itertools.islice((s for s in calls if s.x.numel() < SMALL), QUICK) if quick else calls:
            for reduction in ("mean",) if "normalizer" in sample.kwargs else loss.reductions:
                shape = loss.reference(sample.x, sample.target, **sample.kwargs, reduction=reduction).shape
                upstream = torch.linspace(0.5, 1.5, max(1, shape.numel()), device=device).view(shape)
                exact = run(loss.reference, sample, upstream, torch.float64, reduction=reduction)
                plain = run(loss.reference, sample, upstream, reduction=reduction)
                # float16 gradients written in forward may round to 0 before they are scaled, so "forward" is not the default for float16
                for mode in ("backward",) if reduction == "none" or dtype == torch.float16 else ("forward", "backward"):
                    ours = run(loss.function, sample, upstream, reduction=reduction, gradient=mode)
                    assert ours.gradient is not None
                    assert exact.gradient is not None
                    assert plain.gradient is not None
                    off = error(ours.gradient, exact.gradient)
                    value_bound = bound if ours.value.dtype == dtype else BOUNDS[torch.float32]
                    fits = off <= error(plain.gradient, exact.gradient) + 2 * bound
                    fits &= error(ours.value, exact.value) <= error(plain.value, exact.value) + value_bound
                    count, worst = count + 1, max(worst, off)
                    if not (fits or problem):
                        call = f"{sample.name}, reduction={reduction!r}, gradient={mode!r}"
                        problem = f"{call}: value off by {error(ours.value, exact.value):.1e}, gradient by {off:.1e}"
        report.add(
            section, str(dtype).removeprefix("torch."), not problem, problem or f"{count} calls, gradients off by {worst:.0e} at most"
        )


def _both(loss: Loss, x: Tensor, target: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    value = loss.function(leaf, target, **options)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def check_edges(loss: Loss, report: Report, device: str) -> None:
    section = "edges"
    sample = plain_sample(loss, device)
    assert sample.target is not None
    kept = sample.target >= 0
    x, target, ignored = sample.x[kept][:4], sample.target[kept][:4], loss.template.ignored
    value, gradient = _both(loss, x, target, reduction="mean")

    hole = torch.cat([x[:2], torch.full_like(x[:1], NAN), x[2:]])
    with_hole = torch.cat([target[:2], torch.full_like(target[:1], ignored), target[2:]])
    got, g = _both(loss, hole, with_hole, reduction="mean")
    rest = torch.cat([g[:2], g[3:]])
    fits = error(got, value) < 3e-6 and error(rest, gradient) < 3e-6 and not g[2].any()
    report.add(section, "an ignored row of nan changes nothing", fits)

    got, g = _both(loss, x, torch.full_like(target, ignored), reduction="mean")
    zero, _ = _both(loss, x, torch.full_like(target, ignored), reduction="mean", empty="zero")
    report.add(section, 'all ignored: mean nan, with empty="zero" 0, gradient 0', bool(got.isnan() and zero == 0 and not g.any()))

    empty = torch.rand(0, x.shape[1], device=device)
    none = torch.zeros(0, dtype=torch.long, device=device)
    report.add(
        section,
        "no rows: mean nan, sum 0",
        bool(loss.function(empty, none, reduction="mean").isnan() and loss.function(empty, none, reduction="sum") == 0),
    )

    broken = x.clone()
    broken[1] = NAN
    got, g = _both(loss, broken, target, reduction="none")
    good = torch.tensor([True, False, True, True], device=device)
    clean, g_clean = _both(loss, x[good], target[good], reduction="none")
    report.add(section, "a row of nan harms no other", error(got[good], clean) < 3e-6 and error(g[good], g_clean) < 3e-6)

    for dtype, far in ((torch.float32, (30.0, 100.0, 1e4)), (torch.float16, (30.0, 6e4))):
        if loss.domain == "probabilities":
            far = (0.0, 1.0)
        wide = torch.tensor([*far, *(-v for v in far)] if loss.domain == "logits" else far, device=device).to(dtype)
        wide = wide[:, None].expand(-1, x.shape[1]).contiguous()
        index = torch.arange(len(wide), device=device) % x.shape[1]
        got, g = _both(loss, wide, index, reduction="none")
        leaf = wide.double().requires_grad_()
        exact = loss.reference(leaf, index, reduction="none")
        (slope,) = torch.autograd.grad(exact.sum(), leaf)
        most = torch.finfo(dtype).max
        finite = bool(got[exact.detach().abs() < torch.finfo(got.dtype).max].isfinite().all() and g[slope.abs() < most].isfinite().all())
        report.add(section, f"finite at {', '.join(f'±{v:g}' if v else '0' for v in far)}, {str(dtype).removeprefix('torch.')}", finite)
