"""Contenders are right before they are fast, and who is wrong gets no speed."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from lossforge.bench import check, run
from lossforge.bench.cases import CASES, CONTENDERS, FUSED, RECORDS, Case
from lossforge.bench.contenders import Contender, by_names, contenders
from lossforge.bench.inputs import make_inputs
from lossforge.bench.measure import Measurement
from lossforge.bench.report import Report
from lossforge.bench.run import measure_case, new_report
from lossforge.losses.functional import cross_entropy

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HERE = [name for name in CONTENDERS if GPU or name != "torch.compile"]
QUICK = Measurement(milliseconds=2)


def report():
    found = Report("test", {}, "none", "2026-01-01")
    if GPU:
        found.copy_bytes_per_second = found.read_bytes_per_second = 1e12
    return found


def shrunk(case):
    most = 24 if len(case.shape) < 4 else 8
    return replace(case, shape=tuple(min(n, most) for n in case.shape))


@pytest.mark.parametrize("case", [c for c in CASES if c.suite not in ("scaling", *FUSED)], ids=lambda c: f"{c.suite} {c.key}")
def test_every_contender_computes_the_loss(case):
    case = shrunk(case)
    inputs = make_inputs(case, DEVICE)
    exact = check.reference(case, inputs)
    found = [c for c in contenders(case, DEVICE, set(HERE)) if not c.refuses]
    assert {"lossforge", "torch"} <= {c.name for c in found}
    for contender in found:
        if contender.name == "torch.compile" and RECORDS[case.loss].template == "overlap" and case.dtype == "bf16":
            continue  # Inductor's gradient of several of these losses is nan, on a CPU too: its speed is not shown
        if contender.name == "torch.compile" and case.loss == "multilabel_margin" and DEVICE.type == "cuda":
            continue  # Inductor's value is off by several times the value on a GPU, torch 2.11: its speed is not shown
        assert not check.fault(case, check.errors(contender, case, inputs, exact)), contender.name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_relations_of_many_classes(dtype):
    """Of 1,000 softened classes a row's lengths are so short that the authors' + 1e-8 is 2e-4 of their product."""
    case = replace(next(c for c in CASES if c.loss == "dist" and c.dtype == dtype), shape=(40, 1000))
    inputs = make_inputs(case, DEVICE)
    exact = check.reference(case, inputs)
    for contender in contenders(case, DEVICE, {"lossforge", "torch"}):
        assert not check.fault(case, check.errors(contender, case, inputs, exact)), contender.name


def test_the_gradient_of_logits_that_are_overwritten():
    case = shrunk(next(c for c in CASES if c.loss == "ce"))
    inputs = make_inputs(case, DEVICE)
    exact = check.reference(case, inputs)
    contender = Contender("in place", by_names(partial(cross_entropy, inplace=True)), destroys=True)
    given = check.fresh(contender, inputs)
    for _ in range(2):  # the second time autograd's graph says that they were overwritten
        with torch.no_grad():
            given.x.copy_(inputs.x)
        _, gradient = check.step(contender, case, given)
        torch.testing.assert_close(gradient, exact.gradients[0])
        assert gradient.data_ptr() == given.x.data_ptr()


@pytest.mark.parametrize("inputs", ["classes", "class weights", "ignored", "pair", "probabilities"])
def test_the_reference_in_parts_is_the_whole(inputs, monkeypatch):
    case = Case("table", "ce", "test", (10, 6), "fp32", inputs, options={"lam": 0.3} if inputs == "pair" else {})
    made = make_inputs(case, DEVICE)
    monkeypatch.setattr(check, "CHUNK", 18)
    parts = check.reference(case, made)
    wide = made.x.detach().double().requires_grad_()
    others = {k: t.double() if t.is_floating_point() else t for k, t in made.others.items()}
    whole = RECORDS["ce"].plain(wide, others.pop("target"), **others, **case.options)
    whole.backward()
    torch.testing.assert_close(parts.value, whole.detach())
    torch.testing.assert_close(parts.gradients[0], wide.grad.float())


def test_parts_of_a_batch_mean_are_the_whole(monkeypatch):
    case = Case("losses", "kl", "test", (10, 6), "fp32", "teacher", options={"temperature": 2.0, "reduction": "batchmean"})
    made = make_inputs(case, DEVICE)
    whole = check.reference(replace(case, whole=True), made)
    monkeypatch.setattr(check, "CHUNK", 18)
    parts = check.reference(case, made)
    torch.testing.assert_close(parts.value, whole.value)
    torch.testing.assert_close(parts.gradients[0], whole.gradients[0])


def test_the_cross_entropy_does_not_hide_a_wrong_dice_loss():
    case = next(shrunk(c) for c in CASES if c.loss == "dice_ce" and c.dtype == "fp32")
    inputs = make_inputs(case, DEVICE)
    other = check.reference(replace(case, options=case.options | {"lambda_dice": 1.02}), inputs)
    assert check.fault(case, check.errors(Contender("torch", by_names(RECORDS["dice_ce"].plain)), case, inputs, other))


def wrong(case, spoil):
    """Torch's own computation with a gradient that `spoil` changes."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return spoil(g.clone())

    return Contender("torch", by_names(lambda x, target, **rest: RECORDS[case.loss].plain(Spoilt.apply(x), target, **rest)))


