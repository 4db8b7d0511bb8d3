"""Each value of a checkpoint that is restored has a type and a range: another one is refused by its name."""

import copy
import io
import math
from typing import Any

import pytest
import timm.optim
import torch
from PIL import Image
from words import ALONE, TINY

import predict
import train
from lab.base.errors import UserError
from lab.run import checkpoint
from lab.run.checkpoint_checks import PARTS, fault, fault_of_optimizer
from lab.run.resume import named, restore
from lab.run.saved import load_checkpoint
from lab.training.assemble import assemble

QUICK = [*TINY, "trainer.max_updates=2", *ALONE, "trainer.ema=0.9"]
HUGE = 10**400


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trainer with the settings of a run that can go on, the run, and its checkpoint's contents."""
    runs = tmp_path_factory.mktemp("runs")
    assert train.main([*QUICK, f"trainer.runs={runs}", "name=own", "trainer.save_updates=1", "loss.implementation=torch"]) == 0
    (folder,) = runs.iterdir()
    settings, earlier = named(str(folder), [f"resume={folder}", "trainer.max_updates=3"])
    trainer = assemble(settings, resumed=True)
    return trainer, earlier, load_checkpoint(folder / "checkpoints" / "last.pt", "resume")


def changed(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value at a dotted path."""
    state = copy.deepcopy({name: each for name, each in state.items() if name not in ("model", "ema")}) | {
        name: state[name] for name in ("model", "ema")
    }
    *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    owner: Any = state
    for part in above:
        owner = owner[part]
    owner[last] = value
    return state


CASES: list[tuple[str, Any]] = [
    *[("optimizer.param_groups.0.lr", value) for value in ("x", math.inf, -1.0, math.nan, 1e30, HUGE, None, True)],
    *[("optimizer.param_groups.0.params", value) for value in ([0, 0], "x", [-1], [0])],
    *[("optimizer.param_groups.0.betas", value) for value in ((0.9, "x"), (0.9,), 7)],
    ("optimizer.param_groups.0.eps", math.nan),
    ("optimizer.param_groups.0.weight_decay", "x"),
    ("optimizer.param_groups.0.amsgrad", 3),
    ("optimizer.param_groups", []),
    *[("optimizer.state.0.step", value) for value in (torch.tensor(math.nan), torch.tensor(-7.0), torch.zeros(3), "x", -1)],
    *[("optimizer.state.0.exp_avg", value) for value in (torch.zeros(1), torch.tensor(3), "x", None)],
    ("optimizer.state.999", {"step": torch.tensor(1.0)}),
    ("optimizer.state", {"x": {}}),
    ("optimizer", 7),
    *[
        (name, value)
        for name in ("epoch", "updates", "batch", "skipped", "count", "samples")
        for value in (-1, -5, HUGE, 10**9, "x", 1.5, True)
    ],
    ("epoch", 0),
    ("epoch_ended", "x"),
    *[("window", value) for value in ("x", torch.zeros(2, 2), torch.zeros((), dtype=torch.complex64))],
    *[("values", value) for value in ({"a": "x"}, {1: 2.0}, {"train/loss": [1]}, {"a": HUGE}, 7)],
    ("clock.timed_seconds", -1.0),
    ("clock.timed_updates", "x"),
    ("clock.window_seconds", math.inf),
    ("clock.cuda", True),
    ("clock.read", 3),
    *[("launches", value) for value in ({"a": "x"}, {"a": -1}, {"a": HUGE}, 7)],
    *[("nonfinite.total", value) for value in (torch.tensor(-3), torch.zeros(4), torch.tensor(1.5), 3)],
    *[("nonfinite.evidence", value) for value in ({"update": "x"}, {"update": -1}, {"update": 1, "images": "x"}, {}, 7)],
    ("best.epoch", HUGE),
    *[("best.score", value) for value in (math.nan, "x", None)],
    ("best.stale", -1),
    *[("best.values", value) for value in ({"top1": "x"}, {}, 7)],
    ("scaler", {"scale": math.nan}),
    ("scaler", {"scale": "x"}),
    *[("rng", value) for value in (7, [], [7])],
    *[("rng.0.torch", value) for value in (torch.zeros(3), "x")],
    *[("rng.0.python", value) for value in ((3, (1,) * 10, None), 7)],
    ("rng.0.numpy", ("x",)),
    ("rng.0.mix", 7),
    *[("tracking", value) for value in ({"uri": 7}, {1: "x"}, 7)],
    ("seal", 7),
    *[("norm.mean", value) for value in ([HUGE], [True], [1e300], [math.nan], [0.5] * 4, [], 7)],
    *[("norm.std", value) for value in ([0.0], [-1.0], [1e-320], [HUGE], ["x"])],
    *[("classes", value) for value in (["x" * 20_000], [1], "x")],
    *[("model", value) for value in ({"x": 1}, {1: torch.zeros(1)}, {"x": torch.zeros(1, device="meta")}, {}, 7)],
]


@pytest.mark.parametrize(("path", "value"), CASES, ids=lambda each: f"{each!r:.30}" if not isinstance(each, int) else str(each)[:12])
def test_what_is_not_of_its_kind_is_refused(run, path, value):
    trainer, earlier, state = run
    state = changed(state, path, value)
    if not (said := fault(state)):
        with pytest.raises(UserError) as raised:
            restore(trainer, earlier, state)
        said = str(raised.value)
    assert path.split(".")[0] in said or "is damaged" in said
    assert len(said) < 1000


def test_a_whole_checkpoint_is_restored(run):
    """Each part that a checkpoint holds has its kind, and the run's own values fit."""
    trainer, earlier, state = run
    assert fault(state) == ""
    assert set(state) - set(PARTS) <= {"schedule", "signature", "origin"}
    restore(trainer, earlier, state)
    assert (trainer.done, trainer.epoch, trainer.updater.count) == (state["updates"], state["epoch"], state["count"])


def test_a_checkpoint_from_before_the_median_time_of_an_update_is_restored(run):
    trainer, earlier, state = run
    clock = {name: value for name, value in state["clock"].items() if name != "update_ms"} | {"timed_images": 7.0}
    assert fault(state | {"clock": clock}) == ""
    trainer.clock.update_ms = []
    restore(trainer, earlier, state | {"clock": clock})
    assert (trainer.clock.timed_images, trainer.clock.update_ms) == (7.0, [])
    assert "clock" in fault(state | {"clock": {name: value for name, value in clock.items() if name != "loss_ms"}})


OF_ONE_DEVICE = ("adahessian", "bnb", "fused")  # needs a second derivative; need libraries that need CUDA


@pytest.mark.parametrize("name", [name for name in timm.optim.list_optimizers() if not name.startswith(OF_ONE_DEVICE)])
def test_the_state_of_each_optimiser_fits_it(name, monkeypatch):
    """NovoGrad has one number for a parameter where Adam has a tensor, and Kron keeps a generator beside its state."""
    monkeypatch.setattr("timm.optim.kron.has_dynamo", False)  # it compiles parts of itself, which takes a minute
    made = []
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2))
        made.append((model, timm.optim.create_optimizer_v2(model, opt=name, lr=1e-3, weight_decay=0.05, momentum=0.9)))
    (model, stepped), (_, fresh) = made
    for _ in range(2):
        stepped.zero_grad()
        model(torch.randn(2, 3, 4, 4)).square().sum().backward()
        stepped.step()
    torch.save({"optimizer": stepped.state_dict()}, file := io.BytesIO())
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert fault(saved) == ""
    assert fault_of_optimizer(saved["optimizer"], fresh.param_groups, whole=True) == ""
    fresh.load_state_dict(saved["optimizer"])


