"""The best model in MLflow: loaded by plain torch, served, and registered; it says what predict.py says of the same images."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mlflow.models import Model
from mlflow.tracking import MlflowClient
from PIL import Image

import predict
import train

TRAINED = ["trainer.device=cpu", "loss.implementation=torch"]
DIGITS = ["model=tiny_resnet", "data.image_size=16", "trainer.epochs=2", "optim.lr=0.01", "tracking.register=digits-reader"]
SCENES = [
    "task=detection", "model=fcos_tiny", "data.train_scenes=16", "data.val_scenes=4", "data.scene_pixels=64", "data.digit_pixels=[14,24]",
    "data.workers=0", "trainer.epochs=1", "model.score_threshold=0.0", "model.detections=20",
]  # fmt: skip


def in_store(folder: Path, name: str, *words: str) -> SimpleNamespace:
    """Train; return the run's folder, the run in the store, and its model with the model's folder there."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    assert train.main([*TRAINED, *words, f"trainer.runs={folder / 'runs'}", f"tracking.uri={uri}", f"name={name}"]) == 0
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lossforge").experiment_id], f"attributes.run_name = '{name}'")
    (output,) = run.outputs.model_outputs
    model = client.get_logged_model(output.model_id)
    (path,) = (folder / "runs").glob(f"*-{name}")
    place = Path(model.artifact_location.removeprefix("file://"))
    return SimpleNamespace(run=run, folder=path, model=model, place=place, output=output)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The store, and the run of a classifier."""
    folder = tmp_path_factory.mktemp("models")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    return SimpleNamespace(uri=uri, client=MlflowClient(tracking_uri=uri), digits=in_store(folder, "digits", *DIGITS))


def says(one, out: Path, files: list[Path], *words: str) -> list[list[dict]]:
    """What predict.py finds in files."""
    checkpoint = one.folder / "checkpoints" / "best.pt"
    assert predict.main([f"checkpoint={checkpoint}", f"out={out}", "trainer.device=cpu", *words, *map(str, files)]) == 0
    return [json.loads(line)["found"] for line in (out / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture
def digits(tmp_path):
    """Files of the size that the model takes, and their pixels (N, 1, H, W)."""
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16), dtype=np.uint8)
    files = [tmp_path / f"{number}.png" for number in range(len(pixels))]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(file)
    return files, pixels[:, None]


@pytest.fixture(scope="module")
def elsewhere():
    """The environment of a process that knows nothing of this repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "MLFLOW"))}


def as_rows(found: list[list[dict]], classes: list[str]) -> np.ndarray:
    """Probabilities by class of what predict.py says."""
    return np.array([[next(entry["score"] for entry in each if entry["label"] == name) for name in classes] for each in found])


def test_plain_torch_loads_a_classifier_and_says_what_predict_says(trained, digits, tmp_path, elsewhere):
    files, pixels = digits
    code = (
        "import sys, numpy, torch\n"
        "sys.modules |= dict.fromkeys(['lab', 'timm', 'torchvision', 'lossforge'])  # to import them is an error now\n"
        "import mlflow.pytorch\n"
        "model = mlflow.pytorch.load_model(sys.argv[1])\n"
        "numpy.save(sys.argv[3], model(torch.from_numpy(numpy.load(sys.argv[2]))).detach().numpy())"
    )
    np.save(tmp_path / "images.npy", pixels)
    words = ["models:/digits-reader/1", tmp_path / "images.npy", tmp_path / "said.npy"]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=tmp_path,
        env=elsewhere | {"MLFLOW_TRACKING_URI": trained.uri},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = as_rows(says(trained.digits, tmp_path / "out", files, "top=10"), [str(i) for i in range(10)])
    np.testing.assert_allclose(np.load(tmp_path / "said.npy"), expected, atol=1e-5)


