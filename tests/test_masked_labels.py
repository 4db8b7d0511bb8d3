"""Several labels an image, some of them masked: an empty cell or -1 of a table is no label for loss and metrics."""

from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lab.base.errors import UserError
from lab.config.settings import load
from lab.data.batch import Batch
from lab.tasks.losses import Criterion
from lab.tasks.multilabel.task import MultilabelCounts

COUNT = 24
CPU = torch.device("cpu")
EVERY = ["bce", "focal", "asymmetric", "poly_bce", "quality_focal", "varifocal", "distribution_balanced", "multilabel_soft_margin"]
# one cycle of six images, as a table's cells: yes, no, and four forms of a mask; the last image has no label
CELLS = {"a": ["1", "0", "", "1", "-1", ""], "b": ["0", "-1.0", "1", "1", "0", "-1"], "c": ["yes", "1", "no", "", "0", ""]}
TARGETS = [[1, 0, 1], [0, -1, 1], [-1, 1, 0], [1, 1, -1], [-1, 0, 0]]


@pytest.fixture
def table(tmp_path):
    for number in range(COUNT):
        Image.new("RGB", (16, 16), (10 * number,) * 3).save(tmp_path / f"{number}.png")
    cells = {name: [each[number % 6] for number in range(COUNT)] for name, each in CELLS.items()}
    parts = ["train" if number < 18 else "val" for number in range(COUNT)]
    return pandas.DataFrame({"path": [f"{number}.png" for number in range(COUNT)], "part": parts} | cells)


def words(table, tmp_path, *more):
    table.to_csv(file := tmp_path / "labels.csv", index=False)
    small = ["data.image_size=16", "data.batch_size=8", "data.workers=0", "data.augment=false", "tracking=none"]
    return ["task=multilabel", "data=table", f"data.file={file}", "data.label=[a,b,c]", "data.split=part", *small, *more]


def test_an_empty_cell_or_minus_one_is_no_label(make_trainer, table, tmp_path):
    trainer = make_trainer(*words(table, tmp_path))
    found = {}
    for loader in (trainer.data.train, trainer.data.val):
        for batch in loader:
            found |= {int(Path(loader.keys[i]).stem): row.tolist() for i, row in zip(batch.index.tolist(), batch.target, strict=True)}
    assert found == {number: TARGETS[number % 6] for number in range(COUNT) if number % 6 != 5}
    assert trainer.data.counts.tolist() == [6, 6, 6]  # of 15 images to train on
    assert trainer.task.prior() == pytest.approx(18 / 33)
    assert any("28 of 72 labels are masked" in note and "4 images without any label are left out" in note for note in trainer.notes)


@pytest.mark.parametrize("implementation", ["lossforge", "torch"])
@pytest.mark.parametrize("name", EVERY)
def test_a_masked_label_is_left_out_of_every_loss(table, tmp_path, name, implementation):
    config = load(words(table, tmp_path, f"loss={name}", f"loss.implementation={implementation}")).config
    criterion = Criterion(config.loss, config.data, 3, 0, CPU, torch.full((3,), 6.0), 15)
    generator = torch.Generator().manual_seed(0)
    weight, start = torch.rand(5, generator=generator) + 0.5, torch.randn(5, 3, generator=generator) * 2
    labels = torch.tensor(TARGETS).float()
    target, known = labels.clamp(min=0), labels >= 0
    found = []
    for each in (known, None):
        batch = Batch(torch.zeros(5, 3, 2, 2), target, torch.arange(5), weight, known=each)
        logits = start.clone().requires_grad_()
        loss = criterion(logits, batch, criterion.normalizer(batch))
        (1.5 * loss).backward()
        found.append((loss.item(), logits.grad))
    (masked, gradient), (whole, of_all) = found
    assert 0 < masked < whole
    torch.testing.assert_close(gradient, of_all * known)  # each element's gradient depends on its own logit alone
    if name == "bce":
        elements = F.binary_cross_entropy_with_logits(start, target, reduction="none") * weight[:, None]
        assert masked == pytest.approx(elements[known].sum().item() / 5, rel=1e-5)


def test_a_fused_head_gives_the_loss_of_its_logits(make_trainer, table, tmp_path):
    found = []
    for fused in ("false", "true"):
        trainer = make_trainer(*words(table, tmp_path, "loss=bce", f"loss.fused_head={fused}"))
        batch = next(iter(trainer.data.val))
        batch = trainer.task.prepare(batch, training=False)
        found.append(trainer.task.loss(trainer.model.eval()(batch.images), batch, trainer.task.normalizer(batch)).item())
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_metrics_see_no_masked_label():
    """By sklearn, of the labels that are there."""
    from sklearn.metrics import average_precision_score, f1_score

    generator = np.random.default_rng(0)
    target = (generator.random((50, 3)) < 0.4).astype(float)
    known = generator.random((50, 3)) < (0.7, 0.5, 0.9)
    probability = generator.random((50, 3))
    counts = MultilabelCounts(["a", "b", "c"], 0.5, CPU)
    counts.add(torch.tensor(probability), torch.tensor(np.where(known, target, -1.0)), torch.tensor(3.0), torch.tensor(2.0))
    result = counts.result()
    wanted = {name: average_precision_score(target[known[:, i], i], probability[known[:, i], i]) for i, name in enumerate("abc")}
    assert result.per_class == pytest.approx(wanted)
    assert result.values["map"] == pytest.approx(np.mean(list(wanted.values())))
    assert result.values["f1"] == pytest.approx(f1_score(target[known], probability[known] > 0.5))


def test_figures_and_rows_of_samples_leave_masked_labels_out(make_trainer, table, tmp_path):
    task = make_trainer(*words(table, tmp_path, "loss=bce")).task
    target = torch.tensor([[1, 0, -1], [-1, 1, 0]]).float()
    batch = task.prepare(Batch(torch.zeros(2, 3, 16, 16), target, torch.arange(2)), training=False)
    logits = torch.tensor([[9.0, -9.0, 9.0], [9.0, -9.0, -9.0]])
    assert task.scores(logits, batch).tolist() == [1.5]  # both labels right, and one of two
    first, second = task.samples(logits, batch)
    assert (first["true"], first["predicted"], first["correct"], first["masked"]) == ("a", "a;c", 1, "c")
    assert (second["true"], second["correct"], second["masked"]) == ("b", 0, "a")
    counts = task.counts(None)
    task.count(counts, logits, batch)
    rows = {row["class"]: row for row in task.per_class(counts.result())}
    assert [(rows[name]["labels"], rows[name]["samples"]) for name in "abc"] == [(1, 1), (2, 1), (1, 0)]
    assert (rows["a"]["precision"], rows["b"]["recall"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"a": ["2"] * COUNT}, [], r"row 2, column a: '2'; 0 or 1 is expected, and -1 or nothing for a masked label"),
        ({"a": [""] * COUNT}, [], "the column a has no label: each cell is empty or -1"),
        ({name: ["1"] * 18 + ["-1"] * 6 for name in "abc"}, [], "the images of val have no label"),
        ({}, ["data.label=a"], r"data.label=a: holds yes or no, as a column of one class"),
        ({}, ["loss=custom", "loss.target=torch.nn:BCEWithLogitsLoss"], r"returns \(\) for logits .*, and some labels are masked"),
    ],
)
def test_what_cannot_be_masked_is_refused(make_trainer, table, tmp_path, change, more, said):
    def evaluated():
        trainer = make_trainer(*words(table.assign(**change), tmp_path, *more))
        trainer.evaluate(trainer.model, trainer.data.val)

    with pytest.raises(UserError, match=said):
        evaluated()
