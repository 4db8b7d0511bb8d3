"""experiments/compare.py on runs of known figures in a real store: what is averaged, paired, tested, written and refused."""

import contextlib
import csv
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from mlflow_journal import Journal
from scipy import stats

import compare
from lab.base.errors import UserError
from lab.comparison.page import headline, lead
from lab.comparison.results import Comparison, compare_runs
from lab.comparison.runs import COMPARE, Store, as_hydra, select
from lab.comparison.tables import cells_csv, markdown, runs_csv, sheets, terminal
from lab.config.settings import load_for

CE, FOCAL = [0.90, 0.92, 0.94], [0.93, 0.94, 0.97]  # differences 0.03, 0.02, 0.03


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    return Journal(tmp_path_factory.mktemp("journal"))


@pytest.fixture(scope="module")
def table(journal):
    """Two losses and two models, three seeds each; and runs that are no part of it."""
    for model, shift in (("resnet18", 0.0), ("resnet50", 0.02)):
        for loss, scores in (("ce", CE), ("focal", FOCAL)):
            for seed, score in enumerate(scores):
                costs = {"images_per_second": 1000.0 + seed, "train/peak_process_mib": 512.0, "loss_ms": 0.5}
                curve = {10: score / 2 + shift, 20: score + shift}
                journal.run(loss, model, seed, score + shift, metrics=costs, curve=curve)
    journal.run("ce", "resnet18", 3, None, status="FAILED", tags={"error": "OutOfMemoryError: no memory"})
    journal.run("ce", "resnet18", 4, 0.99, status="RUNNING")
    journal.run("focal", "resnet50", 5, 0.01, tags={"checkpoint": "runs/x/best.pt"})  # an evaluation
    journal.run("focal", "resnet50", 6, 0.01, tags={"compare": "12 runs"})
    return journal


@dataclass
class Result:
    text: str  # tables and notes
    cells: str
    runs: str
    found: Comparison

    def csv(self) -> list[dict[str, str]]:
        return list(csv.DictReader(self.cells.splitlines()))

    def runs_csv(self) -> list[dict[str, str]]:
        return list(csv.DictReader(self.runs.splitlines()))


@pytest.fixture(scope="module")
def look(journal):
    """Compare without writing anything."""

    def look(*words: str) -> Result:
        config = load_for(COMPARE, [as_hydra(word) for word in words]).config
        store = Store(journal.uri)
        runs, _, notes = select(store, config)
        found = compare_runs(runs, config, store)
        found.notes[:0] = notes
        return Result(markdown(found), cells_csv(found), runs_csv(found), found)

    return look


@dataclass
class Written:
    status: int
    text: str
    error: str
    folder: Path

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")


@pytest.fixture
def write(journal, tmp_path, capsys):
    """The app, in this process."""

    def write(*words: str, tracking: str = "none") -> Written:
        runs = tmp_path / "runs"
        capsys.readouterr()
        status = compare.main([*words, f"tracking={tracking}", f"tracking.uri={journal.uri}", f"runs={runs}"])
        out, error = capsys.readouterr()
        assert status == 0, error
        (folder,) = runs.iterdir()
        return Written(status, out, error, folder)

    return write


@pytest.fixture(scope="module")
def written(table, tmp_path_factory):
    """What the app leaves behind of the table, and what it says."""
    runs = tmp_path_factory.mktemp("written")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        words = ["tracking=none", f"tracking.uri={table.uri}", f"runs={runs}", "ui=http://mlflow.example:5000/", "name=mine"]
        status = compare.main(words)
    (folder,) = runs.iterdir()
    return Written(status, out.getvalue(), "", folder)


@pytest.fixture(scope="module")
def rows(written):
    """Return the lines of comparison.csv: CE and focal with the one model, then with the other."""
    return list(csv.DictReader(written.read("comparison.csv").splitlines()))


def test_the_table_has_a_line_for_each_loss_and_model_with_means_intervals_and_costs(rows):
    assert [(row["loss"], row["model"]) for row in rows] == [(a, b) for b in ("resnet18", "resnet50") for a in ("ce", "focal")]
    for row, scores in zip(rows, [CE, FOCAL, [x + 0.02 for x in CE], [x + 0.02 for x in FOCAL]], strict=True):
        low, high = stats.t.interval(0.95, 2, sum(scores) / 3, stats.sem(scores))
        assert row["metric"] == "best_top1"
        assert (int(row["n"]), float(row["mean"])) == (3, pytest.approx(sum(scores) / 3))
        assert (float(row["low"]), float(row["high"])) == (pytest.approx(low), pytest.approx(high))
        assert (float(row["images_per_second"]), float(row["peak_mib"]), float(row["loss_ms"])) == (1001, 512, 0.5)


