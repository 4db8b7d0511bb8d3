"""Generated files are what tools/generate.py writes, which says what is missing by name and place."""

import dataclasses
import inspect
import os
import shutil
import subprocess
import sys

import pytest
from pages import ROOT

sys.path.append(str(ROOT / "tools"))
import reported
import tables
from loss_code import LOSSES as PACKAGE
from loss_code import check_lists, function_of
from loss_configs import in_short
from loss_pages import CURVES, page, reference, written
from loss_text import MissingError, check

from lossforge.bench.report import load
from lossforge.kernels.boxes.calls import BoxesCall
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.text import filled, whole_docstring
from lossforge.losses.definitions.language.linear import LINEAR
from lossforge.losses.templates import TEMPLATES

FOCAL = DECLARED["sigmoid_focal_loss"]


def test_every_generated_file_is_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def changed(documented, **facts):
    """The declaration of sigmoid_focal_loss with another docstring."""

    def definition(*args, **kwargs): ...

    definition.__name__, definition.__doc__, definition.__code__ = (
        "sigmoid_focal_loss",
        documented,
        inspect.unwrap(FOCAL.definition).__code__,
    )
    definition.__signature__ = inspect.signature(FOCAL.definition)
    return dataclasses.replace(FOCAL, definition=definition, **facts)


def test_an_argument_without_a_line_is_named_with_its_loss_and_file():
    without = FOCAL.definition.__doc__.replace("        gamma: ", "        exponent: ")
    with pytest.raises(MissingError, match=r"definitions/classes/binary\.py: sigmoid_focal_loss does not say what gamma means"):
        check(changed(without))
    beside = FOCAL.definition.__doc__.replace("        gamma: ", "        exponent: x.\n        gamma: ")
    with pytest.raises(MissingError, match=r"definitions/classes/binary\.py: sigmoid_focal_loss has no argument exponent"):
        check(changed(beside))


def test_a_loss_without_an_example_is_named():
    with pytest.raises(MissingError, match=r"definitions/classes/binary\.py: sigmoid_focal_loss has no example"):
        check(changed(FOCAL.definition.__doc__, docs=LINEAR))


def test_a_loss_without_a_source_is_named():
    with pytest.raises(
        MissingError, match=r"definitions/classes/binary\.py: sigmoid_focal_loss names no source: give its @loss a paper, .* or .* like"
    ):
        check(changed(FOCAL.definition.__doc__, facts={"targets": "dense"}))


def run_generate(root, **env):
    """Run the generator of a tree, whose packages come before the installed ones."""
    path = os.pathsep.join(str(root / folder) for folder in ("packages/losses/src", "experiments"))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env}
    return subprocess.run([sys.executable, root / "tools" / "generate.py"], capture_output=True, text=True, env=env)


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_nothing_is_written_where_a_page_cannot_be_made(tmp_path):
    """Code and settings of the new loss are made before its page, which lacks the advice: they are put back."""
    for folder in ("conf", "docs", "experiments", "measurements", "packages/losses/src", "results", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path / file)
    definitions = tmp_path / "packages/losses/src/lossforge/losses/definitions/regression.py"
    with definitions.open("a", encoding="utf-8") as file:
        file.write(
            '\n\n@loss("absolute", ELEMENTWISE, Module("AbsoluteLoss", "The absolute error"), formula="l1", paper="arXiv 1712.09482")\n'
            'def absolute_loss(input: Tensor, target: Tensor, reduction: Reduction = "mean", **options: Unpack[WeightedElementwiseOptions]'
            ') -> Tensor:\n    """Absolute error.\n\n    L = w |x - y|.\n    """\n'
            "    return l1_loss(input, target, reduction=reduction, **options)\n"
        )
    before = contents(tmp_path)
    done = run_generate(tmp_path)
    assert done.returncode == 1
    assert "definitions/regression.py: the docstring of absolute_loss has no paragraph" in done.stderr
    assert contents(tmp_path) == before


