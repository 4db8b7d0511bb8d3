"""Tables of losses fused with their linear layer, for the README, and the targets that they have to meet in one run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lossforge.bench.report import Report, Row
from lossforge.bench.report.tables import LOSSES, USES, markdown
from lossforge.bench.report.targets import figure

By = dict[str, Row]
Key = tuple[str, str, str, str]
OURS = {
    "lossforge": ("", "products"),
    "lossforge-weight": ('`accumulate="weight"`', "products-weight"),
    "lossforge-backward": ('`gradient="backward"`', "products-backward"),
    "lossforge-skip": ("`skip_ignored=True`", "products"),
    "lossforge-rounded": ('`logits="weight"`', "products"),
    "lossforge-float32": ('`logits="float32"`', "products"),
}
"""The options of each contender of ours, and the contender that computes its products."""
ALONE = {
    "objective": "the objective alone",
    "products": "its products alone",
    "products-backward": 'those of `gradient="backward"`',
}
"""What a table calls contenders that compute a part of the loss."""
PEERS = ("torch", "torch.compile", "torch-linear", "liger", "cut-cross-entropy")
FEW = ("quack", "quack-scaled", "trl", "verl")
"""Peers that know few of the losses; a table of their own has them."""
GIB = 1024.0
"""1 GiB in MiB."""


def fused(report: Report, suite: str = "linear") -> str:
    """Format one line for each case of a suite and contender of ours, the contenders without a figure, and the wrong ones."""
    cases = report.by_case(suite).values()
    peers = [name for name in PEERS if any(figure(by.get(name), "ms") is not None for by in cases)]
    memory = [name for name in ("torch", "liger") if name in peers]
    header = ("loss", "tokens × hidden × classes", "ours", "ms", "products alone", *peers)
    header += (f"MiB: {', '.join(('ours', *memory))}", "errors: value, input's, weight's gradient")
    rows = [_line(by, name, peers, memory) for by in cases for name in OURS if name in by]
    failed = [
        f"{_said(row)}, {row.contender}: {row.status}" for by in cases for row in by.values() if row.status not in ("ok", "not installed")
    ]
    off = _errors_of_others(cases)
    failed += [f"{name}, which brought its process down" for name in report.settings.get("left_out", [])]
    notes = [f"Without a figure: {'; '.join(failed)}."] if failed else []
    return "\n\n".join([markdown(header, rows), *_beside_few(cases), *([off] if off else []), *notes])


def listed(report: Report, suite: str) -> str:
    """Format one line for each case of a suite and contender, with its errors or why it has none."""
    rows = []
    for by in report.by_case(suite).values():
        for number, row in enumerate(by.values()):
            said = OURS.get(row.contender, ("", ""))[0] or ALONE.get(row.contender, row.contender)
            errors = ", ".join(_number(row, f"{each}_error", "{:.1e}") for each in ("value", "gradient", "weight"))
            costs = [_ms(row, "{:.2f}"), _number(row, "peak_mib", "{:,.0f}")]
            if row.value_error is None:
                errors = "" if row.status == "ok" else row.status.split(":")[0]
            rows.append([*(_what(by) if number == 0 else ("", "")), said, *costs, errors])
    header = ("loss", "tokens × hidden × classes", "by", "ms", "MiB", "errors: value, input's, weight's gradient")
    return markdown(header, rows)


def _beside_few(cases: Iterable[By]) -> list[str]:
    """Format the cases that peers of few losses know: milliseconds and MiB of ours and theirs."""
    known = [by for by in cases if any(figure(by.get(name), "ms") is not None for name in FEW)]
    names = [name for name in FEW if any(figure(by.get(name), "ms") is not None for by in known)]
    rows = [[*_what(by), *(_costs(by.get(name)) for name in ("lossforge", *names))] for by in known]
    header = ("loss", "tokens × hidden × classes", "ours: ms, MiB", *names)
    return [f"Beside peers that know few of these losses:\n\n{markdown(header, rows)}"] if rows else []


def _costs(row: Row | None) -> str:
    return "–" if figure(row, "ms") is None else f"{_ms(row)}, {_number(row, 'peak_mib', '{:,.0f}')}"


def _line(by: By, name: str, peers: Sequence[str], memory: Sequence[str]) -> list[str]:
    """Format a contender of ours; the peers' figures stand in the first one's line."""
    said, products = OURS[name]
    first = name == "lossforge"
    beside = (name, *(memory if first else ()))
    return [
        *_what(by),
        said,
        _ms(by[name], "**{:.1f}**"),
        _ms(by.get(products)),
        *(_ms(by.get(peer)) if first else "" for peer in peers),
        ", ".join(_number(by.get(each), "peak_mib", "{:,.0f}") for each in beside),
        ", ".join(_number(by[name], f"{each}_error", "{:.1e}") for each in ("value", "gradient", "weight")),
    ]


def _errors_of_others(cases: Iterable[By]) -> str:
    """Format how far the peers' gradients of the weight are from float64."""
    worst: dict[str, float] = {}
    for by in cases:
        for row in by.values():
            if row.contender in PEERS + FEW and row.status == "ok" and row.weight_error is not None:
                worst[row.contender] = max(worst.get(row.contender, 0.0), row.weight_error)
    return f"Largest error of the weight's gradient: {', '.join(f'{name} {off:.1e}' for name, off in worst.items())}." if worst else ""


