"""A run that is stopped within an epoch goes on to the bit, whatever is trained: weights, moments, random changes and figures."""

import pytest
import torch

from lab.base.process import StoppedError
from lab.run import checkpoint
from lab.run.folder import RunFolder
from lab.training.callbacks import Callbacks

SMALL = ["data.image_size=16", "trainer.epochs=2", "trainer.ema=0.9", "tracking=none"]
PAIRS = ["task=contrastive", "task.width=8", "task.text_width=8", "data.train_pairs=48", "data.val_pairs=20", "data.batch_size=16"]
ENCODER = ["task=contrastive", "data=digits", "task.width=8", "data.train_share=0.06", "data.batch_size=28", "data.held_out=0.1"]
SCENES = [
    *("task=detection", "data.train_scenes=4", "data.val_scenes=2", "data.scene_pixels=64", "data.digit_pixels=[14,24]", "data.workers=0"),
    *("model=detr_tiny", "model.name=test_resnet", "model.denoising=20", "loss=mal", "loss.implementation=torch", "data.batch_size=1"),
]
RUNS = {
    "image-text pairs": ([*SMALL, *PAIRS, "loss=siglip"], 4),
    "proxies": ([*SMALL, *ENCODER, "loss=proxy_anchor"], 5),
    "drawn views": ([*SMALL, *ENCODER, "loss=nt_xent"], 5),
    "denoising queries": (["trainer.epochs=2", "tracking=none", *SCENES, "task.pictures=0"], 3),
    "a sampler": ([*SMALL, "data.sampler=balanced", "data.train_share=0.1", "data.batch_size=32"], 3),
    "numbers": ([*SMALL, "task=regression", "loss=mse", "data.held_out=0.9", "data.batch_size=32"], 3),
    "frozen parts": ([*SMALL, "model.freeze=[layer1,bn1]", "data.train_share=0.1", "loss.implementation=torch"], 2),
}


class StopAfter:
    """A callback that asks its trainer to stop after an update, as a signal does."""

    def __init__(self, update):
        self.update, self.wanted = update, False

    def on_update(self, trainer):
        trainer.stop, self.wanted = self, trainer.done >= self.update


@pytest.mark.parametrize("what", RUNS)
def test_a_stopped_run_goes_on_to_the_bit(make_trainer, run_folder, quiet, tmp_path, what):
    words, update = RUNS[what]
    if "data.train_scenes=4" in words:
        words = [*words, f"data.root={tmp_path}"]
    whole = make_trainer(*words)
    whole.fit(run_folder, quiet)
    other = RunFolder(tmp_path / "other", "test", {})
    stopped = make_trainer(*words)
    stopped.callbacks = Callbacks((), (StopAfter(update),))
    with pytest.raises(StoppedError):
        stopped.fit(other, quiet)
    again = make_trainer(*words)
    again.restore(checkpoint.load(other.path / "checkpoints" / "last.pt"))
    assert (again.done, again.batch > 0) == (update, True)
    again.fit(other, quiet)
    other.close("FINISHED")
    assert again.done == whole.done > update
    averaged = [(whole.ema.module, again.ema.module)] if whole.ema else []
    for expected, found in [(whole.model, again.model), *averaged]:
        for name, value in expected.state_dict().items():
            assert torch.equal(value, found.state_dict()[name]), name
    moments, others = (trainer.updater.state()["optimizer"]["state"] for trainer in (whole, again))
    assert moments.keys() == others.keys()
    for number, state in moments.items():
        assert torch.equal(state["exp_avg_sq"], others[number]["exp_avg_sq"])
    assert whole.values["val/loss"] == again.values["val/loss"]
