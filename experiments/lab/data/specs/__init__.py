"""The data sources: each file here has the records of one kind, as `SPECS`. A new file is a new source."""

import pkgutil
from importlib import import_module

from lab.data.spec import DataSpec

SOURCES: dict[str, DataSpec] = {
    spec.name: spec for found in pkgutil.iter_modules(__path__) for spec in import_module(f"{__name__}.{found.name}").SPECS
}