@pytest.mark.parametrize("place", [1, 3])
def test_differences_in_the_table_are_tested_against_the_baseline(rows, place):
    row, tested = rows[place], stats.ttest_rel(FOCAL, CE)
    assert (row["baseline"], int(row["difference_n"])) == ("ce", 3)
    assert float(row["difference_mean"]) == pytest.approx(0.08 / 3)
    assert float(row["p"]) == pytest.approx(tested.pvalue)
    assert float(row["p_holm"]) == pytest.approx(2 * tested.pvalue)  # two tests of one p
    assert row["verdict"] == "better"


def test_the_terminal_has_the_table_in_points_and_percent(written):
    p = stats.ttest_rel(FOCAL, CE).pvalue
    assert re.search(r"│ ce +│ 92\.00 ± 4\.97 │ 94\.00 ± 4\.97 │", written.text)
    assert re.search(rf"│ focal │ resnet18 │ \+2\.67 ± 1\.43 │ 3 │ {p:.4f} │ {2 * p:.4f} │ ▲ better", written.text)
    assert "2 losses × 2 models, 3 seeds of each: 12 runs" in written.text


def test_runs_that_are_not_finished_are_listed_and_not_averaged(written):
    assert re.search(r"ce-resnet18-\d+ │ \w{8} │ failed: OutOfMemoryError: no memory", written.text)
    assert re.search(r"ce-resnet18-\d+ │ \w{8} │ running", written.text)
    lines = list(csv.DictReader(written.read("runs.csv").splitlines()))
    assert sum(line["why_left_out"] == "" for line in lines) == 12
    assert {line["why_left_out"] for line in lines} == {"", "running", "failed: OutOfMemoryError: no memory"}
    assert "0.01" not in {line["value"] for line in lines}  # evaluations and comparisons are no part of it


def test_pictures_settings_and_a_markdown_table_are_in_the_folder(written):
    text = written.read("comparison.md")
    assert "| loss | resnet18 | resnet50 |\n| --- | ---: | ---: |\n| ce | 92.00 ± 4.97 | 94.00 ± 4.97 |\n| focal | **94.67" in text
    assert {path.name for path in written.folder.iterdir()} >= {"curves.svg", "differences.svg", "tradeoff.svg", "config.yaml"}
    assert written.folder.name.endswith("-mine")
    curves = written.read("curves.svg")
    assert "resnet50" in curves
    assert "currentColor" not in curves
    assert yaml.safe_load(written.read("config.yaml"))["rows"] == ["loss"]


def test_the_page_is_one_file_with_everything_in_it(written):
    page = written.read("comparison.html")
    assert "<script" not in page
    assert not re.search(r"""\bsrc(set)?=|@import|url\((?!#)""", page)
    links = set(re.findall(r'\bhref="([^#"][^"]*)"', page))
    assert all(link.startswith("http://mlflow.example:5000/#/") for link in links)
    assert len(links) == 12  # each run
    assert page.count("<svg") == 4  # differences, speed and memory, and a curve for each model
    assert "92.00 ± 4.97" in page
    assert not re.search(r"#010203|#ffffff", page.partition("</style>")[2])  # pictures follow the reader's colours


@pytest.fixture(scope="module")
def logged(journal, tmp_path_factory):
    """Compare two losses by an app that logs it; return its run in the store, and what it has written."""
    for seed, score in enumerate((0.5, 0.6)):
        journal.run("ce", "vit", seed, score, experiment="logged")
        journal.run("focal", "vit", seed, score + 0.1 + seed / 100, experiment="logged")
    runs = tmp_path_factory.mktemp("logged")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = compare.main(["experiment=logged", "tracking=mlflow", f"tracking.uri={journal.uri}", f"runs={runs}"])
    (run,) = journal.client.search_runs([journal.experiments["logged"]], "tags.compare != ''")
    (folder,) = runs.iterdir()
    return run, Written(status, out.getvalue(), "", folder)


