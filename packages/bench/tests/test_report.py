"""Reports: the schema, comparison, targets, tables and pictures."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lossforge.bench import compare
from lossforge.bench.cases import FUSED, RECORDS
from lossforge.bench.report import Report, Row, SchemaError, linear, load, pictures, tables
from lossforge.bench.report.targets import TEMPLATES, verdicts

ROOT = Path(__file__).resolve().parents[3]


def row(contender="lossforge", ms=1.0, spread=0.01, case=("ce", "", (8192, 32000), "bf16"), **more):
    loss, variant, shape, dtype = case
    figures = {"ms": ms, "low_ms": ms * (1 - spread), "high_ms": ms * (1 + spread), "floor_ms": 0.244, "peak_mib": 500.0}
    return Row("table", loss, variant, "llm-vocabulary", list(shape), dtype, contender, **(figures | more))


def report(*rows, rate=4.30e12, gpu="NVIDIA H200"):
    rates = {"copy_bytes_per_second": rate, "read_bytes_per_second": rate}
    return Report(gpu, {"torch": "2.11.0"}, "abc", "2026-01-01", **rates, rows=list(rows))


def saved(path, *rows, **more):
    report(*rows, **more).save(path)
    return str(path)


def test_a_saved_report_is_read_back(tmp_path):
    before = report(row(), row("torch", status="failed: x", ms=2.0))
    before.save(tmp_path / "r.json")
    assert load(tmp_path / "r.json") == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("gpu"), "lacks gpu"),
        (lambda t: t.update(colour="red"), "unknown colour"),
        (lambda t: t.update(schema=99), "schema 2"),
        (lambda t: t["rows"][0].update(ms="fast"), "ms is 'fast'"),
        (lambda t: t["rows"][0].pop("dtype"), "row 0: lacks dtype"),
        (lambda t: t.update(rows=None), "no list of rows"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, change, said):
    path = tmp_path / "r.json"
    report(row()).save(path)
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(SchemaError, match=said):
        load(path)


def test_committed_reports_follow_the_schema():
    for name in ("bench", "scaling"):
        path = ROOT / "results" / f"{name}-h200.json"
        if path.exists():
            assert load(path).rows
            assert not re.search(r'"/\w', path.read_text(encoding="utf-8")), "a place of one machine"


@pytest.mark.parametrize(
    ("old", "new", "spread", "verdict"),
    [
        (1.0, 1.005, 0.001, "same"),  # within what two runs differ by
        (1.0, 1.03, 0.001, "slower"),
        (1.0, 0.97, 0.001, "faster"),
        (1.0, 1.03, 0.03, "same"),  # within the spreads
        (1.0, 1.10, 0.03, "slower"),
    ],
)
def test_verdicts_know_the_noise(old, new, spread, verdict):
    (change, _) = compare.compare(report(row(ms=old, spread=spread)), report(row(ms=new, spread=spread)), 0.05)
    assert change.verdict == verdict
    assert change.ratio == pytest.approx(new / old)
    assert change.regression == (new / old > 1.05)


@pytest.mark.parametrize(
    ("ours", "theirs", "words", "status", "said"),
    [
        pytest.param({}, 3.0, (), 0, "", id="nothing"),
        pytest.param({}, 4.0, (), 0, "slower", id="another's time"),
        pytest.param({"ms": 1.04}, 3.0, (), 0, "", id="little"),
        pytest.param({"ms": 1.2}, 3.0, (), 1, "REGRESSION", id="time"),
        pytest.param({"ms": 1.2}, 3.0, ("--threshold", "0.3"), 0, "", id="time below the threshold"),
        pytest.param({"peak_mib": 900.0}, 3.0, (), 1, "more  REGRESSION", id="memory"),
        pytest.param({"status": "wrong: the value"}, 3.0, (), 1, "ok → wrong: the value", id="value"),
    ],
)
def test_compare_exits_with_1_only_on_a_regression_of_ours(tmp_path, capsys, ours, theirs, words, status, said):
    old = saved(tmp_path / "old.json", row(), row("torch", 3.0))
    new = saved(tmp_path / "new.json", row(**ours), row("torch", theirs))
    assert compare.main([old, new, *words]) == status
    out = capsys.readouterr().out
    assert said in out
    assert status or said or "REGRESSION" not in out  # the row of another's slower time is marked, but does not count


def test_compare_exits_with_2_where_reports_cannot_be_compared(tmp_path):
    old = saved(tmp_path / "old.json", row(), row("torch", 3.0))
    assert compare.main([old, saved(tmp_path / "other.json", row(), gpu="NVIDIA A100")]) == 2
    assert compare.main([old, str(tmp_path / "missing.json")]) == 2


def test_reports_that_were_timed_in_two_ways_are_not_compared(tmp_path, capsys):
    now, earlier = report(row()), report(row(ms=2.0))
    earlier.timing = "each call alone"
    for name, each in (("now", now), ("earlier", earlier)):
        each.save(tmp_path / f"{name}.json")
    assert compare.main([str(tmp_path / "earlier.json"), str(tmp_path / "now.json")]) == 2
    assert "times were measured in two ways: each call alone; back to back" in capsys.readouterr().err


def test_rows_of_one_report_only_are_named(tmp_path, capsys):
    old, new = saved(tmp_path / "old.json", row()), saved(tmp_path / "new.json", row(), row("quack", 2.0))
    assert compare.main([old, new]) == 0
    assert "only in the new report" in capsys.readouterr().out


def test_targets_scale_with_the_copy_rate():
    (time,) = (v for v in verdicts(report(row(ms=0.28), rate=4.30e12)) if v.target.limit == 0.29)
    assert time.met
    assert time.wanted == pytest.approx(0.29)
    (time,) = (v for v in verdicts(report(row(ms=0.28), rate=8.60e12)) if v.target.limit == 0.29)
    assert not time.met
    assert time.wanted == pytest.approx(0.145)


def test_targets_of_shares_and_of_others():
    fast = row(ms=0.28, forward_ms=0.1, forward_floor_ms=0.096)
    smooth = row(ms=0.31, case=("ce", "label smoothing", (8192, 32000), "bf16"))
    found = {(v.row.variant, v.target.figure): v for v in verdicts(report(fast, smooth))}
    assert found["", "forward_share"].met
    assert not found["label smoothing", "ms"].met
    assert found["label smoothing", "ms"].wanted == pytest.approx(0.308)
    small = ("ce", "", (64, 10), "fp32")
    (host,) = verdicts(report(row(case=small, host_us=90.0), row("torch", case=small, host_us=95.0)))
    assert host.met
    (host,) = verdicts(report(row(case=small, host_us=90.0)))
    assert not host.met  # nothing to compare with


def test_a_wrong_row_meets_no_target():
    assert not any(v.met for v in verdicts(report(row(ms=0.1, status="wrong: the value"))))


def test_targets_are_of_cases_that_exist():
    for record in RECORDS.values():
        keys = {case.key.removeprefix(f"{case.loss} ") for case in record.cases if case.suite not in FUSED}
        layers = {f"{case.suite} {case.variant}".strip() for case in record.cases if case.suite in FUSED}
        for target in record.targets:
            assert target.case in (layers if target.case.split()[0] in FUSED else keys), (record.name, target)
            assert {*target.use} <= {case.use for case in record.cases}
            if isinstance(target.of, str) and "x" in target.of and target.case in keys:
                assert target.of in keys, (record.name, target)


def test_templates_are_those_of_the_registry():
    from lossforge.losses.registry import LOSSES

    of = {name: RECORDS[name].template for name in LOSSES if name in RECORDS and RECORDS[name].template}
    assert {record.template for record in RECORDS.values()} == {"", *TEMPLATES}
    for template in {loss.template.name for loss in LOSSES.values()}:
        assert len({held for name, held in of.items() if LOSSES[name].template.name == template}) <= 1, template


def test_a_loss_is_held_to_the_best_of_its_template():
    def box(loss, ms, **more):
        return replace(row(ms=ms, case=(loss, "", (2**22, 4), "fp32"), floor_ms=0.05), suite="losses", **more)

    found = report(box("iou", 0.1), box("box_l1", 0.0625), box("ciou", 0.0675), box("giou", 0.0625, status="wrong: the value"))
    shares = {v.row.loss: v for v in verdicts(found) if v.template}
    assert {loss: v.met for loss, v in shares.items()} == {"iou": False, "box_l1": True, "ciou": True, "giou": False}
    assert all(v.wanted == pytest.approx(0.9 * 0.8) for v in shares.values())
    text = tables.targets(found)
    asked = "forward + backward, share of its floor | ≥ 0.9 × the best of its template = 0.72"
    assert f"| 2 of 4 boxes cases, fp32 | {asked} | 0.74 to 0.80 | met |" in text
    assert f"| IoU 4194304×4 fp32 | {asked} | 0.50 | **missed** |" in text
    (alone,) = (v for v in verdicts(report(box("giou", 0.1, status="wrong: the value"))) if v.template)
    assert not alone.met


def test_table_names_the_best_peer():
    text = tables.bench(report(row(ms=0.5), row("torch", 2.0), row("torch.compile", 1.0), row("liger", 0.8), row("quack", 0.6)))
    assert "| 8192×32000 | bf16 | **0.500** | 49 % | 2.000 | 1.000 | quack 0.600 |" in text
    text = tables.bench(report(row(ms=0.5), row("quack", 0.6, status="wrong: the value")))
    assert "| **0.500** | 49 % |" in text
    assert "best peer" not in text
    text = tables.bench(report(row(ms=0.5, idle_ms=0.9), row("torch", 2.0)))
    assert "| **0.500** | 49 % | 2.000 | 500, 500 | 0.900, – |" in text


@pytest.mark.slow
def test_pictures_know_what_they_were_drawn_from(tmp_path):
    one = report(row(), row("torch", 3.0), replace(row(), suite="scaling", use="over-N", variant="over-N"))
    for draw, rows in (
        (pictures.time_picture, pictures.main_rows),
        (pictures.memory_picture, pictures.main_rows),
        (pictures.scaling_picture, pictures.scaling_rows),
    ):
        path = tmp_path / "picture.svg"
        draw(one, path)
        assert pictures.digest(one, rows(one)) in path.read_text()
        first = path.read_bytes()
        draw(one, path)
        assert path.read_bytes() == first
    other = report(row(ms=1.1), row("torch", 3.0))
    assert pictures.digest(other, pictures.main_rows(other)) != pictures.digest(one, pictures.main_rows(one))


def exact_case(ours, rounded, error, quack=None):
    """Rows of Qwen's cross entropy of large logits: times of ours and of rounded logits, and the error of our gradients."""
    case = replace(row(case=("ce", "", (8192, 1024, 151936), "bf16")), suite="exact", use="qwen3-0.6b")
    yield replace(case, contender="lossforge", ms=ours, gradient_error=error, weight_error=1e-3)
    yield replace(case, contender="lossforge-rounded", ms=rounded, value_error=1e-6, gradient_error=3e-2, weight_error=3e-2)
    yield replace(case, contender="lossforge-float32", ms=14.0, gradient_error=2e-3, weight_error=2e-3)
    yield replace(case, contender="products", ms=11.0)
    if quack is not None:
        yield replace(case, contender="quack", ms=quack, gradient_error=2e-2, weight_error=2e-2)


