"""Walk the checklist of a release, and say what is missing; status 1 where something is. docs/release.md tells the order.

usage: uv run --group docs tools/release.py                    walk the checklist
       uv run --group docs tools/release.py --version 0.2.0    write the version and today's date everywhere first
       uv run --group docs tools/release.py --pin              write the digests of images and actions first
       uv run --group docs tools/release.py --tag v0.2.0       the tag that is about to be published, too
"""

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pins
from packages_built import all_faults

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "measurements"))  # whose cases are on the first page
OLDEST = 60
"""The most commits between the figures of the first page and a release."""
LOSSES = tuple(f"packages/{name}/src" for name in ("kernels", "losses"))
APP = (*LOSSES, "experiments/lab")
MEASURED = {
    **dict.fromkeys(
        (
            *(
                "bench-h200",
                "scaling-h200",
                "new-losses-h100",
                "linear",
                "linear-h200",
                "precision-h200",
                "language-model",
                "integrations",
                "recipe-h200",
            ),
            "first-page-h200",
            *("objectives-h200", "drafts-h200", "deviations-h100", "spread-vocabulary-h200", "spread-vocabulary-h100-x4"),
            *("spread-contrastive-h100", "spread-contrastive-h200", "spread-trainings-h200", "matching-h100", "masks-h200"),
            *("vision-h200", "metric-learning-h200"),
            *("self-distillation-h200", "detectors-and-masks-h200"),
        ),
        LOSSES,
    ),
    **dict.fromkeys(
        ("training-h200", "throughput-h100", "detection", "effects", "several-gpus-h100", "several-gpus-h200", "speed-h100-x4"), APP
    ),
    "assignment-h200": (
        "packages/kernels/src/lossforge/kernels/assignment",
        "packages/losses/src/lossforge/losses/detection",
    ),
}
"""The sources that each file of results/ measures. A file that is not here compares two commits, or is the reason for a choice."""
PLACES = {
    "pyproject.toml": r'^version = "([^"]+)"',
    "packages/*/pyproject.toml": r'(?:^version = "|"lossforge(?:-\w+)?==)([^"]+)"',
    "packages/*/src/lossforge/*/__init__.py": r'^__version__ = "([^"]+)"',
    "CITATION.cff": r"^version: (\S+)",
}
"""Where the version stands: files, and what is around it."""
UNRELEASED = "## [Unreleased]\n"

COMMIT = re.compile(r"\b[0-9a-f]{7,40}\b")
VERSION = re.compile(r"N\.N\.N((a|b|rc|\.post)N)?".replace("N", "(0|[1-9][0-9]*)"))


def places(root: Path) -> Iterator[tuple[Path, re.Pattern[str], str]]:
    """Yield the files that have the version, what is around it there, and their texts."""
    for files, pattern in PLACES.items():
        for path in sorted(root.glob(files)):
            yield path, re.compile(pattern, re.MULTILINE), path.read_text(encoding="utf-8")


def versions(root: Path) -> list[tuple[str, str]]:
    """Return each place of the version, and the version there."""
    return [(str(path.relative_to(root)), found[1]) for path, pattern, text in places(root) for found in pattern.finditer(text)]


