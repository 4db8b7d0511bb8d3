"""Text in the width of a terminal."""

import os
import re
import shutil
import sys
import textwrap

WORDS = 30  # columns that words need at least


def show(text: str) -> None:
    """Print a text; its reader, such as `head`, may stop before its end."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of the text goes there as Python ends


def fitted(text: str) -> str:
    """Return a help text whose long lines are wrapped, if a terminal shows it; a file or a pipe gets it as it is."""
    if not sys.stdout.isatty():
        return text
    joined = re.sub(r"(?<=[^\n.:])\n(?=[a-z])", " ", text)
    return "\n".join(_fitted_line(line, shutil.get_terminal_size().columns) for line in joined.split("\n"))


def _fitted_line(line: str, width: int) -> str:
    """Wrap a line under its second column; without one, or too little room, four columns from its beginning, if that is indented."""
    column = re.match(r" +\S+(?:, \S+)? {2,}", line)
    begin = len(line) - len(line.lstrip())
    under = column is not None and width - column.end() >= WORDS
    indent = " " * (column.end() if column and under else begin and begin + 4)
    if len(line) <= width or width - len(indent) < WORDS:
        return line
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
