"""The list of changes that the tests must notice, and the tool that makes them. What kills each runs every night."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # which dataclasses look for
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_the_list_has_changes_of_each_area_each_once(tool):
    mutants = tool.read()
    counted = Counter(each.area for each in mutants if not each.equivalent)
    assert sum(counted.values()) >= 200
    assert set(counted) == {"engine", "parallel", "checks", "app", "definitions", "kernels", "integrations"}
    assert min(counted.values()) >= 10
    assert Counter((each.file, each.old, each.new) for each in mutants).most_common(1)[0][1] == 1
    assert all(each.old != each.new for each in mutants)
    assert min(sum(bool(each.drawn) == drawn for each in mutants) for drawn in (True, False)) >= 50


def test_changes_are_of_text_that_is_there(tool):
    """But for a few: the source may move on before the list does."""
    mutants = [each for each in tool.read() if not each.equivalent]
    lost = [str(each) for each in mutants if len(tool.places(each, ROOT)) != 1]
    assert len(lost) <= 0.05 * len(mutants), "\n".join(lost)


def test_a_list_is_read_as_it_was_written(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "LIST", tmp_path / "list.toml")
    given = [
        tool.Mutant("a.py", 'x = "é\\n"\n', "x = 'y'\t", "engine", "cosmic-ray", ("tests/test_a.py::test[a-'b']",)),
        tool.Mutant("b.py", "a < b", "a <= b", "app", equivalent="a is never b"),
    ]
    tool.write(given)
    assert tool.read() == given
    assert [each.killed_by for each in tool.read()] == [given[0].killed_by, ()]


def test_a_place_is_found_by_its_text_wherever_it_is(tool, tmp_path):
    for path, text in (("packages/a/src/x/one.py", "a = 1\nb = 2\n"), ("experiments/two.py", "a = 1\n"), ("tests/one.py", "b = 2\n")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)

    def found(file, old):
        return [str(path.relative_to(tmp_path)) for path in tool.places(tool.Mutant(file, old, "", "app"), tmp_path)]

    assert found("elsewhere.py", "b = 2") == ["packages/a/src/x/one.py"]
    assert found("two.py", "a = 1") == ["experiments/two.py"]
    assert found("three.py", "a = 1") == []
    assert found("one.py", "c = 3") == []
