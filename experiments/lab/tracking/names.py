"""Change names and texts of data sets and settings so that MLflow accepts them."""

import hashlib
import re

LONGEST = 250
MARK = 6  # hexadecimal digits of the digest at the end of a changed name


def valid_name(name: str) -> str:
    """Return the name of a metric, param or tag in a form that MLflow accepts.

    A valid name is unchanged: letters, digits, `_-.: `, and parts between slashes, none of them empty, `.` or `..`. In any other name the
    rest is replaced and a digest of the name appended, so that two names stay different: `ap/a//b` becomes `ap/a/_/b-9f2c41`.
    """
    first, *rest = re.sub(r"[^/\w.\- :]", "_", name).split("/")
    parts = [re.sub(r"^\.\.", "__", first), *rest]  # MLflow refuses a name that begins with two dots
    cleaned = "/".join("_" * max(len(part), 1) if part in ("", ".", "..") else part for part in parts)
    if cleaned == name and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:MARK]
    return f"{cleaned[: LONGEST - MARK - 1]}-{digest}"


def valid_text(value: object, length: int) -> str:
    """Return a value of a param or tag, cut to a length, without characters that databases refuse: NUL and halves of surrogate pairs."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", str(value))[:length]
