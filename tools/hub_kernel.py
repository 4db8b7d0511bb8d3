"""Write the losses and their kernels as a kernel of the Hugging Face hub, which `kernels.get_kernel` loads without an installation.

The hub loads several versions in one process, each under a name of its own. So imports become relative, and the operators' namespace is
that name. Integrations, the doctor, the command lines and what only tests compare with are left out.

usage: tools/hub_kernel.py [--small] [FOLDER]    writes the repository to upload, with README.md, LICENSE and build/; build/hub by default
  --small    writes what trains language models alone, with the modules that it needs, and layers for kernels.kernelize; build/hub-small
"""

import ast
import base64
import hashlib
import json
import re
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
SMALL = {
    "classes.binary": ["sigmoid_focal_loss"],
    "classes.cross_entropy": ["cross_entropy"],
    "classes.divergence": ["kl_div_with_logits"],
    "language.tokens": ["selective_log_softmax"],
    "language.linear": ["linear_cross_entropy", "linear_kl_div", "linear_selective_log_softmax"],
    "preference.objectives": [],
    "preference.grpo": ["grpo_loss"],
    "preference.pairwise": ["dpo_loss"],
}
"""The functions of the small kernel, by their files of definitions."""
TEMPLATES = "losses/templates/__init__.py"
SMALL_MAIN = '''"""Loss functions of language models as fused Triton kernels, a part of lossforge."""

from . import layers
from .losses import *
from .losses import __version__
from .losses import __all__ as _functions

__all__ = [*_functions, "layers"]
'''
LAYERS = '''"""Forwards for `kernels.kernelize`, which gives them to modules of torch or a model. Options are the module's attributes."""

from torch import Tensor, nn

from . import losses


class CrossEntropyLoss(nn.Module):
    """The forward of torch.nn.CrossEntropyLoss."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        options = {"ignore_index": self.ignore_index, "reduction": self.reduction, "label_smoothing": self.label_smoothing}
        return losses.cross_entropy(input, target, self.weight, **options)


class ForCausalLMLoss(nn.Module):
    """The loss of transformers' language models, by the name that its mapping of kernels has."""

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        divisor = num_items_in_batch.to(logits.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch
        return losses.cross_entropy(logits.view(-1, vocab_size), target, ignore_index=ignore_index, normalizer=divisor)


class KLDivWithLogitsLoss(nn.Module):
    """Kullback-Leibler divergence of two sets of logits, of a module with `temperature` and `reduction`."""

    def forward(self, input: Tensor, target_logits: Tensor) -> Tensor:
        return losses.kl_div_with_logits(input, target_logits, self.temperature, self.reduction)


class LinearCrossEntropyLoss(nn.Module):
    """Cross entropy from hidden states and the head's weight, of a module with `ignore_index` and `reduction`."""

    def forward(self, input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return losses.linear_cross_entropy(input, weight, target, ignore_index=self.ignore_index, reduction=self.reduction)
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels, loss, triton]
---

# {name}

Loss functions for PyTorch as fused Triton kernels. Python 3.11 and PyTorch {torch}.

```python
from kernels import get_kernel

lossforge = get_kernel("lossforge/{name}", version={version}, trust_remote_code=True)
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


def small_sources(root: Path) -> dict[str, str]:
    """Return the files of the small kernel: those that its functions reach by imports, or by names of modules in strings."""
    whole = sources(root)
    names = sorted(name for each in SMALL.values() for name in each)
    public = ["LinearTeacher", "TopKTeacher", "backend", *names, "plain_torch"]
    version = next(line for line in whole["losses/__init__.py"].splitlines() if line.startswith("__version__"))
    files = whole | {
        "losses/__init__.py": f"""from .base.state import backend, plain_torch
from .engine.linear.teacher import LinearTeacher, TopKTeacher
from .functional import {", ".join(names)}

{version}
__all__ = {public!r}
""",
        "losses/definitions/__init__.py": "".join("from .{} import {}\n".format(*file.split(".")) for file in SMALL),
        "losses/definitions/language/__init__.py": "",
        "losses/definitions/preference/__init__.py": "",
        TEMPLATES: "",
    }
    files[TEMPLATES] = of_templates(whole[TEMPLATES], reached(files))
    return {"__init__.py": SMALL_MAIN, "layers.py": LAYERS} | {file: files[file] for file in sorted(reached(files))}


def of_templates(text: str, kept: set[str]) -> str:
    """Return the table of templates without those whose file is not kept."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("losses.templates."):
            file = str(node.module).replace(".", "/")
            if not kept & {f"{file}.py", f"{file}/__init__.py"}:
                dropped = {lines[node.lineno - 1], *(f"        {each.name}," for each in node.names)}
                lines = ["" if line in dropped else line for line in lines]
    return "\n".join(lines)


def reached(files: dict[str, str]) -> set[str]:
    """Return the files that losses/__init__.py imports, at once or later, also by a string such as "binary.focal.focal"."""
    found: set[str] = set()
    waiting = ["losses/__init__.py"]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        modules = {".".join(Path(file).parent.parts[: i + 1]) for i in range(len(Path(file).parent.parts))}
        tree = ast.parse(files[file])
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                node.body = []
            elif isinstance(node, ast.ImportFrom) and node.level:
                folder = Path(file).parent.parts
                start = ".".join([*folder[: len(folder) + 1 - node.level], *([node.module] if node.module else [])])
                modules |= {start, *(f"{start}.{each.name}".lstrip(".") for each in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+(\.\w+)+", node.value):
                ends = (node.value, node.value.rpartition(".")[0])
                modules |= {f"{where}.{end}" for where in ("kernels", "kernels.formulas") for end in ends}
        paths = [each.replace(".", "/") for each in modules]
        waiting += [path for each in paths for path in (f"{each}.py", f"{each}/__init__.py") if path in files]
    return found


def metadata(files: dict[str, str], backend: str, project: dict[str, object], name: str = NAME) -> dict[str, object]:
    """Return what metadata.json holds. The id names the operators' namespace, too, and is another one for other sources."""
    digests = {file: hashlib.sha256(text.encode()).digest() for file, text in files.items()}
    whole = hashlib.sha256(b"".join(file.encode() + digest for file, digest in sorted(digests.items()))).hexdigest()
    return {
        "name": name,
        "id": f"_{name.replace('-', '_')}_{backend}_{whole[:12]}",
        "version": int(str(project["version"]).partition(".")[0]),
        "license": project["license"],
        "upstream": project["urls"]["Repository"],  # type: ignore[index]
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {file: base64.b64encode(digests[file]).decode() for file in sorted(digests)}},
    }


def write(root: Path, folder: Path, small: bool = False) -> None:
    """Write the repository of the kernel.

    Args:
        root: the checkout.
        folder: where it is written.
        small: the kernel of language models alone.

    Raises:
        FileExistsError: the folder has a build, whose files could be of other sources.
    """
    project = tomllib.loads((root / "packages" / "losses" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files, name = (small_sources(root), f"{NAME}-small") if small else (sources(root), NAME)
    for variant, backend in VARIANTS.items():
        for file, text in files.items():
            path = folder / "build" / variant / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as out:
                out.write(text)
        described = json.dumps(metadata(files, backend, project, name), indent=2) + "\n"
        (folder / "build" / variant / "metadata.json").write_text(described, encoding="utf-8")
    torch = next(each for each in project["dependencies"] if each.startswith("torch")).removeprefix("torch")
    version = project["version"].partition(".")[0]
    card = CARD.format(name=name, torch=torch, version=version, source=project["urls"]["Repository"])
    (folder / "README.md").write_text(card, encoding="utf-8")
    shutil.copy(root / "LICENSE", folder)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--small"]
    if len(words) > 1 or any(word.startswith("-") for word in words):
        sys.exit(__doc__)
    small = "--small" in sys.argv
    write(ROOT, Path(words[0]) if words else ROOT / "build" / ("hub-small" if small else "hub"), small)
