"""Results of a call beside its loss, as a named tuple of those that were asked for."""

import difflib
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor


class Outputs(tuple[Tensor, ...]):
    """Results that were asked for, by name and in order.

    A subclass annotates all names that there are, the first of which is always there. It has a class for each set of them, a named tuple to
    torch's pytree, export and compiler, which cannot make classes themselves.
    """

    __slots__ = ()
    names: ClassVar[tuple[str, ...]]
    _fields: ClassVar[tuple[str, ...]] = ()
    _field_defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        if "_fields" in vars(cls):
            return
        cls.names = tuple(cls.__annotations__)
        first, *others = cls.names
        for chosen in [*itertools.product((False, True), repeat=len(others))][1:]:  # not for none: the first alone is returned as a tensor
            fields = first, *itertools.compress(others, chosen)
            name = "_".join(fields)
            shared = {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
            setattr(cls, name, type(name, (cls,), {**shared, "_fields": fields, "__qualname__": f"{cls.__qualname__}.{name}"}))

    @classmethod
    def asked(cls, outputs: object) -> list[bool]:
        """Return which of the names but the first are asked for.

        Raises:
            TypeError, ValueError: `outputs` is not a sequence of such names, each once and in their order.
        """
        names = cls.names[1:]
        if isinstance(outputs, str) or not isinstance(outputs, Sequence):
            raise TypeError(f"outputs must be a tuple of names, such as ({names[0]!r},), got {outputs!r}")
        for name in outputs:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"outputs must be of {', '.join(map(repr, names))}, got {name!r}{meant}")
        asked = [name in outputs for name in names]
        in_order = tuple(itertools.compress(names, asked))
        if tuple(outputs) != in_order:
            raise ValueError(f"outputs must name each result once, in the order in which they come back, {in_order}, got {tuple(outputs)}")
        return asked

    @classmethod
    def of(cls, results: Sequence[Tensor | None]) -> Self:
        """Return the results that are not None. results: one for each of `names`, in their order."""
        known = [(name, t) for name, t in zip(cls.names, results, strict=True) if t is not None]
        made: Self = getattr(cls, "_".join([name for name, _ in known]))(*[t for _, t in known])
        return made

    def __new__(cls, *results: Tensor) -> Self:
        return tuple.__new__(cls, results)

    # not in Python, because torch 2.9 would compile it to a graph that ends with a call of itself
    _make: ClassVar[Any] = classmethod(tuple.__new__)

    def _asdict(self) -> dict[str, Tensor]:
        return dict(zip(self._fields, self, strict=True))

    def __getnewargs__(self) -> tuple[Tensor, ...]:
        return tuple(self)

    def __getattr__(self, name: str) -> Tensor:
        if name in self._fields:
            return self[self._fields.index(name)]
        kind = type(self).__qualname__.partition(".")[0]
        asked = tuple([each for each in self.names[1:] if each == name or each in self._fields])
        how = f": it holds {', '.join(self._fields)}; ask for it with outputs={asked}" if name in asked else ""
        raise AttributeError(f"{kind} has no {name!r}{how}")

    def __repr__(self) -> str:
        held = ", ".join(f"{name}={t!r}" for name, t in self._asdict().items())
        return f"{type(self).__qualname__.partition('.')[0]}({held})"
