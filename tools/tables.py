"""Tables and pictures of README.md and of the documentation: losses from the registry, measurements from results/.

A table stands between `<!-- NAME: uv run tools/generate.py -->` and `<!-- end of NAME -->`, on any page. The page says in words what
the table shows.
"""

import inspect
import itertools
import json
import statistics
import string
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from loss_text import MissingError, file_of

from lab.comparison.stats import Difference, holm, mean_of, paired_difference
from lab.runs.files import write_whole
from lossforge.bench.report import linear, load, pictures, tables
from lossforge.losses.definitions.linear import LINEAR as OF_LAYERS
from lossforge.losses.definitions.preference.common import PREFERENCE
from lossforge.losses.registry import LOSSES, Loss
from lossforge.losses.templates import TEMPLATES
from lossforge.losses.templates.declare import DECLARED, Declared
from lossforge.losses.templates.router import ROUTER
from lossforge.losses.templates.rowwise import ROWWISE

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DRAWN = ROOT / "docs" / "pictures"
RESULTS = ROOT / "results"
BENCH, SCALING, EFFECTS = (RESULTS / f"{name}.json" for name in ("bench-h200", "scaling-h200", "effects"))
LINEAR, PRECISION = RESULTS / "linear-h100.json", RESULTS / "precision-h100.json"
PICTURES = {
    "time": (BENCH, pictures.time_picture, pictures.main_rows),
    "memory": (BENCH, pictures.memory_picture, pictures.main_rows),
    "scaling": (SCALING, pictures.scaling_picture, pictures.scaling_rows),
    "headline": (BENCH, pictures.headline_picture, pictures.headline_rows),
}
HEADER = ("name", "function", "formula", "targets", "in place of")


def formula(function: Callable[..., Any]) -> str:
    """Return the formula in the function's docstring: from `L =` to the end of the clause.

    Raises:
        MissingError: the docstring has none.
    """
    text = " ".join((inspect.getdoc(function) or "").split())
    start = text.find(" L = ") + 1
    if not start:
        raise MissingError(f"{file_of(DECLARED[function.__name__])}: the docstring of {function.__name__} has no formula, L = ...")
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth == 0 and text.startswith((", ", "; ", ". ", " with ", " with,"), i):
            return text[start:i]
    return text[start:].rstrip(".")


def targets_of(loss: Loss) -> str:
    known = loss.targets or loss.template.docs.targets
    return known.replace(", probabilities", "") if "probabilities" in loss.without else known


def folder_of(loss: Loss) -> str:
    """Return the folder of the kernels that launch the loss's template."""
    name = TEMPLATES[loss.template.call].name
    return {"topk": "divergence"}.get(name, name)


def row(loss: Loss) -> list[str]:
    like = loss.like or ""
    theirs = like and not like.startswith("lossforge")
    return [
        f"[`{loss.name}`]({family_of(loss.definition)}.md#{loss.name})",
        f"`{loss.function.__name__}`",
        f"`{formula(loss.function)}`",
        targets_of(loss),
        f"`{like.replace(':', '.')}`" if theirs else "",
    ]


FAMILIES = {
    "regression": "Regression",
    "binary": "Binary and multi-label classification",
    "cross_entropy": "Cross entropy",
    "classification": "Classification with one label",
    "angular": "Metric learning with a margin",
    "likelihood": "Likelihood",
    "noise_model": "Regression under a model of the noise",
    "margin": "Margins",
    "embedding": "Embeddings",
    "detection": "Detection: classes and distributions",
    "iou": "Detection: boxes",
    "dice": "Segmentation",
    "divergence": "Distillation",
    "contrastive": "Contrastive learning",
}


def family_of(definition: Callable[..., Any]) -> str:
    """Return the page of docs/losses that has a loss: the file of its definition."""
    return definition.__module__.rpartition(".")[2]


def titles() -> dict[str, str]:
    """Return the title of each family's page. A family that FAMILIES does not know comes last, under the name of its file."""
    found = (family_of(each.definition) for each in on_pages())
    return FAMILIES | {family: family.replace("_", " ").capitalize() for family in found if family not in FAMILIES}


