"""Files of somebody else are data: nothing in them runs, no address in them is called, no secret goes into them."""

import contextlib
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from words import ALONE, TINY

import evaluate
import predict
import sync
import train
from lab.base.errors import UserError
from lab.config.schema import OptimConfig, TrainerConfig
from lab.config.settings import load
from lab.config.user import KEY
from lab.registry import SCHEMAS
from lab.run import checkpoint
from lab.run.saved import load_checkpoint
from lab.run.trust import MARK, Origin, code_settings, origin, origin_of, read_config, signature, written
from lab.tracking.uploader import run_key

QUICK = [*TINY, "trainer.max_updates=2"]
SOMEWHERE = "http://127.0.0.1:9/attacker"


def said_by(app: Any, *words: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = app.main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A run of this user, cut off after two updates of four so that it can go on."""
    runs = tmp_path_factory.mktemp("own")
    words = [*QUICK, *ALONE, f"trainer.runs={runs}", "name=own", "trainer.save_updates=1"]
    assert said_by(train, *words)[0] == 0
    (folder,) = runs.iterdir()
    return folder


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    Image.new("L", (16, 16)).save(path)
    return path


class Stranger:
    """A stranger's copy of a run, whose settings are theirs; `ran` appears if something in it ran."""

    def __init__(self, own: Path, folder: Path) -> None:
        self.folder = shutil.copytree(own, folder)
        self.best, self.last = self.folder / "checkpoints" / "best.pt", self.folder / "checkpoints" / "last.pt"
        self.ran = folder.parent / "ran"

    def sets(self, **settings: Any) -> "Stranger":
        """Give the settings of all files these values; a name is `group__setting`."""

        def change(tree: dict[str, Any]) -> dict[str, Any]:
            for name, value in settings.items():
                group, _, setting = name.partition("__")
                if setting:
                    tree[group][setting] = value
                elif isinstance(value, dict):
                    tree[group] = value
                else:
                    tree[name] = value
            return tree

        for path in (self.best, self.last):
            state = torch.load(path, weights_only=True)
            checkpoint.save(state | {"config": change(state["config"])}, path)
        safe = checkpoint.load_weights(self.best.with_suffix(".safetensors"))
        about = {name: value for name, value in safe.items() if name not in ("model", "ema")}
        checkpoint.save_weights(safe["model"], self.best.with_suffix(".safetensors"), about | {"config": change(about["config"])})
        records = self.folder / "metrics.jsonl"
        records.write_text(re.sub(r', "sha256": "\w+"', "", records.read_text()))
        file = self.folder / "config.yaml"
        file.write_text(
            yaml.safe_dump(change(yaml.safe_load(file.read_text())), sort_keys=False) + file.read_text().splitlines()[-1] + "\n"
        )
        return self

    def code(self) -> str:
        """A module whose import leaves a trace, as `file.py:name`."""
        file = self.folder / "theirs.py"
        file.write_text(
            f"import pathlib\npathlib.Path({str(self.ran)!r}).touch()\ndef named(*args, **kwargs):\n    raise RuntimeError('ran')\n"
        )
        return f"{file}:named"


@pytest.fixture
def stranger(own, tmp_path):
    return Stranger(own, tmp_path / "theirs")


CODE = ("model", "loss", "data", "task", "optim", "callbacks", "metrics")


def naming(what: str, code: str) -> tuple[dict[str, Any], str]:
    """Settings that name code, and the setting that the refusal shows."""
    return {
        "model": ({"model": {"name": "custom", "target": code, "args": {}}}, f"model.target={code}"),
        "loss": ({"loss": {"name": "custom", "target": code}}, f"loss.target={code}"),
        "data": ({"data": {"name": "custom", "target": code}}, f"data.target={code}"),
        "task": ({"task": {"name": "custom", "target": code}}, f"task.target={code}"),
        "optim": ({"optim__name": "custom", "optim__target": code}, f"optim.target={code}"),
        "callbacks": ({"trainer__callbacks": [code]}, f"trainer.callbacks=['{code}']"),
        "metrics": ({"task__metrics": {"theirs": code}}, f"task.metrics.theirs={code}"),
    }[what]


@pytest.mark.parametrize("what", CODE)
def test_code_that_a_file_names_is_not_run(stranger, image, tmp_path, what):
    settings, shown = naming(what, stranger.code())
    stranger.sets(**settings)
    places = ["tracking=none", f"trainer.runs={tmp_path / 'runs'}"]
    student = [*QUICK, *places, "task=distillation"]
    asked = {
        "evaluate": (evaluate, [f"checkpoint={stranger.best}", *places]),
        "evaluate safetensors": (evaluate, [f"checkpoint={stranger.best.with_suffix('.safetensors')}", *places]),
        "predict": (predict, [f"checkpoint={stranger.best}", f"out={tmp_path / 'out'}", image]),
        "resume": (train, [f"resume={stranger.folder}", "trainer.max_updates=4"]),
        "resume a checkpoint": (train, [f"resume={stranger.last}", "trainer.max_updates=4"]),
    }
    if what == "model":  # the rest of a teacher's settings is not used
        asked["teacher"] = (train, [*student, f"task.teacher={stranger.best}"])
    for name, (app, words) in asked.items():
        status, _, err = said_by(app, *words)
        assert status == 1, name
        assert f"\n  {shown}\n" in err, name
        assert "trust=PATH" in err
        assert "Traceback" not in err
    if what in ("loss", "optim", "callbacks", "metrics"):
        status, _, err = said_by(train, *student, f"task.teacher={stranger.best}")
        assert status == 0, err
    assert not stranger.ran.exists()
    assert not (tmp_path / "out").exists()


def test_a_command_line_repeats_what_a_file_names(stranger, tmp_path):
    stranger.sets(trainer__callbacks=[stranger.code()])
    words = [f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}"]
    assert said_by(evaluate, *words)[0] == 1
    assert said_by(evaluate, *words, "trainer.callbacks=[]")[0] == 0  # as changed
    assert not stranger.ran.exists()
    _, _, err = said_by(evaluate, *words, f"trainer.callbacks=['{stranger.code()}']")
    assert stranger.ran.exists(), err


@pytest.mark.parametrize("trusted", ["the file", "its folder", "a folder above"])
def test_trust_runs_what_a_file_names(stranger, tmp_path, trusted):
    stranger.sets(trainer__callbacks=[stranger.code()])
    path = {"the file": stranger.best, "its folder": stranger.folder, "a folder above": tmp_path}[trusted]
    words = [f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}"]
    for other in (tmp_path / "elsewhere", "", stranger.best.parent / "best"):
        assert said_by(evaluate, *words, f"trust='{other}'")[0] == 1
        assert not stranger.ran.exists()
    _, _, err = said_by(evaluate, *words, f"trust={path}")
    assert stranger.ran.exists(), err


def test_a_file_cannot_trust_itself(stranger, tmp_path):
    stranger.sets(trust=str(stranger.folder), trainer__callbacks=[stranger.code()])
    status, _, err = said_by(evaluate, f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}")
    assert (status, stranger.ran.exists()) == (1, False)
    assert "trainer.callbacks" in err


def test_other_code_in_place_of_a_files_does_not_load_the_files(stranger, tmp_path):
    """A wrong override is an error of its own; to find that out, the file's task is not loaded."""
    stranger.sets(task={"name": "custom", "target": stranger.code()})
    words = [f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}", "trainer.nonsense=1"]
    for instead in ("task=classification", "task.target=nowhere.py:SPEC"):
        assert said_by(evaluate, *words, instead)[0] == 1
        assert said_by(train, f"resume={stranger.folder}", instead)[0] == 1
    assert not stranger.ran.exists()


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"model": {"name": "hf-hub:stranger/model"}}, "model.name=hf-hub:stranger/model"),
        ({"model__args": {"checkpoint_path": "theirs.pt"}}, "model.args.checkpoint_path=theirs.pt"),
        ({"model__args": {"pretrained_cfg": {"url": SOMEWHERE}}}, f"model.args.pretrained_cfg.url={SOMEWHERE}"),
    ],
)
def test_addresses_and_files_for_timm_are_refused(stranger, tmp_path, settings, shown):
    stranger.sets(**settings)
    status, _, err = said_by(evaluate, f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}")
    assert status == 1
    assert f"\n  {shown}\n" in err


