"""Write every file that is generated; with --check only say which are stale, and end with status 1 where one is."""

import argparse
import importlib.util
import sys
from pathlib import Path

from lab.base.files import write_text

ROOT = Path(__file__).resolve().parents[1]


def written(files: dict[Path, str], check: bool) -> list[Path]:
    """Write files that are not as given, or only return them where `check`."""
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if not check:
        for path in stale:
            write_text(path, files[path])
    return stale


def code(check: bool) -> list[Path]:
    """Write the public functions and modules, from the definitions alone: the package's own __init__ imports what is not written yet."""
    import lossforge

    spec = importlib.util.find_spec("lossforge.losses")
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = lossforge.losses = package
    import loss_code

    stale = written(loss_code.files(), check)
    if not (check and stale):
        spec.loader.exec_module(package)
    return stale


def rest(check: bool) -> list[Path]:
    """Write what is made of the registry: configs first, because the schemas of the settings page read them."""
    import loss_configs

    stale = written(loss_configs.files(), check)
    if check and stale:
        return stale
    import loss_pages
    import settings_page
    import tables

    for made in (settings_page, tables, loss_pages):
        stale += written(made.files(), check)
    pictures = tables.stale_drawings() | loss_pages.stale_drawings()
    for draw in () if check else pictures.values():
        draw()
    return [*stale, *pictures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = code(check)
    if not (check and stale):
        stale += rest(check)
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale, run uv run tools/generate.py' if check else 'written'}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
