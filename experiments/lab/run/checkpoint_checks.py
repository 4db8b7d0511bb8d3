"""The parts of a checkpoint, with types and ranges: each is looked at before it is used, because anybody may have written the file."""

import sys
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Any

from torch import Tensor

from lab.base.formats import LONGEST_CLASS
from lab.run.trust import are_settings

Check = Callable[[Any, str], str]
"""Returns what is wrong with a value of this name; empty if nothing."""
MOST = 2**53  # of a count
LARGEST = 1e30  # of a mean or deviation, which are float32
MOST_CLASSES, MOST_CHANNELS, LONGEST = 1_000_000, 1000, 10_000  # LONGEST: characters of a name


def fault(state: Mapping[str, Any]) -> str:
    """Return what is wrong with a checkpoint's parts, as far as it has them; empty if nothing."""
    return _first(check(state[name], name) for name, check in PARTS.items() if name in state)


def fault_of_optimizer(state: Any, groups: list[dict[str, Any]], *, whole: bool) -> str:
    """Return what is wrong with an optimiser's saved state; empty if nothing.

    Args:
        state: as `state_dict` returns it.
        groups: the optimiser's parameter groups, with their values in this run.
        whole: whether the groups have whole parameters, not a rank's parts of them.
    """
    if said := optimizer(state, "optimizer"):
        return said
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        return "optimizer.param_groups: are not those of this run"
    for number, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        for name, value in theirs.items():
            if said := _like(ours[name], value, f"optimizer.param_groups.{number}.{name}") if name in ours and name != "params" else "":
                return said
    numbers = [each for group in saved for each in group["params"]]
    shapes = dict(zip(numbers, [tuple(each.shape) for group in groups for each in group["params"]], strict=True))
    fused = all("fused" in group for group in groups)
    for number, values in state["state"].items():
        if number not in shapes:
            return f"optimizer.state.{_shown(number)}: is of no parameter"
        for name, value in values.items():
            where = f"optimizer.state.{number}.{name}"
            if name == "step" and (said := _step(value, where)):
                return said
            # torch's fused optimisers read memory by the parameter's size; others, such as NovoGrad, have one number for a parameter
            fits = isinstance(value, Tensor) and tuple(value.shape) == shapes[number]
            if whole and fused and name in LIKE_PARAMETERS and not fits:
                return f"{where}: {_shown(value)}; a tensor of its parameter's shape {shapes[number]} is expected"
    return ""


LIKE_PARAMETERS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""States of torch's fused optimisers, which have the shape of their parameter."""


def _step(value: Any, name: str) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_meta and not value.is_complex() else value
    return number(0, MOST)(value, name)


def _like(ours: Any, theirs: Any, name: str) -> str:
    """Return why a value of a group of parameters cannot take the place of this run's; empty if it can."""
    if name.endswith((".lr", ".initial_lr")):
        return number(0, 1e6)(theirs, name)
    if isinstance(ours, bool) or ours is None:
        return "" if theirs is None or isinstance(theirs, bool) else _said(theirs, name, "true, false or none")
    if isinstance(ours, (int, float)):
        return number(-LARGEST, LARGEST)(theirs, name)
    if isinstance(ours, (list, tuple)):
        if not isinstance(theirs, (list, tuple)) or len(theirs) != len(ours):
            return _said(theirs, name, f"{len(ours)} values are expected", "")
        return _first(_like(*pair, name) for pair in zip(ours, theirs, strict=True))
    return "" if isinstance(theirs, type(ours)) else _said(theirs, name, f"a {type(ours).__name__}")


def _first(said: Any) -> str:
    return next((each for each in said if each), "")


def _said(value: Any, name: str, expected: str, verb: str = " is expected") -> str:
    return f"{name}: {_shown(value)}; {expected}{verb}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, (str, bool, float)) or value is None:
        return f"{value!r:.40}"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else "a number of many digits"
    return f"a {type(value).__name__}"


def number(least: float = -inf, most: float = inf, *, nan: bool = False) -> Check:
    """Return a check of numbers within a range, which a boolean is not; nan: whether nan is one, too."""

    def check(value: Any, name: str) -> str:
        kind = isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)  # a larger one does not fit a float
        fits = kind and (least <= value <= most or (nan and value != value))
        return "" if fits else _said(value, name, f"a number from {least:g} to {most:g}")

    return check


def whole(least: int = 0, most: int = MOST) -> Check:
    """Return a check of integers within a range, which a boolean is not."""

    def check(value: Any, name: str) -> str:
        return "" if type(value) is int and least <= value <= most else _said(value, name, f"an integer from {least} to {most}")

    return check


def text(value: Any, name: str) -> str:
    return "" if isinstance(value, str) and len(value) <= LONGEST else _said(value, name, f"a text of at most {LONGEST} characters")


def class_name(value: Any, name: str) -> str:
    fits = isinstance(value, str) and len(value) <= LONGEST_CLASS
    return "" if fits else _said(value, name, f"a text of at most {LONGEST_CLASS} characters")


def truth(value: Any, name: str) -> str:
    return "" if isinstance(value, bool) else _said(value, name, "true or false")