def test_a_comparison_is_logged_with_figures_settings_and_files(logged, journal):
    run, found = logged
    assert found.status == 0
    assert (run.info.status, run.info.run_name) == ("FINISHED", "compare-top1")
    assert f"run {run.info.run_id}" in found.text
    assert run.data.tags["compare"] == "4 runs"
    run, _ = logged
    assert "| focal | **65.50" in run.data.tags["mlflow.note.content"]
    assert run.data.metrics["focal/vit/mean"] == pytest.approx(0.655)
    assert run.data.metrics["focal/vit/difference"] == pytest.approx(0.105)
    assert run.data.params["baseline"] == "[]"
    there = {item.path for item in journal.client.list_artifacts(run.info.run_id)}
    assert there >= {"comparison.html", "comparison.md", "comparison.csv", "runs.csv", "pictures"}


def test_a_logged_comparison_has_a_view_of_its_runs_and_what_differs(logged, journal, look):
    _, found = logged
    (key,) = set(re.findall(r"viewStateShareKey=(compare-\w+)", found.text))
    assert found.read("comparison.html").count(f"viewStateShareKey={key}") == found.text.count(key) == 2  # the list, and the curves
    experiment = journal.experiments["logged"]
    view = json.loads(journal.client.get_experiment(experiment).tags[f"mlflow.sharedViewState.{key}"])
    shown = {run.info.run_id for run in journal.client.search_runs([experiment], view["searchFilter"])}
    assert shown == {line["run_id"] for line in look("experiment=logged").runs_csv()}
    columns = ["params.`loss.name`", "params.`seed`", "metrics.`best_top1`"]
    assert view["selectedColumns"] == [*columns, "attributes.`Dataset`", "attributes.`Models`"]
    assert (view["orderByKey"], view["orderByAsc"]) == ("metrics.`best_top1`", False)


def test_of_runs_with_the_same_settings_and_seed_the_newest_counts(journal, look):
    journal.run("ce", "m", 0, 0.1, experiment="twice")
    new = journal.run("ce", "m", 0, 0.3, experiment="twice")
    journal.run("ce", "m", 0, 0.7, experiment="twice", status="KILLED")
    found = look("experiment=twice")
    (row,) = found.csv()
    assert (row["mean"], row["n"], row["low"]) == ("0.3", "1", "")
    assert "only the newest counts; left for newer ones: ce-m-" in found.text
    assert [line["run_id"] for line in found.runs_csv() if not line["why_left_out"]] == [new]


def test_unlike_runs_get_rows_of_their_own(journal, look):
    """Two learning rates: nothing is averaged over them, and each is paired with its own baseline."""
    for lr in ("0.001", "0.01"):
        for seed in (0, 1):
            journal.run("ce", "m", seed, 0.5 + seed / 10, settings={"optim.lr": lr, "name": f"{lr} {seed}"}, experiment="rates")
            score = 0.6 + seed / 8 if lr == "0.01" else 0.3 + seed / 20
            journal.run("focal", "m", seed, score, settings={"optim.lr": lr, "loss.gamma": 2}, experiment="rates")
    found = look("experiment=rates")
    rows = {(row["loss"], row["optim.lr"]): row for row in found.csv()}
    assert set(rows) == {(a, b) for a in ("ce", "focal") for b in ("0.001", "0.01")}
    assert rows["focal", "0.01"]["baseline"] == "ce, lr=0.01"
    assert float(rows["focal", "0.01"]["difference_mean"]) == pytest.approx(0.1125)
    assert float(rows["focal", "0.001"]["difference_mean"]) == pytest.approx(-0.225)
    assert rows["ce", "0.01"]["baseline"] == ""
    one = look("experiment=rates", "baseline=loss=ce,optim.lr=0.001")
    assert {row["baseline"] for row in one.csv() if row["optim.lr"] == "0.001"} == {"", "ce, lr=0.001"}


def test_a_baseline_of_other_hyperparameters_is_found(journal, look):
    for gamma in (1, 2):
        for seed in (0, 1):
            journal.run("focal", "m", seed, 0.6 + seed / 8 + gamma / 100, settings={"loss.gamma": gamma}, experiment="gammas")
    for seed in (0, 1):
        journal.run("ce", "m", seed, 0.5 + seed / 10, experiment="gammas")
    rows = {(row["loss"], row["loss.gamma"]): row for row in look("experiment=gammas").csv()}
    assert {row["baseline"] for (loss, _), row in rows.items() if loss == "focal"} == {"ce"}
    assert float(rows["focal", "2"]["difference_mean"]) == pytest.approx(0.1325)
    by_gamma = look("experiment=gammas", "where=loss=focal", "rows=loss.gamma", "baseline=loss.gamma=1").csv()
    assert [(row["loss.gamma"], row["baseline"]) for row in by_gamma] == [("1", ""), ("2", "1")]