def families() -> str:
    rows = []
    for family, title in titles().items():
        members = [loss.name for loss in LOSSES.values() if family_of(loss.definition) == family]
        members += [each.definition.__name__ for each in functions() if family_of(each.definition) == family]
        rows.append([f"[{title}](docs/losses/{family}.md)", ", ".join(f"`{name}`" for name in members)])
    return tables.markdown(("family", "losses"), rows)


OWN_PAGES = (OF_LAYERS, PREFERENCE, ROWWISE.docs, ROUTER.docs)
"""What is shared by functions outside the registry that stand on other pages of the reference."""


def on_pages() -> list[Declared]:
    """Return the functions that stand on the pages of the families."""
    return [each for each in DECLARED.values() if each.name or each.docs not in OWN_PAGES]


def functions() -> list[Declared]:
    """Return the losses of the families that are not in the registry: functions with arguments of their own."""
    return [each for each in on_pages() if not each.name]


def reference(modules: bool) -> str:
    """Return the entries of the reference: functions, or modules, by family."""
    shown, parts = on_pages(), []
    for family, title in titles().items():
        members = [each for each in shown if family_of(each.definition) == family]
        names = [each.module.name if modules and each.module else each.definition.__name__ for each in members]
        parts += [f"## {title}", *(f"::: lossforge.losses.{name}" for name in names)]
    return "\n\n".join(parts)


def row_of_function(declared: Declared) -> list[str]:
    name = declared.definition.__name__
    link = f"[`{name}`]({family_of(declared.definition)}.md#{name})"
    return [link, f"`{name}`", f"`{formula(declared.definition)}`", declared.docs.targets, ""]


def losses() -> str:
    return tables.markdown(HEADER, [*(row(loss) for loss in LOSSES.values()), *map(row_of_function, functions())])


def results(bench: Path, fused: Path) -> str:
    report, of_layers = load(bench), load(fused)
    other = "" if of_layers.gpu == report.gpu else f", the linear layer on one {of_layers.gpu}"
    return f"One {report.gpu}{other}:\n\n{tables.short([report, of_layers], SHOWN)}"


SHOWN = (
    *("ce 8192x128256 bf16", "ce 16384x1000 bf16", "focal class index 16x120087x80 fp32", "asymmetric 4096x9605 fp32"),
    *("kl 8192x32000 bf16", "giou 4194304x4 fp32", "dice 8x21x512x512 fp32", "ce 8192x2304x256000 bf16"),
)


def bench(file: Path) -> str:
    report = load(file)
    read = f"{(report.read_bytes_per_second or 0) / 1e12:.2f} TB/s"
    return f"{tables.provenance(report)}. {copy_rate(report)}, and a sum at {read}.\n\n{tables.bench(report)}"


def copy_rate(report: Any) -> str:
    return f"A copy ran at {(report.copy_bytes_per_second or 0) / 1e12:.2f} TB/s"


def fused(file: Path) -> str:
    report = load(file)
    cut = report.versions.get("cut-cross-entropy", "not installed")
    return f"{tables.provenance(report)}, cut-cross-entropy {cut} in its exact mode.\n\n{linear.fused(report)}"


def fused_targets(file: Path) -> str:
    report = load(file)
    return f"{copy_rate(report)} in this run. {linear.targets(report)}"


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
    """Return a table of rows, whose cells are written by formats such as `{ms:,.1f}`; both with | between the columns."""
    return tables.markdown(header.split(" | "), [[Figures().format(cell, **row) for cell in cells.split(" | ")] for row in rows])


def end_to_end(file: Path) -> str:
    found = found_in(file)
    rows = [each if each["status"] == "ok" else each | {"ms": each["status"], "peak_mib": None} for each in found["rows"]]
    made = table("a whole step | loss | ms | peak MiB", "{work} | {loss} | {ms:,.1f} | {peak_mib:,.0f}", rows)
    return f"{source(found)}.\n\n{made}"


STEP = "{step_ms:,.1f} | {peak_mib:,.0f}"
COMMAND = "`uv run experiments/train.py`"


