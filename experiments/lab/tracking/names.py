"""Names and texts as MLflow takes them, whatever a data set or a setting is called."""

import hashlib
import re

LONGEST = 250
MARK = 6  # hexadecimal digits of the digest that ends a changed name


def valid_name(name: str) -> str:
    """Return the name of a metric, param or tag as MLflow takes it.

    A name that MLflow takes stays as it is: letters, digits, `_-.: ` and parts between slashes, none of them empty, `.` or `..`. Any
    other is made like it and ends in a digest of what it was, so that two names never become one: `ap/a//b` is `ap/a/_/b-9f2c41`.
    """
    first, *rest = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    parts = [re.sub(r"^\.\.", "__", first), *rest]  # MLflow refuses a name that begins with two dots
    cleaned = "/".join("_" * max(len(part), 1) if part in ("", ".", "..") else part for part in parts)
    if cleaned == name and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:MARK]
    return f"{cleaned[: LONGEST - MARK - 1]}-{digest}"


def valid_text(value: object, length: int) -> str:
    """Return a value of a param or tag, cut to a length, without what databases refuse: NUL and halves of surrogate pairs."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", str(value))[:length]
