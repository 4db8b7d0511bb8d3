"""Fused losses: contenders are right before they are fast, as on logits, and the products are those that ours makes."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lossforge import kernels
from lossforge.bench import check, contenders, inputs, run
from lossforge.bench.cases import CASES, CONTENDERS, FUSED, RECORDS
from lossforge.bench.contenders import PARTS
from lossforge.bench.measure import Measurement
from lossforge.bench.report import Report, Row, linear, load
from lossforge.bench.report.targets import verdicts

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
HERE = [name for name in CONTENDERS if name != "liger-sm90" and (GPU or name != "torch.compile")]  # the former takes no small sizes
LINEAR = [case for case in CASES if case.suite in ("linear", "objectives", "drafts")]
LINEAR += [case for case in CASES if case.suite == "exact"][:1]
PEERS = ("torch-linear", "liger", "liger-sm90", "cut-cross-entropy", "cut-cross-entropy-exact", "quack", "quack-plain", "trl", "verl")
REFUSING = {name: why for name in PEERS if (why := contenders.refusal(name, DEVICE))}
FEATURES = [case for case in CASES if case.suite == "features"]


def shrunk(case, dtype="fp32"):
    """Small enough for a CPU, and in float32, so that errors are of the formula."""
    options = {"chunk": 5} if "chunk" in case.options else case.options
    lead = (4, 6) if len(case.shape) == 4 else (24,)
    classes = 24 if case.inputs.endswith("views") else 40
    return replace(case, shape=(*lead, 8, classes), dtype=dtype if GPU is False else "bf16", options=options)


@pytest.mark.parametrize("case", [*LINEAR, *{case.loss: case for case in FEATURES}.values()], ids=lambda case: case.key)
def test_every_contender_computes_the_loss(case):
    case = shrunk(case)
    made = inputs.make_inputs(case, DEVICE)
    exact = check.reference(case, made)
    found = contenders.contenders(case, DEVICE, set(HERE))
    assert {"lossforge", "torch"} <= {c.name for c in found}
    assert "products" in {c.name for c in found}
    for contender in found:
        if not contender.refuses and contender.name not in PARTS:
            most = 1e-5 if case.dtype == "fp32" else check.LIMIT
            assert max(check.errors(contender, case, made, exact).values()) < most, contender.name


def test_a_row_has_every_figure(monkeypatch):
    case = shrunk(LINEAR[0])
    report = Report("test", {}, "none", "2026-01-01")
    rows = run.measure_case(case, HERE, DEVICE, report, Measurement(milliseconds=2))
    ours = next(row for row in rows if row.contender == "lossforge")
    assert ours.status == "ok"
    assert max(ours.value_error, ours.gradient_error, ours.weight_error) < 1e-1
    for row in rows:
        assert row.status == REFUSING.get(row.contender, "ok"), row
        assert row.ms is None or row.ms > 0
    products = next(row for row in rows if row.contender == "products")
    assert products.value_error is products.weight_error is None


def test_without_a_gradient_only_forward_is_measured():
    case = shrunk(next(c for c in LINEAR if c.inputs == "tokens without gradient"))
    rows = run.measure_case(case, ["lossforge", "products", "torch"], DEVICE, Report("", {}, "", ""), Measurement(milliseconds=2))
    assert [row.status for row in rows] == ["ok"] * 3
    assert [row.gradient_error for row in rows] == [None] * 3


@pytest.mark.parametrize("part", ["value", "input", "weight"])
def test_a_wrong_result_gets_no_speed(monkeypatch, part):
    case = shrunk(LINEAR[0])

    def wrong(made, **options):
        value = RECORDS["ce"].layer.ours(made)
        scale = {"input": made.x, "weight": made.head}.get(part)
        return value * 1.2 if scale is None else value + scale.sum() - scale.detach().sum()

    made = [contenders.Contender("torch", wrong), *contenders.contenders(case, DEVICE, {"lossforge"})]
    monkeypatch.setattr(run, "contenders", lambda *_: made)
    off, right = run.measure_case(case, [], DEVICE, Report("", {}, "", ""), Measurement(milliseconds=2))
    assert off.status.startswith(f"wrong: the {part if part == 'value' else f'gradient of the {part}'} is off")
    assert off.ms is off.peak_mib is None
    assert right.status == "ok"


def test_products_are_the_engine_s_own(monkeypatch):
    """As many of torch's products of the same sizes as ours makes, whether once, twice or without gradient."""
    from lossforge.losses.engine.linear import engine, objective, products

    monkeypatch.setattr(kernels.load("linear.launch"), "programs", lambda device: 0)  # without the product that computes the loss
    for each in (engine, objective):  # nor the float32 logits that replace it, whose chunks are smaller
        monkeypatch.setattr(each, "is_wide", lambda layer: False)

    calls, mm, add = [], torch.mm, products.add_product

    def counted_mm(a, b, **more):
        calls.append((*a.shape, b.shape[1]))
        return mm(a, b, **more)

    def counted_add(total, a, b, first):
        calls.append((*a.shape, b.shape[1], first))
        add(total, a, b, first)

    monkeypatch.setattr(torch, "mm", counted_mm)
    monkeypatch.setattr(products, "add_product", counted_add)
    monkeypatch.setattr(
        engine, "MEMORY", 96 * 40 * (2 if GPU else 4 * 4)
    )  # rows of 40 classes: 80 at a time, a pair of sequences; a CPU takes a quarter
    monkeypatch.setattr(engine, "ALIGNED", 8)
    for case in LINEAR:
        case = replace(shrunk(case), shape=(*((6, 40) if len(case.shape) == 4 else (240,)), 8, 40))
        made = inputs.make_inputs(case, DEVICE)
        found = {c.name: c for c in contenders.contenders(case, DEVICE, set(HERE))}
        for name in found:
            if name.startswith("products"):
                sizes = []
                for each in (name, name.replace("products", "lossforge")):
                    calls.clear()
                    made.clear()
                    check.step(found[each], case, made)
                    sizes.append(sorted(calls))
                assert sizes[0] == sizes[1], (case.key, name)
                assert len(sizes[0]) >= 3