def training(file: Path) -> str:
    found = found_in(file)
    found["commit"] = " and ".join(dict.fromkeys(each["commit"] for part in ("runs", "presets", "parity") for each in found[part]))
    header = f"{COMMAND} | top-1, last epoch | loss, ms | peak MiB | s | loss computed by"
    cells = "`{command}` | {top1:.2f} % | {loss_ms:,.2f} | {peak_mib:,.0f} | {seconds:,.0f} | {backend}"
    rows = [each if each["whole"] else each | {"seconds": None} for each in found["runs"]]
    return f"{source(found)}.\n\n{table(header, cells, rows)}"


def parity(file: Path) -> str:
    return table("loss | largest difference | steps", "{loss} | {largest_difference:.1e} | {steps}", found_in(file)["parity"])


def presets(file: Path) -> str:
    cells = "`{command}` | {step_ms:,.1f} | {images_per_second:,.0f} | {data_wait_share:.1%}"
    return table(f"{COMMAND} | step, ms | images/s | waiting for data", cells, found_in(file)["presets"])


def detection(file: Path) -> str:
    """Return the trained detectors by where they were measured; a part may be of another measurement."""
    found, places = found_in(file), {}
    for part in ("defaults", "tables", "more", "large"):
        for run in found.get(part, {}).get("runs", ()):
            words = "" if part == "large" else "task=detection "
            places.setdefault(source(found[part], "torchvision"), []).append(run | {"command": words + run["command"]})
    header = f"{COMMAND} | mAP | mAP50 | mAP75 | loss, ms | step, ms | peak MiB | s | loss computed by"
    cells = "`{command}` | {map:.3f} | {map50:.3f} | {map75:.3f} | {loss_ms:,.2f} | " + STEP + " | {seconds:,.0f} | {backend}"
    return "\n\n".join(f"{place}.\n\n{table(header, cells, rows)}" for place, rows in places.items())


