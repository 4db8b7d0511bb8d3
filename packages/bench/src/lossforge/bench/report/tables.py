"""Reports as Markdown tables, for the documentation."""

import itertools
from collections.abc import Iterable, Sequence

from lossforge.bench.cases import RECORDS
from lossforge.bench.report import Report, Row
from lossforge.bench.report.targets import By, Verdict, figure, verdicts

PEERS = ("torchvision", "timm", "liger", "quack")
USES = {
    "timm-head": "timm head",
    "timm-head-odd": "timm head, odd",
    "llm-vocabulary": "LLM vocabulary",
    "llm-vocabulary-odd": "LLM vocabulary, odd",
    "segmentation-512": "segmentation 512²",
    "retinanet-800x1344": "RetinaNet 800×1344",
    "detr": "DETR",
    "large": "a large tensor",
    "gfl-800x1344": "GFL 800×1344",
    "yolo-640": "YOLOv8 640²",
    "open-images": "Open Images labels",
    "imagenet-21k": "ImageNet-21k",
    "ms1mv2": "identities of MS1MV2",
    "clip-16384": "a batch of 16384 pairs",
    "clip-65536": "a batch of 65536 pairs",
    "views-8192": "two views of 8192 images",
    "views-32768": "two views of 32768 images",
    "lvis": "classes of LVIS",
    "masks-512": "masks 512²",
    "augmix": "three views of 8192 images",
    "qwen3-30b-router": "routers of Qwen3 30B",
    "box-pairs": "4.2 million pairs",
    "rotated-box-pairs": "4.2 million rotated pairs",
    "embeddings": "65536 triplets of vectors",
    "prototypes-65536": "65536 prototypes",
    "depths-1024": "depths 1024²",
    "features-8192": "a batch of 8192",
    "online-products": "8192 features and the 11,318 classes of Stanford Online Products",
    "projections-2048": "two views of 2048 images",
    "gemma2-2b": "Gemma 2 2B",
    "llama3-1b": "Llama 3.2 1B",
    "llama3-8b": "Llama 3 8B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "qwen3-8b": "Qwen3 8B",
    "qwen3-14b": "Qwen3 14B",
    "llama2": "Llama 2",
    "gpt2": "GPT-2",
}
LARGE = ("table", "losses", "variants")
ASKED = {
    "ms": "forward + backward, ms",
    "share": "forward + backward, share of its floor",
    "forward_share": "forward alone, share of its floor",
    "host_us": "host, µs",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |" for cells in lines)


def filled(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table without the columns in which nothing was measured."""
    lines = [header, *rows]
    kept = [any(cell.strip("–, ") for cell in column[1:]) for column in zip(*lines, strict=True)]
    first, *others = ([*itertools.compress(line, kept)] for line in lines)
    return markdown(first, others)


def provenance(report: Report) -> str:
    of_liger, of_quack = ("liger-kernel", "liger-kernel-nightly"), ("quack-kernels", "nvidia-cutlass-dsl")
    named = ("torch", "triton", "cuda", "driver", *of_liger, *of_quack, "cut-cross-entropy", "trl", "verl")
    versions = ", ".join(f"{name} {report.versions[name]}" for name in named if name in report.versions)
    return f"One {report.gpu}, {versions}, commit {report.commit}, {report.date}; {report.timing}"


def bench(report: Report) -> str:
    """Format one line for each case: ours beside torch, torch.compile and the best of the peers."""
    small = list(report.by_case("small").values())
    work = ("forward + backward", "shape", "dtype")
    header = (
        *work,
        "ours, ms",
        "of the limit",
        "torch",
        "torch.compile",
        "best peer",
        "forward alone, ours",
        "of its limit",
        "MiB: ours, torch",
        "from an idle host: ours, torch",
    )
    parts = [filled(header, map(_large, report.by_case(*LARGE).values()))]
    if small:
        host = (*work, "ours, µs", "torch", "torch.compile", "best peer", "on the device, ours", "from an idle host: ours, torch")
        parts += [
            "Small work, where the host is the cost: µs of wall time a forward + backward, back to back.",
            filled(host, map(_small, small)),
        ]
    return "\n\n".join([*parts, *without_figure(report)])


def short(reports: Sequence[Report], labels: Sequence[str]) -> str:
    """Format the cases with these labels: time and memory of ours, torch, torch.compile and the best peer."""
    rows = []
    for label in labels:
        by = {row.contender: row for report in reports for row in report.rows if row.label == label and row.suite != "scaling"}
        ours, peer = by["lossforge"], best_peer(by, "ms")
        layer = ["linear layer"] if ours.suite in ("linear", "drafts") else []
        cells = [_both(by.get(name)) for name in ("torch", "torch.compile")]
        rows.append([", ".join([*layer, *what(ours)]), f"**{_both(ours)}**", *cells, f"{peer.contender} {_both(peer)}" if peer else "–"])
    return markdown(("loss", "ours: ms, MiB", "torch", "torch.compile", "best peer"), rows)


def _both(row: Row | None) -> str:
    if figure(row, "ms") is None:
        return "–"
    return f"{number(row, 'ms', '{:.2f}')}, {number(row, 'peak_mib', '{:,.0f}')}"


def without_figure(report: Report, *suites: str) -> list[str]:
    """Name the contenders that refused, failed or were wrong, each with its message and its cases."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for by in report.by_case(*suites).values():
        for row in by.values():
            if row.status != "ok":
                reasons.setdefault((row.contender, row.status), []).append(f"{called(row)} {size(row)} {row.dtype}")
    lines = [f"- {name}, {status} ({'; '.join(cases)})" for (name, status), cases in reasons.items()]
    return ["\n".join(["Without a figure:", "", *lines])] if lines else []


def targets(report: Report) -> str:
    """Format each target beside its figure."""
    found = verdicts(report)
    rows = [_line(v) for v in found if not v.template] + list(_templates(found))
    about = "Times in ms are for a copy rate of 4.30 TB/s, scaled to this run's."
    return f"{about}\n\n{markdown(('case', 'figure', 'target', 'measured', 'outcome'), rows)}"


def best_peer(by: By, name: str) -> Row | None:
    """Return the peer with the least of a figure."""
    rows = [row for peer in PEERS if (row := by.get(peer)) is not None and figure(row, name) is not None]
    return min(rows, key=lambda row: figure(row, name) or 0.0, default=None)


def called(row: Row) -> str:
    return RECORDS[row.loss].title + (f", {row.variant}" if row.variant else "")


def size(row: Row) -> str:
    return "×".join(map(str, row.shape))


def what(row: Row) -> list[str]:
    use = f", {USES[row.use]}" if row.use in USES else ""
    return [f"{called(row)}{use}", size(row), row.dtype]


def _large(by: By) -> list[str]:
    ours = by["lossforge"]
    peer = best_peer(by, "ms")
    memory = [number(by.get(name), "peak_mib", "{:,.0f}") for name in ("lossforge", "torch")]
    return [
        *what(ours),
        number(ours, "ms", "**{:.3f}**"),
        _percent(ours.share()),
        number(by.get("torch"), "ms"),
        number(by.get("torch.compile"), "ms"),
        f"{peer.contender} {number(peer, 'ms')}" if peer else "–",
        number(ours, "forward_ms"),
        _percent(ours.forward_share()),
        ", ".join(memory),
        ", ".join(number(by.get(name), "idle_ms") for name in ("lossforge", "torch")),
    ]


def _small(by: By) -> list[str]:
    ours, peer = by["lossforge"], best_peer(by, "host_us")
    return [
        *what(ours),
        number(ours, "host_us", "**{:.0f}**"),
        number(by.get("torch"), "host_us", "{:.0f}"),
        number(by.get("torch.compile"), "host_us", "{:.0f}"),
        f"{peer.contender} {peer.host_us:.0f}" if peer else "–",
        number(ours, "ms", "{:.3f} ms"),
        ", ".join(number(by.get(name), "idle_ms") for name in ("lossforge", "torch")),
    ]


def number(row: Row | None, name: str, form: str = "{:.3f}") -> str:
    value = figure(row, name)
    return "–" if value is None else form.format(value)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}".replace("%", " %")


def _line(v: Verdict) -> list[str]:
    return [f"{called(v.row)} {size(v.row)} {v.row.dtype}", ASKED[v.target.figure], _limit(v), _shown(v, v.found), outcome(v)]


def outcome(v: Verdict) -> str:
    return "met" if v.met else "**missed**"


def _templates(found: Sequence[Verdict]) -> Iterable[list[str]]:
    """Yield one line for all losses of a template that reach their target share, and one for each that does not."""
    grouped: dict[tuple[str, str], list[Verdict]] = {}
    for v in found:
        if v.template:
            grouped.setdefault((v.template, v.row.dtype), []).append(v)
    for (template, dtype), each in grouped.items():
        if shares := [v.found for v in each if v.met and v.found is not None]:
            span = f"{min(shares):.2f} to {max(shares):.2f}"
            yield [f"{len(shares)} of {len(each)} {template} cases, {dtype}", ASKED["share"], _limit(each[0]), span, "met"]
        yield from (_line(v) for v in each if not v.met)


def _limit(v: Verdict) -> str:
    sign, limit, of = "≥" if v.target.at_least else "≤", v.target.limit, "the best of its template" if v.template else v.target.said
    if not of:
        return f"{sign} {limit:g}"
    return f"{sign} {'' if limit == 1 else f'{limit:g} × '}{of}" + ("" if v.wanted is None else f" = {_shown(v, v.wanted)}")


def _shown(v: Verdict, value: float | None) -> str:
    return "–" if value is None else {"ms": "{:.3f}", "host_us": "{:.0f}"}.get(v.target.figure, "{:.2f}").format(value)
