"""Pin the images and actions that this repository uses by digest and commit, because a tag can be moved to something else.

`tools/release.py --pin` writes the digests, and the checklist of a release refuses what has none.
"""

import hashlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

IMAGE = re.compile(r"(?P<name>\S+?):(?P<tag>[\w][\w.-]*)(?:@(?P<pin>sha256:[0-9a-f]{64}))?")
ACTION = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<folder>/\S+)?@(?:(?P<pin>[0-9a-f]{40}) # )?(?P<tag>v[\w.-]+)")
PLACES = (
    ("docker/Dockerfile", r"^(?:ARG BASE=|FROM )(?P<used>[^\s$]+)(?= AS |$)", IMAGE),
    ("docker/compose.yaml", r"^ +image: (?P<used>[^\s$]+)$", IMAGE),
    (".github/workflows/*.yml", r"^ +(?:container|image|IMAGE): (?P<used>[^\s$#]+)", IMAGE),
    (".github/workflows/*.yml", r"\buses: (?P<used>[^\s#]+(?: # v\S+)?)", ACTION),
)
"""Files, how they name an image or action, and its parts. An image with a variable in its name is built here."""
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
    """An image or action that a file names at a place: its name, tag, and the digest or commit that it is pinned by."""

    file: Path
    place: tuple[int, int]
    parts: re.Match[str]

    @property
    def action(self) -> bool:
        return self.parts.re is ACTION

    def pinned(self) -> str:
        """Return the text with the digest or commit that the tag has now."""
        name, tag = self.parts["name"], self.parts["tag"]
        try:
            if self.action:
                return f"{name}{self.parts['folder'] or ''}@{commit_of(name, tag)} # {tag}"
            return f"{name}:{tag}@{digest_of(name, tag)}"
        except PinError as error:
            raise PinError(f"{self.file}: {self.parts[0]}: {error}") from None


def used(root: Path) -> Iterator[Used]:
    """Yield each image and action that a file names.

    Raises:
        PinError: one has no tag, by which a person knows what it is.
    """
    for files, pattern, form in PLACES:
        for file in sorted(root.glob(files)):
            for each in re.finditer(pattern, file.read_text(encoding="utf-8"), re.MULTILINE):
                if (parts := form.fullmatch(each["used"])) is None:
                    wanted = "an image NAME:TAG" if form is IMAGE else "an action NAME@COMMIT # v1.2.3"
                    raise PinError(f"{file.relative_to(root)}: {each['used']}: {wanted} is expected")
                yield Used(file.relative_to(root), each.span("used"), parts)


def unpinned(root: Path) -> list[str]:
    """Say what is not pinned, by file."""
    try:
        return [f"{each.file}: {each.parts[0]} has no digest: write it with --pin" for each in used(root) if not each.parts["pin"]]
    except PinError as error:
        return [str(error)]


def pin(root: Path) -> list[str]:
    """Write the digest or commit of every image's and action's tag; return what changed. Where one is not found nothing is written.

    Raises:
        PinError: a registry or repository is not reached, has no such tag, or sends something else.
    """
    changes = [(each, now) for each in used(root) if (now := each.pinned()) != each.parts[0]]
    for each, now in reversed(changes):  # from each file's end, so that the places before stay
        text = (root / each.file).read_text(encoding="utf-8")
        (root / each.file).write_text(text[: each.place[0]] + now + text[each.place[1] :], encoding="utf-8")
    return [f"{each.file}: {each.parts[0]} is {now}" for each, now in changes]


def commit_of(action: str, tag: str) -> str:
    """Return the commit of a tag of a repository on GitHub; of an annotated tag the commit that it is of."""
    command = ["git", "ls-remote", f"https://github.com/{action}", f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PinError(f"https://github.com/{action} is not reached: {done.stderr.strip()}")
    refs = dict(reversed(line.split("\t")) for line in done.stdout.splitlines())  # also those that only end like the tag's
    found = refs.get(f"refs/tags/{tag}^{{}}", refs.get(f"refs/tags/{tag}"))
    if found is None:
        raise PinError(f"https://github.com/{action} has no tag {tag}")
    return found


def digest_of(name: str, tag: str) -> str:
    """Return the digest of an image's tag, computed from the manifest that its registry sends (OCI distribution specification).

    Of an image for several platforms it is that of the list of them.
    """
    host, path = place_of(name)
    scheme = "http" if host.startswith(("localhost:", "127.0.0.1:")) else "https"
    address = f"{scheme}://{host}/v2/{path}/manifests/{tag}"
    headers = {"Accept": ", ".join(MANIFESTS)}
    try:
        answer = requests.get(address, headers=headers, timeout=SECONDS)
        if answer.status_code == 401:  # it says where anybody gets a token
            asked = requests.utils.parse_dict_header(answer.headers["WWW-Authenticate"].partition(" ")[2])
            if not (realm := asked.pop("realm")).startswith(f"{scheme}://"):
                raise PinError(f"{host} asks for a login at {realm}; {scheme} is expected")
            given = requests.get(realm, params=asked, timeout=SECONDS).json()
            token = given.get("token") or given["access_token"]
            answer = requests.get(address, headers=headers | {"Authorization": f"Bearer {token}"}, timeout=SECONDS)
    except requests.RequestException as error:
        raise PinError(f"{host} is not reached: {error}") from None
    except (KeyError, AttributeError):
        raise PinError(f"{host} asks for a login, and gives no token to anybody") from None
    kind = answer.headers.get("Content-Type", "").partition(";")[0]
    if answer.status_code != 200 or kind not in MANIFESTS:
        raise PinError(f"{address} answers {answer.status_code} with {kind or 'nothing'}; the manifest of an image is expected")
    digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
    if (said := answer.headers.get("Docker-Content-Digest", digest)) != digest:
        raise PinError(f"{host} says {said}, but sends {digest}")
    return digest


def place_of(name: str) -> tuple[str, str]:
    """Return the registry and the path of an image's name, as Docker reads it."""
    host, found, path = name.partition("/")
    if found and ("." in host or ":" in host or host == "localhost"):
        return host, path
    return "registry-1.docker.io", name if found else f"library/{name}"
