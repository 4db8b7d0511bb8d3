"""Write the losses and their kernels as a kernel of the Hugging Face hub, which `kernels.get_kernel` loads without an installation.

The hub loads several versions in one process, each under a name of its own. So imports become relative, and the operators' namespace is
that name. Integrations, the doctor, the command lines and what only tests compare with are left out.

usage: tools/hub_kernel.py [FOLDER]    writes the repository to upload, with README.md, LICENSE and build/; build/hub by default
"""

import ast
import base64
import hashlib
import json
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "lossforge"
VARIANTS = {"torch-universal": "cuda"}
"""Folders of build/, and the backend that their metadata names."""
LEFT_OUT = {"__main__.py", "doctor.py", "oracles"}
MAIN = '''"""Loss functions as fused Triton kernels: everything that `lossforge.losses` has."""

from .losses import *
from .losses import __all__, __version__
'''
FORMER = '''"""The same kernel where loaders before the flat layout look for it."""

import importlib.util
import json
import sys
from pathlib import Path

_folder = Path(__file__).resolve().parents[1]
_name = json.loads((_folder / "metadata.json").read_text(encoding="utf-8"))["id"]
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _folder / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update({name: getattr(sys.modules[_name], name) for name in (*sys.modules[_name].__all__, "__all__", "__version__")})
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels, loss, triton]
---

# lossforge

Loss functions for PyTorch as fused Triton kernels. Python 3.11 and PyTorch {torch}.

```python
from kernels import get_kernel

lossforge = get_kernel("lossforge/lossforge", version={version}, trust_remote_code=True)
loss = lossforge.cross_entropy(logits, target)
```

Sources and documentation: {source}
"""


def relative(text: str, file: Path) -> str:
    """Return a module's text with its imports of the package made relative.

    Args:
        text: of the module.
        file: its path from the outermost package.

    Raises:
        ValueError: it imports the package by `import lossforge…`, which has no relative form.
    """
    lines = text.split("\n")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(name.name.partition(".")[0] == NAME for name in node.names):
            raise ValueError(f"{file}:{node.lineno}: write `from {NAME}… import …`, which can be made relative")
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == NAME:
            assert node.module
            dots = "." * (len(file.parent.parts) + 1)
            line = lines[node.lineno - 1]
            start = node.col_offset
            lines[node.lineno - 1] = line[:start] + line[start:].replace(
                f"from {node.module} ", f"from {dots}{node.module.removeprefix(NAME).removeprefix('.')} ", 1
            )
    return "\n".join(lines)


def sources(root: Path) -> dict[str, str]:
    """Return the kernel's files by their paths from a variant's folder."""
    found = {"__init__.py": MAIN, f"{NAME}/__init__.py": FORMER}
    for package in ("kernels", "losses"):
        folder = root / "packages" / package / "src" / NAME
        for path in sorted((folder / package).rglob("*.py")):
            file = path.relative_to(folder)
            if not LEFT_OUT & set(file.parts):
                found[file.as_posix()] = relative(path.read_text(encoding="utf-8"), file)
    return found


def metadata(files: dict[str, str], backend: str, project: dict[str, object]) -> dict[str, object]:
    """Return what metadata.json holds. The id names the operators' namespace, too, and is another one for other sources."""
    digests = {file: hashlib.sha256(text.encode()).digest() for file, text in files.items()}
    whole = hashlib.sha256(b"".join(file.encode() + digest for file, digest in sorted(digests.items()))).hexdigest()
    return {
        "name": NAME,
        "id": f"_{NAME}_{backend}_{whole[:12]}",
        "version": int(str(project["version"]).partition(".")[0]),
        "license": project["license"],
        "upstream": project["urls"]["Repository"],  # type: ignore[index]
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {file: base64.b64encode(digests[file]).decode() for file in sorted(digests)}},
    }


def write(root: Path, folder: Path) -> None:
    """Write the repository of the kernel.

    Raises:
        FileExistsError: the folder has a build, whose files could be of other sources.
    """
    project = tomllib.loads((root / "packages" / "losses" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = sources(root)
    for variant, backend in VARIANTS.items():
        for file, text in files.items():
            path = folder / "build" / variant / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as out:
                out.write(text)
        described = json.dumps(metadata(files, backend, project), indent=2) + "\n"
        (folder / "build" / variant / "metadata.json").write_text(described, encoding="utf-8")
    torch = next(each for each in project["dependencies"] if each.startswith("torch")).removeprefix("torch")
    version = project["version"].partition(".")[0]
    (folder / "README.md").write_text(CARD.format(torch=torch, version=version, source=project["urls"]["Repository"]), encoding="utf-8")
    shutil.copy(root / "LICENSE", folder)


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    write(ROOT, Path(sys.argv[1]) if len(sys.argv) == 2 else ROOT / "build" / "hub")