@pytest.mark.slow
def test_a_server_of_the_model_says_what_predict_says(trained, digits, tmp_path, elsewhere):
    files, pixels = digits
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "models",
        "serve",
        "-m",
        str(trained.digits.place),
        "--env-manager",
        "local",
        "-p",
        str(port),
    ]
    path = f"{Path(sys.executable).parent}:{elsewhere['PATH']}"  # the server starts uvicorn by its name
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=elsewhere | {"PATH": path}, stdout=log, stderr=log, start_new_session=True)
    try:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations", json.dumps({"inputs": pixels.tolist()}).encode(), {"Content-Type": "application/json"}
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 600
        while True:
            try:
                with direct.open(asked, timeout=30) as answer:
                    said = json.load(answer)["predictions"]
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)
    expected = as_rows(says(trained.digits, tmp_path / "out", files, "top=10"), [str(i) for i in range(10)])
    np.testing.assert_allclose(said, expected, atol=1e-5)


@pytest.mark.slow
def test_mlflow_predicts_the_boxes_that_predict_finds(tmp_path):
    import mlflow.pyfunc

    scenes = in_store(tmp_path, "scenes", *SCENES, f"data.root={tmp_path / 'data'}")
    assert "torchvision==" in (scenes.place / "requirements.txt").read_text()
    files = sorted(tmp_path.glob("data/digit_scenes/*/images/*.png"))[-3:]
    pixels = np.stack([np.array(Image.open(file).convert("RGB")).transpose(2, 0, 1) for file in files])
    said = mlflow.pyfunc.load_model(str(scenes.place)).predict(pixels)
    assert said.shape == (3, 20, 6)
    found = says(scenes, tmp_path / "out", files, "score=0")
    for rows, entries in zip(said, found, strict=True):
        there = rows[rows[:, 4] > 0]
        assert len(there) == len(entries) > 3
        np.testing.assert_allclose(there[:, 4], [entry["score"] for entry in entries], atol=1e-5)
        np.testing.assert_allclose(there[:, :4], [entry["box"] for entry in entries], atol=1e-3)
        assert [str(int(label)) for label in there[:, 5]] == [entry["label"] for entry in entries]
    # one image alone, as no batch of the export was
    alone = mlflow.pyfunc.load_model(str(scenes.place)).predict(pixels[:1])
    np.testing.assert_allclose(alone[0], said[0], atol=1e-4)


def data_of(one):
    """Return the data sets of a run in the store, by what it did with them."""
    return {each.tags[0].value: each.dataset for each in one.run.inputs.dataset_inputs}


def test_the_store_ties_a_model_to_its_run_and_data(trained):
    data = data_of(trained.digits)
    assert {context: (each.name, json.loads(each.profile)) for context, each in data.items()} == {
        "training": ("digits", {"num_rows": 1437, "num_classes": 10}),
        "validation": ("digits", {"num_rows": 360, "num_classes": 10}),
    }
    assert data["training"].digest != data["validation"].digest
    one = trained.digits
    assert (one.model.source_run_id, one.model.status.value, one.output.step) == (one.run.info.run_id, "READY", 46)
    assert one.model.tags["mlflow.user"] == one.run.data.tags["mlflow.user"]
    of_model = {metric.key: (metric.value, metric.dataset_digest) for metric in one.model.metrics}
    assert of_model["best_top1"] == (one.run.data.metrics["best_top1"], data_of(one)["validation"].digest)
    assert "images_per_second" not in of_model
    (version,) = trained.client.search_model_versions("name = 'digits-reader'")
    assert (version.source, version.run_id) == (one.model.artifact_location, one.run.info.run_id)
    assert json.loads(one.model.tags["mlflow.modelVersions"]) == [{"name": "digits-reader", "version": "1"}]


