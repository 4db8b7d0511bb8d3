# examples/use_exported_model.py
"""Say what a picture shows, by a classifier's best.pt2, best.onnx or best.safetensors: `python use_exported_model.py best.onnx a.png`."""

import json
import sys

import numpy as np
import torch
from PIL import Image, ImageOps


def loaded(path):
    """Return the model, and the description that the file holds."""
    if path.endswith(".pt2"):
        files = {"model.json": ""}
        model = torch.export.load(path, extra_files=files).module()
        return model, json.loads(files["model.json"])
    if path.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        about = json.loads(session.get_modelmeta().custom_metadata_map["model.json"])
        return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0]), about
    import safetensors
    import timm

    with safetensors.safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["model.json"])
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = timm.create_model(**about["timm"]).eval()
    model.load_state_dict(weights)
    mean, std = (torch.tensor(about["input"][name])[:, None, None] for name in ("mean", "std"))
    return lambda images: model((images / 255 - mean) / std), about


model, about = loaded(sys.argv[1])
given = about["input"]
image = Image.open(sys.argv[2]).convert("L" if given["channels"] == 1 else "RGB")
image = ImageOps.fit(image, (given["width"], given["height"]), Image.Resampling.BILINEAR)  # given["resize"] and ["crop"] say it exactly
pixels = torch.from_numpy(np.array(image)).view(given["height"], given["width"], given["channels"]).permute(2, 0, 1)[None]
with torch.no_grad():
    print(about["classes"][int(model(pixels)[0].argmax())])
