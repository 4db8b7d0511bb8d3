"""What mypy and pyright see: ordinary use passes with precise types, misuse is found."""

import json
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

USE = Path(__file__).with_name("ordinary_use.py")
MISUSE = """
import torch
from lossforge.losses import CrossEntropyLoss, HuberLoss, LinearCrossEntropyLoss, cross_entropy, kl_div, nll_loss, dice_ce_loss
from lossforge.losses import linear_cross_entropy, linear_selective_log_softmax, sigmoid_focal_loss
x, t = torch.rand(3, 4), torch.tensor([0, 1, 2])
cross_entropy(x, t, reduction="avg")
cross_entropy(x, t, gama=2.0)
nll_loss(x, t, reduction="batchmean")
kl_div(x, x, empty="none")
dice_ce_loss(x, t, reduction="none")
sigmoid_focal_loss(x, t, gradient="both")
cross_entropy(x, t).lse
cross_entropy(x, t, outputs=("lse",)).backward()
CrossEntropyLoss(reduction="avg")
CrossEntropyLoss(label_smothing=0.1)
CrossEntropyLoss()(x, t).loss
HuberLoss(delta="1")
HuberLoss().delta = "1"
HuberLoss()(x)
linear_cross_entropy(x, x, t).lse
linear_cross_entropy(x, x, t, outputs=("lse",)).backward()
linear_cross_entropy(x, x, t, chunks=2)
linear_cross_entropy(x, x, t, accumulate="double")
linear_selective_log_softmax(x, x, t).entropy
LinearCrossEntropyLoss()(x, x, t).loss
""".strip()
FIRST_MISTAKE = 5


def wrong_lines(found: list[tuple[str, int]], file: str) -> list[int]:
    return sorted({line for name, line in found if Path(name).name == file})


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder of its own, without this repository's settings."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "use.py").write_text(USE.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "misuse.py").write_text(MISUSE, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}', encoding="utf-8")
    return folder


def check(found: list[tuple[str, int]], said: str) -> None:
    assert not wrong_lines(found, "use.py"), said
    assert wrong_lines(found, "misuse.py") == list(range(FIRST_MISTAKE, len(MISUSE.splitlines()) + 1)), said


@pytest.mark.slow
def test_mypy_strict(scripts, pytestconfig):
    cache = f"--cache-dir={pytestconfig.rootpath / '.mypy_cache' / 'strict'}"
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", cache, "use.py", "misuse.py"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    found = [(m[1], int(m[2])) for m in re.finditer(r"^([\w./-]+):(\d+): error", done.stdout, re.MULTILINE)]
    check(found, done.stdout)


@pytest.mark.slow
def test_pyright(scripts):
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson", "use.py", "misuse.py"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True)
    report = json.loads(done.stdout)
    found = [(d["file"], d["range"]["start"]["line"] + 1) for d in report["generalDiagnostics"] if d["severity"] == "error"]
    check(found, done.stdout)


@pytest.mark.parametrize("package", ["kernels", "losses", "bench"])
def test_packages_say_that_they_are_typed(package):
    assert files(f"lossforge.{package}").joinpath("py.typed").is_file()
