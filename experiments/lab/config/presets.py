"""Read the files of the user's config folders: what Hydra would ignore or never finish is refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from lab.base.errors import UserError
from lab.base.files import read_text
from lab.base.yaml_limits import LEVELS, is_shallow

VALUES = 10_000
"""Most values of a file, each reference counted as what it stands for. OmegaConf takes about 3 s for so many."""


OF_HYDRA = re.compile(r"^(?:(?:override|optional)\s+)*/?(?:_global_\.)?hydra\b|@(?:_global_\.)?hydra\b")


class CheckedSource(FileConfigSource):
    """Hydra's source of files, for folders of the user."""

    @staticmethod
    def scheme() -> str:
        return "checked"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        text = read_text(path)
        try:
            small = is_shallow(text, VALUES, references=True)
        except yaml.YAMLError:
            small = True  # Hydra's own reader says where the mistake is
        if not small:
            raise UserError(
                f"{path}: has more than {LEVELS} levels or {VALUES:,} values, references counted as what they stand for, "
                "or a reference to itself."
            )
        found = super().load_config(config_path)
        if name := next(filter(OF_HYDRA.search, _names(found)), None):
            raise UserError(
                f"{path}: sets {name}: Hydra's own settings have no effect in a file. A run's folder is made under trainer.runs=; "
                "give hydra/launcher= and hydra.launcher.<setting>= on the command line of a sweep (-m)."
            )
        return found


def _names(found: ConfigResult) -> Iterator[str]:
    """Yield what a file sets by name: its package, its keys, and the groups and packages of its `defaults`."""
    yield found.header.get("package") or ""
    if isinstance(found.config, DictConfig):
        yield from map(str, found.config)
        for each in found.config.get("defaults") or ():
            yield from map(str, each) if isinstance(each, DictConfig) else (str(each),)


def address(folder: Path) -> str:
    """Return the address under which Hydra reads a config folder of the user; Hydra decodes nothing in it."""
    Plugins.instance().register(CheckedSource)
    return f"{CheckedSource.scheme()}://{folder}"
