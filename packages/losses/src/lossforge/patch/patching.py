"""Replace names of another library: compare them with those that were tested, call the original where ours lacks an option, and undo."""

import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

LOG = logging.getLogger("lossforge.integrations")


class IntegrationError(RuntimeError):
    """A library is not as it was when the integration was tested. The message lists what differs."""


@dataclass(frozen=True)
class Replacement:
    """A name of a library, and what takes its place.

    Attributes:
        name: "package.module:name" or "package.module:Class.method".
        make: from the original to ours, so that ours can call the original; None for a name that ours only calls, or stands for.
        signature: the parameters of the original with which ours was tested, as `signature_of` writes them. Several where versions
            differ; none where the original is not called.
        method: for a class: its method whose parameters are compared, such as "forward"; "__self__.forward" for its `apply`.
        here_only: replace the name in its own module alone, not in other modules that hold the same thing.
        optional: leave it where it is missing, because a tested version lacks it, or its module needs a package that is not installed.
    """

    name: str
    make: Callable[[Any], Any] | None
    signature: str | tuple[str, ...] | None = None
    method: str | None = None
    here_only: bool = False
    optional: bool = False


def or_theirs(library: str, ours: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a `make`: ours runs, and where it returns a string, the original runs and the string says why, once."""

    def make(own: Any) -> Any:
        @functools.wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = ours(*args, **kwargs)
            if not isinstance(found, str):
                return found
            say_once(f"{library}'{'' if library.endswith('s') else 's'} own {own.__qualname__} runs: {found}")
            return own(*args, **kwargs)

        return run

    return make


class Names:
    """A module in which some names are ours, such as torch.nn.functional in one module of a library."""

    def __init__(self, own: ModuleType, ours: Mapping[str, Any]) -> None:
        """Make a stand-in for a module. ours: the names that differ."""
        self._own = own
        vars(self).update(ours)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def signature_of(function: Any) -> str:
    """Return the parameters of a function with their defaults, without annotations: "(input, target, *, reduction='mean')"."""
    found = inspect.signature(function)
    plain = (bool, int, float, str, tuple, type(None))
    kept = [
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty or isinstance(p.default, plain) else ...)
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=kept, return_annotation=found.empty))


def say(message: str, level: int = logging.INFO) -> None:
    """Log a line of a run: at its level on the first process, and for debugging on the others."""
    LOG.log(level if _is_first() else logging.DEBUG, message)


def say_once(message: str) -> None:
    """Warn by a line the first time that it comes."""
    if message not in _SAID:
        _SAID.add(message)
        say(message, logging.WARNING)


def _is_first() -> bool:
    """Return whether this process has rank 0. Launchers set the rank before a process group is there."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) in ("0", "-1")


_SAID: set[str] = set()


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"{distribution} is not installed: pip install {distribution}") from None


class Patch:
    """What an integration replaced. A context manager: leaving it puts the originals back, as `undo` does.

    Attributes:
        library: the library's distribution.
        replaced: the names that were replaced.
        left: the names that the library lacks, and that were left.
    """

    def __init__(self, library: str, replaced: Sequence[str], undo: Callable[[], None], left: Sequence[str] = ()) -> None:
        """Make a handle of replacements that are in place. undo: puts the originals back."""
        self.library, self.replaced, self.left, self._undo, self._uses = library, tuple(replaced), tuple(left), undo, 1

    @property
    def active(self) -> bool:
        """Whether the replacements are in place."""
        return self._uses > 0

    def undo(self) -> None:
        """Put the originals back. After patching twice, the second undo does. More do nothing. One that fails can be repeated."""
        if self._uses == 1:
            self._undo()
        self._uses = max(self._uses - 1, 0)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self.active else " (undone)"
        left = f"; left: {', '.join(self.left)}" if self.left else ""
        return f"<lossforge in {self.library}{state}: {', '.join(self.replaced)}{left}>"


def check(library: str, tested: str, names: Sequence[Replacement], *, force: bool = False) -> list[tuple[Replacement, Any, str, Any]]:
    """Compare names of a library with those that were tested, and say once where its version is another.

    Args:
        library: its distribution, as pip names it.
        tested: the versions with which the names were tested: "1.14, 1.16 to 1.18".
        names: what is compared.
        force: go on where something differs.

    Returns:
        of each name that is there: the name, its owner, its name there and the original.

    Raises:
        ModuleNotFoundError: the library is not installed.
        IntegrationError: names that are not optional are missing, or names have other parameters, and force is not set.
    """
    installed = version_of(library)
    places, differences = [], []
    for each in names:
        try:
            owner, name = _owner_of(each.name)
            original = inspect.getattr_static(owner, name)
            differences += _difference(each, getattr(owner, name))
            places.append((each, owner, name, original))
        except (ImportError, AttributeError, RuntimeError) as error:  # transformers raises RuntimeError where a module does not import
            missing = f"{each.name} is missing ({error})"
            if each.optional:
                LOG.debug(missing)
            else:
                differences.append(missing)
    if differences and not force:
        raise IntegrationError(
            f"{library} {installed} is not as tested ({tested}): {'; '.join(differences)}. Nothing was replaced. Install a version that "
            "was tested, or go on with force=True, where a function has it, and compare the training numbers"
        )
    if not covers(tested, installed):
        say_once(f"{library} {installed} was not tested ({tested} was): compare the first losses with those of the library's own")
    return places


