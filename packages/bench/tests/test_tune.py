"""Every launch that is tuned runs, with other tiles too, and trials that compute something else are refused."""

import pytest
import torch

from lossforge.bench import tune
from lossforge.kernels import tiles
from lossforge.kernels.engine import launch

CPU = torch.device("cpu")
SMALL = {
    "short rows": lambda: tune.rows(4, 100, torch.float32, CPU),
    "long rows": lambda: tune.rows(2, 9000, torch.bfloat16, CPU),
    "long rows with a prior": lambda: [tune.with_prior(2, 9000, torch.float32, CPU)],
    "elements": lambda: [tune.elements("l1", (10, 80), torch.float32, CPU)],
    "weighted, class indices": lambda: [tune.elements("focal", (10, 80), torch.float32, CPU, target="class index", weighted=True)],
    "diagonal": lambda: [tune.elements("bce_with_logits", (10, 12), torch.bfloat16, CPU, target="diagonal")],
    "boxes": lambda: [tune.box_pairs("ciou", 100, CPU)],
    "bins": lambda: [tune.distributions(100, 17, torch.float32, CPU)],
    "short divergences": lambda: [tune.divergences("kl", 4, 1000, torch.bfloat16, CPU)],
    "long divergences": lambda: [tune.divergences("js", 2, 9000, torch.float32, CPU)],
    "similarities": lambda: tune.similarities(40, torch.float32, CPU),
    "features": lambda: tune.features(40, 32, CPU),
    "maps": lambda: [tune.maps((2, 21, 6, 5), torch.float32, CPU)],
    "pixels": lambda: [tune.pixels((2, 21, 6, 5), torch.float32, CPU)],
}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its launches are of CPU tensors, which only the interpreter takes")
@pytest.mark.parametrize("kind", SMALL)
def test_trials_are_launched_and_compared(kind, monkeypatch, capsys):
    monkeypatch.setattr(tune, "MILLISECONDS", 1.0)
    used, start = set(), launch.Launch.start
    monkeypatch.setattr(launch.Launch, "start", lambda one: used.add(tiles.trials()) or start(one))
    for _, tried, call in SMALL[kind]():
        few = [tried[0], tried[-1]]
        found = tune.best(few, call)
        assert capsys.readouterr().out == ""
        assert {(t,) for t in few} <= used
        assert found["kind"] == type(tried[0]).__name__
        assert {tuple(f["tiles"]) for f in found["trials"] if f["tiles"] != "built in"} == set(map(tuple, few))


@pytest.mark.parametrize("spoilt", [float("nan"), 1.1])
def test_a_trial_that_computes_something_else_is_refused(spoilt, monkeypatch, capsys):
    monkeypatch.setattr(tune, "MILLISECONDS", 1.0)
    right, wrong = tiles.BoxTiles(64, 2), tiles.BoxTiles(128, 4)
    found = tune.best([right, wrong], lambda: torch.ones(5) * (spoilt if tiles.trials() == (wrong,) else 1.0))
    assert "wrong by" in capsys.readouterr().out
    assert [64, 2] in [f["tiles"] for f in found["trials"]]
    assert [128, 4] not in [f["tiles"] for f in found["trials"]]
