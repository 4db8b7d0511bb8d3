"""Every case of results/ that others compute beside ours: who takes less time, and who takes less memory.

The table of the first page and the page of cases in which another is ahead are made of these cases, by one rule. A difference in time
counts where it is larger than the spread of both and than 1 %; one in memory where it is larger than 1 % and 1 MiB.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lossforge.bench.cases import FUSED, SUITES
from lossforge.bench.compare import FLOOR, MEMORY, spread, verdict
from lossforge.bench.contenders import PARTS
from lossforge.bench.report import TIMING, load, tables

RESULTS = Path(__file__).resolve().parents[1] / "results"
STEPS, FUSED_LOSSES, LOSSES, PROBLEMS = "Training steps", "Losses fused with their linear layer", "Losses", "Assignment, masks and criteria"
SPREAD = "Losses and trainings over several GPUs"
OUTCOMES = {"faster": "**ours**", "same": "tie", "slower": "another"}


class Cost(NamedTuple):
    """What a contender takes: milliseconds, half of their spread relative to them, MiB."""

    ms: float
    spread: float = 0.0
    mib: float | None = None

    @classmethod
    def between(cls, ms: float, low: float, high: float, mib: float | None) -> "Cost":
        return cls(ms, (high - low) / 2 / ms, mib)


@dataclass(frozen=True)
class Case:
    """A case that ours and others compute.

    Attributes:
        file: the stem of its file of results.
        key: its name there.
        kind: one of STEPS, FUSED_LOSSES, LOSSES, PROBLEMS and SPREAD.
        title: what tables call it.
        source: GPU, versions, commit and date.
        costs: of each contender, ours as "lossforge".
        without: why a contender has no figure.
        timing: how times were measured, where the bench did; else the page of the file says it.
    """

    file: str
    key: str
    kind: str
    title: str
    source: str
    costs: dict[str, Cost]
    without: dict[str, str] = field(default_factory=dict)
    timing: str = ""

    @property
    def ours(self) -> Cost:
        return self.costs["lossforge"]

    def others(self, figure: str = "ms") -> dict[str, Cost]:
        """Return the contenders other than ours that have a figure."""
        return {name: cost for name, cost in self.costs.items() if name != "lossforge" and getattr(cost, figure) is not None}

    def best(self, figure: str) -> str | None:
        """Return the other contender with the least of a figure."""
        others = self.others(figure)
        return min(others, key=lambda name: getattr(others[name], figure), default=None)

    def time(self) -> str:
        """Return "slower" where another is faster than ours, "same" where it is within the spread, else "faster"; empty without another."""
        noise = {name: FLOOR + math.hypot(self.ours.spread, cost.spread) for name, cost in self.others().items()}
        found = {verdict(self.ours.ms / self.costs[name].ms, each) for name, each in noise.items()}
        return next((word for word in ("slower", "same", "faster") if word in found), "")

    def memory(self) -> str:
        """Return the same of memory."""
        other = self.best("mib")
        if other is None or self.ours.mib is None:
            return ""
        theirs = self.costs[other].mib or 0.0
        if max(self.ours.mib, theirs) <= MEMORY * min(self.ours.mib, theirs) or abs(self.ours.mib - theirs) <= 1:
            return "same"
        return "slower" if self.ours.mib > theirs else "faster"


Cases = Iterator[Case]


LIKE = {"exact": ["large logits"], "small": ["small"]}
"""What tables add to the cases of a suite."""


def of_report(path: Path) -> Cases:
    """Yield the cases of a report of the bench. Other forms of ours and parts of a loss are no other contenders."""
    report = load(path)
    for suite in SUITES:
        for by in report.by_case(suite).values():
            found = {n: r for n, r in by.items() if n == "lossforge" or not n.startswith(("lossforge", *PARTS))}
            costs = {n: Cost(r.ms, spread(r, "ms"), r.peak_mib) for n, r in found.items() if r.ms is not None and r.status == "ok"}
            if "lossforge" in costs:
                row, kind = found["lossforge"], FUSED_LOSSES if suite in FUSED else LOSSES
                without = {n: r.status for n, r in found.items() if n not in costs}
                source = tables.provenance(report).partition(";")[0]
                title = ", ".join([*tables.what(row), *LIKE.get(suite, ())])
                yield Case(path.stem, f"{suite} {row.label}", kind, title, source, costs, without, report.timing)


def grouped(rows: Iterable[dict[str, Any]], of: Callable[[dict[str, Any]], str]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(of(row), []).append(row)
    return found


CALLED = {"loss.implementation=torch": "plain torch", "transformers": "transformers' own", "trl": "TRL's own"}
"""What tables call a contender whose name in a file is not plain."""


def of_rows(path: Path, part: str, found: dict[str, Any], kind: str, case: str, by: str, ms: str, title: str) -> Cases:
    """Yield the cases of a part of a file. case, by, ms: the fields with a row's case, its contender and its time."""
    for name, rows in grouped(found["runs"], lambda row: row[case]).items():
        rows = [row | {by: CALLED.get(row[by], row[by])} for row in rows]
        costs = {row[by]: Cost.between(row[ms], *row[f"{ms}_range"], row["peak_mib"]) for row in rows if ms in row}
        if "lossforge" in costs:
            without = {row[by]: row.get("failed") or row["left_out"] for row in rows if ms not in row}
            yield Case(path.stem, f"{part} {name}", kind, title.format(name), source(found), costs, without)