def test_the_users_own_run_keeps_its_code(tmp_path, monkeypatch):
    """What this user started goes on without being repeated, as long as its folder lies where it was."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from lab.training.callbacks import Callback\nclass Mine(Callback):\n    pass\n")
    runs = tmp_path / "runs"
    words = [*QUICK, *ALONE, f"trainer.runs={runs}", "trainer.callbacks=['mine.py:Mine']"]
    assert said_by(train, *words)[0] == 0
    (folder,) = runs.iterdir()
    status, _, err = said_by(evaluate, f"checkpoint={folder}")
    assert status == 0, err
    status, _, err = said_by(train, f"resume={folder}", "trainer.max_updates=3")
    assert status == 0, err
    moved = folder.rename(tmp_path / "moved")
    status, _, err = said_by(evaluate, f"checkpoint={moved}")
    assert status == 1
    assert "trainer.callbacks=['mine.py:Mine']" in err
    before = set(runs.iterdir())
    assert said_by(evaluate, f"checkpoint={moved}", f"trust={moved}")[0] == 0
    assert len(set(runs.iterdir()) - before) == 1  # where to write, this user has said


@pytest.fixture
def settings_file(own):
    """Return the file of the run's settings, which a test may change."""
    path = own / "config.yaml"
    text = path.read_text()
    yield path
    path.write_text(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("seed: 0", "seed: 1"),
        lambda text: text.replace(MARK, "# sign: "),
        lambda text: text.rpartition(MARK)[0],
        lambda text: "",
    ],
    ids=["another setting", "no mark", "no signature", "nothing"],
)
def test_a_folder_of_changed_settings_is_a_strangers(own, settings_file, change):
    text = settings_file.read_text()
    assert change(text) != text
    settings_file.write_text(change(text))
    assert origin_of(own) is Origin.STRANGER


