"""Names from outside as text and nothing else, in each format that is written: a terminal, CSV and Markdown.

HTML is written by Jinja, which escapes by itself.
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

# a terminal obeys control characters, and marks of direction turn what stands after them around
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# what a spreadsheet takes for the beginning of a formula, also in its wide forms (OWASP, CSV Injection)
FORMULA = tuple("=+-@\t\r\n＝＋－＠")
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
MARKUP = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)|[&<>]")  # an underscore within a word is one
BLOCK = re.compile(r"^(\s*)([-+#]+|\d+[.)])(?=\s)")  # begins a list or a heading


def visible(text: str) -> str:
    """Return a text for a terminal: control characters but tabs and line ends as their escapes, such as `\\x1b`."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file: a text that a spreadsheet would calculate gets an apostrophe before it; a number stays one."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a CSV file, names of columns and values as `csv_cell` has them."""
    return {csv_cell(name): csv_cell(value) for name, value in row.items()}


def markdown_text(text: str) -> str:
    """Return a text for Markdown, in a line or a cell of a table, that shows as it is: without markup, links, HTML and line ends."""
    line = MARKUP.sub(lambda found: ENTITIES.get(found[0], f"\\{found[0]}"), " ".join(visible(text).split()))
    return BLOCK.sub(lambda found: f"{found[1]}{found[2][:-1]}\\{found[2][-1]}", line)


def markdown_code(text: str, language: str) -> str:
    """Return a text as a block of code, whose fence is longer than any that the text has."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
