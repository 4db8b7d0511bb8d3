"""Mask credentials in addresses, so that no file, tag or message holds them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

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
