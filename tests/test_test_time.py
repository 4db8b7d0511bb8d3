"""Scores of several views of each image: which views, their mean, and that an evaluation uses it."""

import contextlib
import functools
import importlib
import io
import json

import pytest
import torch
from words import ALONE, TINY

import lab
from lab.base.errors import UserError
from lab.tasks.inference import SeveralViews, five_crop, flip, mean_of_probabilities, several_views

ROWS = torch.tensor([[[1.0, -2.0, 0.5], [80.0, 0.0, -80.0]], [[3.0, 0.0, 0.0], [-80.0, 80.0, 0.0]]])


def test_views_are_mirror_images_corners_and_the_centre():
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    plain, mirrored = flip(images)
    assert torch.equal(plain, images)
    assert torch.equal(mirrored[:, :, :, 0], images[:, :, :, -1])
    ramp = torch.arange(16.0).view(1, 1, 1, 16).expand(1, 1, 16, 16)
    means = [view.mean().item() for view in five_crop(ramp)]
    assert means == pytest.approx([6.5, 8.5, 6.5, 8.5, 7.5], abs=0.01)
    tall = [view.mean().item() for view in five_crop(ramp.transpose(2, 3))]
    assert tall == pytest.approx([6.5, 6.5, 8.5, 8.5, 7.5], abs=0.01)
    assert all(view.shape == images.shape for view in five_crop(images))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_probabilities_are_averaged_at_extremes_too(activation):
    found = mean_of_probabilities(list(ROWS), activation)
    of = (lambda x: x.double().softmax(-1)) if activation == "softmax" else (lambda x: x.double().sigmoid())
    torch.testing.assert_close(of(found), of(ROWS).mean(0), atol=1e-6, rtol=1e-5)
    assert found.isfinite().all()


def test_a_model_of_one_view_is_itself(make_trainer):
    trainer = make_trainer("data.image_size=16")
    images = next(iter(trainer.data.val)).images
    images = images[:4] + images[:4].flip(-1)  # their own mirror images
    model = SeveralViews(trainer.model.eval(), "flip", trainer.task.merged)
    with torch.no_grad():
        torch.testing.assert_close(model(images).softmax(1), trainer.model(images).softmax(1), atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train for three updates; return the run's folder, and a function that evaluates it with more words."""
    root = tmp_path_factory.mktemp("trained")
    main = importlib.import_module("evaluate").main
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        small = [*TINY, *ALONE]
        run = lab.train(*small, "trainer.max_updates=3", "trainer.epochs=1").folder.resolve()

        def scored(*words):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert main([f"checkpoint={run}", "trainer.device=cpu", *words]) == 0
            folder = max((root / "runs").glob("*evaluate*"), key=lambda path: path.stat().st_mtime_ns)
            records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            assert "held-out top-1" in (folder / "log.txt").read_text()
            return next(each["values"] for each in records if each["kind"] == "metrics"), records[0]["tags"], out.getvalue()

        yield run, functools.cache(scored)


def test_an_evaluation_of_one_view_scores_as_the_training_did(trained):
    run, scored = trained
    values, tags, _ = scored()
    assert "tta" not in tags
    best = torch.load(run / "checkpoints/best.pt", weights_only=True)["best"]["values"]
    assert values["val/loss"] == pytest.approx(best["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["flip", "five_crop"])
def test_an_evaluation_scores_the_mean(trained, name):
    _, scored = trained
    values, tags, said = scored(f"tta={name}")
    assert f"split=val, the mean of tta={name} on cpu" in said
    assert tags["tta"] == name
    assert values["val/loss"] != pytest.approx(scored()[0]["val/loss"], rel=1e-6)


def test_tasks_of_boxes_and_masks_have_none():
    with pytest.raises(UserError, match=r"tta=flip: task=detection has no mean of several views"):
        several_views(torch.nn.Identity(), "flip", object(), "detection")
