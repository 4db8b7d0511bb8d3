"""`python -m lossforge.patch`: libraries are patched, and a script, a module or a program runs unedited."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from inspect import signature
from types import FunctionType

import pytest

from lossforge import integrations
from lossforge.patch import patching
from lossforge.patch.__main__ import main, patchable, run, started

SCRIPT = """
import logging
import sys

import torch
from trl.trainer.utils import selective_log_softmax

if __name__ == "__main__":
    from beside import NAME
    print(selective_log_softmax.__module__, NAME, sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="[own] %(message)s")
    logging.info("a step")
    logging.warning("a slow step")
    logging.getLogger("lossforge.integrations").warning("ours")
    sys.exit(3)
"""


def command(folder, *words):
    return subprocess.run([sys.executable, "-m", "lossforge.patch", *words], cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the following arguments are required: LIBRARY"),
        (("trl",), "say what to run after --"),
        (("trl", "--", "-m"), "say what to run after --"),
        (("keras", "--", "script.py"), "no integration for keras; there are "),
        (("trl,keras,flax", "--", "script.py"), "no integration for keras, flax; there are "),
    ],
    ids=str,
)
def test_mistakes_are_named(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_help_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert f"one or several of {', '.join(patchable())}, joined by commas" in " ".join(text.split())


def test_every_integration_with_a_patch_is_there():
    assert {"trl"} <= {*patchable()}
    for library in patchable():
        assert callable(importlib.import_module(f"lossforge.integrations.{library}").patch)


ENTRIES = {"transformers": ["fuse", "loss_function"], "transformers_detection": ["loss_function", "patch"], "torchtitan": ["Loss"]}
"""What an integration has beside its classes, and compares its library with what was tested; elsewhere `patch` alone."""
OF_OURS = {"megatron": ["vocab_parallel_cross_entropy"]}
"""What needs nothing of its library but a process group."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(integrations.__path__)])
def test_every_entry_compares_its_library(name, monkeypatch):
    imported = importlib.import_module(f"lossforge.integrations.{name}")
    module = importlib.util.module_from_spec(imported.__spec__)
    imported.__spec__.loader.exec_module(module)  # a copy, which has compared nothing yet
    entries = ENTRIES.get(name, ["patch"])
    public = {key for key, value in vars(module).items() if isinstance(value, FunctionType) and value.__module__ == module.__name__}
    assert {key for key in public if not key.startswith("_")} | {*entries} == {*entries, *OF_OURS.get(name, [])}
    monkeypatch.setattr(patching, "signature_of", lambda function: "(changed)")
    refused = []
    for each in entries:
        try:
            entry = getattr(module, each)  # torchtitan's is made, and compared, here
            entry(*[None for p in signature(entry).parameters.values() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD])
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
        except patching.IntegrationError as error:
            refused.append(str(error))
    assert len(refused) == len(entries)
    assert all(" takes (changed), tested with " in each for each in refused)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "script"), [(".", ["scripts/train.py"]), ("scripts", ["-m", "train"])], ids=["script", "module"])
def test_a_script_runs_unedited(where, script, tmp_path):
    pytest.importorskip("trl")
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    done = command(tmp_path / where, "trl", "--", *script, "--steps", "2")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[-1] == "lossforge.integrations.trl beside ['--steps', '2']"
    of_patch, *of_script = [line for line in done.stderr.splitlines() if "lossforge: " in line or "[own]" in line]
    assert of_patch.startswith("lossforge: trl 1.")
    assert of_script == ["[own] a step", "[own] a slow step", "[own] ours"]


STARTER = """
import os
import subprocess
import sys

subprocess.run([sys.executable, "-c", "pass"], check=True)
subprocess.run(["true"], check=True)
print("nothing said so far", file=sys.stderr, flush=True)
if sys.argv[1] == "exec":
    os.execvpe(sys.executable, [sys.executable, "-m", "this"], os.environ)
for _ in range(2):
    subprocess.run([sys.executable, "-m", "this"], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["subprocess", "exec"])
def test_a_program_that_starts_another_python_is_told_that_its_patch_ends(how, tmp_path):
    (tmp_path / "train.py").write_text(STARTER)
    done = command(tmp_path, "timm", "--", "train.py", how)
    assert done.returncode == 0, done.stderr
    assert "The Zen of Python" in done.stdout
    before, after = done.stderr.split("nothing said so far")
    assert "starts another process" not in before
    assert after.count("starts another process") == 1
    assert "-m this …" in after
    assert "torchrun … -m lossforge.patch timm -- -m this …, or accelerate launch …" in after


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("-u train.py --steps 2", "train.py"),  # of python, by accelerate launch
        ("launch --num_processes 2 train.py", "train.py"),
        ("-m axolotl.cli.train config.yml", "-m axolotl.cli.train"),
        ("-m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("-m accelerate.commands.launch --module swift.cli.sft", "-m swift.cli.sft"),
        ("--nproc-per-node 2", "SCRIPT.py"),
    ],
)
def test_what_a_command_starts(command, expected):
    assert started(command.split()) == expected


@pytest.mark.slow
def test_one_process_of_a_run_says_it(tmp_path):
    (tmp_path / "train.py").write_text("import os\n\nprint('rank', os.environ['RANK'], flush=True)\n")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lossforge.patch"]
    done = subprocess.run([*ranks, "timm", "--", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "1", "rank", "rank"]
    assert done.stderr.count("lossforge: timm ") == 1


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        ("nothing-of-this-name", SystemExit, "nothing-of-this-name is not a .py file, and no installed Python program has this name"),
        ("nothing.py", FileNotFoundError, r"nothing\.py"),
    ],
    ids=["program", "script"],
)
def test_what_does_not_run_is_named(target, error, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(error, match=said):
        run([target])