@pytest.fixture
def by_another(own, tmp_path, monkeypatch):
    """Sign the folder by another user's key; return the settings and that signature."""
    tree = yaml.safe_load((own / "config.yaml").read_text())
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        assert origin_of(own) is Origin.STRANGER
        signed = signature(tree, own)
        assert (tmp_path / "of another user" / KEY).stat().st_mode & 0o077 == 0
    return tree, signed


def test_a_forged_signature_is_a_strangers(own, by_another):
    """A signature is of these settings, in this folder, by this user's key."""
    tree, signed_by_another = by_another
    signed = signature(tree, own)
    assert origin(tree, signed, own) is Origin.HERE
    (user, here), (other_user, other_here) = signed.split("-"), signed_by_another.split("-")
    for forged in (signed_by_another, f"{other_user}-{here}", f"-{here}", f"{here}-{here}", user, "", "-", "é-é", None, 7):
        assert origin(tree, forged, own) is Origin.STRANGER, forged
    assert origin(tree, f"{user}-{other_here}", own) is Origin.USER


def test_without_a_key_no_run_counts_as_the_users(own, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # no folder can be made in it
    assert signature({}, own) == ""
    assert origin_of(own) is Origin.STRANGER
    assert origin({}, "", own) is Origin.STRANGER


def test_every_setting_that_names_code_is_marked():
    """What a schema says of a setting is `module:name` exactly where it is marked as code."""
    schemas = [schema for options in SCHEMAS.values() for schema in options.values()] + [OptimConfig, TrainerConfig]
    for schema in schemas:
        for item in schema.__dataclass_fields__.values():
            assert bool(item.metadata.get("code")) == ("py:name" in item.metadata.get("meaning", "")), (schema.__name__, item.name)
    assert {"task.target", "model.target", "loss.target", "box_loss.target", "data.target", "optim.target"} < set(code_settings())


def test_a_file_does_not_say_where_to_track_or_write(stranger, tmp_path):
    """Address, writers and the folder of runs are the user's; a token of theirs would go to the file's address."""
    stranger.sets(
        tracking={"enabled": True, "uri": SOMEWHERE, "writers": ["wandb"], "experiment": "theirs"}, trainer__runs=str(tmp_path / "theirs")
    )
    _, said, err = said_by(evaluate, f"checkpoint={stranger.best}", "--cfg")
    tree = yaml.safe_load(said)
    ours = yaml.safe_load(load([]).text())
    assert (tree["tracking"], tree["trainer"]["runs"]) == (ours["tracking"], ours["trainer"]["runs"]), err
    for words in ([], [f"trust={tmp_path}"]):  # trust is for code
        assert SOMEWHERE not in said_by(train, f"resume={stranger.folder}", "trainer.max_updates=4", "--cfg", *words)[1]


def test_a_resumed_run_is_not_tracked_where_its_files_say(stranger, tmp_path):
    stranger.sets(name="theirs")
    (stranger.folder / "tracking.json").write_text(json.dumps({"uri": SOMEWHERE, "run_id": "1" * 32, "offset": 0}))
    store = f"sqlite:///{tmp_path / 'mine.db'}"
    status, said, err = said_by(
        train, f"resume={stranger.folder}", "trainer.max_updates=3", f"tracking.uri={store}", "tracking.patience_seconds=5"
    )
    assert status == 0, err
    assert f"not at {SOMEWHERE} as its files say" in " ".join(said.split())
    assert json.loads((stranger.folder / "tracking.json").read_text())["uri"] == store


def test_sync_sends_nothing_where_a_strangers_files_say(stranger, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mine.db'}")
    (stranger.folder / "tracking.json").write_text(json.dumps({"uri": SOMEWHERE}))
    (stranger.folder / ".lock").unlink(missing_ok=True)
    records = stranger.folder / "metrics.jsonl"
    records.write_text(records.read_text().replace(json.loads(records.read_text().splitlines()[0])["run_folder"], str(stranger.folder)))
    status, said, _ = said_by(sync, stranger.folder)
    assert status == 1
    assert f"its files name the store {SOMEWHERE}" in said
    assert not (tmp_path / "mine.db").exists()
    status, said, _ = said_by(sync, stranger.folder, f"tracking.uri=sqlite:///{tmp_path / 'mine.db'}")
    assert status == 0, said


def test_a_record_hands_over_no_file_outside_of_its_folder(stranger, tmp_path):
    from mlflow.tracking import MlflowClient

    (tmp_path / "secret.txt").write_text("secret")
    (stranger.folder / "some" / "where").mkdir(parents=True)
    (stranger.folder / "some" / "where" / "link.txt").symlink_to(tmp_path / "secret.txt")
    records = stranger.folder / "metrics.jsonl"
    for path in ("../secret.txt", str(tmp_path / "secret.txt"), "some/where/link.txt", "config.yaml"):
        with records.open("a") as file:
            file.write(json.dumps({"kind": "artifact", "time": 2e9, "path": path, "folder": "taken"}) + "\n")
    text = records.read_text().replace(json.loads(records.read_text().splitlines()[0])["run_folder"], str(stranger.folder))
    records.write_text(text)
    store = f"sqlite:///{tmp_path / 'mine.db'}"
    assert said_by(sync, stranger.folder, f"tracking.uri={store}")[0] == 0
    run_id = json.loads((stranger.folder / "tracking.json").read_text())["run_id"]
    assert [each.path for each in MlflowClient(tracking_uri=store).list_artifacts(run_id, "taken")] == ["taken/config.yaml"]


@pytest.mark.parametrize(
    "place",
    ["log.txt", "metrics.jsonl", ".lock", "checkpoints", "checkpoints/.unfinished-last.pt", ".unfinished-tracking.json", "tracking.lock"],
)
@pytest.mark.parametrize("app", [train, sync], ids=["train", "sync"])
def test_nothing_is_written_through_a_strangers_link(stranger, tmp_path, app, place):
    """Text of theirs in the user's shell file would run."""
    precious = tmp_path / "precious"
    link = stranger.sets(name="$(touch ran) #").folder / place
    if place == "checkpoints":
        shutil.move(link, precious)
    else:
        precious.write_text((link.read_text() if link.exists() else "") + "mine\n" * (place != "metrics.jsonl"))
        link.unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in (precious, *precious.glob("*")) if path.is_file()}
    link.symlink_to(precious)
    words = [f"resume={stranger.folder}", "trainer.max_updates=4", "tracking=none"]
    words = words if app is train else [str(stranger.folder), f"tracking.uri=sqlite:///{tmp_path / 'mine.db'}"]
    status, said, err = said_by(app, *words)
    assert (status, f"{link}: is a link that leads out of {stranger.folder}" in said + err) == (1, True), said + err
    assert {path: path.read_bytes() for path in (precious, *precious.glob("*")) if path.is_file()} == before


def test_a_link_within_a_runs_folder_is_no_fault(own, tmp_path):
    """As the one to its newest files that Weights & Biases makes."""
    folder = shutil.copytree(own, tmp_path / "copy")
    (folder / "wandb").mkdir()
    (folder / "wandb" / "latest-run").symlink_to("run-1")
    status, _, err = said_by(train, f"resume={folder}", "trainer.max_updates=4", "tracking=none")
    assert status == 0, err


def elsewhere(folder):
    """Let the records say that the folder was at a place that is no more, so that it does not count as a copy."""
    records = folder / "metrics.jsonl"
    records.write_text(records.read_text().replace(json.loads(records.read_text().splitlines()[0])["run_folder"], "/elsewhere/run"))


@pytest.mark.parametrize(
    "record",
    [{"kind": "resume", "step": 1}, {"kind": "start", "name": "x", "params": {}}, {"id": "x", "kind": "fork"}],
    ids=lambda each: each["kind"],
)
def test_a_copy_that_names_another_folder_is_one(own, tmp_path, record):
    """So that it does not change the original's run in MLflow."""
    copy = shutil.copytree(own, tmp_path / "copy")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record | {"time": 2e9, "run_folder": "/elsewhere", "host": "h", "tags": {}}) + "\n")
    status, said, _ = said_by(sync, copy, f"tracking.uri=sqlite:///{tmp_path / 'mine.db'}")
    assert (status, f"left alone: it is a copy of {own}" in said, (tmp_path / "mine.db").exists()) == (0, True, False)