NAMED = ("torch", "triton", "torchvision", "transformers", "trl", "liger_kernel", "ultralytics", "open_clip_torch", "timm")


def source(found: dict[str, Any]) -> str:
    """Return where figures come from: GPU, versions, commit and date."""
    versions = found.get("versions", found)
    place = found["gpu"] if found["gpu"].endswith("CPU cores") else f"One {found['gpu']}"
    named = (f"{name} {versions[name]}" for name in NAMED if name in versions)
    return ", ".join([place, *named, f"commit {found['commit']}", found["date"]])


def of_integrations(path: Path) -> Cases:
    parts = json.loads(path.read_text(encoding="utf-8"))
    titles = {
        "trl": "TRL, {}",
        "trainer": "transformers, {}",
        "compiled": "transformers, {}, compiled whole",
        "compiled_small": "transformers, {}, compiled whole",
        "detectors": "{}",
        "open_clip": "open_clip's loss, {}",
    }
    for part, title in titles.items():
        if part in parts:
            yield from of_rows(path, part, parts[part], LOSSES if part == "open_clip" else STEPS, "case", "contender", "step_ms", title)
    runs = [run | {"peak_mib": None} for run in parts["detectors"]["runs"]]  # the memory is that of the step
    found = parts["detectors"] | {"runs": runs}
    yield from of_rows(path, "criterion", found, PROBLEMS, "case", "contender", "criterion_ms", "the criterion of {}")


def of_detection(path: Path) -> Cases:
    parts = json.loads(path.read_text(encoding="utf-8"))
    yield from of_rows(path, "steps", parts["steps"], STEPS, "model", "loss", "step_ms", "{}, 16 images of 640×640, our trainer")
    runs = [run | {"model": "retinanet"} for run in parts["retinanet"]["runs"]]
    title = "RetinaNet, ResNet-50, 16 images of 800×1344, bf16"
    yield from of_rows(path, "steps", parts["retinanet"] | {"runs": runs}, STEPS, "model", "loss", "step_ms", title)


def of_language_model(path: Path) -> Cases:
    found = json.loads(path.read_text(encoding="utf-8"))
    for dtype, rows in grouped(found["rows"], lambda row: row["dtype"]).items():
        size, of = found["sizes"][dtype], {row["loss"]: Cost(row["ms"], 0.0, row["peak_mib"]) for row in rows}
        costs = {"lossforge": of["linear_cross_entropy"], "torch": of["torch.nn.functional.cross_entropy"]}
        title = f"a small language model, {size['batch'] * size['length']:,} tokens × {size['width']} → {size['vocabulary']:,}, {dtype}"
        yield Case(path.stem, dtype, STEPS, title, source(found), costs)


