"""The pages say what is so: their commands, examples, quotations, links and files. Recipes of docs/use_with: test_use_with.py."""

import re

import pytest
from pages import (
    ROOT,
    Block,
    blocks_of,
    check_command,
    check_links,
    check_named_files,
    check_quote,
    commands_of,
    docker_commands_of,
    files_of,
    run_python,
    text_of,
)

from lab.base.errors import UserError

DOCUMENTATION = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "experiments/README.md", *DOCUMENTATION]
OWN_TEST = ("docs/your_own.md", *(page for page in DOCUMENTATION if page.startswith("docs/use_with/")))
"""Pages whose files and blocks other tests run."""
PYTHON = [page for page in PAGES if page not in OWN_TEST and any(each.language == "python" and not each.file for each in blocks_of(page))]
QUOTED = [block for page in PAGES for block in blocks_of(page) if block.quotes]
OF_ANOTHER_FOLDER = "docs/your_own.md"
COMMANDS = sorted({line for page in PAGES if page != OF_ANOTHER_FOLDER for line in (*commands_of(page), *docker_commands_of(page))})


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_exists(line):
    check_command(line)


@pytest.mark.parametrize(
    "line",
    [
        "uv run experiments/train.py loss=focl",
        "uv run experiments/trane.py",
        "uv run experiments/train.py --multrun loss=ce",
        "uv run pytest pakages/",
        "uv run rufff check .",
        "uv run --package lossforge-losses python -c 0",
        "pip install lossforge-losses",
        "pip install lossforge[tlr]",
        "uv run --group dogs tools/generate.py",
        "uv run measurements/measure.py lossses",
        "tools/smoke_weels",
        "uv run python -m lossforge.losses.check examples/my_los.py:margin_bce",
    ],
)
def test_a_command_that_does_not_exist_would_be_noticed(line):
    with pytest.raises((AssertionError, UserError)):
        check_command(line)


@pytest.mark.parametrize("page", PYTHON)
def test_examples_run(page, tmp_path, monkeypatch):
    for folder in {(ROOT / block.file).parent for block in blocks_of(page) if block.quotes and block.file}:
        monkeypatch.syspath_prepend(folder)
    run_python(page, tmp_path)


def test_an_example_that_is_wrong_would_be_noticed(tmp_path, monkeypatch):
    right = "```python\n1\n```\n\n```text\nZeroDivisionError: x\n```\n"
    monkeypatch.setattr("pages.text_of", {"wrong.md": "```python\n1 / 0\n```\n", "right.md": right}.get)
    with pytest.raises(ZeroDivisionError):
        run_python("wrong.md", tmp_path)
    with pytest.raises(AssertionError, match=r"right\.md:2: raises nothing"):
        run_python("right.md", tmp_path)


@pytest.mark.parametrize("block", QUOTED, ids=str)
def test_quoted_code_stands_in_its_file(block: Block):
    check_quote(block)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_are_there(page):
    check_links(page)
    check_named_files(page)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/benchmarks/")])
def test_each_column_of_figures_has_a_title_and_figures(page):
    for table in re.findall(r"(?:^\|.*\|\n)+", text_of(page), re.M):
        header, _, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
        assert all(header), header
        assert all(map(any, zip(*rows, strict=True))), header


def test_files_of_pages_are_tried_elsewhere():
    assert {page for page in PAGES if files_of(page)} <= set(OWN_TEST)


def test_the_page_of_own_losses_names_what_has_a_derivative():
    from lossforge.losses.formulas import derive

    text = text_of("docs/learn/write_your_own_loss.md")
    (row,) = re.findall(r"^\| `tl\.` \| (.*) \|$", text, re.M)
    assert set(re.findall(r"`(\w+)`", row)) == {*derive.LANGUAGE, "tanh"}
    (section,) = re.findall(r"^## `lossforge.kernels.math`\n(.*?)^`atan_ratio", text, re.M | re.S)
    assert set(re.findall(r"`(\w+)\([\w, ]+\)`", section)) == {*derive.SHARED, *derive.SHARED_TUPLES, *derive.POWERS}