@pytest.mark.parametrize(
    ("given", "met"),
    [
        ((12.3, 12.0, 2.9e-3), [True, True, True]),
        ((12.5, 12.0, 3.1e-3), [False, False, True]),
        ((1.6, 1.5, 2e-3), [True, True, True]),  # below 2 ms 1.1 times
        ((12.3, 12.0, 2e-3, 12.2), [True, True, True, False]),
    ],
)
def test_exact_logits_cost_little_and_are_exact(given, met):
    made = report(*exact_case(*given))
    assert [verdict.met for verdict in verdicts(made, fused=True)] == met
    text = linear.listed(made, "exact")
    assert f'| `logits="weight"` | {given[1]:.2f} | 500 | 1.0e-06, 3.0e-02, 3.0e-02 |' in text
    assert "| its products alone | 11.00 | 500 |  |" in text


def test_an_objective_takes_its_products_and_itself():
    case = replace(row(case=("grpo", "", (8, 1024, 2048, 128256), "bf16")), suite="objectives", use="llama3-1b")
    times = {"lossforge": 19.0, "products": 17.7, "objective": 1.0}
    made = report(*(replace(case, contender=name, ms=ms) for name, ms in times.items()))
    (verdict,) = verdicts(made, fused=True)
    assert (verdict.wanted, verdict.met) == (pytest.approx(19.054), True)


