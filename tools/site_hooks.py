"""What MkDocs does not do by itself for the documentation: the order of its pages, and a check of what they quote from the code."""

import inspect
import logging
import pkgutil
import re
from pathlib import Path
from typing import Any

NAV: dict[str, dict[str, tuple[str, ...]]] = {
    "Home": {"": ("index", "install", "troubleshooting", "changelog", "glossary")},
    "Learn": {
        "Use the losses": ("learn/replace_your_loss", "learn/preferences_and_policies", "learn/write_your_own_loss", "learn/small_losses"),
        "Train": (
            *("learn/first_training", "learn/train_on_your_images", "learn/detect", "learn/oriented_boxes", "learn/segment_instances"),
            "learn/segment",
            "learn/sweep_and_compare",
            *("learn/reproductions", "learn/mlflow", "learn/evaluate_and_predict", "learn/resume", "your_own", "settings"),
        ),
        "On other machines": ("learn/several_gpus", "learn/slurm", "learn/docker"),
    },
    "Losses": {
        "": ("losses/index",),
        "Classification": ("losses/cross_entropy", "losses/classification", "losses/binary", "losses/angular"),
        "Regression": ("losses/regression", "losses/noise_model", "losses/likelihood"),
        "Detection and segmentation": ("losses/detection", "losses/iou", "losses/rotated", "losses/dice"),
        "Distillation": ("losses/divergence", "losses/draft"),
        "Features and ranking": tuple(
            f"losses/{each}" for each in ("contrastive", "metric_learning", "self_distillation", "embedding", "margin")
        ),
    },
    "Use with": {
        "": ("use_with/index",),
        "Language models": tuple(
            f"use_with/{name}"
            for name in (
                *("hugging_face_trainer", "trl", "from_liger", "liger", "llm_trainers"),
                *("torchtitan", "verl", "megatron", "draft_models"),
            )
        ),
        "Vision": tuple(
            f"use_with/{name}"
            for name in (
                *("timm", "torchvision_detectors", "ultralytics", "transformers_detection", "segmentation_models_pytorch", "monai"),
                *("rfdetr", "segmentation_libraries", "open_clip", "sentence_transformers", "loss_names"),
            )
        ),
        "PyTorch": tuple(
            f"use_with/{name}"
            for name in (
                "lightning",
                "torch_compile",
                "mixed_precision",
                "ddp",
                "fsdp2",
                "dtensor",
                "cuda_graphs",
                "activation_checkpointing",
            )
        ),
    },
    "Reference": {
        "": ("reference/losses",),
        "Losses by family": tuple(
            f"reference/losses_{name}"
            for name in (
                *("cross_entropy", "classification", "binary", "angular", "regression", "noise_model", "likelihood", "detection"),
                *("iou", "rotated", "dice", "divergence", "draft", "contrastive"),
                *("metric_learning", "self_distillation", "embedding", "margin"),
            )
        ),
        "More": tuple(
            f"reference/{name}"
            for name in ("options", "fused_linear", "preference", "detection", "segmentation", "own_losses", "experiments")
        ),
    },
    "Know": {
        "": tuple(
            f"know/{name}"
            for name in (
                "promises",
                "when_not",
                "differences",
                "precision",
                "determinism",
                "same_bits",
                "memory",
                "versions",
                "how_it_works",
            )
        ),
        "Templates": (),
        "Contribute": ("know/way", "know/repository", "know/triton", "know/testing", "know/measuring", "release"),
    },
    "Benchmarks": {
        "": tuple(
            f"benchmarks/{name}"
            for name in ("index", "losses", "fused", "training", "detection", "integrations", "effects", "several_gpus")
        )
    },
}
"""The tabs, and the groups of pages in each, in the order of reading. A page that is not listed follows in the tab of its folder."""
REST = {"know": "Templates", "reference": "More"}
"""The group of a folder's pages that are not listed, where it is not the tab itself."""
BOOST = {
    "reference": 0.4,
    "settings": 0.4,
    "benchmarks": 0.6,
    "use_with": 2.0,
    "losses": 3.0,
    "install": 4.0,
    "troubleshooting": 6.0,
    "losses/binary": 9.0,  # focal loss before focal Tversky
}
"""By how much search prefers the pages of a folder, or a page: a loss before the reference of its arguments."""
WIDE = ("losses/index.md", "use_with/loss_names.md")
"""Pages whose tables need the room of the table of contents, for all their titles."""

ROOT = Path(__file__).resolve().parents[1]
log = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> Any:
    """Make the navigation from NAV and the folders, so that a new page is in it without an edit."""
    docs = Path(config.docs_dir)
    found = [page.relative_to(docs).with_suffix("").as_posix() for page in sorted(docs.rglob("*.md"))]
    listed = {page for groups in NAV.values() for pages in groups.values() for page in pages}
    config.nav = []
    for tab, groups in NAV.items():
        folder = tab.lower().replace(" ", "_")
        rest = [
            page for page in found if page not in listed and (page.partition("/")[0] == folder or (folder == "home" and "/" not in page))
        ]
        items: list[Any] = []
        for group, pages in groups.items():
            pages = (*(page for page in pages if page in found), *(rest if group == REST.get(folder, "") else ()))
            files = [f"{page}.md" for page in pages]
            items += [{group: files}] if group and files else files
        if "" not in groups and folder not in REST:
            items += [f"{page}.md" for page in rest]
        if items:
            config.nav.append({tab: items})
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> None:
    """Set what search prefers and where a page is edited, and warn of what a page shows although it has no docstring.

    mkdocstrings would leave that out without a word.
    """
    for name in re.findall(r"^::: (\S+)", markdown, re.M):
        if not inspect.getdoc(named(name)):
            log.warning(f"{page.file.src_uri}: {name} has no docstring")
    name = page.file.src_uri.removesuffix(".md")
    if boost := BOOST.get(name, BOOST.get(name.partition("/")[0])):
        page.meta["search"] = {"boost": boost}
    if page.edit_url:
        page.edit_url = page.edit_url.replace(f"docs/{page.file.src_uri}", source_of(page.file.src_uri))


def source_of(page: str) -> str:
    """Return the file that a person edits to change a page: that of the definitions, where the page is generated."""
    if page == "changelog.md":
        return "CHANGELOG.md"
    if found := re.fullmatch(r"(?:losses/|reference/losses_)(\w+)\.md", page):
        definitions = Path("packages/losses/src/lossforge/losses/definitions")
        for place in sorted([*(ROOT / definitions).rglob(f"{found[1]}.py"), *(ROOT / definitions).glob(found[1])]):
            return place.relative_to(ROOT).as_posix()
    return f"docs/{page}"


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Take the backslashes out of code in tables: Markdown needs them before a |, and Python-Markdown leaves them there, unlike GitHub.

    A page with tables and at most one title below its own gives them the room of its table of contents.
    """
    if page.file.src_uri in WIDE or ("<td" in html and sum(len(title.children) for title in page.toc) < 2):
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