def with_loss(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run with its loss as code, where that is a setting."""
    return run | {"loss": f"`{run['loss']}`"} if "=" in run["loss"] else run


def detector_steps(file: Path) -> str:
    """Return what a step of each detector takes, and how much of it its loss and assignment do."""
    if (found := found_in(file).get("steps")) is None:
        return NOT_MEASURED
    rows = [with_loss(run) | {"ours": run["loss_ms"] + run["match_ms"]} for run in found["runs"]]
    header = "detector | loss | images/s | peak MiB | step, ms | loss and assignment, ms | of a step | off by, of float64"
    cells = "{model} | {loss} | {images_per_second:,.0f} | {peak_mib:,.0f} | {step_ms:,.1f} | {ours:,.2f} | {share:.1%} | {difference:.1e}"
    rows = [row | {"share": row["ours"] / row["step_ms"]} for row in rows]
    return f"{source(found, 'torchvision')}.\n\n{table(header, cells, rows)}"


def retinanet(file: Path) -> str:
    if (found := found_in(file).get("retinanet")) is None:
        return NOT_MEASURED
    cells = "{loss} | {step_ms:,.1f} | {loss_ms:,.2f} | {peak_mib:,.0f} | {difference:.1e}"
    made = table("loss | step, ms | loss, ms | peak MiB | off by, of float64", cells, map(with_loss, found["runs"]))
    return f"{source(found, 'torchvision')}.\n\n{made}"


def assignment(file: Path) -> str:
    """Return each contender's time for a problem of assignment, and how far its result is plain torch's."""
    found, rows = found_in(file), []
    for each in found["rows"]:
        share, agrees = each["problem"].startswith(("task_aligned_assign", "hungarian_match")), each.get("agrees")
        equal = "other rules" if agrees is None else f"{agrees:.1%} equal" if share else f"off by {agrees:.0e}"
        told = {"contender": each["contender"], "what": "", "equal": equal}
        if each["contender"] == "torch":
            told = {"contender": "plain torch", "what": "`{}` {}".format(*each["problem"].split()), "equal": ""}
        rows.append({"peak_mib": None, **each, **told, "waits": "waits" if each.get("waits") else ""})
    made = table(
        " | by | ms | peak MiB | the host | beside plain torch",
        "{what} | {contender} | {ms:,.3f} | {peak_mib:,.1f} | {waits} | {equal}",
        rows,
    )
    return f"{source(found)}.\n\n{made}"


def several_gpus(file: Path) -> str:
    """Return how long the losses of several GPUs agree with those of one, beside those of one GPU after a disturbance."""
    found, rows = found_in(file), []
    for each in found["losses"]:
        figures = []
        for name in ("several" if "several" in each else "two", "disturbed"):
            differences = [abs(a - b) / abs(a) for a, b in zip(each["one"], each[name], strict=True)]
            equal = list(itertools.takewhile(lambda d: d <= found["tolerance"], differences))
            figures += [f"{len(equal)} of {len(differences)}", f"{max(equal):.1e}"]
        rows.append([each["case"], *figures])
    gpus = found.get("gpus", 2)
    about = f"NCCL {found['nccl']}; tolerance {found['tolerance']:g}, disturbance {found['disturbance']:.0e}"
    header = ("under", "updates that agree", "difference", "by rounding alone", "difference")
    return f"{source(found, gpus='Two' if gpus == 2 else str(gpus))}, {about}.\n\n{tables.markdown(header, rows)}"


PARALLEL = {"none": "one process", "ddp": "DistributedDataParallel", "fsdp": "FSDP2"}


def on_gpus(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows without what only several GPUs have, where they are of one."""
    for each in rows:
        alone = {"scaling": None, "gradient_difference": None} if each["gpus"] == 1 else {}
        yield {"optimizer": "sgd", **each, **alone, "parallel": PARALLEL[each["parallel"]]}


def speed(file: Path) -> str:
    header = "model | by | optimiser | GPUs | batch a GPU | images/s | scaling | step, ms | peak MiB a GPU"
    cells = "{model} | {parallel} | {optimizer} | {gpus} | {batch} | {images_per_second:,.0f} | {scaling:,.2f} | " + STEP
    return table(header, cells, on_gpus(found_in(file)["speed"]))


def fused_on_several(file: Path) -> str:
    """Return the figures of a model that ends in a loss fused with its layer."""
    if not (found := found_in(file).get("fused")):
        return NOT_MEASURED
    header = "by | GPUs | tokens a GPU × features × classes | tokens/s | scaling | step, ms | peak MiB a GPU | gradients differ by"
    cells = "{parallel} | {gpus} | {tokens} × {features} × {classes} | {tokens_per_second:,.0f} | {scaling:,.2f} | "
    return table(header, cells + STEP + " | {gradient_difference:.1e}", on_gpus(found))


def large_model(file: Path) -> str:
    """Return the figures of a model that one GPU cannot hold, under FSDP2."""
    if (each := found_in(file).get("large")) is None:
        return NOT_MEASURED
    losses = f"{each['losses'][0]:.4f} → {each['losses'][-1]:.4f} in {len(each['losses'])} steps"
    header = "model | blocks | 10⁹ parameters | MiB needed | MiB of a GPU | peak MiB a GPU | GPUs | batch a GPU | step, ms | loss"
    cells = "{model} | {depth} | {billions:.2f} | {needed_mib:,.0f} | {gpu_mib:,.0f} | {peak_mib:,.0f} | {gpus} | {batch} | "
    return table(header, cells + "{step_ms:,.0f} | {told}", [each | {"billions": each["parameters"] / 1e9, "told": losses}])


CLASSES_SHOWN = 151_936
CASES_SHOWN = {"σ = 4": (4.0, 0.0), "σ = 64": (64.0, 0.0), "σ = 4, all + 10⁴": (4.0, 1e4)}
ERRORS = {"value": "value", "dh": "input", "dw": "weight"}


def precision_of_peers(loss: str, file: Path) -> str:
    """Return each contender's errors of a loss fused with its layer: in some cases of CLASSES_SHOWN classes, and the largest of all."""
    found, rows, failed = found_in(file), [], []
    of_loss = [each for each in found["rows"] if each["loss"] == loss]
    for name in dict.fromkeys(each["contender"] for each in of_loss):
        own = [each for each in of_loss if each["contender"] == name]
        if any("failed" in each for each in own):
            failed.append(f"{name}: {next(each['failed'] for each in own if 'failed' in each)}")
            continue
        cells = []
        for case in CASES_SHOWN.values():
            (row,) = (each for each in own if each["classes"] == CLASSES_SHOWN and (each["deviation"], each["offset"]) == case)
            cells += [f"{row[error]:.1e}" for error in ERRORS]
        rows.append([name, *cells, *(f"{max(each[error] for each in own if not each['offset']):.1e}" for error in ERRORS)])
    header = ("", *(f"{case}: {error}" for case in (*CASES_SHOWN, "largest without offset") for error in ERRORS.values()))
    text = f"{source(found['source'])}.\n\n{tables.markdown(header, rows)}"
    return text + "".join(f"\n\nWithout a figure: {each}." for each in failed)


def language_model(file: Path) -> str:
    found, rows = found_in(file), []
    for each in found["rows"]:
        size, losses = found["sizes"][each["dtype"]], each["losses"]
        rows.append({**size, **each, "tokens": size["batch"] * size["length"], "first": losses[0], "last": losses[-1]})
    header = "head, tokens × hidden → classes | loss | step, ms | peak MiB | loss | largest difference"
    cells = "{tokens:,} × {width} → {vocabulary:,}, {dtype} | `{loss}` | {ms:,.1f} | {peak_mib:,.0f} | {first:.4f} → {last:.4f} | "
    return f"{source(found)}.\n\n{table(header, cells + '{largest_difference:.1e}', rows)}"


METRICS = {
    "balanced_accuracy": "balanced accuracy",
    "map": "mAP",
    "top1": "top-1",
    "accuracy": "pairs right",
    "probe_top1": "linear probe",
    "recall1": "recall@1",
}


def second_figure(preset: str, values: list[dict[str, Any]]) -> str:
    """Return a second figure of a preset's runs, a mean over the seeds."""
    rarest: Any = ("recall of the three rarest classes", lambda each: sum(each["recall"][-3:]) / 3)
    figures = {
        "long_tail": rarest,
        "multilabel": ("F1", lambda each: each["f1"]),
        "detectors": ("mAP75", lambda each: each["map75"]),
        "image_text": ("recall@5", lambda each: (each["text_recall5"] + each["image_recall5"]) / 2),
    }
    name, figure = figures.get(preset, ("calibration error", lambda each: each["ece"]))
    return f"{name} {statistics.mean(map(figure, values)):.3f}"


def p_text(p: float | None) -> str:
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def differences(ours: list[float], baseline: list[float]) -> Difference:
    """Return the paired difference of runs that share a seed."""
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(baseline)), 0.95)
    assert found
    return found


