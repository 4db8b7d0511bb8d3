"""Build the wheels and source archives of the packages, and look into them. Run as a program: `tools/packages_built.py FOLDER`."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import Requirement

PACKAGES = ("kernels", "losses", "bench")
LARGEST = 2**20
TWINE = "twine@7.0.0"
FIELDS = (
    *("summary", "author", "keywords", "license_expression", "license_files"),
    *("requires_python", "description_content_type", "description", "classifiers"),
)
LINKS = {"Repository", "Documentation", "Changelog", "Issues"}


def build(root: Path, dist: Path) -> None:
    """Build each package's source archive, and its wheel from that, so that what the archive lacks the wheel lacks, too."""
    for name in PACKAGES:
        subprocess.run(["uv", "build", "--quiet", "--out-dir", str(dist), str(root / "packages" / name)], check=True)


def faults(root: Path, dist: Path, name: str) -> list[str]:
    """Return what a package's archives lack, or have too much."""
    version = tomllib.loads((root / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    archive_name = "lossforge" if name == "losses" else f"lossforge_{name}"
    wheel, sdist = dist / f"{archive_name}-{version}-py3-none-any.whl", dist / f"{archive_name}-{version}.tar.gz"
    found = [f"{path.name} has {size:,} bytes, more than {LARGEST:,}" for path in (wheel, sdist) if (size := path.stat().st_size) > LARGEST]
    info = f"{archive_name}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        held = {entry: archive.read(entry) for entry in archive.namelist() if not entry.endswith("/")}
    metadata, _ = parse_email(held[f"{info}/METADATA"])
    found += [f"{wheel.name} {fault}" for fault in (*_files(root, name, held), *_metadata(metadata, version))]
    if held.get(f"{info}/licenses/LICENSE") != (root / "LICENSE").read_bytes():
        found.append(f"{wheel.name} has not the repository's LICENSE")
    return found


def _files(root: Path, name: str, held: dict[str, bytes]) -> list[str]:
    """Compare what is to be installed with the package's sources."""
    source = root / "packages" / name / "src"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    installed = {entry for entry in held if ".dist-info/" not in entry}
    found = [f"lacks {file}" for file in sorted(wanted - installed)] + [f"has {file}, no source" for file in sorted(installed - wanted)]
    if f"lossforge/{name}/py.typed" not in installed:
        found.append("lacks py.typed")
    if "lossforge/__init__.py" in installed:
        found.append("has lossforge/__init__.py, which would hide the other packages")
    return found


def _metadata(metadata: RawMetadata, version: str) -> list[str]:
    found = [f"has no {field} in its metadata" for field in FIELDS if not metadata.get(field)]
    found += [f"has no link {link}" for link in sorted(LINKS - metadata.get("project_urls", {}).keys())]
    for needed in map(Requirement, metadata.get("requires_dist", [])):
        if needed.name.partition("-")[0] == "lossforge" and str(needed.specifier) != f"=={version}":
            found.append(f"needs {needed}, not exactly {version}")
        if needed.name in ("torch", "triton") and {each.operator for each in needed.specifier} != {">=", "<"}:
            found.append(f"needs {needed}, which has not both a lower and an upper bound")
    return found


def twine_faults(dist: Path) -> list[str]:
    """Return what twine's strict check, which is PyPI's, says of the archives."""
    archives = sorted(str(path) for path in dist.glob("lossforge*"))
    command = ["uv", "tool", "run", "--quiet", TWINE, "--no-color", "check", "--strict", *archives]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "1000"})
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip() and not line.endswith(": PASSED")]
    return [f"twine: {line}" for line in lines or ["it failed without a word"]] if done.returncode else []


def all_faults(root: Path, dist: Path) -> list[str]:
    build(root, dist)
    return [*(fault for name in PACKAGES for fault in faults(root, dist, name)), *twine_faults(dist)]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = all_faults(Path(__file__).resolve().parents[1], folder)
    print("\n".join(found) or f"the archives in {folder} are whole")
    sys.exit(bool(found))