@dataclass(frozen=True)
class FusedVerdict:
    """A target that was measured.

    Attributes:
        case: which case and contender.
        what: the figure.
        of: how the limit was computed; empty if it is a plain number.
        wanted: the most that the figure may be in this run.
        found: the figure.
    """

    case: str
    what: str
    of: str
    wanted: float | None
    found: float | None

    @property
    def met(self) -> bool:
        return self.wanted is not None and self.found is not None and self.found <= self.wanted


def verdicts(report: Report) -> list[FusedVerdict]:
    """Evaluate every target whose case was measured."""
    cases = list(report.by_case("linear").values())
    plain = [by for by in cases if _of(by, "ce", "") and "lossforge-backward" in by and by["lossforge"].use != "imagenet-21k"]
    found = [each for by in plain for each in _engines(by)]
    whole = {_size(by["lossforge"]): by for by in plain}
    for by in cases:
        ours, products = by["lossforge"], figure(by.get("products"), "ms")
        weight = math.prod(ours.shape[-2:]) * 2 / 2**20
        if _of(by, "selective_log_softmax", "with entropy, forward only"):
            found.append(_time(by, "lossforge", "1.05 × the one product", _times(1.05, products)))
            found.append(FusedVerdict(_said(ours), "MiB", "", 64.0, figure(ours, "peak_mib")))
        elif _of(by, "selective_log_softmax", "with entropy"):
            found.append(_time(by, "lossforge", "1.04 × its four products", _times(1.04, products)))
            said = "the weight's gradient + 0.75 GiB"
            found.append(FusedVerdict(_said(ours), "MiB", said, weight + 0.75 * GIB, figure(ours, "peak_mib")))
        elif _of(by, "dpo", ""):
            found.append(_time(by, "lossforge", "", 33.0))
            found.append(FusedVerdict(_said(ours), "MiB", "2.6 GB", 2.6e9 / 2**20, figure(ours, "peak_mib")))
        elif "lossforge-skip" in by:
            every = figure(whole.get(_size(ours), {}).get("lossforge"), "ms")
            found.append(_time(by, "lossforge-skip", "0.6 × with no token ignored", _times(0.6, every)))
        elif ours.loss in ("focal", "bce") and ours.use == "imagenet-21k":
            found.append(_time(by, "lossforge", "1.1 × its products", _times(1.1, products)))
    found += [each for by in report.by_case("exact").values() for each in _exact(by)]
    found += [each for by in report.by_case("objectives").values() for each in _objectives(by)]
    for by in report.by_case("features").values():
        if by["lossforge"].use == "clip-65536":
            found.append(FusedVerdict(_said(by["lossforge"]), "MiB", "4 GiB", 4 * GIB, figure(by["lossforge"], "peak_mib")))
    return found


