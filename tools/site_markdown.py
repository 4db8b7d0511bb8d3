"""A Markdown extension for the site: code in tables without backslashes, and room for wide tables."""

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor
from zensical.extensions.context import ContextPreprocessor

WIDE = ("losses/index.md",)
"""Pages whose tables need the room of the table of contents, for all their titles."""


class Tables(Postprocessor):
    """Take the backslashes out of code in tables. Markdown needs them before a |, and Python-Markdown leaves them there, unlike GitHub.

    A page with tables and at most one title below its own gives them the room of its table of contents.
    """

    def run(self, text: str) -> str:
        md: Any = self.md
        if context := ContextPreprocessor.from_markdown(md):
            few = sum(len(title["children"]) for title in getattr(md, "toc_tokens", ())) < 2
            if context.page.path in WIDE or ("<td" in text and few):
                context.page.meta["hide"] = ["toc"]
            else:  # a part of the page may have been rendered before, by mkdocstrings
                context.page.meta.pop("hide", None)
        return re.sub(r"<td\b.*?</td>", lambda cell: cell[0].replace("\\|", "|"), text, flags=re.S)


class SiteExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        md.postprocessors.register(Tables(md), "tables", 0)


def makeExtension(**settings: Any) -> SiteExtension:  # noqa: N802
    return SiteExtension(**settings)