def of_recipe(path: Path) -> Cases:
    found = json.loads(path.read_text(encoding="utf-8"))
    runs = [run | {"case": found["case"]} for run in found["runs"]]
    yield from of_rows(path, "recipe", {**found, "runs": runs}, STEPS, "case", "contender", "step_ms", "{} with LoRA, FSDP2, checkpointing")


def of_throughput(path: Path) -> Cases:
    for name, found in json.loads(path.read_text(encoding="utf-8")).items():
        for data, rows in grouped(found["rows"], lambda row: row["data"]).items():
            turns = {row["by"]: ([1e3 * found["batch"] / rate for rate in row["turns"]], row) for row in rows}
            costs = {
                by: Cost.between(1e3 * found["batch"] / row["images_per_second"], min(ms), max(ms), row["peak_mib"])
                for by, (ms, row) in turns.items()
            }
            title = f"{found['model']}, {found['batch']} images of 224², {'compiled, ' * found['compiled']}batches from {data}, bf16"
            yield Case(path.stem, f"{name} {data}", STEPS, title, source(found), costs)


def of_problems(path: Path) -> Cases:
    found = json.loads(path.read_text(encoding="utf-8"))
    for problem, rows in grouped(found["rows"], lambda row: row["problem"]).items():
        others = [row for row in rows if not row["contender"].startswith("lossforge, ")]
        costs = {r["contender"]: Cost.between(r["ms"], r["low"], r["high"], r.get("peak_mib")) for r in others if "ms" in r}
        without = {row["contender"]: row["error"] for row in others if "ms" not in row}
        yield Case(path.stem, problem, PROBLEMS, f"`{problem.replace(' ', '` ', 1)}", source(found), costs, without, found["timing"])


def of_criterion(path: Path) -> Cases:
    found = json.loads(path.read_text(encoding="utf-8"))["criterion"]
    for name, rows in grouped(found["rows"], lambda row: "{layers} × {images} × {queries} × {boxes}".format(**row)).items():
        costs = {row["by"]: Cost(row["ms"]) for row in rows}
        yield Case(path.stem, name, PROBLEMS, f"the criterion of Deformable DETR, {name}", source(found), costs)


def of_spread_vocabulary(path: Path) -> Cases:
    """Yield the losses of classes over GPUs that other libraries compute, too."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for form, rows in grouped(found["rows"], lambda row: "{rows} × {features} × {classes}, {form}".format(**row)).items():
        if len(rows) > 1:
            others = [row for row in rows if not row["contender"].startswith("lossforge, ")]
            costs = {r["contender"]: Cost.between(r["ms"], r["low"], r["high"], r["mib"]) for r in others if "ms" in r}
            without = {row["contender"]: row["failed"] for row in rows if "failed" in row}
            yield Case(path.stem, form, SPREAD, f"cross entropy over {found['gpus']} GPUs, {form}", source(found), costs, without)


def of_spread_contrastive(path: Path) -> Cases:
    """Yield the contrastive losses in a ring and gathered."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for loss, forms in found["losses"].items():
        if "ring" in forms and all("range" in each for each in forms.values() if "ms" in each):
            costs = {n: Cost.between(each["ms"], *each["range"], each["mib"]) for n, each in forms.items() if "ms" in each}
            costs["lossforge"] = costs.pop("ring")
            title = f"{loss} of {found['batch']:,} pairs over {found['gpus']} GPUs"
            without = {name: each["error"] for name, each in forms.items() if "error" in each}
            yield Case(path.stem, loss, SPREAD, title, source(found), costs, without)


def of_spread_trainings(path: Path) -> Cases:
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, rows in grouped(found["rows"], lambda row: "{kind}: {model} under {parallel}".format(**row)).items():
        costs = {r["contender"]: Cost.between(r["step_ms"], *r["step_ms_range"], r["peak_mib"]) for r in rows if "step_ms" in r}
        without = {row["contender"]: row["failed"] for row in rows if "failed" in row}
        if "lossforge" in costs:
            yield Case(path.stem, name, SPREAD, f"{name}, {found['gpus']} GPUs", source(found), costs, without)