def _engines(by: By) -> Iterable[FusedVerdict]:
    """Evaluate cross entropy at the vocabularies of language models: time alone and against peers, memory."""
    ours = by["lossforge"]
    hidden, classes = ours.shape[-2:]
    weight = hidden * classes * 2 / 2**20
    for name in ("lossforge", "lossforge-weight"):
        yield _time(by, name, "1.05 × its three products", _times(1.05, figure(by.get(OURS[name][1]), "ms")))
        said = "the weight's gradient + 1.25 GiB"
        yield FusedVerdict(_called(by, name), "MiB", said, weight + 1.25 * GIB, figure(by.get(name), "peak_mib"))
    if (compiled := figure(by.get("torch.compile"), "ms")) is not None:
        yield _time(by, "lossforge", "torch.compile", compiled)
    quack = [ms for name in ("quack", "quack-scaled") if (ms := figure(by.get(name), "ms")) is not None]
    if quack:
        yield _time(by, "lossforge", "QuACK's better form", min(quack))
    yield _time(by, "lossforge-backward", "1.08 × its four products", _times(1.08, figure(by.get("products-backward"), "ms")))
    said = "the weight's gradient + 0.75 GiB"
    yield FusedVerdict(
        _called(by, "lossforge-backward"), "MiB", said, weight + 0.75 * GIB, figure(by.get("lossforge-backward"), "peak_mib")
    )


def _exact(by: By) -> Iterable[FusedVerdict]:
    """Evaluate cross entropy of large logits: what exact logits cost, and their errors."""
    rounded, ours = figure(by.get("lossforge-rounded"), "ms"), by["lossforge"]
    factor = 1.1 if rounded is not None and rounded < 2 else 1.03
    yield _time(by, "lossforge", f"{factor} × rounded logits", _times(factor, rounded))
    for what, name in (("input", "gradient_error"), ("weight", "weight_error")):
        wanted, found = (None if row is None else getattr(row, name) for row in (by.get("lossforge-float32"), ours))
        yield FusedVerdict(_said(ours), f"error of the {what}'s gradient", '1.5 × logits="float32"', _times(1.5, wanted), found)
    quack = [ms for name in ("quack", "quack-scaled") if (ms := figure(by.get(name), "ms")) is not None]
    if quack and ours.use == "qwen3-0.6b":
        yield _time(by, "lossforge", "QuACK's better form", min(quack))


def _objectives(by: By) -> Iterable[FusedVerdict]:
    """Evaluate objectives of tokens, which take their three products and what the tokens cost."""
    products, alone = (figure(by.get(name), "ms") for name in ("products", "objective"))
    if alone is not None and products is not None:
        yield _time(by, "lossforge", "1.02 × its three products + the objective alone", 1.02 * products + alone)
    elif by["lossforge"].loss == "weighted_ce":
        yield _time(by, "lossforge", "1.05 × its three products", _times(1.05, products))


def targets(report: Report) -> str:
    found = verdicts(report)
    rows = [
        [v.case, v.what, f"≤ {_shown(v, v.wanted)}{f' = {v.of}' if v.of else ''}", _shown(v, v.found), "met" if v.met else "**missed**"]
        for v in found
    ]
    lines = [
        f"{sum(v.met for v in found)} of {len(found)} targets met.",
        markdown(("case", "figure", "target", "measured", "outcome"), rows),
    ]
    return "\n\n".join(lines)


def _shown(v: FusedVerdict, value: float | None) -> str:
    return "–" if value is None else {"ms": f"{value:.2f}", "MiB": f"{value:,.0f}"}.get(v.what, f"{value:.1e}")


def _time(by: By, name: str, of: str, wanted: float | None) -> FusedVerdict:
    return FusedVerdict(_called(by, name), "ms", of, wanted, figure(by.get(name), "ms"))


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _of(by: By, loss: str, variant: str) -> bool:
    return "lossforge" in by and (by["lossforge"].loss, by["lossforge"].variant) == (loss, variant)


def _called(by: By, name: str) -> str:
    said = OURS[name][0]
    return _said(by["lossforge"]) + (f", {said}" if said else "")


def _said(row: Row) -> str:
    return f"{LOSSES[row.loss]}{f', {row.variant}' if row.variant else ''} {_size(row)}"


def _size(row: Row) -> str:
    """Format tokens × hidden × classes; for sequences, also how many they are."""
    return "×".join(map(str, row.shape))


def _what(by: By) -> list[str]:
    row = by["lossforge"]
    return [f"{LOSSES[row.loss]}{f', {row.variant}' if row.variant else ''}, {USES[row.use]}", _size(row)]


def _ms(row: Row | None, form: str = "{:.1f}") -> str:
    return _number(row, "ms", form)


def _number(row: Row | None, name: str, form: str) -> str:
    value = figure(row, name)
    return "–" if value is None else form.format(value)
