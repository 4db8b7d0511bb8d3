"""Export detectors from the device that trains them, and compare what the programs find: ONNX on the CPU, and .pt2 on CPU and GPU."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import train
from torch import Tensor

MODELS = (
    "model=yolo_tiny loss=varifocal",
    "model=yolo_tiny loss=varifocal model.one_to_one=true",
    "model=detr_tiny loss=mal model.denoising=40",
)
FEW = "experiment=detectors data.train_scenes=64 data.val_scenes=16 data.batch_size=16 data.workers=0 trainer.save_every=10"
FEW += " tracking.model=true export.format=onnx model.score_threshold=0.0005"
SIZES = ((64, 64), (96, 160), (32, 32))
"""Height and width of the images; the scenes of the training are of the first."""
AGREE = 0.97
"""The least share of detections that two programs have in common: one with a score at the threshold is found by one of them."""


def exports(small: bool) -> Iterator[dict[str, Any]]:
    """Yield how the programs of each model agree.

    Raises:
        RuntimeError: they find other detections.
    """
    for command in MODELS:
        with tempfile.TemporaryDirectory() as place:
            words = f"{FEW} {command} trainer.epochs={1 if small else 3} data.root={place}/scenes"
            done = train(words, runs=Path(place))
            found = {f"{height}x{width}": agreements(done.folder / "checkpoints", height, width) for height, width in SIZES}
        if min(share for each in found.values() for share in each.values()) < AGREE:
            raise RuntimeError(f"{command}: the exported programs find other detections: {found}")
        yield {"command": command, "agree": found, "map": done.last("val/map")}


def agreements(folder: Path, height: int, width: int) -> dict[str, float]:
    """Return the shares of the .pt2 program's detections on the CPU that ONNX Runtime and the same program on a GPU find."""
    import onnxruntime
    from torch.export.passes import move_to_device_pass

    pixels = torch.randint(0, 256, (2, 3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(str(folder / "best.onnx"), providers=["CPUExecutionProvider"])
    program = torch.export.load(folder / "best.pt2")
    with torch.no_grad():
        expected = program.module()(pixels)
        found = {"onnx": torch.from_numpy(session.run(["output"], {"images": pixels.numpy()})[0])}
        if torch.cuda.is_available():
            torch.backends.cudnn.allow_tf32 = False  # as the CPU computes
            torch.set_float32_matmul_precision("highest")
            found["cuda"] = move_to_device_pass(program, "cuda").module()(pixels.cuda()).cpu()
    return {name: agreement(expected, each) for name, each in found.items()}


def agreement(expected: Tensor, found: Tensor) -> float:
    """Return the share of detections (N, D, 6) that `found` has, too: within 0.05 pixels and 1e-3 of the score."""
    there = expected[..., 4] > 0
    gap = (expected[:, :, None] - found[:, None]).abs() / torch.tensor([50.0] * 4 + [1.0, 1.0])
    same = (gap.amax(-1) < 1e-3).any(-1)
    return same[there].double().mean().item() if there.any() else 1.0