REPORTS = (
    *("bench-h200", "scaling-h200", "new-losses-h100", "metric-learning-h200", "self-distillation-h200", "detectors-and-masks-h200"),
    *("linear", "linear-h200", "objectives-h200", "drafts-h200", "first-page-h200"),
)
READERS: dict[str, Callable[[Path], Cases]] = {
    **dict.fromkeys(REPORTS, of_report),
    "integrations": of_integrations,
    "detection": of_detection,
    "language-model": of_language_model,
    "recipe-h200": of_recipe,
    "throughput-h100": of_throughput,
    **dict.fromkeys(("assignment-h200", "masks-h200", "vision-h200"), of_problems),
    "matching-h100": of_criterion,
    "spread-vocabulary-h200": of_spread_vocabulary,
    **dict.fromkeys(("spread-contrastive-h100", "spread-contrastive-h200"), of_spread_contrastive),
    "spread-trainings-h200": of_spread_trainings,
}
NO_CASES = {
    **dict.fromkeys(("before-after-h100", "specialisation-h100", "tiles-h200", "kernels-earned-h200"), "two forms of ours, or a choice"),
    **dict.fromkeys(("deviations-h100", "precision-h200", "effects", "training-h200"), "errors and results, not costs beside another's"),
    **dict.fromkeys(("several-gpus-h100", "several-gpus-h200", "speed-h100-x4"), "several GPUs beside one"),
    "spread-vocabulary-h100-x4": "several GPUs beside one",
}
"""Files without a case that another computes, and why."""


def cases(folder: Path = RESULTS) -> list[Case]:
    """Return the cases of all files of results; of one that several files have, what was measured by today's rule."""
    paths = (folder / f"{name}.json" for name in READERS)
    every = [case for path in paths if path.exists() for case in READERS[path.stem](path)]
    newest = {case.key: case.file for case in every if case.timing == TIMING}
    return [case for case in every if newest.get(case.key, case.file) == case.file]


def behind(found: Iterable[Case]) -> list[Case]:
    """Return the cases in which another is faster or takes less memory, or is faster within the spread."""
    return [case for case in found if "slower" in (case.time(), case.memory()) or within(case)]


def within(case: Case) -> bool:
    """Return whether the fastest other is faster by more than 1 %, but within the spread of both."""
    other = case.best("ms")
    return other is not None and case.time() == "same" and case.ours.ms > (1 + FLOOR) * case.costs[other].ms


def standing(found: Iterable[Case]) -> str:
    """Count the cases of `behind` in a sentence."""
    every = [case for case in found if case.others()]
    slower, more = (sum(getattr(case, what)() == "slower" for case in every) for what in ("time", "memory"))
    return (
        f"Of {len(every)} measured cases that another implementation computes, another is faster in {slower} cases, and within the spread "
        f"in {sum(map(within, every))} more; another takes less memory in {more} cases."
    )


def costs_of(case: Case, name: str | None) -> str:
    """Return milliseconds and MiB of a contender."""
    if name is None:
        return "–"
    ms, _, mib = case.costs[name]
    figures = f"{ms:,.{3 if ms < 1 else 2 if ms < 100 else 1}f}" + ("" if mib is None else f", {mib:,.0f}")
    return figures if name == "lossforge" else f"{name} {figures}"


def outcomes(case: Case) -> list[str]:
    """Return who is ahead, in time and in memory."""
    time = "another, within the spread" if within(case) else OUTCOMES.get(case.time(), "–")
    return [time, OUTCOMES.get(case.memory(), "–")]


HEADER = ("ours: ms, MiB", "the fastest other", "the other with least memory", "less time", "less memory")


def columns_of(case: Case) -> list[str]:
    """Return the columns of HEADER."""
    others = [costs_of(case, case.best(figure)) for figure in ("ms", "mib")]
    return [costs_of(case, "lossforge"), *others, *outcomes(case)]