def write_version(root: Path, version: str, date: str) -> None:
    """Write the version everywhere, and name what CHANGELOG.md has as unreleased by it.

    Raises:
        ValueError: the version is not one that PyPI takes, or CHANGELOG.md has nothing unreleased.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"--version {version}: a version is like 0.2.0, 0.2.0rc1 or 0.2.0.post1")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    head = f"## [{version}] - {date}\n"
    if f"## [{version}]" in text:
        text = re.sub(rf"^## \[{re.escape(version)}\].*\n", head, text, flags=re.MULTILINE)
    elif UNRELEASED in text:
        text = text.replace(UNRELEASED, f"{UNRELEASED}\n{head}", 1)
    else:
        raise ValueError(f"CHANGELOG.md has no section {UNRELEASED.strip()}, and none of {version}")
    changelog.write_text(text, encoding="utf-8")
    for path, pattern, text in places(root):
        path.write_text(pattern.sub(lambda found: found[0].replace(found[1], version), text), encoding="utf-8")


def run(*command: str, root: Path) -> tuple[int, str]:
    """Return the status of a command, and what it printed."""
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout.strip()


def failure(command: str, root: Path) -> list[str]:
    """Run a command; where it fails return that, with the last line that it printed."""
    status, text = run(*command.split(), root=root)
    return [f"{command} failed ({(text or 'it printed nothing').splitlines()[-1]})"] if status else []


def check_version(root: Path) -> list[str]:
    (_, version), *others = versions(root)
    write = f"write it with --version {version}"
    missing = [f"{place} says {other}, pyproject.toml {version}: {write}" for place, other in others if other != version]
    untagged, tagged = run("git", "rev-parse", "--quiet", "--verify", f"v{version}^{{commit}}", root=root)
    if not untagged and tagged != run("git", "rev-parse", "HEAD", root=root)[1]:
        missing.append(f"the tag v{version} is there, of another commit: choose the next version")
    return missing


def check_changelog(root: Path) -> list[str]:
    version, text = versions(root)[0][1], (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return [f"CHANGELOG.md has no section of {version} with a date: tools/release.py --version {version} writes it"]
    missing = [] if re.search(r"^- ", found[2], re.MULTILINE) else [f"CHANGELOG.md says nothing of {version}"]
    unreleased = text.partition(UNRELEASED)[2].partition("\n## ")[0]
    return missing + (["CHANGELOG.md still has unreleased changes: move them to the version's section"] if "- " in unreleased else [])


def check_tree(root: Path) -> list[str]:
    _, changed = run("git", "status", "--porcelain", root=root)
    return [f"not committed: {', '.join(line.split(maxsplit=1)[1] for line in changed.splitlines())}"] if changed else []


def check_archives(root: Path) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return all_faults(root, Path(folder))


def check_benchmark(root: Path) -> list[str]:
    """Compare the sources that each file of results measures with those of the commits that it names."""
    found = []
    for name, sources in MEASURED.items():
        file = root / "results" / f"{name}.json"
        if not file.is_file():
            found.append(f"results/{file.name} is missing")
            continue
        for commit in commits_of(json.loads(file.read_text(encoding="utf-8"))):
            status, changed = run("git", "diff", "--name-only", commit, "HEAD", "--", *sources, root=root)
            files = [Path(each).name for each in changed.splitlines()]
            number = "1 source file" if len(files) == 1 else f"{len(files)} source files"
            some = ", ".join([*files[:4], *(["…"] if files[4:] else [])])
            if status:
                found.append(f"results/{file.name} is of {commit}, a commit that is not here")
            elif files:
                found.append(f"results/{file.name} is of {commit}; since then {number} changed ({some})")
    return [*found, "measure them on a GPU machine, as docs/benchmarks/index.md says, and commit the reports"] if found else []


def commits_of(found: Any) -> list[str]:
    """Return the commits that a file of results names for its parts, each once."""
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    own = COMMIT.findall(found["commit"]) if isinstance(found, dict) and "commit" in found else []
    return list(dict.fromkeys([*own, *(commit for part in parts for commit in commits_of(part))]))


def check_first_page(root: Path) -> list[str]:
    """Say which cases of the first page were not measured, or by more than one commit a file, an old one, or with untested libraries."""
    import compared
    import reported

    known, missing, commits = compared.on_first_page(compared.cases(root / "results")), list[str](), dict[str, list[str]]()
    for shown in compared.FIRST_PAGE:
        if (case := known.get((shown.file, shown.key))) is None:
            missing.append(f"not measured: {shown.use}: {shown.key} of results/{shown.file}.json")
        else:
            commits.setdefault(shown.file, []).extend(COMMIT.findall(case.source.rpartition("commit")[2]))
    for file, each in commits.items():
        named = [*dict.fromkeys(each)]
        if len(named) > 1:
            missing.append(f"results/{file}.json: the first page's figures are of {len(named)} commits: {', '.join(named)}")
        for commit in named:
            unknown, count = run("git", "rev-list", "--count", f"{commit}..HEAD", root=root)
            if unknown:
                missing.append(f"results/{file}.json is of {commit}, a commit that is not here")
            elif int(count) > OLDEST:
                missing.append(f"results/{file}.json is of {commit}, {count} commits ago: measure it again after at most {OLDEST}")
    return missing + reported.untested(root / "results" / "integrations.json")


CHECKLIST: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "version": (check_version, "the same everywhere, and not released yet"),
    "changelog": (check_changelog, "has the version's section, dated"),
    "lock": (partial(failure, "uv lock --check"), "agrees with the pyproject.toml files"),
    "pins": (pins.unpinned, "images and actions are pinned by digest"),
    "tree": (check_tree, "everything is committed"),
    "archives": (check_archives, "wheels and source archives are whole, and pass twine"),
    "environments": (partial(failure, "tools/smoke_wheels"), "installed by name, it works with the oldest, locked and newest torch"),
    "docs": (partial(failure, "python -m zensical build --strict --clean"), "the documentation builds without a warning"),
    "figures": (check_first_page, f"each file's figures are of one commit, at most {OLDEST} commits ago, and of tested versions"),
    "benchmark": (check_benchmark, "the committed figures are of these sources"),
}


def walk(root: Path, skipped: list[str]) -> int:
    print(f"Release {versions(root)[0][1]}")
    lacking = 0
    for name, (check, promise) in CHECKLIST.items():
        if name in skipped:
            print(f"  skipped  {name:<13} {promise}")
            continue
        missing = check(root)
        lacking += bool(missing)
        print(f"  {'MISSING' if missing else 'ok':<8} {name:<13} {missing[0] if missing else promise}")
        for line in missing[1:]:
            print(f"{'':25}{line}")
    print(f"\n{lacking} of {len(CHECKLIST)} are missing" if lacking else "\nready: tag it, as docs/release.md says")
    return 1 if lacking else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="tools/release.py", description="Walk a release's checklist; status 1 where something is missing.")
    made.add_argument("--version", help="write this version and today's date everywhere, and renew uv.lock, before the walk")
    made.add_argument("--pin", action="store_true", help="write the digests of images and actions first, from their registries")
    made.add_argument("--tag", help="the tag that is about to be published: it has to be the version's")
    made.add_argument("--skip", action="append", choices=CHECKLIST, default=[], help="leave a check out; may be given again")
    return made


def main() -> int:
    given = parser().parse_args()
    try:
        if given.version:
            write_version(ROOT, given.version, datetime.datetime.now(datetime.UTC).date().isoformat())
            subprocess.run(["uv", "lock"], cwd=ROOT, check=True)
        if given.pin:
            print("\n".join(pins.pin(ROOT)) or "every image and action has its digest")
    except pins.PinError as problem:
        print(f"error: {problem}; nothing is pinned", file=sys.stderr)
        return 1
    except ValueError as problem:
        parser().error(str(problem))
    version = versions(ROOT)[0][1]
    if given.tag not in (None, f"v{version}"):
        parser().error(f"--tag {given.tag}: the sources are version {version}, whose tag is v{version}")
    return walk(ROOT, given.skip)


if __name__ == "__main__":
    sys.exit(main())