def test_a_strangers_tag_does_not_make_its_run_the_users(stranger, own, tmp_path):
    """The run would be found by the tag as the user's, and the user's own deleted as its duplicate."""
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'mine.db'}"
    elsewhere(stranger.sets(name="theirs").folder)
    mine = shutil.copytree(own, tmp_path / "moved")
    elsewhere(mine)
    tags = {"lossforge.run_key": run_key(mine), "mlflow.parentRunId": "1" * 32, "theirs": "kept"}
    with (stranger.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "tags", "time": 2e9, "values": tags}) + "\n")
    ids = []
    for folder in (mine, stranger.folder, mine):
        (folder / "tracking.json").unlink(missing_ok=True)
        assert said_by(sync, folder, f"tracking.uri={store}")[0] == 0
        ids.append(json.loads((folder / "tracking.json").read_text())["run_id"])
    runs = {run.info.run_id: run.data.tags for run in MlflowClient(tracking_uri=store).search_runs(["1"])}
    assert (set(runs), ids[0]) == (set(ids[:2]), ids[2])
    assert (runs[ids[1]]["theirs"], "mlflow.parentRunId" in runs[ids[1]]) == ("kept", False)


@pytest.mark.parametrize("place", ["/proc/nowhere", None], ids=["no key", "another key"])
def test_a_run_stays_one_where_its_key_is_not_kept(own, tmp_path, monkeypatch, place):
    """Without any key, and by trust= with another one."""
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'mine.db'}"
    folder = shutil.copytree(own, tmp_path / "moved")
    elsewhere(folder)
    assert said_by(sync, folder, f"tracking.uri={store}", f"trust={folder}")[0] == 0
    monkeypatch.setenv("XDG_STATE_HOME", place or str(tmp_path / "state"))
    trust = [] if place else [f"trust={folder}"]
    assert said_by(train, f"resume={folder}", "trainer.max_updates=3", f"tracking.uri={store}", *trust)[0] == 0
    assert said_by(sync, folder, f"tracking.uri={store}")[0] == 0
    (run,) = MlflowClient(tracking_uri=store).search_runs(["1"])
    assert run.data.metrics["best_top1"] >= 0