class Sources:
    """Numbers the sources of a table's cases."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> str:
        return f"[{self.numbers.setdefault(text, len(self.numbers) + 1)}]"

    def listed(self) -> list[str]:
        return [f"[{number}] {text}." for text, number in self.numbers.items()]


def ahead_of_us(*files: Path) -> str:
    """Return all cases in which another is ahead, by kind, after the sentence that counts them. files: any, of the folder of results."""
    found, sources = cases(files[0].parent), Sources()
    parts = [standing(found)]
    for kind, members in grouped(({"case": case} for case in behind(found)), lambda row: row["case"].kind).items():
        rows = [[row["case"].title, *columns_of(row["case"]), sources.number(provenance(row["case"]))] for row in members]
        parts.append(f"## {kind}\n\n{tables.markdown(('case', *HEADER, 'measured'), rows)}")
    return "\n\n".join([*parts, "## Measured", *sources.listed()])


def provenance(case: Case) -> str:
    return case.source if case.timing in ("", TIMING) else f"{case.source}; {case.timing}"


class Shown(NamedTuple):
    """A case of the first page: what it is there, and its file and key among all cases."""

    use: str
    file: str
    key: str


FIRST_PAGE = (
    Shown("a step of Llama-3.2-1B, 8 × 1,024 tokens, bf16", "integrations", "trainer Llama-3.2-1B"),
    Shown("the same, compiled whole", "integrations", "compiled Llama-3.2-1B"),
    Shown("a step of Qwen3-0.6B, 8 × 1,024 tokens, bf16", "integrations", "trainer Qwen3-0.6B"),
    Shown("the same, compiled whole", "integrations", "compiled_small Qwen3-0.6B"),
    Shown("SFT of Qwen3-0.6B by TRL", "integrations", "trl SFT, Qwen3-0.6B"),
    Shown("a step of RetinaNet, ResNet-50, 16 images of 800×1344, bf16", "detection", "steps retinanet"),
    Shown("a step of YOLOv8n by ultralytics, 16 images of 640²", "integrations", "detectors yolov8n"),
    Shown("a step of ResNet-50, 256 images of 224², bf16", "throughput-h100", "resnet50 loop"),
    Shown("cross entropy fused with its layer, 8192 × 4096 → 128,256, bf16", "linear-h200", "linear ce 8192x4096x128256 bf16"),
    Shown("the same, 8192 × 1024 → 151,936", "linear-h200", "linear ce 8192x1024x151936 bf16"),
    Shown("the same, 4096 × 2048 → 32,000", "linear-h200", "linear ce 4096x2048x32000 bf16"),
    Shown(
        "log-probabilities and entropies fused, 8192 × 4096 → 128,256, bf16",
        "linear-h200",
        "linear selective_log_softmax with entropy 8192x4096x128256 bf16",
    ),
    Shown("contrastive loss of 16,384 pairs of features, bf16", "first-page-h200", "features clip_features 16384x512x16384 bf16"),
    Shown("cross entropy, 8192 × 128,256, bf16", "first-page-h200", "table ce 8192x128256 bf16"),
    Shown("cross entropy, 256 × 1,000, fp32", "first-page-h200", "small ce 256x1000 fp32"),
    Shown("focal loss, dense targets, RetinaNet 800×1344, fp32", "first-page-h200", "table focal dense 16x120087x80 fp32"),
    Shown("KL divergence of two models, 8192 × 32,000, bf16", "first-page-h200", "losses kl 8192x32000 bf16"),
    Shown("mean squared error, 268 million elements, bf16", "first-page-h200", "losses mse 268435456 bf16"),
    Shown("GIoU, 4.2 million pairs, fp32", "first-page-h200", "losses giou 4194304x4 fp32"),
    Shown("Dice, 8 × 21 × 512², fp32", "first-page-h200", "losses dice 8x21x512x512 fp32"),
)
"""The cases of the first page, chosen by use before they were measured. Their order and number do not depend on who is ahead."""


def on_first_page(every: Iterable[Case]) -> dict[tuple[str, str], Case]:
    """Return the cases of FIRST_PAGE that were measured by today's rule, by file and key."""
    named = {(shown.file, shown.key) for shown in FIRST_PAGE}
    return {(case.file, case.key): case for case in every if (case.file, case.key) in named and case.timing in ("", TIMING)}


