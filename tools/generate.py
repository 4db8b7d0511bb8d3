"""Write every file that is generated; with --check only say which are stale, and end with status 1 where one is.

Where something is missing, no file is changed.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from lab.base.files import write_text

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "measurements"))  # whose tables are in the documentation


def put_back(path: Path, before: str | None) -> None:
    if before is None:
        path.unlink()
    else:
        write_text(path, before)


def written(files: dict[Path, str], check: bool, undo: ExitStack) -> list[Path]:
    """Write files that are not as given, or only return them where `check`. undo: puts back what stood there."""
    before = {path: path.read_text(encoding="utf-8") if path.is_file() else None for path in files}
    stale = [path for path in files if before[path] != files[path]]
    for path in () if check else stale:
        undo.callback(put_back, path, before[path])
        write_text(path, files[path])
    return stale


def code(check: bool, undo: ExitStack) -> list[Path]:
    """Write what editors read of the public functions and modules, and the list of exported names."""
    import loss_code

    return written(loss_code.files(), check, undo)


def rest(check: bool, undo: ExitStack) -> list[Path]:
    """Write what is made of the registry: configs first, because the schemas of the settings page read them."""
    import loss_configs

    stale = written(loss_configs.files(), check, undo)
    if check and stale:
        return stale
    import loss_pages
    import settings_page
    import tables

    for made in (settings_page, tables, loss_pages):
        stale += written(made.files(), check, undo)
    pictures = tables.stale_drawings() | loss_pages.stale_drawings()
    for draw in () if check else pictures.values():
        draw()
    return [*stale, *pictures]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    with ExitStack() as undo:  # later files are made from what earlier ones say, so that these must be written first
        stale = code(check, undo)
        if not (check and stale):
            stale += rest(check, undo)
        undo.pop_all()
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale, run uv run tools/generate.py' if check else 'written'}", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
