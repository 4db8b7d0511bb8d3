"""Write an exported model as MLflow expects it: a folder that mlflow.pytorch loads and `mlflow models` serves, with only plain torch."""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

LOADER = "with_torchvision"
MODEL = "data/model.pt2"
LONGEST_EXAMPLE = 2**18  # most numbers of an example image, which is stored as text


def write_model(exported: Path, record: dict[str, Any], folder: Path, *, run_id: str | None, model_id: str, location: str) -> None:
    """Write the model of a `model` record into `folder`.

    The model takes images (N, channels, height, width) of uint8, or of float32 if the record says so, and normalises them itself.

    Args:
        exported: the file that torch.export wrote.
        record: shape, output, says, classes, step and pixels, the dtype of images.
        folder: an empty folder.
        run_id: the id of the model's run.
        model_id: the id of the model in the store.
        location: the address of its artifacts in the store.
    """
    import mlflow
    import numpy as np
    import torch
    import torchvision
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    (folder / "data").mkdir()
    shutil.copyfile(exported, folder / MODEL)
    boxes = len(record["output"]) == 2
    pixels = record.get("pixels", "uint8")
    # without a name, because MLflow would pass a dict to torch
    shape = [record["shape"][0], -1, -1] if record.get("multiple") else record["shape"]
    inputs = Schema([TensorSpec(np.dtype(pixels), (-1, *shape))])
    outputs = Schema([TensorSpec(np.dtype("float32"), (-1, *record["output"]))])
    about = {"classes": record["classes"], "output": record["says"], "step": record["step"], "input": record.get("input", {})}
    model = Model(location, run_id, signature=ModelSignature(inputs, outputs), metadata=about, model_uuid=model_id, model_id=model_id)
    if np.prod(record["shape"]) <= LONGEST_EXAMPLE:
        model.saved_input_example_info = _write_example(folder, record["shape"], 255 if pixels == "uint8" else 1.0)
    model.add_flavor("pytorch", model_data="data", pytorch_version=str(torch.__version__), code=None)
    if boxes:  # importing torchvision registers the operator that suppresses boxes
        (folder / "code").mkdir()
        lines = ["import torchvision  # noqa: F401", "from mlflow.pytorch import _load_pyfunc  # noqa: F401"]
        (folder / "code" / f"{LOADER}.py").write_text("\n".join([*lines, ""]), encoding="utf-8")
    pyfunc.add_to_model(
        model,
        loader_module=LOADER if boxes else "mlflow.pytorch",
        data="data",
        code="code" if boxes else None,
        python_env="python_env.yaml",
        model_config={"device": None},
    )
    needed = [f"mlflow=={mlflow.__version__}", f"torch=={_public(torch.__version__)}", f"numpy=={np.__version__}"]
    needed += [f"torchvision=={_public(torchvision.__version__)}"] if boxes else []
    (folder / "requirements.txt").write_text("".join(f"{each}\n" for each in needed), encoding="utf-8")
    env = {"python": platform.python_version(), "build_dependencies": ["pip"], "dependencies": ["-r requirements.txt"]}
    (folder / "python_env.yaml").write_text(json.dumps(env), encoding="utf-8")  # YAML contains JSON
    model.save(str(folder / "MLmodel"))


def _write_example(folder: Path, shape: list[int], white: float) -> dict[str, str]:
    """Write an example, one image whose columns go from black to white; return its entry in MLmodel."""
    channels, height, width = shape
    row = [white * column / max(width - 1, 1) for column in range(width)]
    rows = [[[int(value) for value in row] if white == 255 else row] * height] * channels
    for name, content in (("input_example.json", [rows]), ("serving_input_example.json", {"inputs": [rows]})):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return {"artifact_path": "input_example.json", "type": "ndarray", "serving_input_path": "serving_input_example.json"}


def _public(version: str) -> str:
    """Return a version without its local part, such as +cu130, because package indexes may lack it."""
    return str(version).partition("+")[0]