def first_page(*files: Path) -> str:
    """Return the cases of FIRST_PAGE. One that was not measured, or not by today's rule, is shown as such."""
    every, sources = cases(files[0].parent), Sources()
    found = on_first_page(every)
    rows = []
    for shown in FIRST_PAGE:
        case = found.get((shown.file, shown.key))
        columns = ["not measured", *[""] * len(HEADER)] if case is None else [*columns_of(case), sources.number(case.source)]
        rows.append([shown.use, *columns])
    notes = [*sources.listed(), *without_figure(found.values())]
    parts = [
        tables.markdown(("case", *HEADER, "measured"), rows),
        f"{standing(every)} [All of them](docs/benchmarks/ahead_of_us.md), by kind.",
        f"<details><summary>GPUs, versions and dates; who has no figure</summary>{' '.join(notes)}</details>",
    ]
    return "\n\n".join(parts)


def without_figure(found: Iterable[Case]) -> list[str]:
    """Say in a sentence why implementations have no figure: the first sentence of each one's error, without advice how to install it."""
    errors = {(name, re.split(r"\. |\n", reason)[0].rstrip(".")) for case in found for name, reason in case.without.items()}
    return [f"Without a figure: {'; '.join(f'{name}, {reason}' for name, reason in sorted(errors))}."] if errors else []


class Ratio(NamedTuple):
    """The least cost of others over ours, and the outcome by the rule: "faster", "same" or "slower"; None where neither has a figure."""

    value: float
    outcome: str


Ratios = dict[str, tuple[Ratio | None, Ratio | None]]
COLORS = {"faster": "#2e7d32", "same": "#757575", "slower": "#c62828"}
WIDEST = 8.0
"""The largest ratio that is drawn: a mark at the edge says that one is larger, as where others take next to no memory."""


def first_page_ratios(every: Iterable[Case]) -> Ratios:
    """Return, for each case of FIRST_PAGE, the ratios of time and of memory."""
    found = on_first_page(every)

    def ratio(case: Case, figure: str, outcome: str) -> Ratio | None:
        other, ours = case.best(figure), getattr(case.ours, figure)
        return Ratio(getattr(case.costs[other], figure) / ours, outcome) if other and ours else None

    cells = ((shown.use, found.get((shown.file, shown.key))) for shown in FIRST_PAGE)
    return {use: (ratio(case, "ms", case.time()), ratio(case, "mib", case.memory())) for use, case in cells if case}


def first_page_digest(ratios: Ratios) -> str:
    return hashlib.sha256(repr(ratios).encode()).hexdigest()[:16]


def first_page_picture(ratios: Ratios, path: Path) -> None:
    """Draw the cases of FIRST_PAGE, whoever is ahead: to the right of 1 ours takes less than the best other, to the left more."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels, titles = figure.subplots(1, 2, sharey=True), ("time: the fastest other / ours", "memory: the least of others / ours")
    for which, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for row, both in enumerate(ratios.values()):
            if ratio := both[which]:
                value = min(max(ratio.value, 1 / WIDEST), WIDEST)
                mark = "o" if value == ratio.value else "<" if value < 1 else ">"
                axes.plot([1, value], [row, row], color=COLORS[ratio.outcome], linewidth=5, solid_capstyle="butt")
                axes.plot(value, row, mark, color=COLORS[ratio.outcome], markersize=7)
        axes.axvline(1, color="black", linewidth=1)
        axes.set(xscale="log", xlim=(0.9 / WIDEST, 1.1 * WIDEST))
        axes.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["⅛ ×", "¼ ×", "½ ×", "1 ×", "2 ×", "4 ×", "8 ×"], minor=False)
        axes.minorticks_off()
        axes.set_title(f"{title}\n← another takes less  |  ours takes less →", fontsize=9)
        axes.grid(alpha=0.3, axis="x")
    panels[0].set_yticks(range(len(ratios)), [*ratios], fontsize=8)
    panels[0].invert_yaxis()
    with matplotlib.rc_context({"svg.hashsalt": "lossforge", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(path, metadata={"Date": None, "Description": first_page_digest(ratios)}, facecolor="white")


FILES = [path for name in READERS if (path := RESULTS / f"{name}.json").exists()]
SECTIONS: dict[str, tuple[Any, ...]] = {"first page": (first_page, *FILES), "ahead of us": (ahead_of_us, *FILES)}
