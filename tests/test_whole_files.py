"""Files for people are whole or as they were, however their process ends while it writes them."""

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
IN_PLACE = {  # each with its reason
    "lab/detectors/scenes.py": "a folder that gets its name when it is whole",
    "lab/base/files.py": "the function itself",
    "lab/run/machine.py": "a switch of the kernel's",
    "lab/tracking/logged_model.py": "a temporary folder, which is uploaded",
}
DRAW = """
import json, os, resource, signal, sys
from pathlib import Path

import pytest

from lab.comparison.pictures import save
from lab.detectors.detection.plots import precision_recall_picture
from lab.tasks.plots import average_precision_picture, calibration_picture, confusion_picture
from lab.run.frames import write_rows

names = [f"class {i}" for i in range(20)]

def curve(count):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot(range(count))
    return figure

def result(count):
    from types import SimpleNamespace

    values = {"top1": 0.5, "samples": count, "ece": 0.1, "map": 0.5, "map50": 0.5, "map75": 0.5}
    return SimpleNamespace(
        values=values,
        confusion=[[count + i * j for i in range(20)] for j in range(20)],
        calibration=[[count, count / 2, count / 2]] * 20,
        precision={each: [count / 10] * 101 for each in names},
        per_class=dict.fromkeys(names, 0.5),
    )

draw = {
    "confusion.png": lambda count, path: confusion_picture(result(count), names, path),
    "calibration.png": lambda count, path: calibration_picture(result(count), path),
    "average_precision.png": lambda count, path: average_precision_picture(dict.fromkeys(names, count / 10), path),
    "precision_recall.png": lambda count, path: precision_recall_picture(result(count), path),
    "curves.svg": lambda count, path: save(lambda: curve(count), path),
    "predictions.csv": lambda count, path: write_rows(path, [{"sample": i, "count": count} for i in range(10_000)]),
}


def interrupt(*_):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Ctrl-C once
    raise KeyboardInterrupt


for end, handler in {"killed": signal.SIG_DFL, "interrupted": interrupt, "full": signal.SIG_IGN}.items():
    for name, drawn in draw.items():
        path = Path(sys.argv[1], end, name)
        path.parent.mkdir(exist_ok=True)
        drawn(1, path)
        before = path.read_bytes()
        process = os.fork()
        if not process:
            signal.signal(signal.SIGXFSZ, handler)  # comes in the middle of a write, once the file has half its size
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, len(before) // 2))
            try:
                drawn(2, path)
            except BaseException as error:
                print(json.dumps([end, name, type(error).__name__, str(error)]), flush=True)
            os._exit(1)
        _, status = os.waitpid(process, 0)
        if os.WIFSIGNALED(status):
            print(json.dumps([end, name, signal.Signals(os.WTERMSIG(status)).name, ""]), flush=True)
        assert path.read_bytes() == before, (end, name)
"""


@pytest.mark.slow
def test_what_was_there_stays_where_a_write_ends_halfway(tmp_path):
    done = subprocess.run([sys.executable, "-c", DRAW, tmp_path], cwd=EXPERIMENTS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 18
    for end, name, error, said in found:
        # the signal comes with the write's own error, and either may be the first that Python sees
        assert error in {"killed": ["SIGXFSZ"], "interrupted": ["KeyboardInterrupt", "UserError"], "full": ["UserError"]}[end]
        if end == "full":
            assert f"{name}: cannot be written: File too large. Make room there" in said
            assert not list((tmp_path / end).glob(".*"))


def test_no_other_file_is_written_in_place():
    """A picture or a report that is opened under its own name is half there after Ctrl-C."""
    found = {
        str(path.relative_to(EXPERIMENTS)) for path in EXPERIMENTS.rglob("*.py") if any(map(writes, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == set(IN_PLACE)


def writes(node: ast.AST) -> bool:
    """Whether a node opens a file to write it under its own name, or has a library do it."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr == "open":
        return any(isinstance(word, ast.Constant) and word.value in ("w", "wb", "x", "xb") for word in node.args)
    saves_picture = node.func.attr == "savefig" and isinstance(node.args[0], ast.Name) and node.args[0].id not in ("file", "out")
    draws = node.func.attr == "save" and "Image" in ast.unparse(node.func.value)
    return node.func.attr in ("write_text", "write_bytes") or saves_picture or draws


def test_a_linked_file_keeps_what_it_held_when_the_first_name_is_written_again(tmp_path):
    from lab.base.files import link_whole, write_text

    first, second = tmp_path / "run" / "best.pt", tmp_path / "store" / "deep" / "best.pt"
    write_text(first, "the first epoch's")
    assert link_whole(first, second)
    assert first.samefile(second)
    write_text(first, "the second epoch's")
    assert second.read_text() == "the first epoch's"
    assert link_whole(first, second)
    assert link_whole(first, second), "a second time changes nothing"
    assert (second.read_text(), first.samefile(second)) == ("the second epoch's", True)
    assert [path.name for path in second.parent.iterdir()] == ["best.pt"]


def test_no_file_is_linked_across_file_systems(tmp_path):
    from lab.base.files import link_whole

    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    (tmp_path / "best.pt").write_text("weights")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        assert not link_whole(tmp_path / "best.pt", Path(folder) / "best.pt")
        assert not any(Path(folder).iterdir())