def test_a_store_beside_the_runs_keeps_no_weights_twice(trained):
    one = trained.digits
    files = one.folder / "checkpoints"
    kept = Path(one.run.info.artifact_uri.removeprefix("file://")) / "checkpoints" / "best.pt"
    assert kept.samefile(files / "best.pt")
    assert (one.place / "data" / "model.pt2").samefile(files / "best.pt2")
    for name in ("metrics.jsonl", "log.txt"):  # they grow
        assert not (kept.parents[1] / name).samefile(one.folder / name)


def test_the_model_says_what_it_takes(trained):
    model = Model.load(str(trained.digits.place))
    example = model.load_input_example(str(trained.digits.place))
    assert (example.shape, example.dtype, example.max()) == ((1, 1, 16, 16), np.uint8, 255)
    assert model.metadata["classes"] == [str(i) for i in range(10)]
    assert model.get_input_schema().inputs[0].shape == (-1, 1, 16, 16)
    needed = (trained.digits.place / "requirements.txt").read_text()
    assert f"torch=={torch.__version__.partition('+')[0]}\n" in needed
    assert "torchvision" not in needed


OTHERS = {"multilabel": ["experiment=multilabel", "data.train_scenes=8", "data.val_scenes=4"], "preference": ["experiment=preference"]}


@pytest.mark.parametrize("words", OTHERS.values(), ids=OTHERS)
def test_other_tasks_models_are_exported_too(tmp_path, words):
    where = [f"trainer.runs={tmp_path / 'runs'}", "tracking=none"]
    small = ["model=tiny_resnet", "trainer.max_updates=1", "trainer.device=cpu", "loss.implementation=torch"]
    if "experiment=multilabel" in words:
        small += [f"data.root={tmp_path / 'data'}", "data.scene_pixels=64", "data.digit_pixels=[14,24]", "data.workers=0"]
    assert train.main([*words, *small, *where]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = (record for line in (folder / "metrics.jsonl").open() if (record := json.loads(line))["kind"] == "model")
    pixels = np.random.default_rng(0).integers(0, 256, (2, *record["shape"]), dtype=np.uint8)
    files = [tmp_path / f"{number}.png" for number in range(2)]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(file)
    said = torch.export.load(folder / record["path"]).module()(torch.from_numpy(pixels)).detach()
    found = says(SimpleNamespace(folder=folder), tmp_path / "out", files, *(["score=0"] if "experiment=multilabel" in words else []))
    rewards = "experiment=preference" in words
    expected = np.array([[each[0]["reward"]] for each in found]) if rewards else as_rows(found, record["classes"])
    np.testing.assert_allclose(said, expected, atol=1e-5)


def test_a_model_that_cannot_be_exported_costs_its_run_nothing(tmp_path, monkeypatch, capsys):
    """A timm model whose forward depends on its pixels."""
    import timm

    def forward(self, x):
        return self.forward_head(self.forward_features(x)) * (1 if x.sum() > 0 else 2)

    monkeypatch.setattr(type(timm.create_model("test_resnet")), "forward", forward)
    words = ["model=tiny_resnet", "trainer.max_updates=1", "trainer.device=cpu", "loss.implementation=torch", "tracking=none"]
    assert train.main([*words, f"trainer.runs={tmp_path}"]) == 4  # all is there but the export
    (folder,) = tmp_path.iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [record["status"] for record in records if record["kind"] == "end"] == ["FINISHED"]
    assert not [record for record in records if record["kind"] == "model"]
    (tag,) = (record["values"]["model.export"] for record in records if "model.export" in record.get("values", {}))
    assert tag.startswith("failed: ")
    said = capsys.readouterr().out
    assert "the best model was not exported" in said
    assert "model export" in said  # in the table
    assert "failed: " in said.partition("model export")[2]


def test_no_model_is_exported_where_none_is_wanted(tmp_path):
    words = ["model=tiny_resnet", "trainer.max_updates=1", "trainer.device=cpu", "loss.implementation=torch", "tracking=none"]
    assert train.main([*words, f"trainer.runs={tmp_path}", "tracking.model=false"]) == 0
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"best.pt", "best.safetensors", "last.pt"}