def scaled(g):
    return g * 1.05


def row_lost(g):
    g[7] = 0
    return g


def not_finite(g):
    g[3, 2] = float("nan")
    return g


@pytest.mark.parametrize(("spoil", "said"), [(scaled, "the gradient is off"), (row_lost, "is off"), (not_finite, "off by nan")])
def test_a_wrong_gradient_gets_no_speed(monkeypatch, spoil, said):
    case = Case("table", "ce", "test", (2000, 10), "fp32", "classes")
    monkeypatch.setattr(run, "contenders", lambda *_: [wrong(case, spoil)])
    (row,) = measure_case(case, ["torch"], DEVICE, report(), QUICK)
    assert row.status.startswith("wrong: ")
    assert said in row.status
    assert row.ms is row.idle_ms is row.forward_ms is row.host_us is row.peak_mib is None


def test_one_wrong_row_among_many_is_seen():
    """It is lost in the norm of the whole gradient."""
    case = Case("table", "ce", "test", (20000, 4), "bf16", "classes")
    inputs = make_inputs(case, DEVICE)
    found = check.errors(wrong(case, row_lost), case, inputs, check.reference(case, inputs))
    assert found["gradient"] < check.TOLERANCE["bf16"]
    assert found["gradient of a row"] > 0.9
    assert "gradient of a row" in check.fault(case, found)


def rotated(loss, rows):
    case = next(c for c in CASES if c.loss == loss and c.inputs == "rotated")
    return replace(case, shape=(rows, 5))


def test_our_probiou_is_right_in_each_of_many_boxes():
    case = rotated("probiou", 1000)
    inputs = make_inputs(case, DEVICE)
    (ours,) = contenders(case, DEVICE, {"lossforge"})
    assert not check.fault(case, check.errors(ours, case, inputs, check.reference(case, inputs)))


def in_float64(case, spoil=lambda g: g, factor=1.0):
    """The bench's own float64 computation of boxes that are multiplied by `factor`, with a gradient that `spoil` changes."""

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.double() * factor

        @staticmethod
        def backward(ctx, g):
            return spoil(g).float()

    return Contender("torch", by_names(lambda x, target, **rest: RECORDS[case.loss].plain(Spoilt.apply(x), target.double(), **rest)))


def times(factor, row, number=slice(None)):
    def spoil(g):
        g = g.clone()
        g[row, number] *= factor
        return g

    return spoil


ROW_BOUND = check.ROW_TOLERANCE * check.TOLERANCE["fp32"]


def test_a_badly_conditioned_row_may_be_off_as_far_as_rounding_moves_it(monkeypatch):
    """Sides that differ by 1e-5 of themselves: rounding them by 6e-8 moves the gradient, which is their difference, by 6e-3 of itself."""
    case = rotated("kfiou", 50)
    inputs = make_inputs(case, DEVICE)
    with torch.no_grad():
        inputs.x[7] = inputs.others["target"][7] * (1 + 1e-5 * torch.tensor([1, 1, 1, -1, 1], device=DEVICE))
    exact = check.reference(case, inputs)

    def of_worst_row(*how):
        return check.errors(in_float64(case, *how), case, inputs, exact)["gradient of a row"]

    rounded = 1 + 2**-24
    assert of_worst_row(times(1, 0), rounded) < ROW_BOUND
    assert of_worst_row(times(1, 0), 1 + 2**-18) > ROW_BOUND
    assert of_worst_row(times(2, 7), rounded) > ROW_BOUND
    assert of_worst_row(times(1.0002, 8), rounded) > ROW_BOUND
    monkeypatch.setattr(check, "NUDGES", 0)
    assert of_worst_row(times(1, 0), rounded) > ROW_BOUND


def test_pixels_and_radians_do_not_hide_each_other():
    """The derivative in the angle is some hundred times those in pixels, and a box as many pixels large."""
    case = rotated("gwd", 50)
    inputs = make_inputs(case, DEVICE)
    exact = check.reference(case, inputs)
    row = int((exact.gradients[0][:, 4] / exact.gradients[0][:, 2]).abs().argmax())
    assert 0.01 * exact.gradients[0][row, 2].abs() / exact.gradients[0][row].norm() < ROW_BOUND
    assert check.errors(in_float64(case, times(1.01, row, 2)), case, inputs, exact)["gradient of a row"] > ROW_BOUND


