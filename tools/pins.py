"""Pin the images and actions that this repository uses by digest and commit, because a tag can be moved to something else.

`tools/release.py --pin` writes the digests, and the checklist of a release refuses what has none.
"""

import hashlib
import ipaddress
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

DIGEST = r"sha256:[0-9a-f]{64}"
IMAGES = {
    "docker/Dockerfile": r"^(?:ARG BASE=|FROM )(?P<used>[^\s$]+)(?= AS |$)",
    "docker/compose.yaml": r"^ +image: (?P<used>[^\s$]+)$",
    ".github/workflows/*.yml": r"^ +(?:container|image): (?P<used>[^\s$#]+)",
}
"""Where images are named; one with a variable in it is built here."""
IMAGE = re.compile(rf"(?P<name>\S+?):(?P<tag>[\w][\w.-]*)(?:@(?P<pin>{DIGEST}))?")
ACTIONS = {".github/workflows/*.yml": r"\buses: (?P<used>[^\s#]+(?: # v\S+)?)"}
ACTION = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<folder>/\S+)?@(?:(?P<pin>[0-9a-f]{40}) # )?(?P<tag>v[\w.-]+)")
KINDS = (
    (False, IMAGE, "an image with a tag (NAME:TAG)", IMAGES),
    (True, ACTION, "an action, a commit and its tag (NAME@COMMIT # v1.2.3)", ACTIONS),
)
MANIFESTS = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
SECONDS = 30.0  # for an answer of a registry


class PinError(ValueError):
    """An image or action that cannot be pinned, and why."""


@dataclass(frozen=True)
class Used:
    """What a file names: name, tag, and the digest or commit that it is pinned by."""

    file: Path
    place: tuple[int, int]
    text: str
    found: re.Match[str]
    action: bool

    def pinned(self, root: Path) -> str:
        """Return the text with the digest or commit that the tag has now."""
        name, tag = self.found["name"], self.found["tag"]
        try:
            if self.action:
                return f"{name}{self.found['folder'] or ''}@{commit_of(name, tag)} # {tag}"
            return f"{name}:{tag}@{digest_of(name, tag)}"
        except PinError as error:
            raise PinError(f"{self.file.relative_to(root)}: {self.text}: {error}") from None


def used(root: Path) -> Iterator[Used]:
    """Yield each image and action that a file names.

    Raises:
        PinError: one has no tag, by which a person knows what it is.
    """
    for action, form, wanted, places in KINDS:
        for file, pattern in ((file, pattern) for files, pattern in places.items() for file in sorted(root.glob(files))):
            for each in re.finditer(pattern, file.read_text(encoding="utf-8"), re.MULTILINE):
                if (found := form.fullmatch(each["used"])) is None:
                    raise PinError(f"{file.relative_to(root)}: {each['used']}: {wanted} is expected")
                yield Used(file, each.span("used"), each["used"], found, action)


def unpinned(root: Path) -> list[str]:
    """Say what is not pinned, by file."""
    try:
        missing = [each for each in used(root) if not each.found["pin"]]
    except PinError as error:
        return [str(error)]
    return [f"{each.file.relative_to(root)}: {each.text} has no digest: write it with --pin" for each in missing]


def pin(root: Path) -> list[str]:
    """Write the digest or commit of every image's and action's tag; return what changed. Where one is not found nothing is written.

    Raises:
        PinError: a registry or repository is not reached, has no such tag, or says what is not true.
    """
    changes = [(each, now) for each in used(root) if (now := each.pinned(root)) != each.text]
    for each, now in reversed(changes):  # from each file's end, so that the places before stay
        text = each.file.read_text(encoding="utf-8")
        each.file.write_text(text[: each.place[0]] + now + text[each.place[1] :], encoding="utf-8")
    return [f"{each.file.relative_to(root)}: {each.text} is {now}" for each, now in changes]


def commit_of(action: str, tag: str) -> str:
    """Return the commit of a tag of a repository on GitHub; of an annotated tag the commit that it is of."""
    command = ["git", "ls-remote", f"https://github.com/{action}", f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PinError(f"https://github.com/{action} is not reached: {done.stderr.strip()}")
    refs = dict(reversed(line.split("\t")) for line in done.stdout.splitlines())
    found = refs.get(f"refs/tags/{tag}^{{}}", refs.get(f"refs/tags/{tag}"))
    if found is None:
        raise PinError(f"https://github.com/{action} has no tag {tag}")
    return found


def digest_of(name: str, tag: str) -> str:
    """Return the digest of an image's tag, computed from the manifest that its registry sends (OCI distribution specification).

    Of an image for several platforms it is that of the list of them.
    """
    host, path = _place(name)
    address = f"{_scheme(host)}://{host}/v2/{path}/manifests/{tag}"
    headers = {"Accept": ", ".join(MANIFESTS)}
    try:
        answer = requests.get(address, headers=headers, timeout=SECONDS)
        if answer.status_code == 401:
            headers["Authorization"] = f"Bearer {_token(answer.headers.get('WWW-Authenticate', ''))}"
            answer = requests.get(address, headers=headers, timeout=SECONDS)
    except requests.RequestException as error:
        raise PinError(f"{host} is not reached: {error}") from None
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    if answer.status_code != 200 or kind not in MANIFESTS:
        raise PinError(f"{address} answers {answer.status_code} with {kind or 'nothing'}; the manifest of an image is expected")
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if (said := answer.headers.get("Docker-Content-Digest", digest)) != digest:
        raise PinError(f"{host} says {said}, but sends {digest}")
    return digest


def _place(name: str) -> tuple[str, str]:
    """Return the registry and the path of an image's name, as Docker reads it."""
    host, found, path = name.partition("/")
    if found and ("." in host or ":" in host or host == "localhost"):
        return host, path
    return "registry-1.docker.io", name if found else f"library/{name}"


def _scheme(host: str) -> str:
    """Return http for this machine, as Docker does, else https."""
    bare = host.partition(":")[0]
    try:
        here = ipaddress.ip_address(bare).is_loopback
    except ValueError:
        here = bare == "localhost"
    return "http" if here else "https"


def _token(challenge: str) -> str:
    """Return a token for anybody, from where a registry says that there are some."""
    kind, _, rest = challenge.partition(" ")
    given = requests.utils.parse_dict_header(rest)
    realm = given.pop("realm", "")
    scheme, _, place = realm.partition("://")
    if kind.lower() != "bearer" or scheme != _scheme(place.partition("/")[0]):
        raise PinError(f"it asks for a login that is not known: {challenge!r}")
    answer = requests.get(realm, params={key: given[key] for key in ("service", "scope") if key in given}, timeout=SECONDS)
    try:
        tree = answer.json()
        return str(tree.get("token") or tree["access_token"])
    except (requests.JSONDecodeError, AttributeError, KeyError):
        raise PinError(f"{realm} gives no token: it answers {answer.status_code}") from None
