"""Trainings, their comparison through a tracking server, and MLflow's UI and the page in a browser, as a person sees them."""

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, WHY_NOT, browser, keep, mlflow_ui, new_page

import compare
import train

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
TINY = [
    "model=tiny_resnet", "trainer.device=cpu", "data.image_size=16", "data.held_out=0.8", "data.augment=false", "loss.implementation=torch",
    "trainer.epochs=3", "trainer.timing_warmup=2", "trainer.log_every=2", "optim.lr=0.01",
]  # fmt: skip
SEEDS = (0, 1)


@dataclass
class Seen:
    """What there is to see: the UI's address, the experiment's id, its runs by loss, the comparison's folder, output and errors."""

    address: str
    experiment: str
    runs: dict[str, list[Any]]
    comparison: Any
    folder: Path
    output: str
    browser: Any

    def page(self, width: int = 1400, scheme: str = "light", height: int = 900) -> Any:
        return new_page(self.browser, width, height, scheme=scheme)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    from mlflow.tracking import MlflowClient

    folder = tmp_path_factory.mktemp("ui")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    for loss in ("ce", "focal"):
        for seed in SEEDS:
            words = [*TINY, f"loss={loss}", f"seed={seed}", f"name={loss}-seed{seed}"]
            assert train.main([*words, f"trainer.runs={folder / 'runs'}", f"tracking.uri={store}"]) == 0
    with mlflow_ui(store, folder) as address:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert compare.main([f"tracking.uri={address}", f"runs={folder / 'comparisons'}"]) == 0
        client = MlflowClient(tracking_uri=address)
        experiment = client.get_experiment_by_name("lossforge").experiment_id
        stored = client.search_runs([experiment], order_by=["attributes.start_time"])
        runs = {loss: [run for run in stored if run.data.params.get("loss.name") == loss] for loss in ("ce", "focal")}
        (comparison,) = (run for run in stored if "compare" in run.data.tags)
        (made,) = (folder / "comparisons").iterdir()
        with browser() as running:
            yield Seen(address, experiment, runs, comparison, made, output.getvalue(), running)


def picture(page: Any, name: str, tmp_path: Path, full: bool = False) -> None:
    path = tmp_path / f"{name}.png"
    page.screenshot(path=path, full_page=full)
    assert path.stat().st_size > 10_000
    keep(path)


def test_the_comparison_is_of_the_trainings_over_http(seen):
    assert "2 losses × 1 model, 2 seeds of each: 4 runs" in seen.output
    for loss, runs in seen.runs.items():
        scores = [run.data.metrics["best_top1"] for run in runs]
        assert len(scores) == len(SEEDS)
        assert re.search(rf"│ {loss} +│ +{50 * sum(scores):.2f} ± ", seen.output)
    assert seen.comparison.info.status == "FINISHED"


def headers(page: Any) -> list[str]:
    """Of the list of runs, from the left."""
    return placed(page, "[role=columnheader]", "x")


def placed(page: Any, selector: str, side: str) -> list[str]:
    """Texts by where they are on the page, not by where they are in its source."""
    places = f"(a, b) => a.getBoundingClientRect().{side} - b.getBoundingClientRect().{side}"
    found = page.evaluate(f"[...document.querySelectorAll('{selector}')].sort({places}).map(each => each.innerText.trim())")
    return [text for text in dict.fromkeys(found) if text]


def test_the_runs_are_in_the_list_with_their_data_and_models(seen, tmp_path):
    """As the list opens for who has chosen nothing."""
    page = seen.page()
    page.goto(f"{seen.address}/#/experiments/{seen.experiment}?workflowType=machine_learning")
    for loss in seen.runs:
        for seed in SEEDS:
            page.get_by_role("link", name=f"{loss}-seed{seed}").wait_for()
    page.get_by_text(re.compile(r"^digits \(\w{8}\)")).first.wait_for()
    page.get_by_role("link", name="focal-tiny_resnet-digits").nth(1).wait_for()
    text = page.inner_text("body")
    assert text.count("Training\n") >= 4
    assert text.count("ce-tiny_resnet-digits") == text.count("focal-tiny_resnet-digits") == 2
    assert "Results: the runs with their best figures" in text
    page.close()


def test_the_experiment_links_to_its_results(seen, tmp_path):
    page = seen.page()
    page.goto(f"{seen.address}/#/experiments/{seen.experiment}?workflowType=machine_learning")
    with page.expect_popup() as opened:
        page.get_by_role("link", name="Results").click()
    page = opened.value
    page.get_by_text("result/top1", exact=True).first.wait_for()
    page.get_by_role("link", name="focal-seed1").wait_for()
    figures = ["result/top1", "result/loss", "result/images_s", "result/peak_mib", "result/loss_ms"]
    shown_first = ["Run Name", "Created", "loss.name", "model.name", *figures]
    assert [each for each in headers(page) if each in shown_first] == shown_first
    assert "Sort: Created" in page.inner_text("body")
    page.get_by_role("link", name="ce-seed0").wait_for()
    text = page.inner_text("body")
    assert "compare-top1" not in text  # trainings alone
    for run in seen.runs["focal"]:
        metrics = run.data.metrics
        shown = [metrics["best_top1"], metrics["best_loss"], metrics["images_per_second"], metrics["loss_ms"]]
        assert {f"{float(f'{value:.3g}'):g}" for value in shown} <= set(text.split())
    picture(page, "mlflow-runs", tmp_path)
    page.close()