def test_images_outside_of_a_run_are_allowed_by_the_user(own, tmp_path, monkeypatch):
    folder = Stranger(own, tmp_path / "theirs").folder
    root = tmp_path / "pictures"
    for label in ("a", "b"):
        (root / label).mkdir(parents=True)
        for number in range(6):
            Image.new("L", (16, 16), 40 * number).save(root / label / f"{number}.png")
    table = tmp_path / "table" / "labels.csv"
    table.parent.mkdir()
    table.write_text("path,label\n" + "".join(f"{root / label / f'{number}.png'},{label}\n" for label in "ab" for number in range(6)))
    words = [
        *QUICK[:3],
        "data=table",
        f"data.file={table}",
        "data.images_outside=true",
        "data.workers=0",
        *ALONE,
    ]
    status, _, err = said_by(train, *words, "trainer.max_updates=1", f"trainer.runs={tmp_path / 'runs'}")
    assert status == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    again = [f"resume={folder}", "trainer.max_updates=2", "tracking=none"]
    status, _, err = said_by(train, *again)
    assert (status, "data.images_outside=true takes such files" in err) == (1, True), err
    assert said_by(train, *again, "data.images_outside=true")[0] == 0


def test_keys_that_are_numbers_are_settings(tmp_path):
    tree = {"model": {"args": {"names": {0: "cat", 1: "dog", None: "x"}}}, "seed": 0}
    (tmp_path / "config.yaml").write_text(written(tree, tmp_path))
    assert (read_config(tmp_path), origin_of(tmp_path)) == (tree, Origin.HERE)


