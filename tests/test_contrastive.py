"""Images and captions: the drawn pairs, the losses and figures beside plain ones, and what the app does with a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.sets import Norm
from lab.tasks.contrastive.data import CAPTIONS, COLORS, LONGEST, WORDS, caption, choices, digit_captions, text_of, tokens_of
from lab.tasks.contrastive.metrics import RetrievalCounts, ranks, recalls
from lab.tasks.contrastive.model import Features
from lab.tasks.contrastive.task import pair_loss

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
DRAWN = ["data.train_pairs=48", "data.val_pairs=20", "data.image_size=16", "data.batch_size=16", "data.eval_batch_size=8"]
SMALL = ["task=contrastive", "task.width=8", "task.text_width=8", *DRAWN, "trainer.log_every=1", "tracking=none"]


def random_features(count=7, width=5, bias=None):
    """Features with gradients, of which each pair is a little alike."""
    random = torch.Generator().manual_seed(count)
    images = torch.randn(count, width, generator=random)
    texts = images + torch.randn(count, width, generator=random)
    given = [F.normalize(images, dim=1), F.normalize(texts, dim=1), torch.tensor([6.0]), None if bias is None else torch.tensor([bias])]
    return Features(*(None if each is None else each.requires_grad_() for each in given))


def plain(name, output, normalizer):
    """The losses from their papers, an element at a time."""
    images, texts, scale, bias = output
    total = torch.zeros(())
    for i in range(len(images)):
        for side, other in ((images, texts), (texts, images)) if name == "clip" else ((images, texts),):
            logits = torch.stack([scale[0] * (side[i] * each).sum() for each in other])
            if name == "clip":
                total = total + 0.5 * (logits.exp().sum().log() - logits[i])
            else:
                logits = logits + bias[0]
                total = total + sum(torch.log(1 + torch.exp(-logit if i == j else logit)) for j, logit in enumerate(logits))
    return total / normalizer


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize(("name", "bias"), [("clip", None), ("siglip", -2.0)])
def test_the_losses_are_those_of_the_papers(name, bias, implementation):
    config = load(["task=contrastive", f"loss={name}", f"loss.implementation={implementation}"]).config
    values, gradients = [], []
    for function in (pair_loss(config.loss), lambda *given: plain(name, *given)):
        output = random_features(bias=bias)
        value = function(output, torch.tensor(14.0))
        (3 * value).backward()
        values.append(value.detach().reshape(()))
        gradients.append([each.grad for each in output if each is not None])
    torch.testing.assert_close(values[0], values[1])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(gradients[0]) == (3 if bias is None else 4)


def test_recall_is_that_of_sorted_similarities(monkeypatch):
    monkeypatch.setattr("lab.tasks.contrastive.metrics.ROWS", 16)
    output = random_features(50)
    images, texts = output.images.detach(), output.texts.detach()
    counts = RetrievalCounts(CPU)
    tokens = torch.arange(50)[:, None].expand(-1, 2)
    for part in torch.arange(50).split(20):
        counts.add(torch.zeros(len(part), 3, 4, 4), tokens[part], (images[part], texts[part]), torch.tensor(2.0), torch.tensor(len(part)))
    result = counts.result()
    for name, (query, found) in {"text": (images, texts), "image": (texts, images)}.items():
        order = [sorted(range(50), key=lambda j, q=q, f=found: -float(q @ f[j])) for q in query]
        for most in (1, 5):
            wanted = sum(i in row[:most] for i, row in enumerate(order)) / 50
            assert 0 < wanted < 1
            assert result.values[f"{name}_recall{most}"] == pytest.approx(wanted), (name, most)
        if name == "text":
            assert result.nearest[:, :, 0].tolist() == [row[:3] for row in order[:6]]
    assert result.values["recall1"] == pytest.approx((result.values["text_recall1"] + result.values["image_recall1"]) / 2)
    assert result.values["loss"] == pytest.approx(3 * 2.0 / 50)
    assert result.values["samples"] == 50
    assert result.captions[:, 0].tolist() == list(range(6))


def test_equal_features_recall_nothing():
    same = F.normalize(torch.ones(6, 4), dim=1)
    assert ranks(same, same).tolist() == [5] * 6
    assert recalls(same, same)["text_recall1"] == 0


def test_every_caption_is_different_and_is_read_back():
    every = [caption(row) for row in choices(torch.arange(CAPTIONS)).tolist()]
    assert len(set(every)) == CAPTIONS == 51200
    assert max(len(text.split()) for text in every) == LONGEST
    tokens = tokens_of(every[::997], WORDS)
    assert [text_of(row, WORDS) for row in tokens.tolist()] == every[::997]
    assert "a large red 7 left of a small blue 3" in every


def test_images_show_what_their_captions_say():
    config = load(["task=contrastive", *DRAWN]).config.data
    data = digit_captions(config, CPU, 0, Norm([0.0] * 3, [1.0] * 3))
    texts = [text_of(row, WORDS) for row in torch.cat([data.train.targets, data.val.targets]).tolist()]
    assert len(set(texts)) == len(texts) == 68
    words = " ".join(text_of(row, WORDS) for row in data.train.targets.tolist()).split()
    assert data.counts.tolist() == [words.count(word) for word in WORDS]
    assert data.train.images.shape == (48, 3, 16, 16)
    for image, text in zip(data.train.images, texts, strict=False):
        first, second = text.split(" left of " if " left of " in text else " above ")
        halves = image.split(8, dim=2 if " left of " in text else 1)
        for half, about in zip(halves, (first, second), strict=True):
            _, size, color, _ = about.split()
            ink = half.amax((1, 2))
            assert (ink / ink.max()).tolist() == pytest.approx([each / max(COLORS[color]) for each in COLORS[color]], abs=1e-5), text
            assert max((half.amax(0) > 0).any(side).sum().item() for side in (0, 1)) <= (7 if size == "large" else 5), text


def test_no_digit_is_in_two_parts():
    """The held-out digits alone are in the held-out images: with others held out, the images of the same captions differ."""
    config = load(["task=contrastive", *DRAWN, "data.test=0.2", "data.test_pairs=5"]).config.data
    data = digit_captions(config, CPU, 0, None)
    again = digit_captions(load(["task=contrastive", *DRAWN, "data.split_seed=1"]).config.data, CPU, 0, None)
    assert torch.equal(data.val.targets, again.val.targets)
    assert not torch.equal(data.val.images, again.val.images)
    assert data.test is not None
    assert data.test.samples == 5
    assert not {*data.test.keys} & {*data.train.keys, *data.val.keys}


@pytest.mark.parametrize("loss", ["clip", "siglip"])
def test_a_model_learns_and_its_run_can_be_asked(make_trainer, run_folder, quiet, tmp_path, capsys, loss):
    words = [*SMALL, f"loss={loss}", "optim.lr=1e-2", "trainer.epochs=4", "tracking.model=true"]
    trainer = make_trainer(*words)
    assert (trainer.model.bias is None) == (loss == "clip")
    before = trainer.evaluate(trainer.model, trainer.data.plain()).values["loss"]
    scale = trainer.model.log_scale.item()
    trainer.fit(run_folder, quiet)
    trainer.finish()
    assert trainer.evaluate(trainer.model, trainer.data.plain()).values["loss"] < before
    assert trainer.model.log_scale.item() != scale
    assert {"val/recall1", "val/text_recall5", "val/image_recall1", "train/cosine"} <= set(trainer.values)
    assert trainer.monitor.goal == "max"
    assert (run_folder.path / "retrieval.png").stat().st_size > 5000

    batch = next(iter(trainer.data.val))
    best = run_folder.path / "checkpoints" / "best.pt"
    state = torch.load(best, weights_only=True)
    assert state["classes"] == WORDS
    trainer.model.load_state_dict(state["model"])
    norm = [torch.tensor(each).view(-1, 1, 1) for each in (state["norm"]["mean"], state["norm"]["std"])]
    pixels = ((batch.images * norm[1] + norm[0]).clamp(0, 1) * 255).round().to(torch.uint8)
    with torch.no_grad():
        images = trainer.model.eval().of_images((pixels.float() / 255 - norm[0]) / norm[1])
        every = tokens_of([caption(row) for row in choices(torch.arange(CAPTIONS)).tolist()], WORDS)
        cosine, place = (images[0] @ trainer.model.of_texts(every).T).max(0)
    exported = torch.export.load(best.with_suffix(".pt2")).module()
    torch.testing.assert_close(exported(pixels), images, atol=1e-5, rtol=1e-4)
    Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(tmp_path / "image.png")
    import predict

    out = tmp_path / "said"
    assert predict.main([f"checkpoint={best}", "top=3", f"out={out}", str(tmp_path / "image.png"), "trust=" + str(run_folder.path)]) == 0
    (line,) = [json.loads(text) for text in (out / "predictions.jsonl").read_text().splitlines()]
    assert [entry["cosine"] for entry in line["found"]] == sorted((entry["cosine"] for entry in line["found"]), reverse=True)
    assert line["found"][0]["cosine"] == pytest.approx(cosine.item(), abs=1e-4)
    assert line["found"][0]["caption"] == text_of(every[place].tolist(), WORDS)
    assert line["found"][0]["caption"] in capsys.readouterr().out


def test_a_saved_model_is_scored_again_by_pairs(tmp_path):
    import evaluate
    import train

    words = [*SMALL, "trainer.device=cpu", "model=tiny_resnet", "trainer.epochs=2", "tracking.model=false"]
    assert train.main([*words, f"trainer.runs={tmp_path / 'runs'}"]) == 0
    (first,) = (tmp_path / "runs").iterdir()
    assert evaluate.main([f"checkpoint={first}", f"trainer.runs={tmp_path / 'again'}", "split=train"]) == 0
    (again,) = (tmp_path / "again").iterdir()
    rows = (again / "predictions.csv").read_text().splitlines()
    assert rows[0] == "sample,caption,cosine"
    assert len(rows) == 49
    cosines = np.array([float(row.split(",")[2]) for row in rows[1:]])
    assert (abs(cosines) <= 1 + 1e-6).all()


def test_negatives_are_those_of_the_batch_which_a_note_says(make_trainer):
    trainer = make_trainer(*SMALL, "trainer.accumulate=3")
    assert trainer.notes[0] == "each image is compared with the captions of its own batch and process alone, 16 at most"
    (group,) = trainer.groups()
    trainer.model.eval()
    with torch.no_grad():
        losses = [plain("clip", trainer.model(batch.images, batch.target), 48.0) for batch in group]
    trainer.update(group)  # in evaluation, so that batch norm does not change
    torch.testing.assert_close(trainer.window[0].item(), sum(losses).item(), rtol=1e-4, atol=0)
    assert not make_trainer(*SMALL).task.notes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["data.train_pairs=51190"],
            r"data.train_pairs=51190: with held-out and test pairs 51210 different captions are needed; there are",
        ),
        (["data.held_out=0.001"], r"data.held_out=0.001"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make_trainer, words, said):
    with pytest.raises(UserError, match=said):
        make_trainer(*SMALL, *words)


def test_several_views_are_refused(make_trainer):
    from lab.tasks.inference import several_views

    trainer = make_trainer(*SMALL)
    with pytest.raises(UserError, match="tta=flip: task=contrastive has no mean of several views"):
        several_views(trainer.model, "flip", trainer.task, "contrastive")