def test_hyper_parameters_come_from_the_settings(run):
    """A file does not change what its own settings say."""
    trainer, earlier, state = run
    other = {"weight_decay": 1e9, "eps": 1.0, "betas": (0.0, 0.0), "initial_lr": 5.0, "maximize": True, "amsgrad": True}
    altered = copy.deepcopy(state["optimizer"])
    for group in altered["param_groups"]:
        group.update(other)
    before = [{name: group[name] for name in other} for group in trainer.updater.optimizer.param_groups]
    restore(trainer, earlier, state | {"optimizer": altered})
    assert [{name: group[name] for name in other} for group in trainer.updater.optimizer.param_groups] == before


def test_every_figure_may_be_nan_or_infinite(run):
    """A run whose loss is nan goes on."""
    _, _, state = run
    figures = {"a": math.nan, "b": -math.inf, "c": 1}
    assert fault(state | {"values": figures, "best": state["best"] | {"values": figures, "score": -math.inf}}) == ""


@pytest.mark.parametrize(
    ("group", "setting", "value"),
    [
        ("data", "image_size", 100_000),
        ("data", "image_size", 10**9),
        ("model", "args", {"act_layer": "x"}),
        ("model", "args", {"layers": "x"}),
    ],
)
def test_a_model_that_cannot_be_made_is_an_error(run, tmp_path, capsys, group, setting, value):
    _, earlier, _ = run
    state = torch.load(earlier.path / "checkpoints" / "best.pt", weights_only=True)
    checkpoint.save(state | {"config": state["config"] | {group: state["config"][group] | {setting: value}}}, tmp_path / "best.pt")
    Image.new("L", (16, 16)).save(tmp_path / "image.png")
    assert predict.main([f"checkpoint={tmp_path / 'best.pt'}", f"out={tmp_path / 'out'}", str(tmp_path / "image.png")]) == 1
    assert setting in (said := capsys.readouterr().err) or "model.name" in said