def row(case, contender, ms=1.0, **more):
    figures = {"ms": ms, "peak_mib": 100.0, "value_error": 1e-6, "gradient_error": 2e-3, "weight_error": 2e-3}
    return Row(case.suite, case.loss, case.variant, case.use, list(case.shape), case.dtype, contender, **(figures | more))


def measured(**of_ours):
    """Make a report of every case, with ours as fast as its products."""
    report = Report("test", {}, "none", "2026-01-01", copy_bytes_per_second=4e12)
    for case in (case for case in CASES if case.suite in FUSED):
        names = {name for name in CONTENDERS if name.startswith(("lossforge", "products", "objective")) or name == "torch"}
        for c in contenders.contenders(case, torch.device("cpu"), names):
            report.rows.append(row(case, c.name, **(of_ours if c.name == "lossforge" else {})))
    return report


def judged(report):
    return verdicts(report, fused=True)


def test_every_target_is_judged(tmp_path):
    report = measured()
    report.save(tmp_path / "linear.json")
    assert judged(load(tmp_path / "linear.json")) == judged(report)
    missed = [v for v in judged(report) if not v.met]
    # without a gradient 64 MiB are wanted; half of the tokens ignored takes as long as none
    assert sorted(v.target.figure for v in missed) == ["ms", "peak_mib", "peak_mib", "peak_mib"]
    assert len(judged(report)) == 4 * 6 + 3 * 4 + 2 + 1 + 2 + 3 + 8 * 3 + 5 + 4 * 2 + 3
    slow = {
        (v.row.label, v.target.contender, v.target.figure)
        for v in judged(measured(ms=40.0, peak_mib=9e3, gradient_error=3e-3))
        if not v.met
    }
    assert len(slow) == 4 * 2 + 3 * 4 + 2 + 2 + 3 + 6 + 4 + 4 * 2 + 3  # two of large logits, and DPO, have the name of another case


