"""Train YOLO models of ultralytics' own files, from random weights, with its losses and with ours, and compare every number.

python ultralytics_runs.py TASK=MODEL …: it works in the current folder.
"""

import os
import sys
from pathlib import Path

os.environ |= {"YOLO_CONFIG_DIR": str(Path.cwd()), "YOLO_OFFLINE": "true", "YOLO_VERBOSE": "false", "YOLO_AUTOINSTALL": "false"}

import numpy as np
import torch
from PIL import Image
from ultralytics import YOLO, settings

from lossforge.integrations import ultralytics as ours

LABELS = {
    "detect": lambda x, y, w, h: [x, y, w, h],
    "segment": lambda x, y, w, h: [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2],
    "pose": lambda x, y, w, h: [x, y, w, h, x, y, 2, x - w / 4, y, 2, x, y + h / 4, 1],
}
LABELS["obb"] = LABELS["segment"]


def write_data(task):
    """Write six images of 64 × 64 pixels with one or two coloured boxes each, some of which have sides below 16 pixels."""
    draw = np.random.default_rng(0)
    for part in ("images", "labels"):
        Path(task, part).mkdir(parents=True)
    for index in range(6):
        pixels, lines = draw.integers(0, 60, (64, 64, 3), dtype=np.uint8), []
        for kind in range(1 + index % 2):
            w, h = draw.integers(10, 36, 2)
            left, top = draw.integers(0, 64 - w), draw.integers(0, 64 - h)
            pixels[top : top + h, left : left + w, kind] = 255
            numbers = LABELS[task]((left + w / 2) / 64, (top + h / 2) / 64, w / 64, h / 64)
            lines.append(" ".join(map(str, [kind, *numbers])))
        Image.fromarray(pixels).save(f"{task}/images/{index}.png")
        Path(task, "labels", f"{index}.txt").write_text("\n".join(lines))
    pose = "kpt_shape: [3, 3]\n" if task == "pose" else ""
    Path(f"{task}.yaml").write_text(f"path: {Path.cwd() / task}\ntrain: images\nval: images\nnames: {{0: red, 1: green}}\n{pose}")


def trained(task, name):
    """Return the losses of each update and the parameters after the last."""
    torch.manual_seed(0)
    model, losses = YOLO(name, task=task), []
    model.add_callback("on_train_batch_end", lambda trainer: losses.append([float(each) for each in trainer.loss_items.values()]))
    options = {"imgsz": 64, "epochs": 2, "batch": 3, "nbs": 3, "device": "cpu", "workers": 0, "seed": 0, "amp": False, "optimizer": "SGD"}
    off = {"val": False, "plots": False, "save": False, "verbose": False, "mosaic": 0.0, "scale": 0.0, "translate": 0.0}
    model.train(data=f"{task}.yaml", project=str(Path.cwd() / "runs"), exist_ok=True, lr0=1e-3, warmup_epochs=0, **options, **off)
    return torch.tensor(losses), torch.nn.utils.parameters_to_vector(model.trainer.model.parameters()).detach()


def main():
    settings.update({"mlflow": False, "tensorboard": False, "wandb": False})
    for task, name in (word.split("=") for word in sys.argv[1:]):
        if not Path(task).exists():
            write_data(task)
        expected = trained(task, name)
        with ours.patch():
            found = trained(task, name)
        assert len(expected[0]) == 4
        assert not torch.equal(found[1], expected[1]), f"{name} ran ultralytics' own code"
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5, msg=lambda m, of=name: f"{of}: {m}")
        torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-5, msg=lambda m, of=name: f"{of}: {m}")
        print(f"{name}: {expected[0][-1].tolist()} are ultralytics' numbers", flush=True)


if __name__ == "__main__":
    main()
