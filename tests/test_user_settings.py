"""Where runs and tracking go by default: a setting, then an environment variable, then the user's file, then the current folder."""

import importlib
import json
import os

import pytest
import yaml
from words import ALONE, TINY

from lab.base.errors import UserError
from lab.config.schema import TrackingConfig
from lab.config.user import runs_folder, seal
from lab.tracking.uploader import tracking_uri


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("LOSSFORGE_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    return tmp_path / "config" / "lossforge.yaml"


def test_without_any_the_current_folder_is_taken(file, tmp_path):
    assert runs_folder(None) == tmp_path / "runs"
    assert tracking_uri(TrackingConfig()) == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_setting_has_precedence_over_a_variable_and_that_over_the_file(file, tmp_path, monkeypatch):
    file.write_text("runs: ~/mine\ntracking_uri: http://file.example.org\n")
    assert runs_folder(None) == tmp_path / "home" / "mine"
    assert tracking_uri(TrackingConfig()) == "http://file.example.org"
    assert tracking_uri(TrackingConfig(), "http://recorded.example.org") == "http://recorded.example.org"
    monkeypatch.setenv("LOSSFORGE_RUNS", "elsewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://variable.example.org")
    assert runs_folder(None) == tmp_path / "elsewhere"
    assert tracking_uri(TrackingConfig()) == "http://variable.example.org"
    assert runs_folder("given") == tmp_path / "given"
    assert tracking_uri(TrackingConfig(uri="http://setting.example.org")) == "http://setting.example.org"


@pytest.fixture
def printed(capsys):
    """Return what --cfg of an app says of the two places."""

    def places(app, *words):
        capsys.readouterr()
        assert importlib.import_module(app).main([*words, "--cfg"]) == 0
        tree = yaml.safe_load(capsys.readouterr().out)
        return tree.get("trainer", tree)["runs"], tree["tracking"]["uri"]

    return places


@pytest.mark.parametrize("app", ["train", "sync", "compare", "bench"])
def test_cfg_prints_the_places_that_would_be_used(file, tmp_path, monkeypatch, printed, app):
    assert printed(app) == (str(tmp_path / "runs"), f"sqlite:///{tmp_path}/mlflow.db")
    file.write_text("runs: ~/mine\ntracking_uri: http://me:secret@file.example.org\n")
    assert printed(app) == (str(tmp_path / "home" / "mine"), "http://me:***@file.example.org")
    monkeypatch.setenv("LOSSFORGE_RUNS", "elsewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://variable.example.org")
    assert printed(app) == (str(tmp_path / "elsewhere"), "http://variable.example.org")
    runs = "runs" if app in ("compare", "bench") else "trainer.runs"
    assert printed(app, f"{runs}=given", "tracking.uri=http://setting.example.org") == (
        str(tmp_path / "given"),
        "http://setting.example.org",
    )


def test_cfg_of_a_run_that_goes_on_prints_the_store_where_it_is_recorded(file, tmp_path, printed):
    import lab

    small = [*TINY, *ALONE, "trainer.max_updates=2"]
    result = lab.train(*small)
    sealed = {"uri": "http://recorded.example.org", "run_id": "1" * 32, "key": "2" * 32}
    sealed["seal"] = seal(result.folder, *sealed.values())
    (result.folder / "tracking.json").write_text(json.dumps(sealed))
    file.write_text("tracking_uri: http://file.example.org\n")
    assert printed("train", f"resume={result.folder}", "trainer.max_updates=3")[1] == "http://recorded.example.org"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: /data", r"'run' is not known.\nDid you mean 'runs'"),
        ("runs: here", "a whole path is expected"),
        ("runs: 3", "runs: 3; a text is expected"),
        ("[runs]", "settings by name are expected"),
        ("runs: {", "cannot be read"),
    ],
)
def test_a_wrong_file_is_named(file, text, said):
    file.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        runs_folder(None)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_the_whole_help_fits_the_terminal(monkeypatch, columns):
    import shutil
    import sys

    from lab.config.command import fitted
    from lab.config.help import own_help, train_help

    paragraph = "A paragraph is broken in the source where a line\nis full. A sentence may begin a line.\nAs here."
    for make in (lambda: train_help("experiments/train.py", []), lambda: own_help("usage: it", paragraph, [])):
        whole = make()
        assert fitted(whole) == whole
        with monkeypatch.context() as terminal:
            terminal.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            terminal.setattr(shutil, "get_terminal_size", lambda fallback=(80, 24): os.terminal_size((columns, 24)))
            shown = fitted(make())
        assert max(map(len, shown.splitlines())) <= columns
        assert shown.split() == whole.split()
    assert "\nAs here.\n" in shown
    assert "\nis full. A" not in shown


def test_no_file_of_the_current_folder_is_taken_for_the_users(file, tmp_path, monkeypatch):
    (tmp_path / "config" / "lossforge.yaml").write_text("tracking_uri: http://127.0.0.1:9/theirs\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    assert tracking_uri(TrackingConfig()) == f"sqlite:///{tmp_path}/mlflow.db"