def test_a_draft_s_loss_stands_beside_torch_compile_and_the_products_whoever_is_faster():
    case = replace(row(case=("draft", "", (8192, 4096, 151936), "bf16")), suite="drafts", use="qwen3-8b")
    costs = {"lossforge": (66.0, 5500.0), "torch.compile": (64.5, 9500.0), "products": (60.0, 5400.0)}
    rows = [replace(case, contender=n, ms=ms, peak_mib=mib, value_error=1e-6, weight_error=4e-3) for n, (ms, mib) in costs.items()]
    made = report(*rows)
    text = linear.beside_compile(made, "drafts")
    start = "| draft model, Qwen3 8B | 8192×4096×151936 | 66.0, 5,500 | 64.5, 9,500 | 60.0 | 1.10 | 1.0e-06,"
    assert start in text
    assert (
        linear.beside_compile(made, "drafts", ("mtp",)).count("|") == linear.beside_compile(made, "drafts", ("draft",)).count("|") / 3 * 2
    )
    assert [verdict.met for verdict in verdicts(made, fused=True)] == [False, False, False]  # 2,211 MiB are the limit
    wrong = report(rows[0], replace(rows[1], status="wrong: the value is off by 2e-1", ms=None), rows[2])
    assert "| 66.0, 5,500 | – | 60.0 | 1.10 |" in linear.beside_compile(wrong, "drafts")
    assert "- torch.compile, wrong: the value is off by 2e-1 (draft model 8192×4096×151936 bf16)" in linear.beside_compile(wrong, "drafts")


def test_a_contender_without_a_figure_is_named_with_its_message_and_cases():
    refused = "failed: NotImplementedError: V must be a multiple of 256"
    first, second = (("ce", "", (rows, 151936), "bf16") for rows in (8192, 4096))
    made = report(
        *(
            row(name, case=case, **({"status": refused} if name == "quack" else {}))
            for case in (first, second)
            for name in ("lossforge", "quack")
        )
    )
    assert tables.bench(made).endswith(f"- quack, {refused} (cross entropy 8192×151936 bf16; cross entropy 4096×151936 bf16)")
    assert "Without a figure" not in tables.bench(report(row()))