def test_without_ruff_the_cure_is_named():
    done = run_generate(ROOT, PATH="")
    assert done.returncode == 1
    assert done.stderr.startswith("ruff, which puts imports in order, is not on the path: run `uv run tools/generate.py`")


def test_a_line_that_is_too_long_for_the_help_is_named():
    long = FOCAL.definition.__doc__.replace("        gamma: ", "        gamma: " + "of " * 30)
    with pytest.raises(MissingError, match=r"definitions/classes/binary\.py: the first sentence on gamma of sigmoid_focal_loss has"):
        in_short(changed(long), "gamma")


def test_a_formula_without_tex_is_named():
    odd = FOCAL.definition.__doc__.replace("L = ", "L = ∂", 1)
    with pytest.raises(
        MissingError, match=r"definitions/classes/binary\.py: sigmoid_focal_loss: L = ∂.*: no TeX is known for .'∂'.*formula_tex\.py"
    ):
        written(changed(odd))


def test_a_stub_has_the_whole_signature():
    made = " ".join(function_of(FOCAL).split())
    assert made.startswith("def sigmoid_focal_loss( inputs: Tensor, targets: Tensor, alpha: float | Tensor = 0.25, gamma: float = 2.0, ")
    assert made.endswith(", score: Tensor | None = None, ) -> Tensor: ...")


def test_a_file_of_definitions_that_nothing_imports_is_named(tmp_path):
    shutil.copytree(PACKAGE / "definitions", tmp_path / "definitions")
    check_lists(tmp_path)
    (tmp_path / "definitions" / "key_points.py").write_text('"""Losses of key points."""\n')
    with pytest.raises(MissingError, match=r"definitions/__init__\.py: nothing imports key_points\.py\. Add the line `from lossforge"):
        check_lists(tmp_path)


def test_a_template_that_is_not_entered_is_named(monkeypatch):
    monkeypatch.delitem(TEMPLATES, BoxesCall)
    with pytest.raises(MissingError, match=r"templates/__init__\.py: TEMPLATES lacks boxes, the template of iou"):
        check_lists()


def test_a_new_family_has_a_page_without_an_edit_of_the_tools(monkeypatch):
    # as if its file were new; a copy, because a key that is put back would be the last
    monkeypatch.setattr(tables, "FAMILIES", {family: title for family, title in tables.FAMILIES.items() if family != "noise_model"})
    monkeypatch.delitem(CURVES, "noise_model")
    assert list(tables.titles().items())[-1] == ("noise_model", "Noise model")
    assert "## Functions\n\n::: lossforge.losses.gaussian_nll_loss" in reference("noise_model")
    assert page("noise_model", load(reported.BENCH)).startswith('# Noise model\n\n<a id="gaussian_nll"></a>')


@pytest.mark.parametrize("name", ["cross_entropy", "sigmoid_focal_loss", "generalized_box_iou_loss", "linear_cross_entropy", "dpo_loss"])
def test_help_fits_a_terminal_of_80_columns(name):
    """All but a definition's tables, whose rows begin with spaces, and examples."""
    text = whole_docstring(DECLARED[name]).partition("Examples:")[0]
    table = [row for block in text.split("\n\n") if block.startswith("    ") for row in block.splitlines()]
    assert not [row for row in text.splitlines() if len(row) > 76 and row not in table]


def test_a_paragraph_is_not_broken_within_a_formula_or_a_table():
    assert filled("the share that is (1 - ε) yⱼ of arXiv 1606.04797", 22) == "the share that is\n(1 - ε) yⱼ of\narXiv 1606.04797"
    table = '    "hinge"  max(0, 1 - βh)\n    "ipo"    (h - 1 / (2β))²'
    assert filled(table, 10) == table


def test_only_a_loss_with_class_indices_raises_an_index_error():
    assert "IndexError: a class index is out of range" in whole_docstring(FOCAL)
    assert "IndexError" not in whole_docstring(DECLARED["generalized_box_iou_loss"])
    assert "IndexError" not in whole_docstring(DECLARED["gaussian_nll_loss"])
