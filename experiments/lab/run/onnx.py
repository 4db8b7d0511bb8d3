"""Write an exported model as ONNX, and check it: ONNX Runtime must give the model's output on real images."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.base.files import write_whole
from lab.run.exported import ABOUT, Exported, pixels_of, refuse_different


def write_onnx(exported: Exported, images: Tensor, path: Path) -> str:
    """Write a model as one ONNX file of any batch size, from `images` to `output`; its metadata has `Exported.about()`.

    Args:
        exported: the model.
        images: real images (N, C, H, W), normalised.
        path: the file.

    Returns:
        What was checked, in words.

    Raises:
        ValueError: ONNX Runtime's output differs from the model's.
        Exception: the model has an operator that ONNX lacks, or is larger than 2 GB.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # else its import writes an id into the home folder, and it sends reports
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
    text = json.dumps(exported.about(), ensure_ascii=False)
    # a name of bytes that are not UTF-8 becomes an escape
    made.model.metadata_props[ABOUT] = text.encode(errors="backslashreplace").decode()
    content = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    pixels = pixels_of(images, record["shape"], exported.norm, record["pixels"], record["multiple"])
    batches = [pixels, pixels[:1]]
    if multiple := record["multiple"]:  # other shapes: turned, and one step higher
        batches += [pixels[:2].mT.contiguous(), F.pad(pixels[:1], (0, 0, 0, multiple))]
    largest = max(_checked(exported, session, batch) for batch in batches)
    write_whole(path, lambda file: file.write(content))
    shapes = len({batch.shape[2:] for batch in batches})
    said = f"{len(pixels)} real images" + (f" in {shapes} sizes" if shapes > 1 else "")
    return f"ONNX Runtime gives the model's output on {said} (largest difference: {largest:.1e} of the largest number)"


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


def _checked(exported: Exported, session: Any, pixels: Tensor) -> float:
    """Return the difference of ONNX Runtime's output and the module's; raise ValueError if it is too large."""
    with torch.no_grad():
        expected = exported.module(pixels)
    found = torch.from_numpy(session.run(None, {"images": pixels.numpy()})[0])
    return refuse_different("ONNX Runtime", expected, found, exported.record["precision"])
