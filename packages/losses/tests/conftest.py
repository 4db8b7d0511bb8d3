import sys
from pathlib import Path

import pytest
import torch
import torch.utils.deterministic

from lossforge.losses.engine import calls as run

sys.path.insert(0, str(Path(__file__).parent))  # for loss_calls, linear_calls and preference_calls


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison():
    """Memory that torch.empty hands out is nan: an element that a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def paths(monkeypatch):
    """The ways that calls took, in order: "kept", "direct", and the names of operators."""
    seen = []
    kept, planned = run.CallPlan.tensors, run.planned

    def direct(checked):
        plan, tensors = planned(checked)
        if plan.way in (run.DIFFERENTIATED, run.undifferentiated):
            seen.append("direct")
        return plan, tensors

    monkeypatch.setattr(run.CallPlan, "tensors", lambda *args: (seen.append("kept"), kept(*args))[1])
    monkeypatch.setattr(run, "planned", direct)
    return seen


@pytest.fixture
def points():
    """Logits that take a gradient, and targets between 0 and 1, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, generator=generator, dtype=torch.float64) * 2
    return x.requires_grad_(), torch.rand(500, generator=generator, dtype=torch.float64)
