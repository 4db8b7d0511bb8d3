"""Replacing names of a library: a small real one, installed into a folder, in versions that differ."""

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lossforge.patch.patching import _SAID, IntegrationError, Names, Patch, Replacement, covers, once, or_theirs, patch

OWN = """
def loss(input, target, *, reduction="mean"):
    return input - target

class Trainer:
    def step(self, x, rate=0.1):
        return x - rate

    @staticmethod
    def scale(x):
        return 2 * x

class Sub(Trainer):
    pass
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Install a package `drifting` of a given source, with its metadata, and import it anew."""
    monkeypatch.syspath_prepend(tmp_path)
    _SAID.clear()

    def install(source=OWN, version="1.2.0"):
        (tmp_path / "drifting").mkdir(exist_ok=True)
        (tmp_path / "drifting" / "__init__.py").write_text("")
        (tmp_path / "drifting" / "core.py").write_text(source)
        (tmp_path / "drifting" / "user.py").write_text("from drifting.core import loss\n")
        info = tmp_path / f"drifting-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: drifting\nVersion: {version}\n")
        importlib.invalidate_caches()
        return importlib.import_module("drifting.core"), importlib.import_module("drifting.user")

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "drifting"]:
        del sys.modules[name]


def ours(original):
    return lambda input, target, *, reduction="mean": ("ours", original(input, target))


LOSS = Replacement("drifting.core:loss", ours, "(input, target, *, reduction='mean')")
STEP = Replacement("drifting.core:Trainer.step", lambda own: lambda self, x, rate=0.1: ("ours", own(self, x, rate)), "(self, x, rate=0.1)")
SCALE = Replacement("drifting.core:Trainer.scale", lambda own: lambda x: ("ours", own(x)), "(x)")
INHERITED = Replacement("drifting.core:Sub.step", lambda own: lambda self, x, rate=0.1: ("sub", own(self, x, rate)), "(self, x, rate=0.1)")


REPLACED = [LOSS, STEP, SCALE, INHERITED]


def test_names_are_replaced_where_they_are_imported(library):
    core, user = library()
    with patch("drifting", "1.2", REPLACED):
        assert core.loss(3, 1) == user.loss(3, 1) == ("ours", 2)
        assert core.Trainer().step(1.0) == ("ours", 0.9)
        assert core.Trainer.scale(2) == core.Trainer().scale(2) == ("ours", 4)


def test_an_inherited_method_wraps_the_original(library):
    """Our wrapper of it is made before anything is replaced."""
    core, _ = library()
    with patch("drifting", "1.2", REPLACED):
        assert core.Sub().step(1.0) == ("sub", 0.9)


def test_names_are_put_back(library, caplog):
    core, user = library()
    with caplog.at_level(logging.INFO, "lossforge.integrations"), patch("drifting", "1.2", REPLACED):
        pass
    assert core.loss(3, 1) == user.loss(3, 1) == 2
    assert core.Trainer().step(1.0) == core.Sub().step(1.0) == 0.9
    assert "step" not in vars(core.Sub)
    assert core.Trainer.scale(2) == 4
    assert len(caplog.records) == 1
    assert "replaced by something else" not in caplog.text


def test_the_handle_says_what_is_replaced_and_can_be_undone_twice(library):
    library()
    with patch("drifting", "1.2", REPLACED) as handle:
        assert handle.active
        assert "drifting.core:loss" in repr(handle)
    assert not handle.active
    assert "undone" in repr(handle)
    handle.undo()


def test_a_module_that_is_loaded_while_patched_has_the_original_after(library):
    library()
    with patch("drifting", "1.2", [LOSS]):
        del sys.modules["drifting.user"]
        user = importlib.import_module("drifting.user")
        assert user.loss(3, 1) == ("ours", 2)
    assert user.loss(3, 1) == 2