def test_titles_say_what_is_compared_in_one_line(journal, look):
    for share in (None, 0.5):
        for loss in ("ce", "focal"):
            journal.run(loss, "m", 0, 0.5, settings={"data.train_share": share, "optim.lr": 0.1}, experiment="lines")
    divided = look("experiment=lines").found
    rows = [line.label for line in divided.grid.rows]
    assert rows == [f"{loss}, train_share={share}" for share in ("null", "0.5") for loss in ("ce", "focal")]
    assert headline(divided) == "ce, focal × m"
    assert lead(divided).startswith("4 settings × 1 model, 1 seed of each: 4 runs")
    assert lead(look("experiment=lines", "where=data.train_share=null").found).startswith("2 losses × 1 model")
    of_share = look("experiment=lines", "rows=data.train_share", "columns=loss", "baseline=data.train_share=null").found
    assert (headline(of_share), of_share.baseline) == ("null, 0.5 × ce, focal", "null")
    assert lead(of_share).startswith("2 settings × 2 losses")


def test_a_title_on_the_terminal_is_one_line(journal, look):
    from rich.console import Console

    console = Console(width=60, soft_wrap=True, record=True, file=io.StringIO())
    (scores, *_) = sheets(look("experiment=lines").found)
    console.print(terminal(scores))
    assert scores.title in console.export_text().splitlines()


def test_settings_that_differ_between_cells_are_named(journal, look):
    journal.run("ce", "m", 0, 0.5, settings={"trainer.epochs": 3}, tags={"device": "H100"}, experiment="unlike")
    journal.run("focal", "m", 0, 0.6, settings={"trainer.epochs": 8, "loss.gamma": 2}, tags={"device": "cpu"}, experiment="unlike")
    found = look("experiment=unlike")
    assert "Not only what is compared differs: trainer.epochs is 3 (ce × m); 8 (focal × m)." in found.text
    assert "different devices: H100 (1 run), cpu (1 run)" in found.text
    assert "loss.gamma" not in found.text
    assert "cannot be tested: a single pair of seeds" in found.text
    assert "A single seed has no interval and no test" in found.text
    assert "one seed, without an interval" in found.text
    assert "0 tests" not in found.text


def test_seeds_of_both_names_are_paired(journal, look):
    journal.run("ce", "m", 7, 0.5, experiment="seeds")
    journal.run("ce", "m", None, 0.6, settings={"seed": 8, "data.split_seed": 1}, experiment="seeds")
    journal.run("focal", "m", None, 0.6, settings={"seed": 7}, experiment="seeds")
    journal.run("focal", "m", None, 0.8, settings={"seed": 8}, experiment="seeds")
    row = look("experiment=seeds").csv()[1]
    assert (row["difference_n"], float(row["difference_mean"])) == ("2", pytest.approx(0.15))


def test_folds_are_averaged_and_paired_as_seeds_are(journal, look):
    for fold in range(3):
        given = {"data.folds": 3, "data.fold": fold}
        journal.run("ce", "m", 0, 0.5 + fold / 10, settings=given, metrics={"test/top1": 0.4}, experiment="folds")
        journal.run("focal", "m", 0, 0.6 + fold / 10, settings=given, metrics={"test/top1": 0.45 + fold / 100}, experiment="folds")
    found = look("experiment=folds")
    row = found.csv()[1]
    assert (row["difference_n"], float(row["difference_mean"])) == ("3", pytest.approx(0.1))
    assert "Folds share training images" in found.text
    assert "Test top-1, best epoch" in look("experiment=folds", "metric=test/top1").text


def test_seeds_that_only_one_has_are_said(journal, look):
    for seed in (0, 1, 2):
        journal.run("focal", "m", seed, 0.6 + seed / 8, experiment="some")
    journal.run("ce", "m", 1, 0.5, experiment="some")
    journal.run("mae", "m", 9, 0.5, experiment="some")
    found = look("experiment=some")
    assert "focal × m: the baseline has 1 of its 3 seeds; these are paired." in found.text
    assert "mae × m: no seed is shared with the baseline." in found.text


