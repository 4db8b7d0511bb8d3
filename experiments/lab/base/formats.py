"""Write names from outside as plain text in each format (a terminal, CSV, Markdown), and mask credentials in addresses.

HTML is written by Jinja, which escapes by itself. No file, tag or message holds a credential.
"""

import contextlib
import os
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

# a terminal obeys control characters, direction marks reverse the text after them, and surrogates (bytes of a name that is not UTF-8)
# cannot be written
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# characters that begin a formula in a spreadsheet, also in their wide forms (OWASP, CSV Injection)
FORMULA = tuple("=+-@\t\r\n＝＋－＠")
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
LONGEST = 2000  # characters of a line of a terminal; a file may hold a name of millions
LONGEST_CLASS = 1000  # characters of a class's name, which stands in pictures and tables
MARKUP = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)|[&<>]")  # an underscore within a word is not markup
BLOCK = re.compile(r"^(\s*)([-+#]+|\d+[.)])(?=\s)")  # begins a list or a heading


def visible(text: str) -> str:
    """Return a text for a terminal: control characters (not tabs and line ends) and bytes that are not UTF-8 become escapes."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a text for one line of a terminal, `visible` and without line ends: a file's name may have them, and millions of letters."""
    line = visible(text).replace("\n", "\\n")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


def shortened(name: str, most: int) -> str:
    """Return the beginning of a file's name, of at most so many bytes."""
    return os.fsencode(name)[:most].decode(errors="ignore") if len(os.fsencode(name)) > most else name


def one_form(name: str) -> str:
    """Return a name in Unicode's composed form (NFC); macOS writes é in file names as two characters, which other systems take for one."""
    return unicodedata.normalize("NFC", name)


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file: `visible`, with an apostrophe before a text that a spreadsheet would calculate; numbers stay."""
    if not isinstance(value, str):
        return value
    if not value.startswith(FORMULA):
        return visible(value)
    with contextlib.suppress(ValueError):
        float(value)
        return value
    return f"'{visible(value)}"


def csv_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a CSV file, with `csv_cell` applied to names of columns and to values."""
    return {csv_cell(name): csv_cell(value) for name, value in row.items()}


def markdown_text(text: str) -> str:
    """Return a text that Markdown shows literally in a line or in a table's cell: without markup, links, HTML and line ends."""
    line = MARKUP.sub(lambda found: ENTITIES.get(found[0], f"\\{found[0]}"), " ".join(visible(text).split()))
    return BLOCK.sub(lambda found: f"{found[1]}{found[2][:-1]}\\{found[2][-1]}", line)


def markdown_code(text: str, language: str) -> str:
    """Return a text as a code block, `visible`; its fence is longer than any in the text."""
    text = visible(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


MASK = "***"
# SQLAlchemy reads a password up to the first @, with any characters
DATABASE = re.compile(r"((?:postgres|mysql|mariadb|mssql|oracle)[\w+]*://[^:@/\s]*:)[^@\n]*@(?:[^@/\s]*@)*", re.IGNORECASE)
# the second alternative matches passwords with an unquoted / ? or #; a number there is a port
PASSWORD = re.compile(r"(://[^:@/?#\s\[]*:)(?:[^/?#\s]*|(?!\d*(?:[/?#'\",;\s]|$))\S*?)@")
TOKEN = re.compile(r"(https?://)[^:@/?#\s]+@", re.IGNORECASE)
QUERY = re.compile(
    r"([?&][^=&\s]*(?:passw|passphrase|pwd|secret|token|credential|signature|api[-_]?key|access[-_]?key|odbc_connect)[^=&\s]*=)"
    r"[^&\s]*?(?=['\")\]}>,;.]*(?:[&\s]|$))",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Mask passwords, tokens and keys in a text's addresses: `http://me:secret@host` becomes `http://me:***@host`."""
    if "://" not in text:
        return text
    for pattern in (DATABASE, PASSWORD, TOKEN):
        text = pattern.sub(rf"\1{MASK}@", text)
    return QUERY.sub(rf"\1{MASK}", text)


def masked_tree(value: Any) -> Any:
    """Return lists and mappings with every text masked."""
    return mapped(value, lambda each: masked(each) if isinstance(each, str) else each)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return lists and mappings with a function applied to every value in them."""
    if isinstance(value, Mapping):
        return {key: mapped(each, function) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(each, function) for each in value]
    return function(value)
