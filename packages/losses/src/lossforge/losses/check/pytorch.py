"""Check a loss with PyTorch's mechanisms: operators, compile, retained graphs, second derivatives, torch.func, CUDA graphs."""

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

from lossforge.losses.base.namespace import NAMESPACE, OPERATORS
from lossforge.losses.check.report import Report
from lossforge.losses.custom.written import SecondDerivativeError
from lossforge.losses.registry import Loss
from lossforge.losses.testing import Sample, error, has_inplace, plain_sample, run

SECTION, GRAPH = "in PyTorch", "CUDA graph, no host synchronisation"
INPLACE, OPCHECK = "inplace=True", "torch.library.opcheck"
SLOW = (OPCHECK, "torch.compile, fullgraph, dynamic")
"""Checks that a quick run leaves out."""


class Operators(TorchFunctionMode):
    """Records the names and arguments of calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        library, _, name = str(function).partition(".")
        if library == NAMESPACE:
            self.seen.append((name.partition(".")[0], args))
        return function(*args, **(kwargs or {}))


def check_pytorch(loss: Loss, report: Report, device: str, quick: bool = False) -> None:
    sample = plain_sample(loss, device)
    exact = run(loss.reference, sample, dtype=torch.float64, reduction="mean")
    assert exact.gradient is not None
    without = {GRAPH: device == "cpu", INPLACE: not has_inplace(loss), OPCHECK: not loss.has_kernel}
    for name, attempt in ATTEMPTS.items():
        if without.get(name) or (quick and name in SLOW):
            continue
        try:
            problem = attempt(loss, sample, exact.gradient, device)
        except Exception as e:  # any error of PyTorch's is the finding
            problem = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        report.add(SECTION, name, not problem, problem)
    if device == "cpu":
        report.add(SECTION, GRAPH, None, "needs a GPU")


def _opcheck(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    x = sample.x.detach().requires_grad_()
    for mode in ("forward", "backward"):
        with Operators() as operators:
            loss.function(x, sample.target, **sample.kwargs, reduction="mean", gradient=mode)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        for name, args in operators.seen:
            result = torch.library.opcheck(getattr(OPERATORS, name).default, args, test_utils=tests, raise_exception=False)
            wrong = {test: str(outcome) for test, outcome in result.items() if outcome != "SUCCESS"}
            if wrong:
                return str(wrong)
        if not operators.seen:
            return "no operator was called"
    return ""


def _compile(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: loss.function(x * 1.0, sample.target, **sample.kwargs, reduction="mean") * 2,
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    x = sample.x.detach().requires_grad_()
    compiled(x).backward()
    assert x.grad is not None
    return _off(x.grad, 2 * exact, 3e-6)


def _retained(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    x = sample.x.detach().requires_grad_()
    value = loss.function(x, sample.target, **sample.kwargs, reduction="mean")
    walked = [(f, torch.autograd.grad(value, x, torch.tensor(f, device=device), retain_graph=True)[0]) for f in (2.0, 1.0, -3.0)]
    return next((problem for f, g in walked if (problem := _off(g, f * exact, 3e-6))), "")


def _repeated(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    first, second = (run(loss.function, sample, reduction="mean") for _ in range(2))
    assert first.gradient is not None
    assert second.gradient is not None
    same = torch.equal(first.value, second.value) and torch.equal(first.gradient, second.gradient)
    return "" if same else "two runs differ"


def _twice(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    """Compare second derivatives; where the formula writes its gradient, there are none, and the loss says so."""
    found: list[torch.Tensor | None] = []
    for function, dtype in ((loss.function, torch.float32), (loss.reference, torch.float64)):
        x = sample.x.detach().to(dtype).requires_grad_()
        (g,) = torch.autograd.grad(function(x, sample.target, **sample.kwargs, reduction="mean"), x, create_graph=True)
        try:
            found.append(torch.autograd.grad(g.square().sum(), x)[0] if g.requires_grad else torch.zeros_like(x))
        except SecondDerivativeError:
            found.append(None)
    ours, reference = found
    if ours is None or reference is None:
        return "" if ours is reference else "it is refused by the kernels or by the reference alone"
    return _off(ours, reference, 1e-4)


def _func(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    return _off(torch.func.grad(lambda x: loss.function(x, sample.target, **sample.kwargs, reduction="mean"))(sample.x), exact, 3e-6)


def _inplace(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    leaf = sample.x.detach().requires_grad_()
    loss.function(leaf * 1.0, sample.target, **sample.kwargs, reduction="mean", inplace=True).backward()
    assert leaf.grad is not None
    return _off(leaf.grad, exact, 3e-6)


def _graph(loss: Loss, sample: Sample, exact: torch.Tensor, device: str) -> str:
    """Capture forward and backward in a CUDA graph, with host synchronisation forbidden, and compare a replay on other logits."""
    x = sample.x.detach().clone().requires_grad_()

    def step() -> torch.Tensor:
        return torch.autograd.grad(loss.function(x, sample.target, **sample.kwargs, reduction="mean"), x)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradient = step()
    with torch.no_grad():
        x.add_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    moved = run(loss.reference, Sample("", sample.x + 0.5, sample.target, sample.kwargs), dtype=torch.float64, reduction="mean").gradient
    assert moved is not None
    return _off(gradient, moved, 3e-6)


def _off(got: torch.Tensor, exact: torch.Tensor, bound: float) -> str:
    off = error(got, exact)
    return "" if off <= bound else f"the gradient is off by {off:.1e}"


ATTEMPTS: dict[str, Callable[[Loss, Sample, torch.Tensor, str], str]] = {
    OPCHECK: _opcheck,
    "torch.compile, fullgraph, dynamic": _compile,
    "a retained graph walked three times": _retained,
    "bitwise the same, run after run": _repeated,
    "second derivative": _twice,
    "torch.func.grad": _func,
    INPLACE: _inplace,
    GRAPH: _graph,
}