def test_lower_is_better_of_a_loss(journal, look):
    """Of the same loss under two learning rates."""
    for seed in (0, 1, 2):
        journal.run("ce", "m", seed, 0.5, metrics={"val/loss": 1.0 + seed / 10}, experiment="lower")
        journal.run("ce", "m", seed, 0.5, metrics={"val/loss": 0.5 + seed / 9}, settings={"optim.lr": 0.01}, experiment="lower")
    words = ["experiment=lower", "metric=val/loss", "rows=optim.lr", "baseline=optim.lr=0.001"]
    found = look(*words)
    slow, fast = found.csv()
    assert (slow["best"], fast["best"], fast["verdict"]) == ("0", "1", "better")
    assert "Lower is better" in found.text
    assert "each run's own loss" not in found.text
    assert re.search(r"1\.1 ± 0\.2484 \|", found.text)
    assert look(*words, "goal=max").csv()[1]["verdict"] == "worse"


def test_values_of_different_losses_are_not_judged(journal, look):
    for seed in (0, 1, 2):
        journal.run("ce", "m", seed, 0.5, metrics={"val/loss": 1.0 + seed / 10}, experiment="unlike")
        journal.run("focal", "m", seed, 0.5, metrics={"val/loss": 0.5 + seed / 9}, experiment="unlike")
    found = look("experiment=unlike", "metric=val/loss")
    assert [(row["best"], row["verdict"]) for row in found.csv()] == [("0", ""), ("0", "another loss")]
    assert "val/loss is each run's own loss. The runs have different ones, whose values do not compare." in found.text
    assert "each run's own loss" not in look("experiment=unlike").text
    for seed in (0, 1, 2):  # of a version that has an option more
        settings = {"loss.new": None, "optim.lr": 0.01}
        journal.run("ce", "m", seed, 0.5, metrics={"val/loss": 0.9 + seed / 9}, settings=settings, experiment="versions")
        journal.run("ce", "m", seed, 0.5, metrics={"val/loss": 1.0 + seed / 10}, experiment="versions")
    assert "each run's own loss" not in look("experiment=versions", "metric=val/loss").text


def test_a_baseline_among_columns(table, look):
    rows = look("baseline=model=resnet18").csv()
    assert [row["baseline"] for row in rows] == ["", "", "resnet18", "resnet18"]
    assert float(rows[2]["difference_mean"]) == pytest.approx(0.02)
    assert rows[2]["verdict"] == "the differences are all equal"


def test_no_baseline_among_the_rows_is_said(table, look):
    found = look("where=loss=focal")
    assert "No differences: no row is loss=ce" in found.text
    assert "difference_mean" not in found.csv()[0]


@pytest.fixture(scope="module")
def sweeps(journal):
    """Three sweeps of one name, whose own runs have the words of the command line as params, and the last of which has no runs."""
    experiment = journal.experiment_id("sweeps")
    found = [journal.client.create_run(experiment, 1000 + number, run_name="sweep-a").info.run_id for number in range(3)]
    for number, sweep in enumerate(found):
        for name, value in (("loss", "ce,focal"), ("model", "m"), ("seed", "0,1")):
            journal.client.log_param(sweep, name, value)
        for seed in (0, 1) if number < 2 else ():
            tags = {"mlflow.parentRunId": sweep}
            journal.run("ce", "m", seed, 0.1 + number / 10 + seed / 2, experiment="sweeps", tags=tags)
    journal.run("ce", "m", 0, 0.9, experiment="sweeps")
    journal.run("ce", "m", 3, 0.8, experiment="sweeps", tags={"mlflow.parentRunId": found[1]})
    return found


def test_a_sweep_is_its_runs(sweeps, look):
    (line,) = look("experiment=sweeps", f"sweep={sweeps[0]}").csv()
    assert (float(line["mean"]), line["n"]) == (pytest.approx(0.35), "2")


def test_of_sweeps_of_one_name_the_newest_with_runs_is_taken(sweeps, look):
    found = look("experiment=sweeps", "sweep=sweep-a").runs_csv()
    assert [float(line["value"]) for line in found] == pytest.approx([0.2, 0.7, 0.8])