def test_a_name_that_another_library_took_has_the_original_after(library, monkeypatch):
    core, _ = library()
    other = ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", other)
    with patch("drifting", "1.2", [LOSS]):
        other.cross_entropy = core.loss  # as Liger puts its own into torch.nn.functional
    assert other.cross_entropy is core.loss
    assert other.cross_entropy(3, 1) == 2


def test_an_undo_that_fails_can_be_repeated():
    failures = [RuntimeError("changed since: undo that first")]
    undone = []

    def undo():
        if failures:
            raise failures.pop()
        undone.append(True)

    handle = Patch("drifting", ["loss"], undo)
    with pytest.raises(RuntimeError, match="changed since"):
        handle.undo()
    assert handle.active
    handle.undo()
    handle.undo()
    assert undone == [True]
    assert not handle.active


def test_patching_twice_is_undone_by_two(library):
    core, _ = library()
    first, second = (patch("drifting", "1.2", [LOSS], options=1) for _ in range(2))
    assert core.loss(3, 1) == ("ours", 2)
    with pytest.raises(ValueError, match="patched with other options"):
        patch("drifting", "1.2", [LOSS], options=2)
    first.undo()
    assert core.loss(3, 1) == ("ours", 2)
    second.undo()
    assert core.loss(3, 1) == 2


def test_other_parameters_are_refused_by_what_differs(library):
    core, _ = library(OWN.replace('reduction="mean"', 'reduction="sum"'), "2.0.0")
    took = r"drifting\.core:loss takes \(input, target, \*, reduction='sum'\), tested with .*'mean'\)"
    said = rf"drifting 2\.0\.0 is not as tested \(1\.2\): {took}"
    with pytest.raises(IntegrationError, match=said):
        patch("drifting", "1.2", [STEP, LOSS])
    assert core.Trainer().step(1.0) == 0.9
    with patch("drifting", "1.2", [LOSS], force=True):
        assert core.loss(3, 1) == ("ours", 2)


def test_an_untested_version_is_a_warning(library, caplog):
    library(version="1.3.0")
    for _ in range(2):
        with patch("drifting", "1.2", [LOSS]):
            pass
    said = "drifting 1.3.0 was not tested (1.2 was): compare the first losses with those of the library's own"
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == [said]


@pytest.mark.parametrize(
    ("tested", "covered", "others"),
    [
        ("1.16", ["1.16", "1.16.3", "1.16.0rc1"], ["1.15.9", "1.17", "1.1", "11.6"]),
        ("0.8.1, 0.8.5", ["0.8.1", "0.8.5.post1"], ["0.8.3", "0.8"]),
        ("4.57.6 to 5.24", ["4.57.6", "4.60", "5.0.0", "5.24.0", "5.24.9"], ["4.57.5", "5.25.0.dev0", "6.0"]),
    ],
)
def test_versions_that_were_tested(tested, covered, others):
    assert [each for each in [*covered, *others] if covers(tested, each)] == covered


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_the_first_process_says_it(library, caplog, monkeypatch, variable):
    library(version="1.3.0")
    monkeypatch.setenv(variable, "1")
    with caplog.at_level(logging.INFO, "lossforge.integrations"), patch("drifting", "1.2", [LOSS]):
        assert not caplog.records
    _SAID.clear()
    monkeypatch.setenv(variable, "0")
    with caplog.at_level(logging.INFO, "lossforge.integrations"), patch("drifting", "1.2", [LOSS]):
        assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]


