"""The calls of docs/use_with/segmentation_libraries.md, with the real libraries: those of a line have one value and one gradient."""

import re

import pytest
import torch
from pages import run_python, text_of

PAGE = "docs/use_with/segmentation_libraries.md"
LIBRARIES = {"smp": "segmentation_models_pytorch.losses", "monai": "monai.losses", "kornia": "kornia.losses"}
LINES = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", text_of(PAGE), re.M)
NUMBERS = {
    "the page's": {},
    "others": {"s": 0.25, "alpha": 0.8, "beta": 0.1, "gamma": 1.0, "w": torch.tensor([0.5, 3.0, 1.0, 0.25])},
    "no smoothing": {"s": 0.0, "alpha": 0.5, "beta": 0.5, "gamma": 3.0},
}


@pytest.fixture(scope="module")
def libraries():
    return {short: pytest.importorskip(name, reason="the libraries need: uv sync --group recipes") for short, name in LIBRARIES.items()}


@pytest.fixture(scope="module")
def names(libraries, tmp_path_factory):
    torch.manual_seed(0)
    return run_python(PAGE, tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize(("theirs", "ours"), LINES, ids=[re.sub(r"\W+", "_", theirs) for theirs, _ in LINES])
def test_a_line_has_one_value_and_one_gradient(names, theirs, ours, numbers):
    namespace = names | NUMBERS[numbers]
    leaf = names["corners" if "boxes" in theirs else "logits"]
    right, found = (eval(call, dict(namespace)) for call in (theirs, ours))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
    upstream = torch.rand(right.shape) + 0.5
    (exact,), (gradient,) = (torch.autograd.grad(value, leaf, upstream) for value in (right, found))
    assert exact.abs().max() > 0
    digits = 1e-4 if "Lovasz" in theirs else 1e-5  # whose weights are differences in float32
    torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=digits * exact.abs().max().item())
