"""Windows of four images, and batches of another size: pixels and boxes stay together."""

import pytest
import torch

from lab.base.seeds import seeded
from lab.data.sets import Norm
from lab.detectors.detection.augment import Prepared, mosaic
from lab.detectors.detection.data import Collate, Sample, load_detection_data
from lab.detectors.schema import DigitScenesConfig

FILL = [7, 8, 9]


def parts(sizes=((32, 48), (32, 48), (20, 60), (40, 40))):
    """Images that are black but for one box each, of a value of its own."""
    made = []
    for number, (height, width) in enumerate(sizes):
        image = torch.zeros(3, height, width, dtype=torch.uint8)
        image[:, 6:16, 10:26] = 50 + 50 * number
        mask = (image[:1] > 0).byte()
        made.append(Prepared(image, torch.tensor([[10.0, 6.0, 26.0, 16.0]]), torch.tensor([number]), mask))
    return made


@pytest.mark.parametrize("seed", range(12))
def test_boxes_of_a_window_frame_what_they_framed(seed):
    with seeded(seed):
        image, boxes, labels, masks, _ = mosaic(parts(), FILL, 0.3)
    assert image.shape == (3, 32, 48)
    assert len(boxes) == len(labels)
    for box, label in zip(boxes.long().tolist(), labels.tolist(), strict=True):
        inside = image[:, box[1] : box[3], box[0] : box[2]]
        assert inside.numel()
        assert (inside == 50 + 50 * label).all()
    for mask, label in zip(masks, labels.tolist(), strict=True):
        assert mask.bool().equal(image[0] == 50 + 50 * label)
    for label in range(4):  # a box that goes was cut to less than 0.3 of it
        shown = (image[0] == 50 + 50 * label).sum().item()
        assert (label in labels.tolist()) == (shown >= 0.3 * 160)


def test_what_an_image_lacks_is_filled():
    with seeded(5):
        image, *_ = mosaic(parts(((32, 48), (32, 48), (8, 8), (8, 8))), FILL, 0.3)
    assert (image == torch.tensor(FILL, dtype=torch.uint8).view(3, 1, 1)).all(0).any()


def sample(seed=0):
    (image, boxes, labels, *_), *_ = parts()
    return Sample(image, boxes, labels, (32, 48), 0, 0, seed)


def test_a_batch_of_another_size_has_its_boxes_scaled():
    plain = Collate(None, 16, FILL, None)([sample(), sample(1)])
    scaled = Collate(None, 16, FILL, None, (2.0, 2.0))([sample(), sample(1)])
    assert plain.images.shape[-2:] == (32, 48)
    assert scaled.images.shape[-2:] == (64, 96)
    assert scaled.boxes.equal(2 * plain.boxes)
    assert scaled.sizes.tolist() == [[64, 96]] * 2
    assert scaled.labels.equal(plain.labels)


def test_the_size_follows_from_the_first_images_seed():
    collate = Collate(None, 16, FILL, None, (0.5, 2.0))
    sizes = {collate([sample(seed)]).images.shape[-2:] for seed in range(20)}
    assert len(sizes) > 2
    assert all(side % 16 == 0 for size in sizes for side in size)
    assert collate([sample(3), sample(4)]).images.shape == collate([sample(3), sample(9)]).images.shape


def test_a_data_sets_windows(tmp_path):
    config = DigitScenesConfig(
        root=str(tmp_path), train_scenes=12, val_scenes=4, mosaic=1.0, batch_scale=[0.75, 1.25], batch_size=4, workers=0
    )
    data = load_detection_data(config, None, Norm((0.5,) * 3, (0.2,) * 3), torch.device("cpu"), 0)
    boxes = sum((batch.labels >= 0).sum().item() for batch in data.train)
    assert boxes > 12
    assert all(batch.images.shape[-1] == 128 for batch in data.val)