def test_an_optional_name_that_is_missing_is_left_and_said(library, caplog):
    """A module that is not there, one that does not import, and a name; one that is there is compared."""
    core, _ = library(OWN.replace("def scale", "def scaled"))
    (Path(core.__file__).parent / "broken.py").write_text("raise RuntimeError('a package is not installed')\n")
    names = ["drifting.none:loss", "drifting.broken:loss", "drifting.core:Trainer.scale"]
    lacking = [Replacement(each, ours, LOSS.signature, optional=True) for each in names]
    with caplog.at_level(logging.INFO, "lossforge.integrations"), patch("drifting", "1.2", [LOSS, *lacking]) as handle:
        assert core.loss(3, 1) == ("ours", 2)
        assert handle.replaced == ("drifting.core:loss",)
        assert handle.left == (*names,)
        assert f"left: {', '.join(names)}>" in repr(handle)
    assert [each.message for each in caplog.records] == [f"drifting 1.2.0: drifting.core:loss. Missing there, and left: {', '.join(names)}"]
    with pytest.raises(IntegrationError, match=r"Trainer\.step takes \(self, x, rate=0\.1\), tested with \(self, x\)"):
        patch("drifting", "1.2", [Replacement("drifting.core:Trainer.step", ours, "(self, x)", optional=True)])


def test_a_name_that_is_only_called_is_compared(library):
    core, _ = library()
    called = Replacement("drifting.core:Trainer.step", None, "(self, x, rate=0.1)")
    with patch("drifting", "1.2", [LOSS, called]) as handle:
        assert handle.replaced == ("drifting.core:loss",)
        assert core.Trainer().step(1.0) == 0.9
    with pytest.raises(IntegrationError, match=r"Trainer\.step takes \(self, x, rate=0\.1\), tested with \(self, x\)"):
        patch("drifting", "1.2", [LOSS, Replacement("drifting.core:Trainer.step", None, "(self, x)")])
    assert core.loss(3, 1) == 2


def test_once_compares_until_nothing_differs(library):
    core, _ = library()
    compare, step = once("drifting", "1.2", [STEP]), core.Trainer.step
    core.Trainer.step = lambda self, x: x
    for _ in range(2):
        with pytest.raises(IntegrationError, match=r"Trainer\.step takes \(self, x\)"):
            compare()
    core.Trainer.step = step
    compare()
    core.Trainer.step = lambda self, x: x
    compare()


def test_missing_names_are_refused_and_forced_past(library):
    core, _ = library(OWN.replace("def scale", "def scaled"))
    with pytest.raises(IntegrationError, match=r"drifting\.core:Trainer\.scale is missing"):
        patch("drifting", "1.2", [LOSS, SCALE])
    with patch("drifting", "1.2", [LOSS, SCALE], force=True) as handle:
        assert handle.replaced == ("drifting.core:loss",)
        assert core.loss(3, 1) == ("ours", 2)


def test_what_others_replaced_later_is_left(library, caplog):
    core, _ = library()
    handle = patch("drifting", "1.2", [LOSS])
    core.loss = theirs = lambda *args: "theirs"
    handle.undo()
    assert core.loss is theirs
    assert "replaced by something else" in caplog.text


def test_a_library_that_is_not_installed_is_named():
    with pytest.raises(ModuleNotFoundError, match="pip install drifting-nowhere"):
        patch("drifting-nowhere", "1", [])


def test_a_reason_runs_the_original_and_is_said_once(library, caplog):
    core, _ = library()

    def positive(input, target, *, reduction="mean"):
        return ("ours", input - target) if input > target else "the difference is negative"

    with patch("drifting", "1.2", [Replacement("drifting.core:loss", or_theirs("drifting", positive), LOSS.signature)]):
        assert core.loss(3, 1) == ("ours", 2)
        assert core.loss(1, target=3) == core.loss(0, 2) == -2
        assert core.loss.__name__ == "loss"
    assert [each.message for each in caplog.records] == ["drifting's own loss runs: the difference is negative"]


def test_names_of_a_module_are_replaced_in_one_module_alone(library):
    core, user = library("import math\n" + OWN)
    user.math = core.math

    def changed(own):
        return Names(own, {"floor": lambda x: ("ours", own.floor(x))})

    with patch("drifting", "1.2", [Replacement("drifting.core:math", changed, here_only=True)]):
        assert core.math.floor(1.5) == ("ours", 1)
        assert core.math.ceil(1.5) == 2
        assert user.math.floor(1.5) == 1
    assert core.math is user.math