def interval(difference: Difference, factor: float, digits: int) -> str:
    """Return a mean difference and its interval, times a factor."""
    values = [each if each is None else factor * each for each in (difference.of.mean, difference.of.low, difference.of.high)]
    mean, low, high = (f"{each:+.{digits}f}" if each is not None else "" for each in values)
    return f"{mean} ({low} to {high})" if low else mean


def verdict(difference: Difference, corrected: float | None, worse: bool = False) -> str:
    """Return what a difference says of the claim that the run is better; worse: where higher values are worse."""
    if corrected is None or corrected >= 0.05:
        return "no"
    return "**yes**" if (difference.of.mean > 0) != worse else "**the opposite**"


def corrected(found: list[Difference]) -> list[float | None]:
    """Return Holm's p of tests that are asked together; None of those that could not be tested."""
    adjusted = iter(holm([each.p for each in found if each.p is not None]))
    return [None if each.p is None else next(adjusted) for each in found]


Key = TypeVar("Key")


def judged(reached: dict[Key, list[float]], beside: dict[Key, Key]) -> dict[Key, tuple[Difference, float | None]]:
    """Return how each contender differs from the baseline that it is beside, and Holm's p over all of them."""
    tested = [differences(reached[key], reached[baseline]) for key, baseline in beside.items()]
    return dict(zip(beside, zip(tested, corrected(tested), strict=True), strict=True))


EFFECT_HEADER = (
    *(COMMAND, "seeds", "held-out, %, ± standard deviation", "paired difference (95 %)", "p", "p, corrected", "effect", "", "CPU s"),
)


