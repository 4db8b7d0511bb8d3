"""Write an exported model as ONNX, and check it: ONNX Runtime must give the model's output on real images."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.base.files import write_whole
from lab.run.exported import Exported

LARGEST = 1e-4  # largest difference, as a share of the largest number of the output or of 1
CHECKED = 8  # images


def write_onnx(exported: Exported, images: Tensor, path: Path, about: dict[str, str]) -> str:
    """Write a model as one ONNX file of any batch size, from `images` to `output`; its metadata has classes and how to prepare images.

    Args:
        exported: the model.
        images: real images (N, C, H, W), normalised.
        path: the file.
        about: more texts for the metadata.

    Returns:
        What was checked, in words.

    Raises:
        ValueError: ONNX Runtime's output differs from the model's.
        Exception: the model has an operator that ONNX lacks, or is larger than 2 GB.
    """
    import onnxruntime
    import torchvision  # noqa: F401  registers nms

    made: Any
    with _quiet():
        made = torch.onnx.export(
            exported.program,
            (),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["output"],
            dynamic_shapes=({0: "batch"} | ({2: "height", 3: "width"} if exported.record["multiple"] else {}),),
            custom_translation_table={torch.ops.torchvision.nms.default: _nms},
        )
    record = exported.record
    lists = {"classes": record["classes"], "mean": exported.norm.mean, "std": exported.norm.std, "input": record["input"]}
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in lists.items()}
    meanings = {"output": record["says"], "step": str(record["step"]), "pixels": record["pixels"], "normalization": "in the graph"}
    # a name of bytes that are not UTF-8 becomes an escape
    made.model.metadata_props.update(
        {name: text.encode(errors="backslashreplace").decode() for name, text in (about | texts | meanings).items()}
    )
    content = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    pixels = _pixels(images, exported)
    batches = [pixels, pixels[:1]]
    if multiple := record["multiple"]:  # other shapes: turned, and one step higher
        batches += [pixels[:2].mT.contiguous(), F.pad(pixels[:1], (0, 0, 0, multiple))]
    difference = max(_difference(exported, session, batch) for batch in batches)
    write_whole(path, lambda file: file.write(content))
    shapes = len({batch.shape[2:] for batch in batches})
    said = f"{len(pixels)} real images" + (f" in {shapes} sizes" if shapes > 1 else "")
    return f"ONNX Runtime gives the model's output on {said} (largest difference {difference:.1e})"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages about its own passes and torch's old names."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Return torchvision's nms in float32, which is all that NonMaxSuppression takes."""
    from onnxscript import FLOAT, opset18

    op: Any = opset18  # its methods take Python's numbers and lists, too
    boxes, scores = (op.Cast(each, to=FLOAT.dtype) for each in (boxes, scores))
    found = op.NonMaxSuppression(op.Unsqueeze(boxes, [0]), op.Unsqueeze(scores, [0, 1]), 2**63 - 1, iou_threshold)
    return op.Reshape(op.Slice(found, axes=[1], starts=[2], ends=[3]), [-1])


def _pixels(images: Tensor, exported: Exported) -> Tensor:
    """Return normalised images as the exported model takes them, at most CHECKED."""
    if not exported.record["multiple"] and list(images.shape[2:]) != exported.record["shape"][1:]:
        images = F.interpolate(images.float(), exported.record["shape"][1:], mode="bilinear", antialias=True)
    mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (exported.norm.mean, exported.norm.std))
    pixels = images[:CHECKED].float().cpu() * std + mean
    return pixels if exported.record["pixels"] == "float32" else (pixels * 255).round().clamp(0, 255).to(torch.uint8)


def _difference(exported: Exported, session: Any, pixels: Tensor) -> float:
    with torch.no_grad():
        expected = exported.module(pixels)
    got = torch.from_numpy(session.run(None, {"images": pixels.numpy()})[0])
    if got.shape != expected.shape:
        raise ValueError(f"ONNX Runtime gives an output {tuple(got.shape)}, the model {tuple(expected.shape)}")
    differences = (got - expected).abs()
    if exported.record["output"][1:] == [6]:
        # detections of nearly equal scores may change places or drop out at the end, so that a row may be elsewhere, and 2 % may lack
        nearest = torch.cdist(expected, got, p=float("inf")).amin(-1).flatten().sort().values
        differences = nearest[: max(1, int(0.98 * len(nearest)))]
    difference = float(differences.max())
    if not difference <= LARGEST * max(1.0, float(expected.abs().max())):
        raise ValueError(f"ONNX Runtime's output differs from the model's by {difference:.3g}")
    return difference