@pytest.mark.parametrize("kind", ["loop", "pipe"])
def test_what_is_no_file_stops_no_other_run(stranger, tmp_path, kind):
    elsewhere(stranger.folder)
    place = stranger.folder / "log.txt"
    place.unlink()
    os.mkfifo(place) if kind == "pipe" else place.symlink_to(place)
    status, said, err = said_by(sync, stranger.folder, f"tracking.uri=sqlite:///{tmp_path / 'mine.db'}")
    assert (status, err, "nothing is written there" in said) == ((1, "", True) if kind == "pipe" else (0, "", False)), said


def test_the_user_may_have_links(own, tmp_path):
    """Checkpoints on another disk, say."""
    folder = shutil.copytree(own, tmp_path / "copy")
    shutil.move(folder / "checkpoints", tmp_path / "large")
    (folder / "checkpoints").symlink_to(tmp_path / "large")
    assert said_by(train, f"resume={folder}", "trainer.max_updates=4", "tracking=none", f"trust={folder}")[0] == 0


@pytest.mark.parametrize("resumed", [False, True])
def test_an_address_beside_a_signed_run_is_not_called(own, tmp_path, resumed):
    """One's own run in its folder, of which another person replaced tracking.json; or a stranger's, which was resumed in between."""
    folder = tmp_path / "runs" / "own"
    if resumed:
        Stranger(own, folder).sets(name="theirs")
        elsewhere(folder)
        assert said_by(train, f"resume={folder}", "trainer.max_updates=3", "tracking=none")[0] == 0
        assert origin_of(folder) is Origin.STRANGER, "a stranger's run stays one"
    else:
        words = [*QUICK, *ALONE, f"trainer.runs={tmp_path / 'runs'}", "name=own"]
        assert said_by(train, *words)[0] == 0
        (folder,) = (tmp_path / "runs").iterdir()
        assert origin_of(folder) is Origin.HERE
    (folder / "tracking.json").write_text(json.dumps({"uri": SOMEWHERE, "run_id": "1" * 32, "offset": 0}))
    status, said, _ = said_by(sync, folder, "tracking.patience_seconds=1")
    assert (status, f"its files name the store {SOMEWHERE}" in said) == (1, True)


def test_a_strangers_records_change_nothing_of_the_users_in_a_store(stranger, tmp_path):
    """No registered model, no view of an experiment, and no run of the user's, though theirs begins with the same record."""
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'mine.db'}"
    mine = shutil.copytree(stranger.sets(name="theirs").folder, tmp_path / "mine")
    elsewhere(mine)
    assert said_by(sync, mine, f"tracking.uri={store}", f"trust={mine}")[0] == 0
    run_id = json.loads((mine / "tracking.json").read_text())["run_id"]
    client = MlflowClient(tracking_uri=store)
    client.create_registered_model("production")
    before = client.get_run(run_id).data.metrics, client.get_experiment_by_name("lossforge").tags

    theirs = shutil.copytree(mine, tmp_path / "again")
    shutil.rmtree(mine)
    (theirs / "evil.pt2").write_bytes(b"theirs")
    model = {"path": "evil.pt2", "step": 9, "name": "m", "params": {}, "type": "best", "register": "production"}
    with (theirs / "metrics.jsonl").open("a") as file:
        for record in (
            {"kind": "summary", "values": {"best_top1": 0.99}},
            {"kind": "model", **model},
            {"kind": "view", "key": "results", "state": {}},
        ):
            file.write(json.dumps(record | {"time": 2e9}) + "\n")
    status, said, _ = said_by(sync, theirs, f"tracking.uri={store}")
    assert (status, "not sent of a run that you did not make" in said) == (0, True), said
    assert (client.get_run(run_id).data.metrics, client.get_experiment_by_name("lossforge").tags) == before
    assert json.loads((theirs / "tracking.json").read_text())["run_id"] != run_id
    assert client.search_model_versions("name = 'production'") == []
    records = len(client.search_runs([client.get_run(run_id).info.experiment_id]))
    assert said_by(sync, theirs, f"tracking.uri={store}")[0] == 0
    assert len(client.search_runs([client.get_run(run_id).info.experiment_id])) == records, "sent again, it is the same run"


