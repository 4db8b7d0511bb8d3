"""Tables of losses fused with their linear layer, for the README, and the targets that they have to meet in one run."""

from collections.abc import Iterable, Sequence

from lossforge.bench.report import Report, Row
from lossforge.bench.report.tables import USES, called, filled, markdown, number, outcome, size, without_figure
from lossforge.bench.report.targets import By, Verdict, figure, verdicts

OURS = {
    "lossforge": ("", "products"),
    "lossforge-weight": ('`accumulate="weight"`', "products-weight"),
    "lossforge-backward": ('`gradient="backward"`', "products-backward"),
    "lossforge-lean": ('`accumulate="weight"`, `chunk=512`', "products"),
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
PEERS = ("torch", "torch.compile", "torch-linear", "liger")
FEW = ("liger-sm90", "cut-cross-entropy", "cut-cross-entropy-exact", "quack", "quack-plain", "trl", "verl")
"""Peers that know few of the losses; a table of their own has them."""
ERRORS = ("value_error", "gradient_error", "weight_error")
WHAT = {
    "ms": ("ms", "{:.2f}"),
    "peak_mib": ("MiB", "{:,.0f}"),
    "gradient_error": ("error of the input's gradient", "{:.1e}"),
    "weight_error": ("error of the weight's gradient", "{:.1e}"),
}
"""What a table calls a figure, and how it shows it."""


def fused(report: Report, suite: str = "linear") -> str:
    """Format one line for each case of a suite and contender of ours, the contenders without a figure, and the wrong ones."""
    cases = report.by_case(suite).values()
    peers = [name for name in PEERS if any(figure(by.get(name), "ms") is not None for by in cases)]
    memory = [name for name in ("torch", "liger") if name in peers]
    header = ("loss", "tokens × hidden × classes", "ours", "ms", "products alone", *peers)
    header += ("from an idle host: ours, torch, torch.compile", f"MiB: {', '.join(('ours', *memory))}")
    header += ("errors: value, input's, weight's gradient",)
    rows = [_line(by, name, peers, memory) for by in cases for name in OURS if name in by]
    off = _errors_of_others(cases)
    return "\n\n".join([filled(header, rows), *_beside_few(cases), *([off] if off else []), *without_figure(report, suite)])


def listed(report: Report, suite: str) -> str:
    """Format one line for each case of a suite and contender, with its errors or why it has none."""
    rows = []
    for by in report.by_case(suite).values():
        for row in by.values():
            said = OURS.get(row.contender, ("", ""))[0] or ALONE.get(row.contender, row.contender)
            errors = _errors(row)
            costs = [_ms(row, "{:.2f}"), number(row, "peak_mib", "{:,.0f}")]
            if row.value_error is None:
                errors = "" if row.status == "ok" else row.status.split(":")[0]
            rows.append([*(_what(by) if row.contender == next(iter(by)) else ("", "")), said, *costs, errors])
    header = ("loss", "tokens × hidden × classes", "by", "ms", "MiB", "errors: value, input's, weight's gradient")
    return "\n\n".join([markdown(header, rows), *without_figure(report, suite)])


WHOSE = ("errors: value, input's, weight's gradient", "torch.compile's")


def beside_compile(report: Report, suite: str, losses: Sequence[str] = ()) -> str:
    """Format one line for each case of a suite, or of these losses: ours beside torch.compile of the plain form and the products alone."""
    cases = [by for by in report.by_case(suite).values() if not losses or by["lossforge"].loss in losses]
    header = ("loss", "tokens × hidden × classes", "ours: ms, MiB", "torch.compile", "products alone, ms", "ours / products", *WHOSE)
    rows = []
    for by in cases:
        ours, compiled, products = (by.get(name) for name in ("lossforge", "torch.compile", "products"))
        of_products, own = figure(products, "ms"), figure(ours, "ms")
        share = f"{own / of_products:.2f}" if own and of_products else "–"
        rows.append([*_what(by), *map(_costs, (ours, compiled)), _ms(products), share, *map(_errors_of, (ours, compiled))])
        if (lean := by.get("lossforge-lean")) is not None:
            rows.append([OURS["lossforge-lean"][0], "", _costs(lean), "", "", "", _errors_of(lean), ""])
    return "\n\n".join([markdown(header, rows), *without_figure(report, suite)])


def _errors_of(row: Row | None) -> str:
    """Format the errors of a contender, or why it has none."""
    if row is None:
        return "–"
    return _errors(row) if row.status == "ok" else row.status.partition(":")[0]


def _beside_few(cases: Iterable[By]) -> list[str]:
    """Format the cases that peers of few losses know: milliseconds and MiB of ours and theirs."""
    known = [by for by in cases if any(figure(by.get(name), "ms") is not None for name in FEW)]
    names = [name for name in FEW if any(figure(by.get(name), "ms") is not None for by in known)]
    rows = [[*_what(by), *(_costs(by.get(name)) for name in ("lossforge", *names))] for by in known]
    header = ("loss", "tokens × hidden × classes", "ours: ms, MiB", *names)
    return [f"Beside peers that know few of these losses:\n\n{markdown(header, rows)}"] if rows else []


def _costs(row: Row | None) -> str:
    return "–" if figure(row, "ms") is None else f"{_ms(row)}, {number(row, 'peak_mib', '{:,.0f}')}"


def _line(by: By, name: str, peers: Sequence[str], memory: Sequence[str]) -> list[str]:
    """Format a contender of ours; the peers' figures stand in the first one's line."""
    said, products = OURS[name]
    first = name == "lossforge"
    beside = (name, *(memory if first else ()))
    return [
        *(_what(by) if first else ("", "")),
        said,
        _ms(by[name], "**{:.1f}**"),
        _ms(by.get(products)),
        *(_ms(by.get(peer)) if first else "" for peer in peers),
        ", ".join(number(by.get(each), "idle_ms", "{:.1f}") for each in (name, *(("torch", "torch.compile") if first else ()))),
        ", ".join(number(by.get(each), "peak_mib", "{:,.0f}") for each in beside),
        _errors(by[name]),
    ]


def _errors_of_others(cases: Iterable[By]) -> str:
    """Format how far the peers' gradients of the weight are from float64."""
    worst: dict[str, float] = {}
    for by in cases:
        for row in by.values():
            if row.contender in PEERS + FEW and row.status == "ok" and row.weight_error is not None:
                worst[row.contender] = max(worst.get(row.contender, 0.0), row.weight_error)
    return f"Largest error of the weight's gradient: {', '.join(f'{name} {off:.1e}' for name, off in worst.items())}." if worst else ""


def targets(report: Report) -> str:
    return markdown(("case", "figure", "target", "measured", "outcome"), map(_judged, verdicts(report, fused=True)))


def _judged(v: Verdict) -> list[str]:
    whose, (what, form) = OURS[v.target.contender][0], WHAT[v.target.figure]
    wanted, found = ("–" if value is None else form.format(value) for value in (v.wanted, v.found))
    of = (f"{v.factor:g} × " if v.target.of and v.factor != 1 else "") + v.target.said
    case = f"{called(v.row)} {size(v.row)}" + (f", {whose}" if whose else "")
    return [case, what, f"≤ {wanted}{f' = {of}' if of else ''}", found, outcome(v)]


def _errors(row: Row) -> str:
    return ", ".join(number(row, name, "{:.1e}") for name in ERRORS)


def _what(by: By) -> list[str]:
    row = by["lossforge"]
    return [f"{called(row)}, {USES[row.use]}", size(row)]


def _ms(row: Row | None, form: str = "{:.1f}") -> str:
    return number(row, "ms", form)
