"""Write files that are complete or absent."""

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a text beside the file and rename it, so that neither a reader nor an interrupt meets half of it; a link is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with draft.open("x", encoding="utf-8") as file:  # refuses a link
        file.write(text)
    draft.replace(path)