def test_a_wrong_value_gets_no_speed(monkeypatch):
    case = Case("table", "mae", "test", (5000,), "fp32", "dense")
    shifted = Contender("torch", by_names(lambda x, target: RECORDS["mae"].plain(x, target) + 1e-3))
    monkeypatch.setattr(run, "contenders", lambda *_: [shifted])
    (row,) = measure_case(case, ["torch"], DEVICE, report(), QUICK)
    assert row.status.startswith("wrong: the value")


def test_a_contender_that_fails_says_why_and_the_others_go_on(monkeypatch):
    def fail(inputs):
        raise RuntimeError("no such luck\nand more")

    case = Case("table", "mae", "test", (500,), "fp32", "dense")
    absent = Contender("quack", fail, refuses="not installed")
    monkeypatch.setattr(
        run, "contenders", lambda *_: [Contender("liger", fail), absent, Contender("torch", by_names(RECORDS["mae"].plain))]
    )
    failed, missing, right = measure_case(case, [], DEVICE, report(), QUICK)
    assert failed.status == "failed: RuntimeError: no such luck"
    assert missing.status == "not installed"
    assert right.status == "ok"
    assert right.ms > 0


@pytest.mark.skipif(GPU, reason="says what a machine without a GPU measures")
def test_without_a_gpu_only_wall_clock_times():
    found = new_report(DEVICE, "abc", {})
    assert found.gpu == "none"
    case = next(c for c in CASES if c.suite == "small" and c.shape == (64, 10))
    *rows, liger = measure_case(case, ["lossforge", "lossforge-inplace", "torch", "liger"], DEVICE, found, QUICK)
    assert [row.contender for row in rows] == ["lossforge", "torch"]
    for row in rows:
        assert row.status == "ok"
        assert row.high_ms >= row.ms >= row.low_ms > 0
        assert row.idle_high_ms >= row.idle_ms >= row.idle_low_ms > 0
        assert row.forward_ms > 0
        assert row.floor_ms is row.peak_mib is row.host_us is None
    assert liger.status in ("needs a CUDA GPU", "not installed")
    assert liger.ms is None


def test_contenders_take_turns_and_one_that_fails_later_leaves_them(monkeypatch):
    """Each is called in every round, so that what changes on the machine meets all of them; no figure of the failed one stays."""
    calls, case = [], Case("table", "mae", "test", (500,), "fp32", "dense")

    def noted(name, most=10**9):
        def call(x, target):
            calls.append(name)
            if calls.count(name) > most:
                raise RuntimeError("worn out")
            return RECORDS["mae"].plain(x, target)

        return Contender(name, by_names(call))

    monkeypatch.setattr(run, "contenders", lambda *_: [noted("a"), noted("b", most=5), noted("c")])
    first, worn, last = measure_case(case, [], DEVICE, report(), Measurement(milliseconds=1e-3, forward=False))
    assert worn.status == "failed: RuntimeError: worn out"
    assert worn.ms is worn.idle_ms is None
    assert first.ms > 0
    assert last.idle_ms > 0
    turns = "".join(name for name, before in zip(calls, ["", *calls], strict=False) if name != before)
    assert re.fullmatch(r"abc(abc)+(ac)+", turns)  # first each is checked


def test_a_contender_that_brought_a_process_down_is_named_and_not_called():
    case = next(c for c in CASES if c.suite == "small" and c.shape == (64, 10))
    ours, broken = measure_case(case, ["lossforge", "torch"], DEVICE, report(), QUICK, broken=["torch"])
    assert (ours.status, broken.status) == ("ok", "failed: brought its process down")
    assert broken.value_error is None


def test_without_a_gpu_cases_are_cut_and_none_comes_twice():
    cases = [c for c in CASES if c.suite == "scaling" and c.loss == "focal"]
    assert run.cases_for(torch.device("cuda"), cases) == cases
    assert [c.shape for c in run.cases_for(torch.device("cpu"), cases)] == [(1000, 80), (3276, 80)]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_on_a_gpu_every_figure():
    case = next(c for c in CASES if c.suite == "small" and c.variant == "label smoothing")
    rows = measure_case(case, ["lossforge", "lossforge-backward", "lossforge-inplace", "torch"], DEVICE, report(), QUICK)
    assert [row.contender for row in rows] == ["lossforge", "lossforge-backward", "lossforge-inplace", "torch"]
    for row in rows:
        assert row.status == "ok", row
        for name in ("ms", "idle_ms", "forward_ms", "host_us", "peak_mib", "first_ms", "floor_ms", "forward_floor_ms"):
            assert getattr(row, name) > 0, name
    ours, _, inplace, _ = rows
    assert ours.recompiled_options == 0
    assert inplace.peak_mib < 0.1 < ours.peak_mib
