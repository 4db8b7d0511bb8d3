"""Write generated files; with --check on the command line only say which are stale."""

import sys
from pathlib import Path

from lab.runs.files import write_text


def write_or_check(files: dict[Path, str]) -> int:
    """Return the exit status: 1 where --check finds a file that is not as it would be written."""
    check = "--check" in sys.argv[1:]
    stale = [path for path, made in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != made]
    for path in stale:
        if check:
            print(f"{path} is stale: run python tools/{Path(sys.argv[0]).name}", file=sys.stderr)
        else:
            write_text(path, files[path])
    return int(check and bool(stale))