def test_a_registered_model_is_the_one_that_the_user_names(tmp_path):
    """A record's name alone registers nothing."""
    from mlflow.tracking import MlflowClient

    store = f"sqlite:///{tmp_path / 'mine.db'}"
    words = [*QUICK, f"tracking.uri={store}", f"trainer.runs={tmp_path / 'runs'}", "tracking.register=mine"]
    assert said_by(train, *words)[0] == 0
    client = MlflowClient(tracking_uri=store)
    assert [version.version for version in client.search_model_versions("name = 'mine'")] in (["1"], [1])
    (folder,) = (tmp_path / "runs").iterdir()
    records = folder / "metrics.jsonl"
    records.write_text(records.read_text().replace('"register": "mine"', '"register": "production"'))
    assert said_by(sync, folder, f"tracking.uri=sqlite:///{tmp_path / 'other.db'}")[0] == 0
    assert MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'other.db'}").search_registered_models() == []


def test_a_picture_that_is_postscript_starts_no_program(image, tmp_path, monkeypatch):
    """Pillow goes by the content, and gives it to Ghostscript."""
    from PIL import EpsImagePlugin

    from lab.data.images.files import UNREADABLE, read_rgb
    from lab.data.images.pixels import read_pixels

    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # what it found before
    Image.new("L", (16, 16)).save(image, "EPS")
    for read in (read_rgb, lambda path: read_pixels(path, 3)):
        with pytest.raises(UNREADABLE, match="cannot identify image file"):
            read(image)
    with contextlib.suppress(Exception), Image.open(image) as opened:
        opened.load()
    assert (tmp_path / "ran").exists(), "Pillow itself does start it"


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 100_000,
        "[" * 2000 + "]" * 2000,
        "a: &a {b: *a}",
        "? [a]\n: 1",
        "a: !!bool foo",
        "a: !!int ''",
        "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 1}]" for i in range(20)),
    ],
    ids=["100,000 levels", "2,000 levels", "cycle", "list as a key", "no bool", "no number", "billions of values"],
)
def test_settings_that_no_run_has_are_none(stranger, tmp_path, text):
    (stranger.folder / "config.yaml").write_text(text)
    assert read_config(stranger.folder) is None
    status, said, err = said_by(train, f"resume={stranger.folder}")
    assert (status, "a run's folder, such as runs/<run>" in err) == (1, True), said + err
    status, said, err = said_by(sync, stranger.folder, f"tracking.uri=sqlite:///{tmp_path / 'mine.db'}")
    assert (status, err) == (0, ""), said


def test_settings_of_a_checkpoint_that_no_run_has_are_refused(stranger, image):
    state = torch.load(stranger.best, weights_only=True)
    other = "is damaged, or not of train.py: config"
    said_of = {b"x": "names _codecs.encode, and is not read", ("a", "b"): "a key is neither a text nor a number"}
    for change in ({b"x": 1}, {("a", "b"): 1}, {"a": "b\0c"}, {"a": 10**30}):
        checkpoint.save(state | {"config": state["config"] | change}, stranger.best)
        status, _, err = said_by(predict, f"checkpoint={stranger.best}", image)
        assert (status, said_of.get(next(iter(change)), other) in err) == (1, True), (change, err)


def test_where_a_file_writes_and_reads_is_not_the_files_choice(stranger, tmp_path):
    """A download, whose setting it leaves out, and images outside of their folder."""
    place = tmp_path / "chosen"
    stranger.sets(data={"name": "cifar10", "root": str(place), "image_size": 16})
    status, _, err = said_by(evaluate, f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}")
    assert (status, "data.download=false" in err, place.exists()) == (1, True, False), err
    stranger.sets(data={"name": "table", "file": "labels.csv", "root": "/", "images_outside": True, "image_size": 16})
    status, said, _ = said_by(evaluate, f"checkpoint={stranger.best}", "--cfg")
    assert (status, "images_outside: false" in said) == (0, True)