def test_a_run_says_what_came_of_it(seen, tmp_path):
    (run,) = (run for run in seen.runs["focal"] if run.info.run_name == "focal-seed1")
    page = seen.page()
    page.goto(f"{seen.address}/#/experiments/{seen.experiment}/runs/{run.info.run_id}?workflowType=machine_learning")
    page.get_by_text("best_top1", exact=True).first.wait_for()
    text = page.inner_text("body")
    assert f"held-out top-1 {run.data.metrics['best_top1']:.2%}, held-out loss" in text
    assert "uv run experiments/" in text
    assert page.get_by_text("About this run").bounding_box()["x"] < 1400  # beside a long command
    assert f"{run.data.metrics['best_top1']}"[:8] in text
    for link in ("focal-tiny_resnet-digits", "digits"):
        page.get_by_role("link", name=link).first.wait_for()
    page.get_by_text("Show more").first.click()
    pictures = page.get_by_role("link", name="pictures", exact=True)
    assert pictures.get_attribute("href").endswith(f"#/experiments/{seen.experiment}/runs/{run.info.run_id}/artifacts/pictures")
    picture(page, "mlflow-run", tmp_path)
    page.close()


def test_curves_come_before_single_values(seen, tmp_path):
    page = seen.page()
    run = seen.runs["focal"][0].info.run_id
    page.goto(f"{seen.address}/#/experiments/{seen.experiment}/runs/{run}/model-metrics?workflowType=machine_learning")
    page.get_by_text("Add section").wait_for()
    sections = re.findall(r"^(.+)\n\(\d+\)$", page.inner_text("body"), re.MULTILINE)
    assert sections == ["result", "train", "val", "Model metrics"]
    page.wait_for_timeout(1000)  # charts are drawn one after another
    picture(page, "mlflow-charts", tmp_path)
    page.close()


def test_the_model_has_a_page_of_its_own(seen, tmp_path):
    (run,) = (run for run in seen.runs["ce"] if run.info.run_name == "ce-seed0")
    (output,) = run.outputs.model_outputs
    page = seen.page()
    page.goto(f"{seen.address}/#/experiments/{seen.experiment}/models/{output.model_id}?workflowType=machine_learning")
    page.get_by_text("best_top1", exact=True).first.wait_for()
    text = page.inner_text("body")
    for said in ("ce-tiny_resnet-digits", "Ready", "ce-seed0", "train.py", f"{run.data.metrics['best_top1']}"[:8]):
        assert said in text, said
    picture(page, "mlflow-model", tmp_path)
    page.close()


def test_the_printed_address_shows_the_compared_runs_in_order(seen, tmp_path):
    address = re.search(r"http\S+viewStateShareKey=\S+", seen.output)[0]
    page = seen.page()
    page.goto(address)
    page.get_by_text("result/top1", exact=True).first.wait_for()
    page.get_by_role("link", name="ce-seed1").wait_for()
    wanted = ["loss.name", "seed", "result/top1", "result/loss", "result/images_s", "result/peak_mib", "result/loss_ms"]
    assert [each for each in headers(page) if each in wanted] == wanted
    assert not [each for each in headers(page) if each.startswith("system/")]
    rows = placed(page, ".ag-pinned-left-cols-container [row-index]", "y")
    names = [found[0] for row in rows if (found := re.search(r"\w+-seed\d", row))]
    scores = {run.info.run_name: run.data.metrics["best_top1"] for runs in seen.runs.values() for run in runs}
    assert sorted(names) == sorted(scores)
    assert [scores[name] for name in names] == sorted(scores.values(), reverse=True)
    picture(page, "mlflow-comparison", tmp_path)
    page.close()


def test_the_other_address_has_their_charts(seen):
    address = re.search(r"as charts: (http\S+)", seen.output)[1]
    page = seen.page(height=3000)
    page.goto(address)
    for name in ("result/top1", "result/loss_ms", "train/loss"):
        page.get_by_text(name, exact=True).first.wait_for()
    text = page.inner_text("body")
    names = [f"{loss}-seed{seed}" for loss in seen.runs for seed in SEEDS]
    assert [name for name in names if text.count(name) < 3] == []  # in the list, and in the legends
    page.close()


def test_the_comparisons_own_run_shows_its_tables(seen, tmp_path):
    page = seen.page()
    page.goto(f"{seen.address}/#/experiments/{seen.experiment}/runs/{seen.comparison.info.run_id}?workflowType=machine_learning")
    cell = page.locator("table td", has_text=re.compile(r"^\+|^−")).first
    cell.wait_for()
    assert page.get_by_text("Difference to ce in points, paired over seeds of the same model").is_visible()
    picture(page, "mlflow-comparison-run", tmp_path)
    page.close()


@pytest.mark.parametrize(("name", "width", "scheme"), [("wide", 1200, "light"), ("phone", 390, "dark")])
def test_the_page_is_read_without_a_network(seen, tmp_path, name, width, scheme):
    page = seen.page(width, scheme)
    asked, complaints = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    address = (seen.folder / "comparison.html").as_uri()
    page.goto(address)
    assert asked == [address]
    assert complaints == []
    cells = page.locator("#scores tbody tr")
    assert cells.count() == 2
    for place, (loss, runs) in enumerate(seen.runs.items()):
        text = cells.nth(place).inner_text()
        assert text.startswith(loss)
        assert f"{50 * sum(run.data.metrics['best_top1'] for run in runs):.2f} ± " in text
    pictures = page.locator("figure svg")
    assert pictures.count() == 3
    for place in range(3):
        box = pictures.nth(place).bounding_box()
        assert box["width"] > 250
        assert box["height"] > 80
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")  # nothing is cut off at the side
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (paper, ink)]
    assert (brightness[0] < brightness[1]) == (scheme == "dark")
    page.locator("summary").click()
    assert page.get_by_role("link", name="focal-seed1").get_attribute("href").startswith(f"{seen.address}/#/experiments/")
    picture(page, f"comparison-{name}", tmp_path, full=True)
    page.close()
