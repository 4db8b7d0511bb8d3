"""A release: what its checklist checks, on the packages as they are built, and on copies of them that lack something."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import packages_built
import pytest
import release
import smoke

ROOT = Path(__file__).resolve().parents[1]

HOME = "https://github.com/lossforge/lossforge"
KEPT = ("packages", "LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "pyproject.toml")


def copy(to: Path) -> Path:
    """The files of a release, as a repository of their own."""
    for name in KEPT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        else:
            shutil.copy(source, to / name)
    return to


def git(root: Path, *words: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    return subprocess.run(["git", *names, *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    root = copy(tmp_path)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    return root


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    packages_built.build(ROOT, folder)
    return folder


@pytest.mark.parametrize("name", packages_built.PACKAGES)
def test_archives_are_whole(dist, name):
    assert packages_built.faults(ROOT, dist, name) == []


def test_archives_pass_the_check_of_the_index(dist):
    assert packages_built.twine_faults(dist) == []


def test_what_an_archive_lacks_is_found(tmp_path):
    """The losses without their licence, their marker of types, a bound of torch, a pinned version and a link."""
    root = copy(tmp_path)
    package = root / "packages" / "losses"
    (package / "LICENSE").unlink()
    (package / "LICENSE").write_text("Do what you like.")
    (package / "src/lossforge/losses/py.typed").unlink()
    (package / "README.md").write_text("")
    text = (package / "pyproject.toml").read_text().replace("torch>=2.9,<2.16", "torch>=2.9").replace("kernels==", "kernels>=")
    (package / "pyproject.toml").write_text(re.sub(r"^(Changelog|authors) = .*\n", "", text, flags=re.MULTILINE))
    packages_built.build(root, root / "dist")
    wheel = f"lossforge-{release.versions(ROOT)[0][1]}-py3-none-any.whl"
    assert [fault.removeprefix(f"{wheel} ") for fault in packages_built.faults(root, root / "dist", "losses")] == [
        "lacks py.typed",
        "has no author in its metadata",
        "has no description in its metadata",
        "has no link Changelog",
        f"needs lossforge-kernels>={release.versions(ROOT)[0][1]}, not exactly {release.versions(ROOT)[0][1]}",
        "needs torch>=2.9, which has not both a lower and an upper bound",
        "has not the repository's LICENSE",
    ]
    said = "\n".join(packages_built.twine_faults(root / "dist"))
    assert f"twine: Checking {root}/dist/{wheel}: FAILED" in said
    assert "`long_description` missing" in said


def test_files_of_another_build_are_found(dist, tmp_path):
    """A module that no source has."""
    for archive in dist.glob("lossforge_bench*"):
        shutil.copy(archive, tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl")), "a") as wheel:
        wheel.writestr("lossforge/__init__.py", "")
    found = packages_built.faults(ROOT, tmp_path, "bench")
    assert [fault.split(" ", 1)[1] for fault in found] == [
        "has lossforge/__init__.py, no source",
        "has lossforge/__init__.py, which would hide the other packages",
    ]


def test_the_version_stands_in_every_place():
    found = release.versions(ROOT)
    assert len({version for _, version in found}) == 1
    packages = len(packages_built.PACKAGES)
    pins = 4  # losses on kernels and, as an extra, on bench; bench on both
    assert len(found) == 1 + packages + pins + packages + 1
    locked = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    assert {p["version"] for p in locked if p["name"].startswith("lossforge")} == {found[0][1]}


def test_write_version(tree):
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A loss.\n\n## [0.1.0] - 2026-01-01\n\n- All.\n")
    release.write_version(tree, "0.2.0rc1", "2027-02-03")
    assert {version for _, version in release.versions(tree)} == {"0.2.0rc1"}
    changed = git(tree, "diff", "-U0", "--", ":!CHANGELOG.md").splitlines()
    added = [line for line in changed if re.match(r"\+(?!\+)", line)]
    assert len(added) == len(release.versions(tree)) - 1  # two pins of the benchmarks stand in one line
    assert all("0.2.0rc1" in line for line in added)
    text = (tree / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [0.2.0rc1] - 2027-02-03\n\n### Added\n\n- A loss.\n\n## [0.1.0] - 2026-01-01\n" in text
    assert release.check_changelog(tree) == []
    release.write_version(tree, "0.2.0rc1", "2027-02-04")  # a day later
    assert (tree / "CHANGELOG.md").read_text().count("0.2.0rc1] - 2027-02-04\n") == 1


@pytest.mark.parametrize("version", ["v0.2", "new", "0.2.0-final"])
def test_a_version_that_cannot_be_is_refused(tree, version):
    with pytest.raises(ValueError, match=f"--version {version}: a version is like 0.2.0"):
        release.write_version(tree, version, "2027-02-03")
    assert git(tree, "status", "--porcelain") == ""


def test_check_version(tree):
    version = release.versions(tree)[0][1]
    assert release.check_version(tree) == []
    git(tree, "tag", f"v{version}")
    assert release.check_version(tree) == []  # of this commit
    citation = tree / "CITATION.cff"
    citation.write_text(citation.read_text().replace(version, "0.0.9"))
    git(tree, "commit", "-qam", "two")
    assert release.check_version(tree) == [
        f"CITATION.cff says 0.0.9, pyproject.toml {version}: write it with --version {version}",
        f"the tag v{version} is there, of another commit: choose the next version",
    ]


def test_check_changelog(tree):
    version, file = release.versions(tree)[0][1], tree / "CHANGELOG.md"
    file.write_text("## [Unreleased]\n\n- A loss.\n")
    assert "has no section" in release.check_changelog(tree)[0]
    file.write_text(f"## [Unreleased]\n\n- A loss.\n\n## [{version}] - 2027-02-03\n\n## [0.0.1] - 2026-01-01\n\n- All.\n")
    assert release.check_changelog(tree) == [
        f"CHANGELOG.md says nothing of {version}",
        "CHANGELOG.md still has unreleased changes: move them to the version's section",
    ]
    file.write_text(f"## [Unreleased]\n\n## [{version}] - 2027-02-03\n\n- A loss.\n")
    assert release.check_changelog(tree) == []


def test_check_tree_and_benchmark(tree, monkeypatch):
    monkeypatch.setattr(release, "MEASURED", {name: release.MEASURED[name] for name in ("bench-h200", "assignment-h200")})
    assert release.check_tree(tree) == []
    (tree / "results").mkdir()
    report, measured = tree / "results/bench-h200.json", git(tree, "rev-parse", "--short", "HEAD")
    report.write_text(json.dumps({"commit": measured}))
    (tree / "results/assignment-h200.json").write_text(json.dumps({"part": [{"commit": f"{measured} and {measured}"}]}))
    assert release.check_tree(tree) == ["not committed: results/"]
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "two")
    assert release.check_benchmark(tree) == []
    (tree / "packages/losses/src/lossforge/losses/base/option_types.py").write_text("")
    git(tree, "commit", "-qam", "three")
    assert release.check_benchmark(tree) == [
        f"results/bench-h200.json is of {measured}; since then 1 source file changed (option_types.py)",
        "measure them on a GPU machine, as docs/benchmarks/index.md says, and commit the reports",
    ]
    report.write_text('{"commit": "0000000"}')
    assert "a commit that is not here" in release.check_benchmark(tree)[0]
    report.unlink()
    assert release.check_benchmark(tree)[0] == "results/bench-h200.json is missing"


def test_check_first_page(tree):
    """The figures of one commit, then of two, then of one that is too long ago; and what was not measured."""
    shutil.copytree(ROOT / "results", tree / "results")
    file, known = tree / "results/integrations.json", git(tree, "rev-parse", "--short", "HEAD")
    found = json.loads(file.read_text(encoding="utf-8"))
    found = {part: each | {"commit": known, "transformers": "5.23.1"} for part, each in found.items()}
    file.write_text(json.dumps(found))

    def said(part: str) -> list[str]:
        return [line for line in release.check_first_page(tree) if part in line]

    assert said("results/integrations.json is of") == said("integrations.json, ") == []
    assert "results/detection.json is of ad64f73, a commit that is not here" in said("detection")
    git(tree, "commit", "--allow-empty", "-qm", "two")
    other = git(tree, "rev-parse", "--short", "HEAD")
    file.write_text(json.dumps(found | {"trl": found["trl"] | {"commit": other, "trl": "1.15.2"}}))
    assert f"results/integrations.json: the first page's figures are of 2 commits: {known}, {other}" in said("of 2 commits")
    assert said("trl: trl") == ["results/integrations.json, trl: trl 1.15.2 was measured; the version tested with our integration is 1.16."]
    file.write_text(json.dumps(found))
    for _ in range(release.OLDEST - 1):
        git(tree, "commit", "--allow-empty", "-qm", "more")
    assert said("commits ago") == []
    git(tree, "commit", "--allow-empty", "-qm", "one too many")
    assert said("commits ago") == [f"results/integrations.json is of {known}, 61 commits ago: measure it again after at most 60"]
    for part in found.values():
        part["runs"] = [run for run in part["runs"] if run["case"] != "SFT, Qwen3-0.6B"]
    file.write_text(json.dumps(found))
    assert "not measured: SFT of Qwen3-0.6B by TRL: trl SFT, Qwen3-0.6B of results/integrations.json" in said("not measured")


def test_every_file_of_results_names_its_commits():
    found = {path.stem: release.commits_of(json.loads(path.read_text(encoding="utf-8"))) for path in (ROOT / "results").glob("*.json")}
    assert all(found.values()), [name for name, commits in found.items() if not commits]
    # of two commits, and what choices were made by
    of_past = {"before-after-h100", "specialisation-h100", "tiles-h200", "kernels-earned-h200"}
    assert set(found) - of_past <= set(release.MEASURED), "a new file of results: name what it measures in tools/release.py"
    assert all((ROOT / source).exists() for sources in release.MEASURED.values() for source in sources)


def test_the_checklist_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(release.CHECKLIST, "docs", (lambda root: ["there is no page", "there is no index"], "the documentation builds"))
    rest = [name for name in release.CHECKLIST if name not in ("docs", "lock", "archives")]
    assert release.walk(ROOT, rest) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^  MISSING  docs +there is no page\n +there is no index$", printed, re.MULTILINE)
    assert re.search(r"^  ok       lock +agrees", printed, re.MULTILINE)
    assert re.search(r"^  ok       archives +wheels and", printed, re.MULTILINE)
    assert re.search(r"^  skipped  benchmark ", printed, re.MULTILINE)
    assert printed.endswith(f"1 of {len(release.CHECKLIST)} are missing\n")


def test_a_tag_of_another_version_is_refused():
    done = subprocess.run([sys.executable, "tools/release.py", "--tag", "v9.9.9"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--tag v9.9.9: the sources are version" in done.stderr


def test_examples_of_a_page(tmp_path):
    page = tmp_path / "page.md"
    blocks = ("python\n# a comment\nx = 2", "python\n# some/file.py\nraise", "sh\nls", "python\nassert x == 2")
    page.write_text("\n".join(f"```{block}\n```\n" for block in blocks))
    assert smoke.run_examples(page) == 2
    page.write_text(page.read_text().replace("x == 2", "x == 3"))
    with pytest.raises(AssertionError):
        smoke.run_examples(page)


def test_the_torches_that_are_tried_are_those_that_are_allowed():
    """The scripts name the oldest and the newest torch below the bound, and the locked one."""
    losses = tomllib.loads((ROOT / "packages/losses/pyproject.toml").read_text(encoding="utf-8"))
    oldest, below = re.search(r"torch>=([\d.]+),<2\.(\d+)", " ".join(losses["project"]["dependencies"])).groups()
    constraints = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]["constraint-dependencies"]
    locked = next(line.partition("==")[2] for line in constraints if line.startswith("torch=="))
    ends = f"2.{int(below) - 1}"
    assert f"|| set -- {oldest} {locked} {ends}\n" in (ROOT / "tools/smoke_wheels").read_text(encoding="utf-8")
    assert f"|| set -- {oldest} {ends}\n" in (ROOT / "tools/oldest_and_newest").read_text(encoding="utf-8")


def test_links_name_one_repository():
    files = git(ROOT, "ls-files", "*.md", "*.toml", "*.yml", "*.cff").splitlines()
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    found = {link for text in texts for link in re.findall(r"https://github\.com/[\w-]*lossforge[\w-]*/\w+", text)}
    assert found == {HOME}
    assert tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"] == HOME


def test_commands_of_the_page():
    """Its scripts are there, and take these options."""
    lines = re.findall(r"^ *(?:uv run --group docs )?(tools/.*)$", (ROOT / "docs" / "release.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"tools/release.py", "tools/smoke_wheels"}
    for line in lines:
        script, *words = line.partition("#")[0].split()
        assert (ROOT / script).stat().st_mode & 0o100 or script.endswith(".py")
        if script == "tools/release.py":
            release.parser().parse_args(words)


def test_the_checklist_is_described():
    page = (ROOT / "docs" / "release.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\w+) \|", page, re.MULTILINE)[1:] == list(release.CHECKLIST)
