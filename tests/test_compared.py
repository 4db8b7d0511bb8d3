"""The table of the first page, and the cases in which another is ahead: one population, counted by one rule."""

import json
import re

import compared
import pytest
from compared import FIRST_PAGE, NO_CASES, READERS, RESULTS, Case, Cost
from pages import text_of

from lossforge.bench.report import TIMING

AHEAD = "docs/benchmarks/ahead_of_us.md"


def rows_of(text):
    """The cells of every row of a text's tables, without their headers."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for row in cells if row[0] not in ("---", "case")]


def place(name, page):
    return text_of(page).partition(f"<!-- {name}:")[2].partition(f"<!-- end of {name} -->")[0]


def test_every_file_of_results_is_read_or_says_why_not():
    assert {path.stem for path in RESULTS.glob("*.json")} <= READERS.keys() | NO_CASES.keys()
    assert not READERS.keys() & NO_CASES.keys()


def test_a_case_is_named_once():
    names = [(case.file, case.key) for case in compared.cases()]
    assert len(set(names)) == len(names)


def test_the_first_page_counts_the_cases_that_the_other_page_lists():
    counted = re.search(
        r"faster in (\d+) cases, and within the spread in (\d+) more; another takes less memory in (\d+) cases",
        place("first page", "README.md"),
    )
    listed = rows_of(place("ahead of us", AHEAD))
    times, memory = ([row[column] for row in listed] for column in (4, 5))
    assert [int(each) for each in counted.groups()] == [
        times.count("another"),
        times.count("another, within the spread"),
        memory.count("another"),
    ]
    assert all(time.startswith("another") or more == "another" for time, more in zip(times, memory, strict=True))


def test_the_first_page_has_its_cases_in_their_order_whatever_they_show():
    assert [row[0] for row in rows_of(place("first page", "README.md"))] == [shown.use for shown in FIRST_PAGE]
    known = compared.on_first_page(compared.cases())
    for shown, row in zip(FIRST_PAGE, rows_of(place("first page", "README.md")), strict=True):
        assert (row[1] == "not measured") == ((shown.file, shown.key) not in known)


def test_the_cases_of_the_bench_on_the_first_page_are_ones_that_it_has():
    from lossforge.bench.cases import CASES

    of_bench = {f"{case.suite} {case.key}" for case in CASES}
    assert all(shown.key in of_bench for shown in FIRST_PAGE if shown.file in compared.REPORTS)


@pytest.mark.parametrize("worse", [0.5, 1.0, 2.0])
def test_a_figure_that_changes_moves_no_case_off_the_first_page(worse, tmp_path):
    """Real results, ours a factor slower and larger: the same rows, and every case of theirs that is ahead is counted."""
    for name in (name for name in READERS if (RESULTS / f"{name}.json").exists()):
        text = (RESULTS / f"{name}.json").read_text(encoding="utf-8")
        tree = json.loads(text)
        for row in tree["rows"] if isinstance(tree, dict) and "schema" in tree else ():
            if row["contender"] == "lossforge" and row["ms"] is not None:
                row |= {figure: row[figure] * worse for figure in ("ms", "low_ms", "high_ms")}
        if "schema" in tree:
            tree["timing"] = TIMING
        (tmp_path / f"{name}.json").write_text(json.dumps(tree), encoding="utf-8")
    page = compared.first_page(tmp_path / "any.json")
    assert [row[0] for row in rows_of(page)] == [shown.use for shown in FIRST_PAGE]
    slower = sum(row[4] == "another" for row in rows_of(compared.ahead_of_us(tmp_path / "any.json")))
    assert f"another is faster in {slower} cases" in page
    fused = next(row for row in rows_of(page) if row[0].startswith("cross entropy fused"))
    assert fused[4] == {0.5: "**ours**", 1.0: "**ours**", 2.0: "another"}[worse]


def case(ours, **others):
    return Case("file", "key", compared.LOSSES, "title", "place", {"lossforge": ours, **others})


@pytest.mark.parametrize(
    ("ours", "theirs", "time", "memory"),
    [
        (Cost(1.0, 0.01, 100.0), Cost(1.2, 0.01, 120.0), "**ours**", "**ours**"),
        (Cost(1.0, 0.1, 100.0), Cost(1.05, 0.1, 100.5), "tie", "tie"),
        (Cost(1.05, 0.1, 0.2), Cost(1.0, 0.1, 0.1), "another, within the spread", "tie"),
        (Cost(1.005, 0.0, 100.0), Cost(1.0, 0.0, None), "tie", "–"),
        (Cost(1.2, 0.01, 120.0), Cost(1.0, 0.01, 100.0), "another", "another"),
    ],
)
def test_the_rule(ours, theirs, time, memory):
    assert compared.outcomes(case(ours, torch=theirs)) == [time, memory]


def test_any_other_that_is_beyond_the_spread_is_ahead():
    """The quickest one varies widely; the second one does not."""
    found = case(Cost(1.2, 0.01, 10.0), quick=Cost(1.0, 0.5, 50.0), steady=Cost(1.05, 0.01, 5.0))
    assert compared.outcomes(found) == ["another", "another"]
    assert compared.behind([found]) == [found]
    assert compared.columns_of(found)[1:3] == ["quick 1.00, 50", "steady 1.05, 5"]


def test_without_another_nothing_is_said():
    assert compared.outcomes(case(Cost(1.0))) == ["–", "–"]
    assert compared.behind([case(Cost(1.0))]) == []
    assert "Of 0 measured cases" in compared.standing([case(Cost(1.0))])