@pytest.mark.parametrize("setting", ["name", "data__root", "model__name"])
def test_interpolations_in_a_file_are_not_resolved(stranger, tmp_path, monkeypatch, setting):
    monkeypatch.setenv("SECRET", "the-secret")
    stranger.sets(**{setting: "${oc.env:SECRET}"})
    runs = tmp_path / "runs"
    for app, words in (
        (evaluate, [f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={runs}"]),
        (evaluate, [f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={runs}", f"trust={tmp_path}"]),
        (train, [f"resume={stranger.folder}", "trainer.max_updates=4"]),
    ):
        status, said, err = said_by(app, *words)
        assert status == 1
        assert f"{setting.replace('__', '.')}=${{oc.env:SECRET}}" in err
        assert "the-secret" not in said + err
    assert not runs.exists()


def test_an_edited_seed_is_found_by_the_checkpoint(own, tmp_path):
    folder = shutil.copytree(own, tmp_path / "copy")
    file = folder / "config.yaml"
    file.write_text(file.read_text().replace("\nseed: 0\n", "\nseed: 7\n"))
    status, _, err = said_by(train, f"resume={folder}", "trainer.max_updates=4", "tracking=none")
    assert status == 1
    assert "seed=7, while the run has 0" in err


def flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["best.pt", "last.pt", "best.safetensors"])
def test_no_flipped_bit_loads_other_weights(own, tmp_path, name):
    """One bit anywhere in the file: it is refused by name, or what it holds is what was written."""
    source = own / "checkpoints" / name
    written = load_checkpoint(source)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for position in torch.randint(source.stat().st_size * 8, (100,), generator=generator).tolist():
        copy = Path(shutil.copy(source, tmp_path / name))
        flipped(copy, position)
        try:
            found, said = load_checkpoint(copy), ""
        except UserError as error:  # any other error fails the test
            found, said = written, str(error)
            refused += 1
        assert not said or (said.startswith(f"checkpoint={copy}: ") and "weights_only" not in said), position
        assert found["model"].keys() == written["model"].keys(), position
        assert all(torch.equal(found["model"][key], written["model"][key]) for key in written["model"]), position
        assert found["config"] == written["config"], position
    assert refused > 50


@pytest.mark.parametrize("theirs", ["digits", "folder", "custom"])
@pytest.mark.parametrize("setting", ["val_transform", "transform", "sampler", "target"])
def test_choosing_the_data_does_not_vouch_for_a_files_code(stranger, tmp_path, theirs, setting):
    """`data=folder` replaces a file's data, or is its data's name; what stays of the file's settings is not the user's.

    What only training needs is left out, and so neither refused nor run.
    """
    data = load(["data=folder", "data.image_size=16"]).tree()["data"] | {"name": theirs, setting: stranger.code()}
    if theirs == "folder" and setting == "target":
        pytest.skip("data=folder has no target")
    stranger.sets(data=data)
    words = [f"checkpoint={stranger.best}", "tracking=none", f"trainer.runs={tmp_path / 'runs'}", f"data.root={tmp_path}"]
    for name in {"folder", theirs}:
        status, _, err = said_by(evaluate, *words, f"data={name}")
        assert (status, stranger.ran.exists()) == (1, False), err
        if (name == theirs and setting == "target") or setting == "val_transform":  # which belongs to the model, and stays with other data
            assert f"\n  data.{setting}=" in err
            assert "trust=PATH" in err


def test_a_data_set_of_the_hub_that_a_file_names_is_not_fetched(stranger, tmp_path):
    stranger.sets(data=load(["data=hf", "data.path=stranger/images", "data.image_size=16"]).tree()["data"])
    for app, word in ((evaluate, f"checkpoint={stranger.best}"), (train, f"resume={stranger.folder}")):
        status, _, err = said_by(app, word, "tracking=none", "trainer.max_updates=4", f"trainer.runs={tmp_path / 'runs'}")
        assert status == 1
        assert "\n  data.path=stranger/images\n" in err


def test_labels_of_a_file_do_not_control_the_terminal(stranger, image, tmp_path):
    state = torch.load(stranger.best, weights_only=True)
    checkpoint.save(state | {"classes": [f"\x1b]0;{name}\x07" for name in state["classes"]]}, stranger.best)
    records = stranger.folder / "metrics.jsonl"
    records.write_text(re.sub(r', "sha256": "\w+"', "", records.read_text()))
    status, said, err = said_by(predict, f"checkpoint={stranger.best}", f"out={tmp_path / 'out'}", image)
    assert status == 0, err
    assert r"\x1b]0;" in said
    assert "\x1b" not in said + err