def test_runs_of_the_newest_sweep_alone_are_compared_and_that_is_said(sweeps, look):
    found = look("experiment=sweeps", "baseline=loss=ce")
    assert [float(line["value"]) for line in found.runs_csv()] == pytest.approx([0.2, 0.7, 0.8])  # of its seeds 0, 1 and 3
    assert "Only the runs of the newest sweep, sweep-a, are compared; sweep=all takes all 6 runs" in found.text


@pytest.mark.parametrize("every", ["sweep=all", "where=loss=ce"])
def test_the_newest_run_of_each_seed_is_taken_of_all(sweeps, look, every):
    found = look("experiment=sweeps", every)
    assert [float(line["value"]) for line in found.runs_csv()] == pytest.approx([0.9, 0.7, 0.8])
    assert "newest sweep" not in found.text


def test_an_unknown_sweep_is_refused_with_the_known_ones(sweeps, look):
    with pytest.raises(UserError, match="Choices: sweep-a"):
        look("experiment=sweeps", "sweep=other")


def test_titles_of_custom_losses_and_detectors(journal, look):
    journal.run("custom", "resnet50", 0, 0.5, settings={"loss.target": "mine.py:margin", "model.detector": "fcos"}, experiment="titles")
    (row,) = look("experiment=titles").csv()
    assert (row["loss"], row["model"]) == ("margin", "fcos_resnet50")


def test_tags_and_settings_choose_runs(table, look):
    found = look("tag=host:he*", "where=model=resnet5*,loss=ce,data=digits", "confidence=0.5")
    (row,) = found.csv()
    low, _ = stats.t.interval(0.5, 2, 0.94, stats.sem(CE))
    assert (row["loss"], row["model"], float(row["low"])) == ("ce", "resnet50", pytest.approx(low))


def test_a_setting_takes_several_values(table, look):
    rows = look("where=loss=ce,focal,model=resnet18").csv()
    assert [(row["loss"], row["model"]) for row in rows] == [("ce", "resnet18"), ("focal", "resnet18")]


