"""What MkDocs does not do by itself for the documentation: the order of its pages, and a check of what they quote from the code."""

import inspect
import logging
import pkgutil
import re
from pathlib import Path
from typing import Any

FOLDERS = ("learn", "losses", "use_with", "reference", "know", "benchmarks")
FIRST = {
    "learn": (
        *("first_training", "replace_your_loss", "write_your_own_loss", "train_on_your_images", "detect", "segment", "sweep_and_compare"),
        *("mlflow", "evaluate_and_predict", "resume", "several_gpus", "slurm", "docker", "reproductions"),
    ),
    "losses": (
        *("cross_entropy", "classification", "binary", "regression", "iou", "detection", "dice", "divergence", "contrastive"),
        *("angular", "margin", "embedding", "noise_model"),
    ),
    "know": ("promises", "differences", "precision", "determinism", "memory", "versions", "how_it_works", "repository"),
    "benchmarks": ("losses", "fused", "training", "detection", "effects", "several_gpus"),
}
"""Pages in the order of reading; a folder's others follow by name."""

log = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> Any:
    """Make the navigation from the folders, so that a new page is in it without an edit."""
    docs = Path(config.docs_dir)
    config.nav = [{"Home": "index.md"}]
    for folder in FOLDERS:
        if pages := sorted((docs / folder).glob("*.md"), key=lambda page: place(folder, page.stem)):
            config.nav.append({folder.replace("_", " ").capitalize(): [page.relative_to(docs).as_posix() for page in pages]})
    others = {"settings": "Settings", "your_own": "Bring your own", "release": "Release", "glossary": "Glossary"}
    config.nav += [{title: f"{name}.md"} for name, title in others.items() if (docs / f"{name}.md").is_file()]
    return config


def place(folder: str, name: str) -> tuple[int, str]:
    """Return what a folder's pages are sorted by."""
    order = ("index", *FIRST.get(folder, ()))
    return (order.index(name) if name in order else len(order), name)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Warn of what a page shows although it has no docstring: mkdocstrings would leave it out without a word."""
    for name in re.findall(r"^::: (\S+)", markdown, re.M):
        if not inspect.getdoc(named(name)):
            log.warning(f"{page.file.src_uri}: {name} has no docstring")


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Take the backslashes out of code in tables: Markdown needs them before a |, and Python-Markdown leaves them there, unlike GitHub.

    A page with tables and at most one title below its own gives them the room of its table of contents.
    """
    if "<td" in html and sum(len(title.children) for title in page.toc) < 2:
        page.meta["hide"] = ["toc"]
    return re.sub(r"<td\b.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.S)


def named(name: str) -> Any:
    """Return what Python has under a dotted name, or None. A function may hide the module of its name, as lossforge.losses.check does."""
    place, _, last = name.rpartition(".")
    try:
        found = pkgutil.resolve_name(place)
        return getattr(found, last) if hasattr(found, last) else pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
