"""Credentials in addresses: no file, tag or message holds them."""

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# SQLAlchemy takes a password up to the first @, whatever it holds
DATABASE = re.compile(r"((?:postgres|mysql|mariadb|mssql|oracle)[\w+]*://[^:@/\s]*:)[^@\n]*@(?:[^@/\s]*@)*", re.IGNORECASE)
# the second form is for passwords whose / ? # ought to be quoted; a number in its place is a port
PASSWORD = re.compile(r"(://[^:@/?#\s\[]*:)(?:[^/?#\s]*|(?!\d*(?:[/?#'\",;\s]|$))\S*?)@")
TOKEN = re.compile(r"(https?://)[^:@/?#\s]+@", re.IGNORECASE)
QUERY = re.compile(
    r"([?&][^=&\s]*(?:passw|passphrase|pwd|secret|token|credential|signature|api[-_]?key|access[-_]?key|odbc_connect)[^=&\s]*=)"
    r"[^&\s]*?(?=['\")\]}>,;.]*(?:[&\s]|$))",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """The text, in whose addresses passwords, tokens and keys are masked: `http://me:secret@host` becomes `http://me:***@host`."""
    if "://" not in text:
        return text
    for pattern in (DATABASE, PASSWORD, TOKEN):
        text = pattern.sub(rf"\1{MASK}@", text)
    return QUERY.sub(rf"\1{MASK}", text)


def masked_tree(value: Any) -> Any:
    """Lists and mappings in which every text is masked."""
    if isinstance(value, Mapping):
        return {key: masked_tree(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked_tree(each) for each in value]
    return masked(value) if isinstance(value, str) else value