def effect_rows(file: Path = EFFECTS) -> list[list[str]]:
    """Return a row for each run and metric, beside the last baseline before it; p is corrected over all tests of a preset."""
    rows = []
    for preset, what in found_in(file).items():
        of = by_command(what["runs"])
        beside = baselines(of)
        metrics = [what[name] for name in ("metric", "also") if name in what]
        reached = {(metric, command): [run["values"][metric] for run in runs] for metric in metrics for command, runs in of.items()}
        found = judged(reached, {key: (key[0], beside[key[1]]) for key in reached if of[key[1]][0]["role"] == "contender"})
        for (metric, command), values in reached.items():
            runs = of[command]
            figure = f"{METRICS[metric]} {100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}"
            said = [runs[0]["role"], "", "", ""]
            if (metric, command) in found:
                difference, p = found[metric, command]
                said = [interval(difference, 100, 1), p_text(difference.p), p_text(p), verdict(difference, p)]
            cost = f"{statistics.mean(run.get('cpu_seconds', run['seconds']) for run in runs):,.0f}"
            rows.append([f"`{command}`", str(len(values)), figure, *said, second_figure(preset, [run["values"] for run in runs]), cost])
    return rows


def baselines(of: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the baseline of each command: the last one before it."""
    found, baseline = {}, ""
    for command, runs in of.items():
        baseline = command if runs[0]["role"] == "baseline" else baseline
        found[command] = baseline
    return found


def by_command(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return each command's runs, by seed."""
    commands = dict.fromkeys(run["command"] for run in runs)
    return {command: sorted((run for run in runs if run["command"] == command), key=lambda run: run["seed"]) for command in commands}


def effects(file: Path) -> str:
    found = found_in(file)
    first = next(iter(found.values()))
    commits, dates = (", ".join(dict.fromkeys(what[name] for what in found.values())) for name in ("commit", "date"))
    devices = "; ".join(dict.fromkeys(what["device"] for what in found.values()))
    about = f"{devices}; torch {first['torch']}, timm {first['timm']}, commit {commits}, {dates}."
    return f"{about}\n\n{tables.markdown(EFFECT_HEADER, effect_rows(file))}"


CALIBRATED = ("few_digits", "ece", "ece_temperature")


def calibration(file: Path) -> str:
    """Return calibration errors before and after temperature scaling, each beside cross entropy's after it."""
    preset, *metrics = CALIBRATED
    if preset not in (found := found_in(file)):
        return NOT_MEASURED
    of = by_command(found[preset]["runs"])
    baseline = next(command for command, runs in of.items() if runs[0]["role"] == "baseline")
    values = {(command, metric): [run["values"][metric] for run in runs] for command, runs in of.items() for metric in metrics}
    first = baseline, metrics[1]
    tested, rows = judged(values, {key: first for key in values if key != first}), []
    for (command, metric), errors in values.items():
        said = ["baseline", "", "", ""]
        if (command, metric) in tested:
            difference, p = tested[command, metric]
            better = verdict(difference, p, worse=True).replace("**the opposite**", "**worse**").replace("**yes**", "**better**")
            said = [interval(difference, 1, 3), p_text(difference.p), p_text(p), better]
        scaled = metric == metrics[1]
        temperature = statistics.geometric_mean(run["values"]["temperature"] for run in of[command])
        figure = f"{statistics.mean(errors):.3f} ± {statistics.stdev(errors):.3f}"
        rows.append([f"`{command}`", f"T = {temperature:.2f}" if scaled else "as trained", figure, *said])
    header = (COMMAND, "temperature", "calibration error, ± standard deviation", "paired difference (95 %)", "p", "p, corrected", "")
    return tables.markdown(header, rows)


def detectors(file: Path) -> str:
    """Return what each detector reached over the seeds, with the interval of the mean, and beside FCOS."""
    if (found := found_in(file).get("detectors")) is None:
        return NOT_MEASURED
    of = by_command(found["runs"])
    baseline = next(command for command in of if "fcos" in command)
    reached = {command: [run["map"] for run in runs] for command, runs in of.items()}
    tested, rows = judged(reached, {command: baseline for command in of if command != baseline}), []
    for command, runs in of.items():
        mean = mean_of(reached[command], 0.95)
        others = [f"{statistics.mean(run[name] for run in runs):.3f}" for name in ("map50", "map75")]
        said = ["baseline", ""]
        if command in tested:
            difference, p = tested[command]
            said = [interval(difference, 1, 3), p_text(p)]
        spread = f"{mean.mean:.3f} ± {mean.half:.3f}" if mean.half is not None else f"{mean.mean:.3f}"
        rows.append([f"`{command}`", str(len(runs)), spread, *others, *said])
    header = (COMMAND, "seeds", "mAP (95 %)", "mAP50", "mAP75", "paired difference (95 %)", "p, corrected")
    return f"{source(found, 'torchvision')}.\n\n{tables.markdown(header, rows)}"


NOT_MEASURED = "Not measured yet."
SECTIONS: dict[str, tuple[Any, ...]] = {
    "losses": (losses,),
    "families": (families,),
    "functions": (partial(reference, False),),
    "modules": (partial(reference, True),),
    "results": (results, BENCH, LINEAR),
    "bench": (bench, BENCH),
    "new losses": (bench, RESULTS / "new-losses-h100.json"),
    "targets": (lambda file: tables.targets(load(file)), BENCH),
    "scaling": (lambda file: f"{tables.provenance(load(file))}.", SCALING),
    "fused": (fused, LINEAR),
    **{f"precision of {loss}": (partial(precision_of_peers, loss), PRECISION) for loss in ("linear_ce", "logps", "entropy")},
    "fused targets": (fused_targets, LINEAR),
    "language model": (language_model, RESULTS / "language-model.json"),
    "end to end": (end_to_end, RESULTS / "end-to-end-h200.json"),
    **{make.__name__: (make, RESULTS / "training-h200.json") for make in (training, parity, presets)},
    **{make.__name__: (make, RESULTS / "detection.json") for make in (detection, detectors, detector_steps, retinanet)},
    "assignment": (assignment, RESULTS / "assignment-h200.json"),
    "effects": (effects, EFFECTS),
    "calibration": (calibration, EFFECTS),
    **{
        make.__name__.replace("_", " "): (make, RESULTS / "several-gpus-h100.json")
        for make in (several_gpus, speed, fused_on_several, large_model)
    },
}
"""What makes each table, and the files of results that it reads."""


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: uv run tools/generate.py -->", f"<!-- end of {name} -->"


def renewed(text: str) -> str:
    """Return a page's text with the tables of today's registry and results."""
    for name, (make, *files) in SECTIONS.items():
        begin, end = marks(name)
        before, found, rest = text.partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise ValueError(f"the line {end} is missing after {begin}")
            made = make(*files) if all(file.exists() for file in files) else NOT_MEASURED
            text = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return text


def unplaced() -> list[str]:
    """Return the tables that no page has."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return [name for name in SECTIONS if marks(name)[0] not in text]


def files() -> dict[Path, str]:
    """Return each page with its tables.

    Raises:
        MissingError: no page has the place of a table.
    """
    if missing := unplaced():
        raise MissingError(f"no page has the line {marks(missing[0])[0]}")
    return {page: renewed(page.read_text(encoding="utf-8")) for page in PAGES}


def stale_pictures() -> list[str]:
    """Return the names of pictures that were drawn from other figures than results/ holds now."""
    stale = []
    for name, (source, _, rows) in PICTURES.items():
        if source.exists():
            report, path = load(source), DRAWN / f"{name}.svg"
            if not path.exists() or pictures.digest(report, rows(report)) not in path.read_text(encoding="utf-8"):
                stale.append(name)
    return stale


def draw_picture(name: str, file: IO[bytes]) -> None:
    source, draw, _ = PICTURES[name]
    draw(load(source), Path(file.name))


def stale_drawings() -> dict[Path, Callable[[], object]]:
    """Return the pictures to draw, and what draws each."""
    return {path: partial(write_whole, path, partial(draw_picture, name)) for name in stale_pictures() if (path := DRAWN / f"{name}.svg")}
