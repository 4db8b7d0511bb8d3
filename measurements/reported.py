"""Tables of README.md and of the documentation from results/: what each measurement found, in the words of its page."""

import itertools
import json
import statistics
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from compared import HEADER, READERS
from compared import SECTIONS as OF_CASES
from compared import columns_of as costs_of

from lab.comparison.stats import Difference, mean_of, paired_difference, write_verdicts
from lossforge.bench.report import linear, load, tables
from lossforge.patch.patching import covers

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
BENCH, SCALING, EFFECTS, INTEGRATIONS = (RESULTS / f"{name}.json" for name in ("bench-h200", "scaling-h200", "effects", "integrations"))
LINEAR, PRECISION = RESULTS / "linear-h200.json", RESULTS / "precision-h200.json"


def bench(file: Path) -> str:
    report = load(file)
    read = f"{(report.read_bytes_per_second or 0) / 1e12:.2f} TB/s"
    return f"{tables.provenance(report)}. {copy_rate(report)}, and a sum at {read}.\n\n{tables.bench(report)}"


def copy_rate(report: Any) -> str:
    return f"A copy ran at {(report.copy_bytes_per_second or 0) / 1e12:.2f} TB/s"


def fused(file: Path) -> str:
    report = load(file)
    return f"{tables.provenance(report)}.\n\n{linear.fused(report)}"


Rows = list[dict[str, Any]]


