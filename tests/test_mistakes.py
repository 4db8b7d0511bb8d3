"""A mistake stops the app at once: exit status 1, the way out in the message, nothing trained or written."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.base.errors import UserError

ROOT = Path(__file__).resolve().parents[1]

KNOWN_TO_CONFIGS = [
    (["loss=focl"], ["focl", "'focal'", "preference_bce"]),
    (["loss=cross_entropy"], ["Did you mean 'ce'?"]),
    (["loss=dice"], ["loss=dice: is a loss of task=segmentation; task=classification takes arcface, "]),
    (["loss=giou"], ["loss=giou: is an option of box_loss; give box_loss=giou, with task=detection or task=instances."]),
    (["model=digits"], ["model=digits: is an option of data; give data=digits."]),
    (["loss.gama=2"], ["gama", "loss.gamma of loss=focal", "label_smoothing"]),
    (["loss=focal", "loss.gama=2"], ["gama", "Did you mean 'gamma'", "alpha"]),
    (["optim.lr=-1"], ["optim.lr", "above 0"]),
    (["optim.lr=inf"], ["optim.lr=inf", "finite numbers above 0"]),
    (["optim.args={eps: -inf}"], ["optim.args", "finite numbers"]),
    (["loss=poly_ce", "loss.epsilon=nan"], ["loss.epsilon=nan", "finite"]),
    (["lr=0.1"], ["'lr' is not known", "There is also optim.lr."]),
    (
        ["name=${oc.env:LOSSFORGE_UNSET}"],
        ["name: Environment variable 'LOSSFORGE_UNSET' not found. Set it, or write ${oc.env:NAME,default}."],
    ),
    (["optim.lr=${oc.env:HOME}"], ["optim.lr", "could not be converted to Float"]),
    (["optim.args={eps: ${nothing}}"], ["optim.args.eps: Interpolation key 'nothing' not found"]),
    (["loss=${oc.env:LOSSFORGE_UNSET}"], ["loss=${oc.env:LOSSFORGE_UNSET}: Environment variable"]),
    (["name=${nothing:1}"], ["name: Unsupported interpolation type nothing"]),
    (["trainer.epochs=ten"], ["trainer.epochs=ten", "an integer", "at least 1"]),
    (["trainer.amp=bf61"], ["bf61", "'bf16'", "fp16"]),
    (["optimizer.lr=1"], ["optimizer", "'optim'"]),
    (["trainer.seed=3"], ["trainer.seed", "There is also plain seed."]),
    (["data=folder", "data.root=~/cats"], ["data.root=~/cats: a value with such characters", "\"data.root='~/cats'\""]),
    (
        ["task=detection", "data=coco", "data.image_size=64"],
        [
            "data.image_size",
            "There is also data.image_size of data=digits, data.image_size of data=cifar10, data.image_size of data=cifar100.",
        ],
    ),
    (["loss.name=focal"], ["loss=focal"]),
    (["model=timm"], ["model.name"]),
    (["~trainer.amp"], ["~trainer.amp: settings cannot be deleted. Leave it out for its default, or give it another value."]),
    (["focal"], ["'focal'", "name=value"]),
    (["--hlep"], ["--hlep", "'--help'"]),
    (["loss=focal,ce"], ["--multirun"]),
    (["--multirun", "loss=focal,cee"], ["cee", "'ce'"]),
    (["data.class_weight={3: -1}"], ["data.class_weight", "at least 0"]),
    (["loss.class_weight=[1,x]"], ["loss.class_weight", "number"]),
]


@pytest.fixture(scope="module")
def answers(answers_without_torch):
    return answers_without_torch("train", [words for words, _ in KNOWN_TO_CONFIGS])


@pytest.mark.parametrize(("words", "said"), KNOWN_TO_CONFIGS, ids=lambda value: " ".join(value))
def test_mistake_known_to_the_configs(answers, words, said):
    status, output, written = answers[tuple(words)]
    assert status == 1, output
    assert "Traceback" not in output
    assert [text for text in said if text not in output] == [], output
    assert written == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optim:\n  lr: [1\n", "mine.yaml, line 4, column 1: is not valid YAML: while parsing a flow sequence"),
        ("a: 1\na: 2\n", "mine.yaml, line 3, column 1: is not valid YAML: "),
        ("optim:\n  lr: ${oc.env:LOSSFORGE_UNSET}\n", "optim.lr: Environment variable 'LOSSFORGE_UNSET' not found."),
        ("optim:\n  lr: ${a b\n", "conf/: "),
        ("lr: 1\n", "conf/ sets lr: no such setting."),
        ("loss: focal\n", "conf/ sets loss: focal: settings by name are expected; an option is chosen in `defaults`."),
        ("defaults:\n  - override /task: detection\nmodel: fcos_tiny\n", "conf/ sets model: fcos_tiny: settings by name are expected"),
        ("defaults:\n  - override /loss: nope\n", "conf/: In 'train': Could not find 'loss/nope' Available options"),
        ("\udcff\udcfe", "conf/ with experiment=mine: a file is not valid YAML: "),
    ],
    ids=["unclosed", "twice", "unset", "grammar", "unknown", "name", "model", "default", "bytes"],
)
def test_a_config_of_ones_own_with_a_mistake(tmp_path, monkeypatch, text, said):
    import shutil

    from lab.config import settings

    shutil.copytree(settings.CONF, tmp_path / "conf")
    monkeypatch.setattr(settings, "CONF", tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        settings.load(["experiment=mine"])
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


TOO_LARGE = "mine.yaml: has more than 50 levels or 10,000 values, references counted as what they stand for, or a reference to itself."
OF_HYDRA = "Hydra's own settings have no effect in a file."
HALF = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 10)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"model: {{args: {{x: {'[' * 3000}{']' * 3000}}}}}", TOO_LARGE),
        (f"model: {{args: {{x: [{'1,' * 300_000}]}}}}", TOO_LARGE),
        ("model: {args: {x: &x [*x]}}", TOO_LARGE),
        ("\n  ".join(["model:", "  args:", "  x0: &x0 [1]", *(f"  {line}" for line in HALF)]), TOO_LARGE),
        ("defaults: [mine]", "conf/ with experiment=mine: `defaults` name each other without end"),
        ("hydra: {run: {dir: elsewhere}}", f"mine.yaml: sets hydra: {OF_HYDRA}"),
        ("defaults: [override /hydra/launcher: joblib]", f"mine.yaml: sets override /hydra/launcher: {OF_HYDRA}"),
        ("defaults: [/optim@hydra.run: adamw]", f"mine.yaml: sets /optim@hydra.run: {OF_HYDRA}"),
        ("# @package hydra.run\ndir: elsewhere", f"mine.yaml: sets hydra.run: {OF_HYDRA}"),
        ("optim: {lr: *unknown}", TOO_LARGE),
    ],
    ids=["levels", "values", "itself", "references", "circle", "run", "launcher", "package", "header", "undefined"],
)
def test_a_preset_of_a_config_folder_with_a_mistake(tmp_path, monkeypatch, text, said):
    from lab.config import settings

    monkeypatch.setenv("LOSSFORGE_CONFIG_DIR", str(tmp_path))
    (tmp_path / "experiment").mkdir()
    header = "" if text.startswith("#") else "# @package _global_\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(header + text)
    with pytest.raises(UserError) as caught:
        settings.load(["experiment=mine"])
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_a_preset_of_a_config_folder_may_do(tmp_path, monkeypatch):
    """What SECURITY.md says: it is as a command line, and may have references."""
    from lab.config import settings

    monkeypatch.setenv("LOSSFORGE_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("LOSSFORGE_NAME", "of mine")
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nname: ${oc.env:LOSSFORGE_NAME}\ntracking: {uri: http://host, tags: &a {b: c}}\nmodel: {args: *a}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    config = settings.load(["experiment=mine", "model.target=x:y", "model=custom"]).config
    assert (config.name, config.tracking.uri, config.tracking.tags, config.model.args) == ("of mine", "http://host", {"b": "c"}, {"b": "c"})


@pytest.mark.parametrize("path", ["runs/lr=0.1", "/a b/c=d, e=f", "o'clock=9", "a=[b]", "a=(b)"])
def test_a_folder_with_an_equals_sign_is_taken(path):
    """As it is where its other characters need no quotes, else as the printed command gives it."""
    from lab.config.settings import load, override_of, value_of

    words = [f"trainer.runs={path}", f"data.root={path}", f"resume={path}"]
    if set(path) & set("',[("):
        words = [shlex.split(override_of(*word.split("=", 1)))[0] for word in words]
    config = load(["data=folder", *words]).config
    assert (config.trainer.runs, config.resume, value_of(words, "resume")) == (path,) * 3
    assert config.data.root == str(Path(path).absolute())


def test_images_in_a_folder_with_an_equals_sign_are_no_setting(tmp_path, monkeypatch, capsys):
    from PIL import Image

    import predict

    monkeypatch.chdir(tmp_path)
    Path("a=b").mkdir()
    Image.new("L", (8, 8)).save("a=b/photo.png")
    for given in ("a=b", "a=b/photo.png"):
        assert predict.main(["checkpoint=nothing", given]) == 1
        assert capsys.readouterr().err.startswith("error: checkpoint=")


def test_what_omegaconf_resolves_is_taken(monkeypatch):
    from lab.config.settings import load, value_of
    from lab.run.saved import checkpoint_of

    for name, value in (("LOSS", "focal"), ("LR", "0.25"), ("WHERE", "/pictures"), ("EPOCHS", "3")):
        monkeypatch.setenv(f"LOSSFORGE_{name}", value)
    words = ["loss=${oc.env:LOSSFORGE_LOSS}", "optim.lr=${oc.env:LOSSFORGE_LR}", "trainer.epochs=${oc.env:LOSSFORGE_EPOCHS}"]
    words += ["data=folder", "data.root=${oc.env:LOSSFORGE_WHERE}/birds", "seed=${trainer.epochs}", "name=${oc.env:LOSSFORGE_UNSET,mine}"]
    config = load(words).config
    assert (config.loss.name, config.optim.lr, config.trainer.epochs, config.seed) == ("focal", 0.25, 3, 3)
    assert (config.data.root, config.name) == ("/pictures/birds", "mine")
    assert value_of(["resume=${oc.env:LOSSFORGE_WHERE}/run"], "resume") == "/pictures/run"
    assert str(checkpoint_of(["checkpoint=${oc.env:LOSSFORGE_WHERE}/best.pt"], "")[0]) == "/pictures/best.pt"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra/launcher=joblib", "hydra.launcher.n_job=2"], ["hydra.launcher.n_job=2", "Did you mean 'n_jobs'?", "pre_dispatch"]),
        (["hydra/launcher=joblb"], ["joblb", "Did you mean 'joblib'?", "uv sync --extra sweeps"]),
        (["hydra.launcher.n_jobs=2"], ["hydra/launcher=basic has no settings"]),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=two"], ["n_jobs=two", "could not be converted to Integer"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_in_a_launchers_settings(tmp_path, words, said):
    from lab.sweep.launch import make_launcher

    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs uv sync --extra sweeps")
    with pytest.raises(UserError) as caught:
        make_launcher(words, tmp_path)
    assert [text for text in said if text not in str(caught.value)] == [], str(caught.value)


def test_a_gpu_that_is_not_there_is_explained(monkeypatch):
    import torch

    from lab.run.machine import pick_device

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def said(wanted="cuda"):
        with pytest.raises(UserError) as caught:
            pick_device(wanted)
        return str(caught.value)

    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        if torch.version.cuda:
            assert f"torch {torch.__version__} sees no GPU: CUDA_VISIBLE_DEVICES={hidden!r} hides all of them" in said("cuda:0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda and not Path("/proc/driver/nvidia").exists():
        assert "sees no GPU: Found no NVIDIA driver" in said()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "sees no GPU: it is a CPU build" in said()
    assert "trainer.device=cpu" in said()
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=timm", "model.name=vit_smal_patch16_224"], ["'vit_small_patch16_224'", "timm's", "models"]),
        (["model.name=resnet50.nope"], ["pretrained tags", "a1_in1k"]),
        (["optim.name=adamww"], ["'adamw'", "sgd"]),
        (["trainer.device=coda"], ["auto, cpu"]),
        (["model.args={stem: 3}"], ["model.name=tiny_resnet", "stem"]),
        (["data.class_weight={eleven: 2}"], ["data.class_weight", "eleven", "0, 1, 2"]),
        (["data.class_group={0: 0}"], ["data.class_group", "every class", "1, 2"]),
        (["loss.class_weight=[1, 2]"], ["loss.class_weight", "has 2", "10 classes"]),
        (["loss=preference_bce", "loss.group_weight=[1, 2]"], ["loss.group_weight", "no groups", "data.class_group"]),
        (["loss.implementation=torch", "loss.z_loss=0.1"], ["loss.z_loss", "lossforge"]),
        (["optim.schedule.warmup_epochs=8"], ["warmup_epochs", "trainer.epochs"]),
        (["optim.args={betta: 3}"], ["optim.name=adamw", "betta"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistake_known_to_the_libraries(make_trainer, words, said):
    with pytest.raises(UserError) as caught:
        make_trainer(*words)
    assert [text for text in said if text not in str(caught.value)] == [], str(caught.value)


def test_cifar_without_network_says_what_to_put_where(clone):
    root = clone.path / "pictures"
    refused = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = clone.run("data=cifar10", f"data.root={root}", "model=tiny_resnet", **refused)
    assert done.status == 1, done.output
    assert "Traceback" not in done.output
    assert f"data.root={root}" in done.output
    assert "cifar-10-python.tar.gz" in done.output
    assert not (clone.path / "runs").exists()
    assert not (clone.path / "mlflow.db").exists()


@pytest.mark.parametrize(("data", "archive"), [("cifar100", "cifar-100-python.tar.gz"), ("mnist", "MNIST/raw/")])
def test_data_that_is_not_there_is_named(make_trainer, tmp_path, data, archive):
    with pytest.raises(UserError) as caught:
        make_trainer(f"data={data}", f"data.root={tmp_path}", "data.download=false")
    assert f"data.root={tmp_path}" in str(caught.value)
    assert archive in str(caught.value)


def test_help_answers_at_once_with_groups_and_options(clone, without_torch):
    done = clone.run("--help", fresh=True, **without_torch)
    assert done.status == 0, done.output
    for text in ("loss=focal model=resnet50", "preference_bce", "convnext_tiny", "cifar100", "--multirun"):
        assert text in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["loss"], ["task=segmentation asymmetric, bce, boundary, ce, custom,", "--help loss loss=NAME", "loss.label_smoothing=0.0 "]),
        (["model"], ["task=instances detr, ", "task=regression convnext_tiny, "]),
        (["data"], ["task=oriented boxes, coco, "]),
        (["box_loss"], ["task=oriented gwd, "]),
        (["experiment"], ["quick a look in about a minute"]),
        (["loss", "loss=focal"], ["loss.gamma=2.0 "]),
    ],
    ids=" ".join,
)
def test_help_of_a_group_lists_its_options_and_settings(words, said):
    from lab.config.help import train_help

    text = " ".join(train_help("experiments/train.py", words).split())
    assert [each for each in said if each not in text] == [], text


@pytest.mark.parametrize(
    "words", [["train.py", "--help"], ["train.py", "--cfg"], ["compare.py", "--help"], ["compare.py", "--cfg"]], ids=" ".join
)
def test_a_reader_may_stop_before_the_end(words):
    """As `head` does: nothing is written of it, and the status is 0."""
    command = [sys.executable, str(ROOT / "experiments" / words[0]), *words[1:]]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_cfg_prints_what_would_run_and_runs_nothing(clone):
    before = clone.contents()
    done = clone.run("--cfg", "loss=focal", "loss.gamma=1.5", "experiment=quick")
    assert done.status == 0
    assert "gamma: 1.5" in done.output
    assert "name: tiny_resnet" in done.output
    assert clone.contents() == before
