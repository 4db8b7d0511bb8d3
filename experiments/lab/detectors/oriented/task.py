"""Oriented boxes: the detection task with rectangles at any angle, counted by COCO's rule with their exact IoU."""

from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from lab.config.schema import TrainConfig
from lab.data.sets import Norm
from lab.detectors.detection.boxes import corners_of, rows_at, turned_boxes
from lab.detectors.detection.data import FileLoader
from lab.detectors.detection.inference import Cells, best_rows, exportable, predictor
from lab.detectors.detection.metrics import DETECTIONS, DetectionCounts, DetectionResult, Found
from lab.detectors.detection.task import Detection
from lab.detectors.detection.task import build as build_detection
from lab.detectors.detection.types import DetectionBatch, DetectorOutput
from lab.detectors.oriented.model import YoloOriented, near
from lab.run.export import Exportable
from lab.run.predict import Asked, Predictor
from lossforge.losses import plain_torch, rotated_box_iou


class OrientedResult(DetectionResult):
    """Figures of oriented boxes."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the detections with `rbox`, centre, width, height and angle in radians, and `poly`, the corners, in place of `bbox`."""
        found = []
        for row in super().rows():
            box = row.pop("bbox")
            found.append(row | {"rbox": box, "poly": corners_of(torch.tensor([box]))[0].tolist()})
        return found


class OrientedCounts(DetectionCounts):
    """Collect oriented detections on the device; only the result waits for it."""

    def in_file(self, boxes: Tensor, size: Tensor, original: Tensor) -> Tensor:
        """Return boxes (D, 5) in pixels of the file. size, original: (2,) height and width of the image and of its file."""
        return boxes * scale_of((original / size).float())

    def true_boxes(self, rows: slice) -> Tensor:
        return turned_boxes(cast(Tensor, self.truth.corners)[rows])

    def evaluator(self) -> Any:
        """Return COCO's evaluation with the IoU of turned rectangles; a crowd is found by nothing."""

        class ByTurnedIoU(super().evaluator()):  # type: ignore[misc]  # it is imported where it is needed
            def computeIoU(self, image_id: int, label: int) -> Any:  # noqa: N802  # the name that it calls
                true, found = (data.get_instances([image_id], [label], True)[0][0] for data in (self.gt_dataset, self.dt_dataset))
                if not true or not found:
                    return []
                best = sorted(found, key=lambda each: -each["score"])[: DETECTIONS[-1]]
                boxes = [torch.tensor([each["bbox"] for each in some], dtype=torch.float64) for some in (best, true)]
                return (rotated_box_iou(*boxes) * torch.tensor([not each["iscrowd"] for each in true])).numpy()

        return ByTurnedIoU

    def _evaluate(self, found: dict[int, Found]) -> DetectionResult:
        of_all = self._figures(found)
        values = {name: of_all.values[name] for name in ("map", "map50", "map75")}
        return OrientedResult(values, of_all.per_class, of_all.precision, {}, self.category_ids)


def scale_of(ratio: Tensor) -> Tensor:
    """Return the factors (5,) of an oriented box where an image is resized by `ratio` (2,) of height and width, which are nearly equal."""
    return torch.cat([ratio.flip(0), ratio.mean()[None].expand(2), torch.ones_like(ratio[:1])])


class Oriented(Detection):
    own_loss = "probiou"

    @staticmethod
    def kinds(config: TrainConfig) -> dict[str, Any]:
        return {"yolo": YoloOriented}

    def outlines(self, batch: DetectionBatch) -> Tensor:
        boxes = cast(Tensor, batch.turned)
        return corners_of(boxes.flatten(0, 1)).unflatten(0, boxes.shape[:2])

    def counts(self, loader: FileLoader) -> OrientedCounts:
        return OrientedCounts(self.data.classes, self.data.category_ids, self.device, loader.file)


def build(config: TrainConfig, device: torch.device, saved: Norm | None) -> Detection:
    return build_detection(config, device, saved, Oriented, shapes="corners")


ROUNDS = 15
"""Of suppression in an exported graph; odd, so that a box that is not decided then is left out."""


def predict(config: TrainConfig, classes: list[str], asked: Asked) -> tuple[nn.Module, Predictor]:
    """Return the detector, and a function from an image to its oriented boxes, as corners."""

    def in_file(found: dict[str, Tensor], batch: DetectionBatch, _image: Image.Image) -> tuple[Tensor, dict[str, Any]]:
        return corners_of(found["boxes"] * scale_of((batch.originals / batch.sizes)[0])), {}

    return predictor(config, classes, asked, Oriented, in_file)


def export(config: TrainConfig, classes: list[str], norm: Norm) -> Exportable:
    """Return the detector, from images to oriented boxes, to export."""
    said = "detections: x and y of the centre, width and height in pixels, angle in radians (clockwise), score, class"
    return exportable(config, classes, norm, Oriented, OrientedScenes, said)


class OrientedScenes(Cells):
    """Map images (N, 3, H, W) of uint8 to detections (N, D, 7): centre, width, height, angle, score, class; rows without one are 0.

    A box is suppressed if it is near a better one that stays, which is known after as many rounds as boxes depend on each other in a row.
    A graph has a fixed number of rounds, ROUNDS. What is not decided then, in a crowd where more than ROUNDS boxes depend on each other, is
    left out.
    """

    def found(self, output: DetectorOutput, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return detections (N, D, 7) and the indices of their anchors (N, D), which mean nothing where a row is 0."""
        model = cast(Any, self.model)
        anchors = torch.cat(self.anchors(images))
        if not model.suppresses:
            boxes = model.coder.decode(output.regression.float(), anchors)
            return best_rows(model, output, boxes, model.detections_per_img)
        score, label, boxes, index = self.candidates(output.logits.float().sigmoid(), output.regression.float(), anchors)
        with plain_torch():
            over = near(boxes, label, model.nms_thresh).float()
        sure = score > model.score_thresh
        kept = sure
        for _ in range(ROUNDS):
            kept = sure & ((kept[:, None].float() @ over)[:, 0] == 0)
        best, place = (score * kept).topk(min(model.detections_per_img, model.topk_candidates))
        found = torch.cat([boxes, score[..., None], label[..., None].float()], dim=-1)
        return rows_at(found, place) * (best > 0)[..., None], index.gather(1, place)
