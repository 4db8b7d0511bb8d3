"""lab.train in a program that goes on: what it leaves behind, what it takes, and in which surroundings it works."""

import asyncio
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import hydra
import numpy
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from words import ALONE

import lab
from lab.base.errors import UserError
from lab.run.folder import running

QUICK = ("experiment=quick", "trainer.epochs=1", "data.train_share=0.1", "trainer.runs=runs", *ALONE)
OWN_LOSS = "import torch\n\n\ndef scaled(logits, target):\n    return {} * torch.nn.functional.cross_entropy(logits, target)\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def only_run() -> Path:
    (folder,) = Path("runs").iterdir()
    return folder


def surroundings():
    """What a program may have set, which a training sets for itself."""
    modes = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    return modes, dict(os.environ), signal.getsignal(signal.SIGINT), [thread.name for thread in threading.enumerate()]


def test_what_a_training_changes_is_given_back():
    def seeded():
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)

    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    seeded()
    expected = [drawn() for _ in range(2)]
    seeded()
    before, found = surroundings(), []
    for number, tracking in enumerate((["tracking=none"], ["tracking.uri=sqlite:///own.db", "tracking.writers=[tensorboard]"])):
        found.append(drawn())
        result = lab.train(
            *QUICK[:-2], *tracking, "tracking.model=false", "trainer.deterministic=true", "trainer.tf32=false", f"seed={number}"
        )
        assert result.status == "FINISHED"
    assert found == expected
    assert surroundings() == before


def test_pillows_limit_is_given_back(monkeypatch):
    from PIL import Image

    from lab.data.images.files import most_pixels
    from lab.training.process_state import left_as_found

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12345)
    monkeypatch.setenv("LOSSFORGE_MAX_PIXELS", "777")
    most_pixels.cache_clear()
    for _ in range(2):
        with left_as_found():
            assert most_pixels() == Image.MAX_IMAGE_PIXELS == 777
        assert Image.MAX_IMAGE_PIXELS == 12345


@pytest.mark.slow
def test_a_config_folder_is_of_one_call():
    for name, rate in (("first", 0.01), ("second", 0.02)):
        Path(name, "optim").mkdir(parents=True)
        Path(name, "optim", "mine.yaml").write_text(f"name: sgd\nlr: {rate}\n")
        result = lab.train(*QUICK, "optim=mine", config_dir=Path(name))
        assert records(result.folder)[0]["params"]["optim.lr"] in (rate, str(rate))
    with pytest.raises(UserError, match="no such folder"):
        lab.train(*QUICK, config_dir="third")
    with pytest.raises(UserError, match="'mine' is not known"):
        lab.train(*QUICK, "optim=mine")


@pytest.mark.slow
def test_in_a_thread_of_an_event_loop(capsys):
    assert asyncio.run(asyncio.to_thread(lab.train, *QUICK, "tracking.model=true")).status == "FINISHED"
    if not torch.cuda.is_available():
        assert "the best model was not exported" in capsys.readouterr().out
    # where torch.export would end the process, had it run in the thread
    assert lab.train(*QUICK, "tracking.model=true").status == "FINISHED"


def test_within_a_hydra_program():
    Path("conf").mkdir()
    with hydra.initialize_config_dir(str(Path("conf").resolve()), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert lab.train(*QUICK).status == "FINISHED"
        assert GlobalHydra.instance().hydra is outer


def test_a_callback_that_ends_the_program_ends_the_run_first():
    class Leaves:
        def on_epoch(self, trainer):
            sys.exit("enough")

    with pytest.raises(SystemExit, match="enough"):
        lab.train(*QUICK, callbacks=[Leaves])
    end = records(only_run())[-1]
    assert (end["kind"], end["status"]) == ("end", "FAILED")
    assert "enough" in (only_run() / "error.txt").read_text()
    assert not running(only_run())
    assert [thread for thread in threading.enumerate() if thread.name == "system"] == []


def test_a_refused_continuation_leaves_the_folder_free(monkeypatch):
    from lab.training.trainer import Trainer

    class Stops:
        def on_epoch(self, trainer):
            os.kill(os.getpid(), signal.SIGINT)

    assert lab.train(*QUICK, "trainer.epochs=3", callbacks=[Stops()]).status == "KILLED"

    def refuses(self, state):
        raise UserError("the training data has changed")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "restore", refuses)
        with pytest.raises(UserError, match="has changed"):
            lab.train(f"resume={only_run()}")
    assert not running(only_run())
    assert lab.train(f"resume={only_run().resolve()}").status == "FINISHED"


def test_an_edited_file_is_read_again():
    values = []
    for factor in (1.0, 100.0):
        Path("my_loss.py").write_text(OWN_LOSS.format(factor))
        values.append(lab.train(*QUICK, "loss=custom", "loss.target=my_loss.py:scaled").values["val/loss"])
    assert values[1] == pytest.approx(100 * values[0], rel=0.2)


@pytest.mark.slow
def test_peak_memory_is_the_run_s_own():
    """Not that of what the process did before."""
    large = torch.ones(2**28)  # 1 GiB
    during = lab.train(*QUICK).values["train/peak_process_mib"]
    del large
    assert lab.train(*QUICK).values["train/peak_process_mib"] < during - 512


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        ((["loss=focal"],), {}, TypeError, r"overrides must be strings such as \"loss=focal\", got \['loss=focal'\]"),
        ((), {"callbacks": object()}, TypeError, "callbacks must be a list, got <object"),
        (("--help",), {}, UserError, "--help: an option of the command line"),
        (("trainer.runs=Läufe hier",), {}, UserError, """is quoted, in the shell too: "trainer.runs='Läufe hier'"$"""),
    ],
    ids=["a list", "no list", "an option", "not quoted"],
)
def test_what_it_does_not_take(arguments, options, kind, said):
    with pytest.raises(kind, match=said):
        lab.train(*arguments, **options)
    assert not Path("runs").exists()


def test_a_result_is_a_checkpoint(capsys):
    result = lab.train(*QUICK)
    found = [lab.evaluate(each, "tracking=none") for each in (result, result.folder, f"checkpoint={result.folder}")]
    assert len({each.values["top1"] for each in found}) == 1
    with pytest.raises(TypeError, match=r"checkpoint must be a result of lab\.train, or the path of a run or checkpoint, got int"):
        lab.evaluate(3)


def test_a_quoted_folder_s_way_on_can_be_typed(capsys):
    class Stops:
        def on_epoch(self, trainer):
            os.kill(os.getpid(), signal.SIGINT)

    given = ("experiment=quick", "trainer.epochs=2", "data.train_share=0.1", *ALONE, "trainer.runs='Läufe hier'")
    assert lab.train(*given, callbacks=[Stops()]).status == "KILLED"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("to go on:")]
    assert line.startswith("""to go on: uv run experiments/train.py "resume='Läufe hier/""")
    assert lab.train(line.split('"')[1]).status == "FINISHED"