def test_quack_is_judged_by_its_better_form():
    report = measured()
    report.rows += [row(LINEAR[0], "quack", 0.9), row(LINEAR[0], "quack-plain", 1.1)]
    (found,) = (v for v in judged(report) if "QuACK" in v.target.said)
    assert not found.met
    assert found.wanted == 0.9


def test_tables_name_who_failed():
    report = measured()
    report.rows.append(row(LINEAR[0], "liger", None, status="failed: RuntimeError: no such luck"))
    text = linear.fused(report)
    assert "- liger, failed: RuntimeError: no such luck (cross entropy 8192×4096×128256 bf16)" in text
    assert text.count("**1.0**") == 21 + 8 * 2 + 1  # cases, two more ways of eight, and skip_ignored
    assert "1.05 × the one product | 1.00 | met |" in linear.targets(report)


@pytest.mark.slow
def test_all_cases_are_measured_and_shown():
    """The whole way on small shapes."""
    report = Report("test", {}, "none", "2026-01-01", copy_bytes_per_second=4e12)
    for case in (case for case in CASES if case.suite in FUSED):
        report.rows += run.measure_case(shrunk(case), HERE, DEVICE, report, Measurement(milliseconds=1))
    assert {r.status for r in report.rows if r.contender not in REFUSING} == {"ok"}
    for made in (linear.fused, linear.targets):
        assert made(report).count("\n") >= 5
    assert linear.fused(report, "features").count("of features") == 5  # both sizes are cut to one


def test_peers_of_token_losses_compute_ours(monkeypatch):
    """What verl and Liger's function for Hopper give for each token becomes the case's loss. TRL's runs on a CPU, too."""
    case = shrunk(next(c for c in LINEAR if c.inputs == "tokens"))
    made = inputs.make_inputs(case, DEVICE)

    def both(x, weight, *_):
        log_p = torch.nn.functional.linear(x, weight).float().log_softmax(-1)
        return log_p.gather(-1, made.others["target"].unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def of_liger(*given):
        logps, entropy = both(*given)
        return -logps, entropy

    monkeypatch.setitem(sys.modules, "verl.utils.kernel.linear_cross_entropy", SimpleNamespace(linear_cross_entropy=both))
    module = "liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90"
    named = SimpleNamespace(LigerFusedScaledCrossEntropySM90Function=SimpleNamespace(apply=of_liger))
    monkeypatch.setitem(sys.modules, module, named)
    found = {c.name: c for c in contenders.contenders(case, torch.device("cuda"), {"lossforge", "liger-sm90", "verl"})}
    assert set(found) == {"lossforge", "liger-sm90", "verl"}
    wanted = found["lossforge"].call(made)
    for name in ("liger-sm90", "verl"):
        torch.testing.assert_close(found[name].call(made), wanted, rtol=1e-4, atol=1e-4)
    assert not contenders.contenders(LINEAR[0], torch.device("cuda"), {"verl"})


def test_a_peer_that_cannot_run_here_says_why():
    """By its row, not by its absence."""
    case = shrunk(LINEAR[0])
    device, peers = torch.device("cpu"), set(PEERS) - {"verl"}  # which has no cross entropy
    rows = run.measure_case(case, ["lossforge", *PEERS], device, Report("", {}, "", ""), Measurement(milliseconds=1))
    said = {row.contender: row.status for row in rows}
    assert said.keys() == {"lossforge", *peers}
    assert said["lossforge"] == "ok"
    for name in peers:
        refused = contenders.refusal(name, device)
        assert said[name] == (refused or "ok")
        assert refused or name in ("torch-linear", "trl")