def found_in(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def source(found: dict[str, Any], *more: str, gpus: str = "One") -> str:
    """Return where figures come from: GPU, versions of torch, triton and `more`, commit and date."""
    place = found["gpu"] if found["gpu"].endswith("CPU cores") else f"{gpus} {found['gpu']}"
    versions = found.get("versions", found)
    named = [f"{name} {versions[name]}" for name in ("torch", "triton", *more)]
    return ", ".join([place, *named, f"commit {found['commit']}", found["date"]])


class Figures(string.Formatter):
    """Writes figures; nothing for one that was not measured, and a text as it is."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return value or "" if value is None or isinstance(value, str) else super().format_field(value, format_spec)


def table(header: str, cells: str, rows: Iterable[dict[str, Any]]) -> str:
    """Return a table of rows, whose cells are written by formats such as `{ms:,.1f}`; both with | between the columns.

    Columns that no row fills are left out.
    """
    written = [[Figures().format(cell, **row) for cell in cells.split(" | ")] for row in rows]
    filled = [any(column) for column in zip(*written, strict=True)]
    titles, *lines = ([*itertools.compress(line, filled)] for line in (header.split(" | "), *written))
    return tables.markdown(titles, lines)


@dataclass(frozen=True)
class Table:
    """A table of files of results, called with them.

    Attributes:
        header, cells: as of `table`.
        rows: from what a file holds to the rows.
        part: of a file, that has the figures.
        about: from what the first file holds to the line above the table.
    """

    header: str
    cells: str
    rows: Callable[[Any], Iterable[dict[str, Any]]] = lambda found: found["rows"]
    part: str = ""
    about: Callable[[dict[str, Any]], str] | None = source

    def __call__(self, *files: Path) -> str:
        found = [each[self.part] if self.part else each for each in map(found_in, files)]
        made = table(self.header, self.cells, (row for each in found for row in self.rows(each)))
        return made if self.about is None else f"{self.about(found[0])}.\n\n{made}"


def throughput(file: Path) -> str:
    parts, rows = found_in(file).values(), []
    for part in parts:
        for data in dict.fromkeys(row["data"] for row in part["rows"]):
            of = {row["by"]: row for row in part["rows"] if row["data"] == data}
            ratio = of["lossforge"]["images_per_second"] / of["timm"]["images_per_second"]
            rows.append({"model": part["model"], "compiled": "yes" if part["compiled"] else "no", "data": data, **of, "ratio": ratio})
    header = "model | torch.compile | photos | ours, images/s | timm, images/s | ours / timm | MiB: ours | timm"
    rates, memory = (f"{{lossforge[{name}]:,.0f}} | {{timm[{name}]:,.0f}}" for name in ("images_per_second", "peak_mib"))
    places: dict[str, list[str]] = {}
    for part in parts:
        places.setdefault(source(part, "timm"), []).append(part["model"] + ", compiled" * part["compiled"])
    told = ". ".join(place if len(places) == 1 else f"{'; '.join(names)}: {place}" for place, names in places.items())
    return f"{told}.\n\n{table(header, f'{{model}} | {{compiled}} | {{data}} | {rates} | {{ratio:.2f}} | {memory}', rows)}"


STEP, GRADIENTS = "{step_ms:,.1f} | {peak_mib:,.0f}", " | {gradient_difference:.1e}"
COMMAND = "`uv run experiments/train.py`"


def _trained_at(found: dict[str, Any]) -> str:
    commits = dict.fromkeys(each["commit"] for part in ("runs", "presets", "parity") for each in found[part])
    return source(found | {"commit": " and ".join(commits)})


training = Table(
    f"{COMMAND} | top-1, last epoch | loss, ms | peak MiB | s | loss computed by",
    "`{command}` | {top1:.2f} % | {loss_ms:,.2f} | {peak_mib:,.0f} | {seconds:,.0f} | {backend}",
    lambda found: (each if each["whole"] else each | {"seconds": None} for each in found["runs"]),
    about=_trained_at,
)
parity = Table("loss | largest difference | steps", "{loss} | {largest_difference:.1e} | {steps}", list, "parity", None)
presets = Table(
    f"{COMMAND} | step, ms | images/s | waiting for data",
    "`{command}` | {step_ms:,.1f} | {images_per_second:,.0f} | {data_wait_share:.1%}",
    list,
    "presets",
    None,
)


def detection(file: Path) -> str:
    """Return the trained detectors by where they were measured; a part may be of another measurement."""
    found, places = found_in(file), {}
    for part in ("defaults", "large"):
        for run in found.get(part, {}).get("runs", ()):
            words = "" if part == "large" else "task=detection "
            places.setdefault(source(found[part], "torchvision"), []).append(run | {"command": words + run["command"]})
    header = f"{COMMAND} | mAP | mAP50 | mAP75 | loss, ms | step, ms | peak MiB | s | loss computed by"
    cells = "`{command}` | {map:.3f} | {map50:.3f} | {map75:.3f} | {loss_ms:,.2f} | " + STEP + " | {seconds:,.0f} | {backend}"
    return "\n\n".join(f"{place}.\n\n{table(header, cells, rows)}" for place, rows in places.items())


LIBRARIES = ("transformers", "trl", "liger_kernel", "ultralytics", "open_clip_torch")
STACKS = {
    "trl": ("TRL", "logps_error", "error of log-probabilities, nats"),
    "trainer": ("A training step of transformers", "value_error", "error of the loss"),
    "compiled": ("A training step of transformers, compiled whole", "value_error", "error of the loss"),
    "compiled_small": ("A training step of a smaller model, compiled whole", "value_error", "error of the loss"),
    "detectors": ("Detectors", "value_error", "difference from theirs"),
    "open_clip": ("open_clip, forward and backward", "value_error", "error of the loss"),
}
"""Of each part of results/integrations.json: its title, and its error that is shown."""


TESTED_BY = {
    "trl": {"trl": "trl", "transformers": "transformers"},
    **{key: {"transformers": "transformers", "liger_kernel": "liger"} for key in ("trainer", "compiled", "compiled_small", "curves")},
    "detectors": {"transformers": "transformers_detection", "ultralytics": "ultralytics"},
    "open_clip": {"open_clip_torch": "open_clip"},
}
"""Of each part of results/integrations.json: its libraries, and our integration that says which versions were tested."""


def beside_tested(part: str, found: dict[str, Any]) -> list[str]:
    """Say of each library of a part that was measured in another version than the tested ones what both are."""
    said = []
    for library, name in TESTED_BY[part].items():
        tested = import_module(f"lossforge.integrations.{name}").TESTED
        if library in found and not covers(tested, found[library]):
            said.append(f"{library} {found[library]} was measured; the version tested with our integration is {tested}.")
    return said


def untested(file: Path) -> list[str]:
    """Return what beside_tested says of all parts of results/integrations.json."""
    return [f"results/{file.name}, {part}: {said}" for part, each in found_in(file).items() for said in beside_tested(part, each)]


def integrations(file: Path) -> str:
    """Return what training with other libraries takes, with their own losses and with ours; or why it was not measured."""
    found, texts = found_in(file), list[str]()
    for part, (title, error, named) in STACKS.items():
        if part not in found:
            continue
        runs = found[part]["runs"]
        header, cells = (
            "case | loss of | step, ms | range",
            "{case} | {contender} | {step_ms:,.2f} | {step_ms_range[0]:,.1f} to {step_ms_range[1]:,.1f}",
        )
        if part == "detectors":
            header += " | synchronisations | criterion, ms | synchronisations of the criterion"
            cells += " | {step_waits:d} | {criterion_ms:,.2f} | {criterion_waits:d}"
        shown = table(
            f"{header} | peak MiB | {named}",
            f"{cells} | {{peak_mib:,.0f}} | {{{error}:.1e}}",
            (run for run in runs if "step_ms" in run),
        )
        reasons: dict[str, list[str]] = {}
        for run in runs:
            if "step_ms" not in run:
                reason = (run.get("failed") or run["left_out"]).splitlines()[0][:200]
                reasons.setdefault(reason, []).append(f"{run['contender']} ({run['case']})")
        without = "".join(f"\n\nWithout figures: {', '.join(names)}: {reason}." for reason, names in reasons.items())
        place = source(found[part], *(name for name in LIBRARIES if name in found[part]))
        texts.append(f"### {title}\n\n{place}.{' '.join(['', *beside_tested(part, found[part])])}\n\n{shown}{without}")
    return "\n\n".join(texts)


def first_steps(file: Path) -> str:
    """Return how far the losses of the first steps are from those of the library's own loss, by contender."""
    found = found_in(file)["curves"]
    runs = [run for run in found["runs"] if "losses" in run]
    own = {run["case"]: run["losses"] for run in reversed(runs) if run["contender"] == runs[0]["contender"]}
    rows = []
    for contender, each in by("contender", runs).items():
        pairs = [(loss, other) for run in each for loss, other in zip(run["losses"], own[run["case"]], strict=True)]
        rows.append({"loss": contender, "seeds": len(each), "first": each[0]["losses"][0], "last": each[0]["losses"][-1]})
        rows[-1]["apart"] = max(abs(loss - other) for loss, other in pairs)
    header = "loss of | seeds | the first step's loss, seed 0 | the last one's | the largest difference of a step"
    shown = table(header, "{loss} | {seeds:d} | {first:.4f} | {last:.4f} | {apart:.4f}", rows)
    return f"{source(found, 'transformers', 'liger_kernel')}.\n\n{shown}"


def _steps(found: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield steps of detectors, and how much of each loss and assignment take; a loss that is a setting is shown as code."""
    for run in found["runs"]:
        ours = run["loss_ms"] + run.get("match_ms", 0)
        loss = f"`{run['loss']}`" if "=" in run["loss"] else run["loss"]
        yield run | {"loss": loss, "ours": ours, "share": ours / run["step_ms"]}


def _with_torchvision(found: dict[str, Any]) -> str:
    return source(found, "torchvision")


detector_steps = Table(
    "detector | loss | images/s | peak MiB | step, ms | loss and assignment, ms | of a step | off by, of float64",
    "{model} | {loss} | {images_per_second:,.0f} | {peak_mib:,.0f} | {step_ms:,.1f} | {ours:,.2f} | {share:.1%} | {difference:.1e}",
    _steps,
    "steps",
    _with_torchvision,
)
retinanet = Table(
    "loss | step, ms | loss, ms | peak MiB | off by, of float64",
    "{loss} | {step_ms:,.1f} | {loss_ms:,.2f} | {peak_mib:,.0f} | {difference:.1e}",
    _steps,
    "retinanet",
    _with_torchvision,
)


def problems(file: Path) -> str:
    """Return each contender's time for a problem, and how far its result is from the first contender's or from float64."""
    found, rows, before = found_in(file), [], ""
    for each in found["rows"]:
        problem, agrees, errors = each["problem"], each.get("agrees"), each.get("errors")
        first, before = problem != before, problem
        name, _, sizes = problem.partition(" ")
        share = name.endswith("_assign") or name == "hungarian_match"
        if errors is not None:
            beside = f"errors {', '.join(f'{error:.0e}' for error in errors)}"
        elif first:
            beside = None
        elif agrees is None:
            beside = "" if "waits" not in each else "other rules"
        else:
            beside = f"{agrees:.1%} equal" if share else f"off by {agrees:.0e}"
        floor = each.get("floor_ms")
        told: dict[str, Any] = {"contender": "plain torch" if each["contender"] == "torch" else each["contender"], "beside": beside}
        told |= {
            "what": (f"`{name}` {sizes}" if "_" in name else problem) if first else "",
            "waits": "synchronises" if each.get("waits") else "",
        }
        told["floor"] = None if floor is None or "ms" not in each else f"{floor / each['ms']:.0%}"
        rows.append({"peak_mib": None, "operations": None, "ms": None, **each, **told, "failed": each.get("error", "")[:80]})
    header = "problem | by | ms | of the limit | peak MiB | operations | the host | beside the first, or float64"
    cells = "{what} | {contender} | {ms:,.3f} | {floor} | {peak_mib:,.1f} | {operations:,d} | {waits} | {beside}{failed}"
    return f"{source(found)}.\n\n{table(header, cells, rows)}"


def kernels(file: Path) -> str:
    """Return what the kernel of each problem gains over torch.compile, which has no time where its result is wrong or it fails."""
    found, rows = found_in(file), []
    for problem, each in by("problem", found["rows"]).items():
        ours, compiled = (next((row for row in each if row["contender"] == who), {}) for who in ("lossforge", "torch.compile"))
        row = {"problem": problem, "ms": ours["ms"], "mib": ours["peak_mib"]}
        row |= {"compiled_ms": compiled.get("ms"), "compiled_mib": compiled.get("peak_mib")}
        rows.append(row | {"gain": compiled["ms"] / ours["ms"] if "ms" in compiled else None})
    header = "forward + backward | a kernel of ours, ms | torch.compile, ms | gain | MiB: a kernel of ours | MiB: torch.compile"
    cells = "{problem} | {ms:,.3f} | {compiled_ms:,.3f} | {gain:.2f} | {mib:,.0f} | {compiled_mib:,.0f}"
    return f"{source(found)}.\n\n{table(header, cells, rows)}"


def objectives(file: Path) -> str:
    """Return what cross entropies of large logits and objectives of tokens take from hidden states, beside peers and the products alone."""
    report = load(file)
    suites = [suite for suite in ("exact", "objectives") if report.by_case(suite)]
    return "\n\n".join([f"{tables.provenance(report)}.", *(linear.listed(report, suite) for suite in suites)])


def drafts(file: Path, losses: Sequence[str] = ()) -> str:
    """Return what losses of draft models, of a teacher's likeliest classes and of several depths take, beside torch.compile."""
    report = load(file)
    return f"{tables.provenance(report)}.\n\n{linear.beside_compile(report, 'drafts', losses)}"


def metric_learning(file: Path) -> str:
    """Return what losses of labelled features take, beside plain torch and the products alone."""
    report = load(file)
    return f"{tables.provenance(report)}.\n\n{linear.listed(report, 'features')}"


# what cross entropy fused with its layer takes by the spread of the logits, and how many rows are computed again
deviations = Table(
    "deviation of the logits | `logits=` | ms | errors: input's gradient | weight's | rows computed again",
    "{deviation:d} | {logits} | {ms:.2f} | {input_error:.1e} | {weight_error:.1e} | {computed_again:,d}",
)


NUMBERS = {2: "Two", 4: "Four"}
PARALLEL_LIBRARIES = ("liger-kernel", "megatron-core")
TRAINING_LIBRARIES = ("transformers", "trl", "accelerate")


def spread_vocabulary(*files: Path) -> str:
    """Return what losses take whose classes are spread over GPUs, and which share of their part of one GPU's time that is."""
    return "\n\n".join(map(_spread_vocabulary, files))


def _spread_vocabulary(file: Path) -> str:
    found = found_in(file)
    number = NUMBERS[found["gpus"]]
    rows = [{"contender": "lossforge", **row} for row in found["rows"]]
    own = [row for row in rows if row["contender"] == "lossforge"]
    libraries = [name for name in PARALLEL_LIBRARIES if name in found]
    texts = [
        f"{source(found, *libraries, gpus=number)}.",
        table(*_of_spread(found["gpus"], "tokens × features × classes"), _with_errors(own)),
    ]
    if others := [row for row in rows if row["contender"] != "lossforge"]:
        texts += ["Beside other libraries, in turns in one run:", _beside_libraries(found["gpus"], rows, others), *ahead(file)]
    if beside := found.get("beside_fsdp"):
        header = "blocks × tokens × features × classes | form | GPUs | step, ms | peak MiB a GPU | gradients differ by"
        cells = (
            "{blocks:d} × {tokens:d} × {features:d} × {classes:d} | {form} | {processes:d} | {step_ms:.1f} | {peak_mib:,.0f} | {error:.1e}"
        )
        about = "A model of bfloat16 that ends in the loss, under AdamW; gradients against one GPU in float32:"
        texts += [about, table(header, cells, beside)]
    return "\n\n".join(texts)


def _of_spread(gpus: int, sizes: str) -> tuple[str, str]:
    """Return header and cells of a table of losses on one GPU and on several. sizes: what the first column has."""
    header = (
        f"{sizes} | form | one GPU, ms | {NUMBERS[gpus].lower()}, ms | one's time / {gpus} by theirs | without exchanges, ms | "
        "only exchanging, ms | idle, ms | peak MiB: one | each | errors of the gradients: one | all"
    )
    cells = "{sizes} | {form} | {one_ms:.1f} | {ms:.1f} | {share:.1%} | {part_ms:.1f} | {exposed_ms:.2f} | {idle_ms:.2f} | "
    cells += "{one_mib:,.0f} | {mib:,.0f} | {of_one} | {of_all}"
    return header, cells


def _with_errors(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for row in rows:
        of_one, of_all = (", ".join(f"{error:.1e}" for error in errors) for errors in row["errors"])
        sizes = " × ".join(str(row[name]) for name in ("rows", "features", "classes") if name in row)
        yield {"part_ms": None, "exposed_ms": None, "idle_ms": None, **row, "of_one": of_one, "of_all": of_all, "sizes": sizes}


def ahead(file: Path) -> list[str]:
    """Return who is ahead in each case of a file, by the rule of the first page; nothing where no other library has a figure."""
    cases = [case for case in READERS.get(file.stem, lambda _: iter(()))(file) if case.others()]
    return [tables.markdown(("case", *HEADER), [[case.title, *costs_of(case)] for case in cases])] if cases else []


def _beside_libraries(gpus: int, rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Return the forms that other libraries compute, with those that failed below the table."""
    forms = {row["form"] for row in others}
    shown = _with_errors(row for row in rows if row["form"] in forms and "ms" in row)
    header = f"form | by | ms | from – to | one's time / {gpus} by theirs | peak MiB each | errors of the gradients"
    cells = "{form} | {contender} | {ms:.2f} | {low:.2f} – {high:.2f} | {share:.1%} | {mib:,.0f} | {of_all}"
    failed = [f"{row['contender']} ({row['form']}): {row['failed'].rstrip('.')}." for row in others if "failed" in row]
    return "\n\n".join([table(header, cells, shown), *(["Without figures:", *failed] if failed else [])])


def spread_trainings(file: Path) -> str:
    """Return what trainings on several GPUs take, and how far the losses of their steps are from the library's own."""
    found = found_in(file)
    first: dict[Any, list[float]] = {}
    rows = []
    for row in found["rows"]:
        if "failed" in row:
            rows.append(row | dict.fromkeys(("step_ms", "low", "high", "peak_mib"), None) | {"told": row["failed"]})
            continue
        own = first.setdefault((row["kind"], row["parallel"]), row["losses"])
        pairs = zip(row["losses"], own, strict=True)
        off = max(abs(a - b) / max(abs(b), 1) for a, b in pairs)
        low, high = row["step_ms_range"]
        told = f"{row['losses'][0]:.4f} → {row['losses'][-1]:.4f}" + (f"; differ by {off:.1e}" if own is not row["losses"] else "")
        rows.append({**row, "low": low, "high": high, "told": told})
    header = "training | model | by | losses | step, ms | from – to | peak MiB a GPU | loss of the steps | commit"
    cells = "{kind} | {model} | {parallel} | {contender} | {step_ms:.1f} | {low:.1f} – {high:.1f} | {peak_mib:,.0f} | {told} | {commit}"
    libraries = [name for name in TRAINING_LIBRARIES if name in found]
    return "\n\n".join([f"{source(found, *libraries, gpus=NUMBERS[found['gpus']])}.", table(header, cells, rows), *ahead(file)])


def spread_contrastive(*files: Path) -> str:
    """Return what losses of features spread over GPUs take: in a ring and gathered, and those without negatives beside one GPU."""
    return "\n\n".join(map(_spread_contrastive, files))


def _spread_contrastive(file: Path) -> str:
    found = found_in(file)
    texts = [ring_and_gathered(file), _ring_beside_gathered(found), *ahead(file)]
    if rows := found.get("rows"):
        about = "Losses of a whole batch and centres of a teacher's logits, float32, with all rows on one GPU and with each GPU's own:"
        texts += [about, table(*_of_spread(found["gpus"], "rows × features"), _with_errors(rows))]
    return "\n\n".join(texts)


def _ring_beside_gathered(found: dict[str, Any]) -> str:
    """Return how much longer the ring takes than the fastest gathered form, and how much more memory that form takes."""
    rows = []
    for loss, forms in found["losses"].items():
        others = {form: each for form, each in forms.items() if form != "ring" and "ms" in each}
        if "ring" in forms and others:
            form, best = min(others.items(), key=lambda pair: pair[1]["ms"])
            ring = forms["ring"]
            pairs = best["mib"] * 2**20 * found["gpus"] / found["batch"] ** 2
            ratios = {"time": ring["ms"] / best["ms"], "memory": best["mib"] / ring["mib"] if ring["mib"] else None, "pairs": pairs}
            rows.append({"loss": loss, "form": form, "exposed_ms": ring.get("exposed_ms"), **ratios})
    header = "loss | the fastest gathered form | the ring's time / its | its MiB / the ring's | bytes a pair | the ring waits, ms"
    cells = "{loss} | {form} | {time:.2f} | {memory:.1f} | {pairs:.1f} | {exposed_ms:.2f}"
    return table(header, cells, rows)


# what contrastive losses take, in a ring and gathered
ring_and_gathered = Table(
    "loss | form | forward, ms | backward, ms | both, ms | peak MiB a GPU | errors: loss | images | texts",
    "{loss} | {form} | {forward_ms:.1f} | {backward_ms:.1f} | {ms:.1f} | {mib:,.0f} | {errors[0]:.1e} | {errors[1]:.1e} | {errors[2]:.1e}",
    lambda found: (
        {"loss": loss.removesuffix(" again"), "form": form, **each}
        for loss, forms in found["losses"].items()
        for form, each in forms.items()
    ),
    about=lambda found: f"{source(found, gpus=NUMBERS[found['gpus']])}, {found['batch']:,} pairs of {found['width']} features",
)


# the time of the Hungarian method on the GPU, beside that of scipy with the copies
hungarian = Table(
    "images × queries × boxes an image | costs, ms | assignment, ms | scipy with its copies, ms",
    "{images:d} × {queries:d} × {boxes:d} | {cost_ms:.3f} | {ms:.3f} | {scipy_ms:.1f}",
    part="hungarian",
)
# what DETR's criterion takes, ours beside that of transformers
criterion = Table(
    "layers × images × queries × boxes an image | by | operations | synchronisations | kernels, ms | step, ms | "
    "errors of the gradients: logits | boxes",
    "{layers:d} × {images:d} × {queries:d} × {boxes:d} | {by} | {operations:,d} | {waits:d} | {kernels_ms:.2f} | {ms:.1f} | "
    "{logits_error:.1e} | {boxes_error:.1e}",
    part="criterion",
)


def several_gpus(*files: Path) -> str:
    """Return how long the losses of several GPUs agree with those of one, beside those of one GPU after a disturbance."""
    return "\n\n".join(map(_several_gpus, files))


def _several_gpus(file: Path) -> str:
    found, rows = found_in(file), []
    for each in found["losses"]:
        row = [each["case"]]
        for name in ("several", "disturbed"):
            differences = [abs(a - b) / abs(a) for a, b in zip(each["one"], each[name], strict=True)]
            equal = list(itertools.takewhile(lambda d: d <= found["tolerance"], differences))
            row += [f"{len(equal)} of {len(differences)}", f"{max(equal):.1e}"]
        rows.append(row)
    gpus = NUMBERS.get(found["gpus"], str(found["gpus"]))
    about = f"NCCL {found['nccl']}; tolerance {found['tolerance']:g}, disturbance {found['disturbance']:.0e}"
    header = ("under", "updates that agree", "difference", "by rounding alone", "difference")
    return f"{source(found, gpus=gpus)}, {about}.\n\n{tables.markdown(header, rows)}"


PARALLEL = {"none": "one process", "ddp": "DistributedDataParallel", "fsdp": "FSDP2"}


def on_gpus(part: str) -> Callable[[dict[str, Any]], Iterable[dict[str, Any]]]:
    """Return what yields the figures of a part, without what only several GPUs have, where they are of one."""

    def rows(found: dict[str, Any]) -> Iterable[dict[str, Any]]:
        for each in found[part]:
            alone = {"scaling": None, "gradient_difference": None} if each["gpus"] == 1 else {}
            yield {**each, **alone, "parallel": PARALLEL[each["parallel"]], "gpus": of_kind(each["gpus"], found)}

    return rows


def of_kind(gpus: int, found: dict[str, Any]) -> str:
    """Return how many GPUs of which kind, such as 2×H100."""
    return f"{gpus}×{found['gpu'].split()[1]}"


def _large(found: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield the figures of a model that one GPU cannot hold, under FSDP2."""
    each = found["large"]
    losses = f"{each['losses'][0]:.4f} → {each['losses'][-1]:.4f} in {len(each['losses'])} steps"
    yield each | {"billions": each["parameters"] / 1e9, "told": losses, "gpus": of_kind(each["gpus"], found)}


speed = Table(
    "model | by | optimiser | GPUs | batch a GPU | images/s | scaling | step, ms | peak MiB a GPU",
    "{model} | {parallel} | {optimizer} | {gpus} | {batch} | {images_per_second:,.0f} | {scaling:,.2f} | " + STEP,
    on_gpus("speed"),
    about=None,
)
fused_on_several = Table(
    "by | GPUs | tokens a GPU × features × classes | tokens/s | scaling | step, ms | peak MiB a GPU | gradients differ by",
    "{parallel} | {gpus} | {tokens} × {features} × {classes} | {tokens_per_second:,.0f} | {scaling:,.2f} | " + STEP + GRADIENTS,
    on_gpus("fused"),
    about=None,
)
large_model = Table(
    "model | blocks | 10⁹ parameters | MiB needed | MiB of a GPU | peak MiB a GPU | GPUs | batch a GPU | step, ms | loss",
    "{model} | {depth} | {billions:.2f} | {needed_mib:,.0f} | {gpu_mib:,.0f} | {peak_mib:,.0f} | {gpus} | {batch} | "
    "{step_ms:,.0f} | {told}",
    _large,
    about=None,
)


def by(key: str, rows: Iterable[dict[str, Any]]) -> dict[str, Rows]:
    """Return the rows of each value of a column."""
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


CLASSES_SHOWN = 151_936
CASES_SHOWN = {"σ = 4": (4.0, 0.0), "σ = 64": (64.0, 0.0), "σ = 4, all + 10⁴": (4.0, 1e4)}
ERRORS = {"value": "value", "dh": "input", "dw": "weight"}


def precision_of_peers(loss: str, file: Path) -> str:
    """Return each contender's errors of a loss fused with its layer: in some cases of CLASSES_SHOWN classes, and the largest of all."""
    found, rows, failed = found_in(file), [], ""
    for name, own in by("contender", by("loss", found["rows"])[loss]).items():
        if reasons := [each["failed"] for each in own if "failed" in each]:
            failed += f"\n\nWithout a figure: {name}: {reasons[0]}."
            continue
        shown = {(each["deviation"], each["offset"]): each for each in own if each["classes"] == CLASSES_SHOWN}
        errors = [shown[case][error] for case in CASES_SHOWN.values() for error in ERRORS]
        errors += [max(each[error] for each in own if not each["offset"]) for error in ERRORS]
        rows.append([name, *(f"{error:.1e}" for error in errors)])
    header = ("by", *(f"{case}: {error}" for case in (*CASES_SHOWN, "largest without offset") for error in ERRORS.values()))
    return f"{source(found['source'])}.\n\n{tables.markdown(header, rows)}{failed}"


def _of_language_model(found: dict[str, Any]) -> Iterable[dict[str, Any]]:
    for each in found["rows"]:
        size, losses = found["sizes"][each["dtype"]], each["losses"]
        yield {**size, **each, "tokens": size["batch"] * size["length"], "first": losses[0], "last": losses[-1]}


language_model = Table(
    "head, tokens × hidden → classes | loss | step, ms | peak MiB | loss | largest difference",
    "{tokens:,} × {width} → {vocabulary:,}, {dtype} | `{loss}` | {ms:,.1f} | {peak_mib:,.0f} | {first:.4f} → {last:.4f} | "
    "{largest_difference:.1e}",
    _of_language_model,
)


RECIPE_LOSSES = {"transformers": "the model's own", "lossforge": "ours"}
# what a step of the recipe of 7B takes, by whose loss it has
recipe = Table(
    "loss | step, ms | range | peak MiB | loss of the first and the last step",
    "{whose} | {step_ms:,.1f} | {step_ms_range[0]:,.1f} to {step_ms_range[1]:,.1f} | {peak_mib:,.0f} | {losses[0]:.5f} → {losses[4]:.5f}",
    lambda found: (each | {"whose": RECIPE_LOSSES[each["contender"]]} for each in found["runs"]),
    about=lambda found: source(found, "transformers", "peft"),
)


METRICS = {
    "balanced_accuracy": "balanced accuracy",
    "map": "mAP",
    "top1": "top-1",
    "accuracy": "pairs right",
    "probe_top1": "linear probe",
    "recall1": "recall@1",
}
Figure = tuple[str, Callable[[dict[str, Any]], float]]
SECOND_FIGURES: dict[str, Figure] = {
    "long_tail": ("recall of the three rarest classes", lambda each: sum(each["recall"][-3:]) / 3),
    "multilabel": ("F1", lambda each: each["f1"]),
    "detectors": ("mAP75", lambda each: each["map75"]),
    "image_text": ("recall@5", lambda each: (each["text_recall5"] + each["image_recall5"]) / 2),
}
CALIBRATION_ERROR: Figure = ("calibration error", lambda each: each["ece"])
Key = TypeVar("Key")


def compared(reached: dict[Key, list[float]], beside: dict[Key, Key], higher: bool = True) -> dict[Key, Difference]:
    """Return how each contender differs from its baseline over the same seeds; their verdicts are corrected for each other by Holm."""
    seeded = {key: dict(enumerate(values)) for key, values in reached.items()}
    found = {key: paired_difference(seeded[key], seeded[baseline], 0.95) for key, baseline in beside.items()}
    write_verdicts([(each, higher) for each in found.values()], 0.05)
    return found


def columns_of(difference: Difference | None, digits: int, factor: int = 1, role: str = "baseline") -> dict[str, str]:
    """Return the columns of a difference to the baseline, times a factor; without a difference, the role."""
    if difference is None:
        return {"difference": role, "p": "", "corrected": "", "verdict": ""}
    of = difference.of
    within = "" if of.low is None or of.high is None else f" ({factor * of.low:+.{digits}f} to {factor * of.high:+.{digits}f})"
    return {
        "difference": f"{factor * of.mean:+.{digits}f}{within}",
        "p": p_text(difference.p),
        "corrected": p_text(difference.holm),
        "verdict": f"**{difference.verdict}**" if difference.verdict in ("better", "worse") else "no",
    }


def p_text(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


DIFFERENCE = "{difference} | {p} | {corrected} | {verdict}"


def effect_rows(file: Path = EFFECTS) -> Rows:
    """Return a row for each run and metric, beside the last baseline before it; p is corrected over all tests of a preset."""
    rows = []
    for preset, what in found_in(file).items():
        runs_of, reached, beside = by("command", sorted(what["runs"], key=lambda run: run["seed"])), {}, {}
        metrics = [what[name] for name in ("metric", "also") if name in what]
        for key in itertools.product(metrics, runs_of):
            metric, command = key
            reached[key] = [run["values"][metric] for run in runs_of[command]]
            role = runs_of[command][0]["role"]
            if role == "baseline":
                baseline = key
            elif role == "contender":
                beside[key] = baseline
        found = compared(reached, beside)
        name, second = SECOND_FIGURES.get(preset, CALIBRATION_ERROR)
        for (metric, command), values in reached.items():
            runs = runs_of[command]
            row = {"command": command, "seeds": len(runs), "metric": METRICS[metric], "name": name}
            row |= {"mean": 100 * statistics.mean(values), "deviation": 100 * statistics.stdev(values)}
            row |= columns_of(found.get((metric, command)), 1, 100, role=runs[0]["role"])
            row["second"] = statistics.mean(second(run["values"]) for run in runs)
            row["seconds"] = statistics.mean(run.get("cpu_seconds", run["seconds"]) for run in runs)
            rows.append(row)
    return rows


def effect_table(rows: Rows) -> str:
    tested = "paired difference (95 %) | p | p, corrected | effect"
    header = f"{COMMAND} | seeds | held-out, %, ± standard deviation | {tested} | second figure | CPU s"
    cells = "`{command}` | {seeds} | {metric} {mean:.1f} ± {deviation:.1f} | " + DIFFERENCE + " | {name} {second:.3f} | {seconds:,.0f}"
    return table(header, cells, rows)


def effects(file: Path) -> str:
    found = found_in(file)
    first = next(iter(found.values()))
    named = ({each: None for what in found.values() for each in what[name].split(", ")} for name in ("commit", "date"))
    commits, dates = map(", ".join, named)
    devices = "; ".join(dict.fromkeys(what["device"] for what in found.values()))
    about = f"{devices}; torch {first['torch']}, timm {first['timm']}, commit {commits}, {dates}."
    return f"{about}\n\n{effect_table(effect_rows(file))}"


def calibration(file: Path) -> str:
    """Return calibration errors before and after temperature scaling, each beside cross entropy's after it."""
    runs_of = by("command", sorted(found_in(file)["few_digits"]["runs"], key=lambda run: run["seed"]))
    keys = list(itertools.product(runs_of, ("ece", "ece_temperature")))
    reached = {(command, metric): [run["values"][metric] for run in runs_of[command]] for command, metric in keys}
    baseline = keys[1]
    tested, rows = compared(reached, {key: baseline for key in keys if key != baseline}, higher=False), []
    for key, errors in reached.items():
        command, metric = key
        temperature = statistics.geometric_mean(run["values"]["temperature"] for run in runs_of[command])
        scaled = f"T = {temperature:.2f}" if metric == "ece_temperature" else "as trained"
        row = {"command": command, "temperature": scaled, "mean": statistics.mean(errors), "deviation": statistics.stdev(errors)}
        rows.append(row | columns_of(tested.get(key), 3))
    header = f"{COMMAND} | temperature | calibration error, ± standard deviation | paired difference (95 %) | p | p, corrected | better"
    return table(header, "`{command}` | {temperature} | {mean:.3f} ± {deviation:.3f} | " + DIFFERENCE, rows)


def detectors(file: Path) -> str:
    """Return what each detector reached over the seeds, with the interval of the mean, and beside FCOS; then variants, where measured."""
    found = found_in(file)
    tables = [_over_seeds(found["detectors"], lambda command: "fcos")]
    if "variants" in found:
        about = "Variants, each beside the first of its model:"
        tables += [about, _over_seeds(found["variants"], lambda command: command.split()[1])]
    return "\n\n".join(tables)


def _over_seeds(found: dict[str, Any], base_of: Callable[[str], str]) -> str:
    """Return what each command reached. base_of: from a command to a part of those that it is compared with, the first of them."""
    runs_of = by("command", sorted(found["runs"], key=lambda run: run["seed"]))
    bases = {command: next(other for other in runs_of if base_of(command) in other) for command in runs_of}
    reached = {command: [run["map"] for run in runs] for command, runs in runs_of.items()}
    tested, rows = compared(reached, {command: base for command, base in bases.items() if command != base}), []
    for command, runs in runs_of.items():
        mean = mean_of(reached[command], 0.95)
        others = {name: statistics.mean(run[name] for run in runs) for name in ("map50", "map75")}
        row = {"command": command, "seeds": len(runs), "mean": mean.mean, "half": mean.half, **others}
        rows.append(row | columns_of(tested.get(command), 3))
    header = f"{COMMAND} | seeds | mAP (95 %) | mAP50 | mAP75 | paired difference (95 %) | p, corrected"
    cells = "`{command}` | {seeds} | {mean:.3f} ± {half:.3f} | {map50:.3f} | {map75:.3f} | {difference} | {corrected}"
    return f"{source(found, 'torchvision')}.\n\n{table(header, cells, rows)}"


DRAFTS = RESULTS / "drafts-h200.json"
DRAFTS_OF = {"draft models": ("draft", "draft_tv", "draft_kl", "js"), "depths": ("mtp",)}
"""Of tables of their own: the losses of the suite `drafts` that each has."""
DETECTION, SEVERAL_GPUS = RESULTS / "detection.json", [RESULTS / f"several-gpus-{gpu}.json" for gpu in ("h100", "h200")]
SECTIONS: dict[str, tuple[Any, ...]] = {
    **OF_CASES,
    "bench": (bench, BENCH),
    "new losses": (bench, RESULTS / "new-losses-h100.json"),
    "scaling": (lambda file: f"{tables.provenance(load(file))}.", SCALING),
    "fused": (fused, LINEAR),
    "fused before": (fused, RESULTS / "linear.json"),
    **{f"precision of {loss}": (partial(precision_of_peers, loss), PRECISION) for loss in ("linear_ce", "logps", "entropy")},
    "language model": (language_model, RESULTS / "language-model.json"),
    "recipe": (recipe, RESULTS / "recipe-h200.json"),
    "throughput": (throughput, RESULTS / "throughput-h100.json"),
    **{name: (make, RESULTS / "training-h200.json") for name, make in (("training", training), ("parity", parity), ("presets", presets))},
    "detection": (detection, DETECTION),
    "detectors": (detectors, DETECTION),
    "detector_steps": (detector_steps, DETECTION),
    "retinanet": (retinanet, DETECTION),
    "integrations": (integrations, INTEGRATIONS),
    "first steps": (first_steps, INTEGRATIONS),
    "assignment": (problems, RESULTS / "assignment-h200.json"),
    "hungarian": (hungarian, RESULTS / "matching-h100.json"),
    "criterion": (criterion, RESULTS / "matching-h100.json"),
    "metric learning": (metric_learning, RESULTS / "metric-learning-h200.json"),
    "self-distillation": (bench, RESULTS / "self-distillation-h200.json"),
    "detectors and masks": (bench, RESULTS / "detectors-and-masks-h200.json"),
    "masks": (problems, RESULTS / "masks-h200.json"),
    "vision": (problems, RESULTS / "vision-h200.json"),
    "kernels": (kernels, RESULTS / "kernels-earned-h200.json"),
    "objectives": (objectives, RESULTS / "objectives-h200.json"),
    "drafts": (drafts, DRAFTS),
    **{name: (partial(drafts, losses=losses), DRAFTS) for name, losses in DRAFTS_OF.items()},
    "deviations": (deviations, RESULTS / "deviations-h100.json"),
    "spread vocabulary": (spread_vocabulary, *(RESULTS / f"spread-vocabulary-{gpus}.json" for gpus in ("h200", "h100-x4"))),
    "spread contrastive": (spread_contrastive, *(RESULTS / f"spread-contrastive-{gpu}.json" for gpu in ("h200", "h100"))),
    "spread trainings": (spread_trainings, RESULTS / "spread-trainings-h200.json"),
    "effects": (effects, EFFECTS),
    "calibration": (calibration, EFFECTS),
    "several gpus": (several_gpus, *SEVERAL_GPUS),
    "speed": (speed, *SEVERAL_GPUS, RESULTS / "speed-h100-x4.json"),
    "fused on several": (fused_on_several, *SEVERAL_GPUS),
    "large model": (large_model, *SEVERAL_GPUS),
}
"""What makes each table, and the files of results that it reads."""
