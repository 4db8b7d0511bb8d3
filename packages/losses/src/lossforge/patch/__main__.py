"""Patch libraries, and run a script, a module or an installed program in the same process."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from lossforge import integrations
from lossforge.patch.patching import LOG, IntegrationError, say_once

USAGE = """python -m lossforge.patch LIBRARY[,LIBRARY…] [--force] --
       SCRIPT.py | -m MODULE | PROGRAM [ARGUMENT …]"""
EXAMPLES = """examples:
  python -m lossforge.patch timm -- train.py --model resnet50
  python -m lossforge.patch ultralytics -- yolo train data=coco8.yaml
  torchrun --nproc-per-node 8 -m lossforge.patch trl -- grpo.py
  accelerate launch -m lossforge.patch trl -- grpo.py
"""
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn")
"""Python's audit events of a new program, whose first arguments are its path and its words."""
LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed")
MODULES_OF_LAUNCHERS = ("torch.distributed.", "accelerate.", "deepspeed.")


def patchable() -> list[str]:
    """Return the libraries whose integration has a `patch`."""
    names = [each.name for each in pkgutil.iter_modules(integrations.__path__) if not each.name.startswith("_")]
    return [name for name in names if hasattr(importlib.import_module(f"lossforge.integrations.{name}"), "patch")]


KEPT: list[dict[str, object]] = []
"""Names of the script that ran. As those of a script of its own they live until Python ends: process groups that end before may wait."""


def watch(libraries: str) -> None:
    """Say, once, that a patch ends with its process where the program starts another Python, as the launchers of many trainers do."""

    def seen(event: str, given: tuple[object, ...]) -> None:
        if event not in STARTS or not isinstance(given[1], (list, tuple)):
            return
        path, *words = [os.fsdecode(word) for word in (given[0], *given[1][1:]) if isinstance(word, (str, bytes, os.PathLike))]
        # a probe of one line, or a worker of torch.compile, trains nothing
        if not Path(path).name.startswith(LAUNCHERS) or words[:1] == ["-c"] or any("_inductor" in word for word in words):
            return
        say_once(
            f"the program starts another process, {Path(path).name} {' '.join(words[:3])} …, which has the library's own losses. Start the "
            f"processes first: torchrun … -m lossforge.patch {libraries} -- {started(words)} …, or accelerate launch … with the same words"
        )

    sys.addaudithook(seen)


def started(words: Sequence[str]) -> str:
    """Return the script or the module that a command of Python or of a launcher starts, as `run` takes it."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            return word
        if word in ("-m", "--module") and not following.startswith(MODULES_OF_LAUNCHERS):
            return f"-m {following}"
    return "SCRIPT.py"


def run(argv: Sequence[str]) -> None:
    """Run a script (a path that ends in .py), a module (-m NAME) or an installed program, as if it had been called."""
    target, *rest = argv
    if target == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif target.endswith(".py"):
        sys.argv = list(argv)
        sys.path[0] = str(Path(target).resolve().parent)
        KEPT.append(runpy.run_path(target, run_name="__main__"))
    else:
        found = importlib.metadata.entry_points(group="console_scripts", name=target)
        if not found:
            sys.exit(f"lossforge.patch: {target} is not a .py file, and no installed Python program has this name")
        sys.argv = list(argv)
        sys.exit(next(iter(found)).load()())


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        "python -m lossforge.patch",
        usage=USAGE,
        description="Run a script of another library with lossforge's losses in it, unedited.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("libraries", metavar="LIBRARY", help=f"one or several of {', '.join(patchable())}, joined by commas")
    parser.add_argument("--force", action="store_true", help="go on where a library is not as it was tested")
    own, target = (list(argv[: argv.index("--")]), list(argv[argv.index("--") + 1 :])) if "--" in argv else (list(argv), [])
    given = parser.parse_args(own)
    names = given.libraries.split(",")
    if unknown := [name for name in names if name not in patchable()]:
        parser.error(f"no integration for {', '.join(unknown)}; there are {', '.join(patchable())}")
    if not target or target == ["-m"]:
        parser.error("say what to run after --: a .py file, -m MODULE or an installed program")
    say = logging.StreamHandler()
    say.setFormatter(logging.Formatter("lossforge: %(message)s"))
    say.addFilter(lambda record: not logging.getLogger().handlers)  # once the program has handlers of its own, these have our lines
    LOG.addHandler(say)
    LOG.setLevel(logging.INFO)
    for name in names:
        try:
            importlib.import_module(f"lossforge.integrations.{name}").patch(force=given.force)
        except (IntegrationError, ModuleNotFoundError) as error:
            sys.exit(f"lossforge.patch: {error}")
    watch(given.libraries)
    run(target)


if __name__ == "__main__":
    main()