def listed(of: Check, least: int, most: int) -> Check:
    """Return a check of lists of so many values."""

    def check(value: Any, name: str) -> str:
        if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
            return _said(value, name, f"a list of {least} to {most} values")
        return _first(of(each, f"{name}.{place}") for place, each in enumerate(value))

    return check


def mapped(of: Check, key: type = str) -> Check:
    """Return a check of mappings from names, or other keys, to values."""

    def check(value: Any, name: str) -> str:
        if not isinstance(value, dict) or not all(type(each) is key for each in value):
            return _said(value, name, f"a mapping with keys of type {key.__name__}")
        return _first(of(each, f"{name}.{_shown(inner) if key is not str else inner[:40]}") for inner, each in value.items())

    return check


def record(newer: Collection[str] = (), **fields: Check) -> Check:
    """Return a check of mappings with exactly these names; those of `newer` may lack, because earlier versions did not save them."""

    def check(value: Any, name: str) -> str:
        if not isinstance(value, dict) or not fields.keys() - set(newer) <= value.keys() <= fields.keys():
            return _said(value, name, f"a mapping of {', '.join(fields)}")
        return _first(fields[inner](each, f"{name}.{inner}") for inner, each in value.items())

    return check


def optional(of: Check) -> Check:
    return lambda value, name: "" if value is None else of(value, name)


def tensor(dimensions: int | None = None) -> Check:
    """Return a check of real tensors in memory, of any shape or of so many dimensions."""

    def check(value: Any, name: str) -> str:
        fits = isinstance(value, Tensor) and not (value.is_complex() or value.is_meta or value.is_sparse or value.is_quantized)
        fits = fits and dimensions in (None, value.ndim)
        return "" if fits else _said(value, name, "a tensor of real numbers" + (f" of {dimensions} dimensions" if dimensions else ""))

    return check


def count(value: Any, name: str) -> str:
    """Return what is wrong with a tensor that counts."""
    fits = isinstance(value, Tensor) and value.ndim == 0 and not (value.is_meta or value.is_floating_point() or value.is_complex())
    return whole()(int(value), name) if fits else _said(value, name, "a tensor of one integer")


def any_value(_value: Any, _name: str) -> str:
    return ""


def norm(value: Any, name: str) -> str:
    each = record(mean=listed(number(-LARGEST, LARGEST), 1, MOST_CHANNELS), std=listed(number(1 / LARGEST, LARGEST), 1, MOST_CHANNELS))
    said = each(value, name)
    return said or ("" if len(value["mean"]) == len(value["std"]) else f"{name}: mean and std are not of as many channels")


def evidence(value: Any, name: str) -> str:
    if not isinstance(value, dict) or "update" not in value:
        return _said(value, name, "a batch")
    return whole()(value["update"], f"{name}.update") or mapped(tensor())({each: value[each] for each in value if each != "update"}, name)


WEIGHTS = mapped(tensor())
FIGURES = mapped(number(nan=True))
COUNTS = ("timed_updates", "window_updates")
SECONDS = ("timed_images", "timed_seconds", "timed_waited", "waited", "window_seconds")


def optimizer(value: Any, name: str) -> str:
    """Return what is wrong with an optimiser's state, which may hold more than every optimiser's, such as Kron's generator."""
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        return _said(value, name, "a mapping of state, param_groups")
    of = {"state": mapped(mapped(any_value), int), "param_groups": listed(_group, 1, MOST)}
    return _first(check(value[inner], f"{name}.{inner}") for inner, check in of.items())


def _group(value: Any, name: str) -> str:
    if not isinstance(value, dict) or "params" not in value:
        return _said(value, name, "a group of parameters")
    said = listed(whole(), 0, MOST)(value["params"], f"{name}.params")
    return said or ("" if len(set(value["params"])) == len(value["params"]) else f"{name}.params: names a parameter twice")


PARTS: dict[str, Check] = {
    "config": lambda value, name: "" if are_settings(value) else f"{name}: is not the settings of a run",
    "model": WEIGHTS,
    "ema": optional(WEIGHTS),
    "classes": listed(class_name, 0, MOST_CLASSES),
    "norm": norm,
    **dict.fromkeys(("updates", "samples", "batch", "skipped", "count"), whole()),
    "epoch": whole(1),
    "epoch_ended": truth,
    "tracking": mapped(text),
    "seal": text,
    "data": text,
    "values": FIGURES,
    "best": record(score=number(), epoch=whole(), values=optional(FIGURES), stale=whole()),
    "clock": record(
        newer=["update_ms"],
        **dict.fromkeys(("loss_ms", "update_ms"), listed(number(0, LARGEST), 0, MOST)),
        **dict.fromkeys(COUNTS, whole()),
        **dict.fromkeys(SECONDS, number(0, LARGEST)),
    ),
    "launches": mapped(whole()),
    "nonfinite": record(total=count, streak=count, longest=count, evidence=optional(evidence)),
    "optimizer": optimizer,
    "scaler": mapped(number(0, LARGEST)),
    "window": tensor(1),
    "rng": listed(mapped(any_value), 1, MOST),
}
"""The parts that train.py saves; those that are not named here are not used."""