def once(library: str, tested: str, names: Sequence[Replacement]) -> Callable[[], None]:
    """Return a function that does as `check` when it is called first, outside of the graph of torch.compile, and again after an error."""

    @functools.cache
    def compare() -> None:
        check(library, tested, names)

    @torch.compiler.assume_constant_result
    def compare_once() -> None:
        compare()

    return compare_once


_INHERITED = object()
_ACTIVE: dict[str, tuple[Any, Patch]] = {}


def patch(library: str, tested: str, replacements: Sequence[Replacement], *, options: Any = None, force: bool = False) -> Patch:
    """Replace names of a library by ours.

    Args:
        library: its distribution, as pip names it.
        tested: the versions with which the replacements were tested, for messages: "1.16".
        replacements: the names, and ours.
        options: what a second call must repeat: a call with the same options returns the handle of the first.
        force: replace what is there, although it is not what was tested.

    Raises:
        ModuleNotFoundError: the library is not installed.
        IntegrationError: names are missing or have other parameters, and force is not set. Nothing was replaced.
        ValueError: the library is patched with other options.
    """
    if library in _ACTIVE and _ACTIVE[library][1].active:
        before, handle = _ACTIVE[library]
        if before != options:
            raise ValueError(f"{library} is patched with other options: call undo() of the handle {handle!r} first")
        handle._uses += 1
        return handle
    places = check(library, tested, replacements, force=force)
    made = [
        (each.name, each.make(getattr(owner, name)), owner, name, original, each.here_only)
        for each, owner, name, original in places
        if each.make is not None
    ]
    done: list[tuple[Any, str, Any, Any]] = []
    for _, ours, owner, name, original, here_only in made:
        if isinstance(original, (staticmethod, classmethod)):
            ours = staticmethod(ours)
        for other in _holders(owner, name, original, here_only):
            done.append((other, name, original if name in vars(other) else _INHERITED, ours))
            setattr(other, name, ours)
    replaced = [each for each, *_ in made]
    left = [each.name for each in replacements if each.make is not None and each.name not in replaced]
    handle = Patch(library, replaced, functools.partial(_restore, library, done), left)
    _ACTIVE[library] = options, handle
    missing = f". Missing there, and left: {', '.join(left)}" if left else ""
    say(f"{library} {version_of(library)}: {', '.join(replaced)}{missing}")
    return handle


def _owner_of(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *classes, last = path.split(".")
    return functools.reduce(getattr, classes, importlib.import_module(module)), last


def _difference(each: Replacement, original: Any) -> list[str]:
    if each.signature is None:
        return []
    expected = (each.signature,) if isinstance(each.signature, str) else each.signature
    found = signature_of(functools.reduce(getattr, each.method.split("."), original) if each.method else original)
    return [] if found in expected else [f"{each.name} takes {found}, tested with {' or '.join(expected)}"]


def _holders(owner: Any, name: str, original: Any, here_only: bool) -> list[Any]:
    """Return the owner of a name, and the loaded modules of its library that imported it."""
    if here_only or not isinstance(owner, ModuleType):
        return [owner]
    root = owner.__name__.partition(".")[0]
    of_library = [m for key, m in list(sys.modules.items()) if key.partition(".")[0] == root and isinstance(m, ModuleType)]
    return [owner, *[m for m in of_library if m is not owner and vars(m).get(name) is original]]


def _restore(library: str, done: Sequence[tuple[Any, str, Any, Any]]) -> None:
    for owner, name, original, ours in reversed(done):
        if vars(owner).get(name) is not ours:
            say(f"{library}: {name} of {owner} was replaced by something else since, and is left as it is", logging.WARNING)
        elif original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    # modules that were loaded since, and imported ours; under another name too, as Liger's in torch
    originals = {id(ours): original for owner, _, original, ours in done if isinstance(owner, ModuleType)}
    for module in [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, name, originals[id(value)])


def covers(tested: str, installed: str) -> bool:
    """Return whether a version is one of those tested: "1.14, 1.16 to 1.18" covers 1.14.2, 1.17.0 and 1.18.3."""
    version = _numbers(installed)
    for each in tested.split(","):
        first, _, last = each.partition(" to ")
        lowest, highest = _numbers(first), _numbers(last or first)
        if lowest <= version and version[: len(highest)] <= highest:
            return True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))