def test_nothing_finite_is_averaged(journal, look):
    journal.run("ce", "m", 0, math.nan, experiment="nan")
    journal.run("ce", "m", 1, None, experiment="nan")
    with pytest.raises(UserError, match=r"(?s)none of 2 runs.*best_top1 is nan.*no best_top1"):
        look("experiment=nan", "metric=best_top1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["experiment=losforge"], ["experiment=losforge", "Did you mean 'lossforge'"]),
        (["tag=host"], ["tag=host", "tag=host:gpu*"]),
        (["tag=host:there"], ["tag=host:there of 14 runs", "Choices: here"]),
        (["where=loss=focl"], ["where=loss=focl of 14 runs", "'focal'", "ce, focal"]),
        (["where=loss=ce,model=resnet50", "where=data=digits", "sweep=x"], ["sweep=x", "no sweeps"]),
        (["metric=best_top_1"], ["metric=best_top_1", "'best_top1'"]),
        (["baseline=loss=mae"], ["baseline=loss=mae", "ce, focal"]),
        (["baseline=data=digits"], ["baseline=data=digits", "loss, model"]),
        (["rows=losses"], ["rows=losses", "'loss'"]),
        (["confidence=1"], ["confidence", "below 1"]),
        (["--hlep"], ["'--help'"]),
        (["tracking.uri=sqlite:////nowhere/mlflow.db"], ["tracking.uri=sqlite:////nowhere/mlflow.db", "train first"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistake(table, tmp_path, capsys, words, said):
    others = [] if any(word.startswith("tracking.uri") for word in words) else [f"tracking.uri={table.uri}"]
    assert compare.main([*words, *others, f"runs={tmp_path / 'runs'}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert [text for text in said if text not in error] == [], error
    assert not (tmp_path / "runs").exists()


def test_an_experiment_without_training_runs(journal, look):
    journal.experiment_id("empty")
    with pytest.raises(UserError, match=r"experiment=empty in .*no training runs among 0 runs"):
        look("experiment=empty")


def test_of_several_tasks_the_newest_runs_is_compared(journal, look):
    journal.run("ce", "m", 0, 0.5, experiment="tasks")
    detection = {"task.name": "detection", "model.detector": "fcos"}
    for loss, score in (("focal", 0.2), ("quality_focal", 0.3)):
        journal.run(loss, "m", 0, None, metrics={"best_map": score}, settings=detection, tags={"monitor": "map"}, experiment="tasks")
    found = look("experiment=tasks")
    assert [(row["loss"], row["model"], row["metric"], row["mean"]) for row in found.csv()] == [
        ("focal", "fcos_m", "best_map", "0.2"),
        ("quality_focal", "fcos_m", "best_map", "0.3"),
    ]
    assert "Left out: classification (1 run); where=task=..." in found.text
    (row,) = look("experiment=tasks", "where=task=classification").csv()
    assert (row["metric"], row["mean"]) == ("best_top1", "0.5")


def test_help_answers_at_once_and_cfg_prints(clone, without_torch):
    clone.script = "experiments/compare.py"
    done = clone.run("--help", fresh=True, **without_torch)
    assert done.status == 0, done.output
    for text in ("sweep=", "baseline=loss=ce", "ui="):
        assert text in done.output
    done = clone.run("--cfg", "where=loss=ce,data=digits", fresh=True, **without_torch)
    assert yaml.safe_load(done.output)["where"] == ["loss=ce", "data=digits"]


SPEED = {"ce": [100.0, 900.0, 5000.0], "focal": [900.0, 5000.0, 100.0], "mae": [110.0, 980.0, 5600.0]}
MEMORY = {"ce": [400.0] * 3, "focal": [200.0] * 3, "mae": [440.0, 441.0, 442.0]}


@pytest.fixture(scope="module")
def ratios(journal, look):
    """Compare three losses whose speeds vary by more than they differ."""
    for loss in SPEED:
        for seed in range(3):
            costs = {"images_per_second": SPEED[loss][seed], "train/peak_process_mib": MEMORY[loss][seed]}
            journal.run(loss, "m", seed, 0.5 + seed / 10, metrics=costs, experiment="ratios")
    return look("experiment=ratios")


@pytest.mark.parametrize("loss", ["focal", "mae"])
def test_ratios_of_costs_have_intervals_and_tests(ratios, loss):
    (row,) = (row for row in ratios.csv() if row["loss"] == loss)
    logs = [math.log(a / b) for a, b in zip(SPEED[loss], SPEED["ce"], strict=True)]
    ends = [math.exp(end) for end in stats.t.interval(0.95, 2, sum(logs) / 3, stats.sem(logs))]
    assert float(row["images_per_second_ratio"]) == pytest.approx(stats.gmean([math.exp(each) for each in logs]))
    assert [float(row[f"images_per_second_ratio_{end}"]) for end in ("low", "high")] == pytest.approx(ends)
    assert float(row["images_per_second_ratio_p"]) == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)


def test_ratios_of_costs_are_corrected_for_their_number_and_sure_only_where_they_differ(ratios):
    """Or the costs vary by more than they differ."""
    rows = {row["loss"]: row for row in ratios.csv()}
    verdicts = {loss: (row["images_per_second_ratio_verdict"], row["peak_mib_ratio_verdict"]) for loss, row in rows.items()}
    assert verdicts == {"ce": ("", ""), "focal": ("not shown", "the differences are all equal"), "mae": ("better", "worse")}
    raw, held = ([float(rows["mae"][f"{name}_ratio_{p}"]) for name in ("peak_mib", "images_per_second")] for p in ("p", "p_holm"))
    assert raw[0] < raw[1]
    assert held == pytest.approx([3 * raw[0], 2 * raw[1]])  # three tests in all: equal ratios are none


@pytest.mark.parametrize(
    "line",
    [
        r"\| focal \| m \| 3 \| 1\.00 \(0\.00 to [\d.]+\) ○ \| 0\.50 \(0\.50 to 0\.50\) \| – \|",
        r"\| mae \| m \| 3 \| 1\.10 \(1\.\d\d to 1\.\d\d\) ▲ \| 1\.10 \(1\.10 to 1\.11\) ▼ \| – \|",
    ],
    ids=["focal", "mae"],
)
def test_the_table_of_ratios_of_costs(ratios, line):
    assert re.search(f"^{line}$", ratios.text, re.MULTILINE)


def test_a_ratio_without_an_interval_is_not_shown(journal, look):
    for loss, speed in (("ce", 100.0), ("focal", 886.0)):
        journal.run(loss, "m", 0, 0.5, metrics={"images_per_second": speed}, experiment="single")
    found = look("experiment=single")
    assert "886" in found.text
    assert "÷" not in found.text
    assert not [name for name in found.csv()[0] if "ratio" in name]
