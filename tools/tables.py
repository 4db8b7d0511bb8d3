"""Tables and pictures of README.md and of the documentation: losses from the registry, measurements from results/. `--write` renews them.

A table stands between `<!-- NAME: uv run tools/tables.py --write -->` and `<!-- end of NAME -->`, on whichever page.
"""

import inspect
import itertools
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import IO

import detection_table

from lab.runs.files import write_text, write_whole
from lossforge.bench.report import linear, load, pictures, tables
from lossforge.kernels.call import KINDS
from lossforge.losses.registry import LOSSES, Loss

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DRAWN = ROOT / "docs" / "pictures"
BENCH, SCALING, END_TO_END, TRAINING = (ROOT / "results" / f"{name}-h200.json" for name in ("bench", "scaling", "end-to-end", "training"))
LINEAR = ROOT / "results" / "linear-h200.json"
DETECTION = ROOT / "results" / "detection.json"
EFFECTS = ROOT / "results" / "effects.json"
SEVERAL_GPUS = ROOT / "results" / "several-gpus-h200.json"
LANGUAGE_MODEL = ROOT / "results" / "language-model.json"
PICTURES = {
    "time": (BENCH, pictures.time_picture, pictures.main_rows),
    "memory": (BENCH, pictures.memory_picture, pictures.main_rows),
    "scaling": (SCALING, pictures.scaling_picture, pictures.scaling_rows),
    "headline": (BENCH, pictures.headline_picture, pictures.headline_rows),
}
TARGETS = {
    "elementwise": "dense, class index, class index and score, mixup pair",
    "rowwise": "class index, probabilities, mixup pair",
    "nll": "class index, mixup pair",
    "boxes": "a box each, `xyxy` or `cxcywh`",
    "overlap": "class index a pixel, dense",
    "divergence": "a teacher's logits",
    "topk": "a teacher's k largest",
}
HEADER = ("name", "function", "formula", "targets", "in place of")


def formula(loss: Loss) -> str:
    """The formula in the function's docstring: from `L =` to the end of the clause."""
    text = " ".join((inspect.getdoc(loss.function) or "").split())
    start = text.find(" L = ") + 1
    if not start:
        raise ValueError(f"{loss.function.__name__}: its docstring has no formula, L = ...")
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([") - (text[i] in ")]")
        if depth == 0 and text.startswith((", ", "; ", ". ", " with ", " with,"), i):
            return text[start:i]
    return text[start:].rstrip(".")


def targets_of(loss: Loss) -> str:
    known = loss.targets or TARGETS[loss.template]
    return known.replace(", probabilities", "") if "probabilities" in loss.without else known


def folder_of(loss: Loss) -> str:
    """Where lossforge.kernels has the template."""
    name = "elementwise" if loss.template == "nll" else loss.template
    return next(kind.folder for kind in KINDS.values() if kind.operator == name)


def row(loss: Loss) -> list[str]:
    judge = loss.judge or ""
    theirs = judge and not judge.startswith("lossforge")
    return [
        f"[`{loss.name}`]({family_of(loss)}.md#{loss.name})",
        f"`{loss.function.__name__}`",
        f"`{formula(loss)}`",
        targets_of(loss),
        f"`{judge.replace(':', '.')}`" if theirs else "",
    ]


FAMILIES = {
    "regression": "Regression",
    "binary": "Binary and multi-label classification",
    "cross_entropy": "Cross entropy",
    "classification": "Classification with one label",
    "likelihood": "Likelihood",
    "detection": "Detection: classes and distributions",
    "iou": "Detection: boxes",
    "dice": "Segmentation",
    "divergence": "Distillation",
    "contrastive": "Contrastive learning",
}
JOINED = {"asymmetric": "classification", "siglip": "contrastive"}  # families of one loss stand with their relatives


def family_of(loss: Loss) -> str:
    """The page of docs/losses that has the loss: the file of its function, joined with its relatives'."""
    file = loss.function.__module__.rpartition(".")[2]
    return JOINED.get(file, file)


def families() -> str:
    rows = []
    for family, title in FAMILIES.items():
        names = [f"`{loss.name}`" for loss in LOSSES.values() if family_of(loss) == family]
        rows.append([f"[{title}](docs/losses/{family}.md)", ", ".join(names)])
    return tables.markdown(("family", "losses"), rows)


def results() -> str:
    report, fused = load(BENCH), load(LINEAR)
    return "\n\n".join(
        [
            f"One {report.gpu}, forward + backward: milliseconds, and MiB of memory beyond the inputs. Value and gradient were checked "
            "against float64 in the same run.",
            tables.short([report, fused], SHOWN),
        ]
    )


SHOWN = (
    *("ce 8192x128256 bf16", "ce 16384x1000 bf16", "focal class index 16x120087x80 fp32", "asymmetric 4096x9605 fp32"),
    *("kl 8192x32000 bf16", "giou 4194304x4 fp32", "dice 8x21x512x512 fp32", "ce 8192x2304x256000 bf16"),
)


def detection() -> str:
    return detection_table.section(DETECTION)


def losses() -> str:
    return tables.markdown(HEADER, [row(loss) for loss in LOSSES.values()])


def provenance(found: dict, gpus: str = "One") -> str:
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton"))
    return f"{gpus} {found['gpu']}, {versions}, commit {found['commit']}, {found['date']}"


def bench() -> str:
    report = load(BENCH)
    copy, read = (f"{(rate or 0) / 1e12:.2f} TB/s" for rate in (report.copy_bytes_per_second, report.read_bytes_per_second))
    return "\n\n".join(
        [
            f"{tables.provenance(report)}. Milliseconds on the device, forward + backward from a scalar, the shorter of called and "
            "replayed from a CUDA graph. Value and every row of the gradient were checked against float64 in the same run; "
            "who is wrong has no time. The floor is the fewest bytes that must cross memory over the rate of a copy in that run "
            f"({copy}), for forward alone over that of a sum ({read}). MiB: the peak beyond the inputs.",
            tables.bench(report),
            picture("time", "time over the floor, by case and contender"),
            picture("memory", "peak memory, by case and contender"),
        ]
    )


def targets() -> str:
    return tables.targets(load(BENCH))


def scaling() -> str:
    report = load(SCALING)
    return f"{tables.provenance(report)}.\n\n{picture('scaling', 'time over rows, classes and anchors, with the floor')}"


def fused() -> str:
    report = load(LINEAR)
    cut = f"cut-cross-entropy {report.versions.get('cut-cross-entropy', 'not installed')}"
    copy = f"{(report.copy_bytes_per_second or 0) / 1e12:.2f} TB/s"
    return "\n\n".join(
        [
            f"{tables.provenance(report)}, {cut} in its exact mode; made by `python tools/measure_linear.py`. bf16, milliseconds of "
            "forward + backward; MiB: the peak beyond input and weight, their gradients counted in. Value and gradients were checked "
            "against float64 in the same run: relative errors by norm. The products alone are those that ours makes, at the same chunks "
            "and in the same memory.",
            linear.fused(report),
            "Errors over the number of chunks, by the dtype in which the weight's gradient is summed, beside those of the unfused bf16 "
            "computation.",
            linear.precision(report),
            f"Targets of this run, whose copy ran at {copy}.",
            linear.targets(report),
        ]
    )


def end_to_end() -> str:
    found = json.loads(END_TO_END.read_text(encoding="utf-8"))
    rows = []
    for each in found["rows"]:
        costs = [f"{each['ms']:.1f}", f"{each['peak_mib']:,.0f}"] if each["status"] == "ok" else [each["status"], ""]
        rows.append([each["work"], each["loss"], *costs])
    versions = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "triton") if name in found["versions"])
    return "\n\n".join(
        [
            f"One {found['gpu']}, {versions}, commit {found['commit']}, {found['date']}; made by `python tools/measure_end_to_end.py`. "
            "cut-cross-entropy here leaves small gradients out, as it does by default.",
            tables.markdown(("a whole step", "loss", "ms", "peak MiB"), rows),
        ]
    )


def picture(name: str, about: str) -> str:
    return f"![{about}](../pictures/{name}.svg)"


def training() -> str:
    found = json.loads(TRAINING.read_text(encoding="utf-8"))
    found["commit"] = " and ".join(dict.fromkeys(each["commit"] for part in ("runs", "presets", "parity") for each in found[part]))
    rows = []
    for each in found["runs"]:
        costs = f"{each['loss_ms']:.2f}", f"{each['peak_mib']:,.0f}", f"{each['seconds']:.0f}" if each["whole"] else ""
        rows.append([f"`{each['command']}`", f"{each['top1']:.2f} %", *costs, each["backend"]])
    parity = [[each["loss"], f"{each['largest_difference']:.1e}", str(each["steps"])] for each in found["parity"]]
    presets = [
        [f"`{each['command']}`", f"{each['step_ms']:.1f}", f"{each['images_per_second']:,.0f}", f"{each['data_wait_share']:.1%}"]
        for each in found.get("presets", [])
    ]
    said = [
        f"{provenance(found)}; made by `python tools/measure_training.py`: digits, held-out top-1. A step's loss, forward and "
        "backward, in ms; the most memory that was allocated, with cuDNN's search for algorithms in a process's first run; seconds of the "
        "whole command, where it was one of its own.",
        tables.markdown(("`uv run experiments/train.py`", "top-1, last epoch", "loss, ms", "peak MiB", "s", "loss computed by"), rows),
        "Training losses under ours and torch's, same trainer and seed, fp32 (`model=vit_tiny`): largest relative difference.",
        tables.markdown(("loss", "largest difference", "steps"), parity),
    ]
    if presets:
        said += [
            "The presets: a step in ms, images a second, and the share of a step's time in which the host waited for the next batch.",
            tables.markdown(("`uv run experiments/train.py`", "step, ms", "images/s", "waiting for data"), presets),
        ]
    return "\n\n".join(said)


def several_gpus() -> str:
    found = json.loads(SEVERAL_GPUS.read_text(encoding="utf-8"))
    tolerance = found["tolerance"]
    losses = []
    for each in found["losses"]:
        figures = []
        for name in ("several" if "several" in each else "two", "disturbed"):
            differences = [abs(a - b) / abs(a) for a, b in zip(each["one"], each[name], strict=True)]
            alike = list(itertools.takewhile(lambda d: d <= tolerance, differences))
            figures += [f"{len(alike)} of {len(differences)}", f"{max(alike):.1e}"]
        losses.append([each["case"], *figures])
    speed = [
        [
            *(each["model"], PARALLEL[each["parallel"]], each.get("optimizer", "sgd"), str(each["gpus"]), str(each["batch"])),
            *(f"{each['images_per_second']:,.0f}", f"{each['scaling']:.2f}" if each["gpus"] > 1 else "", f"{each['step_ms']:.1f}"),
            "" if each["peak_mib"] is None else f"{each['peak_mib']:,.0f}",
        ]
        for each in found["speed"]
    ]
    gpus = found.get("gpus", 2)
    made = f"{provenance(found, 'Two' if gpus == 2 else str(gpus))}, NCCL {found['nccl']}; made by `python tools/measure_several_gpus.py`."
    return "\n\n".join(
        [
            f"{made} The same samples on one GPU as a whole batch and on {gpus} by equal parts, float32: how many updates the training "
            f"losses agree to a relative {tolerance:g}, and their largest difference until then. Beside it one GPU against itself, its "
            f"weights first disturbed by {found['disturbance']:.0e} of each, about a rounding. Under batch norm and ReLU, from nothing, a "
            "rounding alone soon makes two runs differ. We believe that this begins where an activation changes its sign.",
            tables.markdown(("under", "updates alike", "difference", "by rounding alone", "difference"), losses),
            "Steps on images of 224 pixels that lie on the GPU, bf16 autocast. Scaling: images a second over those of one GPU under the "
            f"same optimiser, times {gpus}.",
            tables.markdown(
                ("model", "by", "optimiser", "GPUs", "batch a GPU", "images/s", "scaling", "step, ms", "peak MiB a GPU"), speed
            ),
            *([large_model(found["large"])] if "large" in found else []),
        ]
    )


def large_model(each: dict) -> str:
    """A model that one GPU cannot hold, under FSDP2."""
    peak = "" if each["peak_mib"] is None else f", and took {each['peak_mib']:,.0f} MiB a GPU"
    return (
        f"`{each['model']}` with {each['depth']} blocks has {each['parameters'] / 1e9:.2f} billion parameters. Its weights, gradients and "
        f"AdamW's state alone take {each['needed_mib']:,.0f} MiB; a GPU has {each['gpu_mib']:,.0f}, so that DistributedDataParallel cannot "
        f"hold it. Under FSDP2 on {each['gpus']} GPUs, {each['batch']} images each, it took {each['step_ms']:.0f} ms a step{peak}; over "
        f"{len(each['losses'])} steps on the same images its loss went from {each['losses'][0]:.4f} to {each['losses'][-1]:.4f}."
    )


def language_model() -> str:
    found = json.loads(LANGUAGE_MODEL.read_text(encoding="utf-8"))
    rows = []
    for each in found["rows"]:
        size, losses = found["sizes"][each["dtype"]], each["losses"]
        what = f"{size['batch'] * size['length']:,} × {size['width']} → {size['vocabulary']:,}, {each['dtype']}"
        costs = f"{each['ms']:.1f}", "" if each["peak_mib"] is None else f"{each['peak_mib']:,.0f}"
        rows.append([what, f"`{each['loss']}`", *costs, f"{losses[0]:.4f} → {losses[-1]:.4f}", f"{each['largest_difference']:.1e}"])
    steps = len(found["rows"][0]["losses"])
    return "\n\n".join(
        [
            f"{provenance(found)}; made by `python tools/measure_language_model.py`. A causal language model of the standard library's "
            f"bytes, its head tied to its embedding, {steps} steps from the same weights on the same batches, by the fused loss and by "
            "unfused ones. A whole step in ms, the most memory that was allocated, the losses of the first and the last step, and the "
            "largest relative difference of a curve from that of `cross_entropy` in the same dtype.",
            tables.markdown(("head, tokens × hidden → classes", "loss", "step, ms", "peak MiB", "loss", "largest difference"), rows),
        ]
    )


PARALLEL = {"none": "one process", "ddp": "DistributedDataParallel", "fsdp": "FSDP2"}
METRICS = {"balanced_accuracy": "balanced accuracy", "map": "mAP", "top1": "top-1", "accuracy": "pairs right"}


def beside(preset: str, values: list[dict]) -> str:
    """A second figure of a preset's runs, a mean over the seeds."""
    figures = {
        "long_tail": ("recall of the three rarest classes", lambda each: sum(each["recall"][-3:]) / 3),
        "multilabel": ("F1", lambda each: each["f1"]),
        "preference": ("calibration error", lambda each: each["ece"]),
    }
    name, figure = figures.get(preset, ("calibration error", lambda each: each["ece"]))
    return f"{name} {sum(map(figure, values)) / len(values):.3f}"


def effect(ours: list[float], baseline: list[float]) -> list[str]:
    """Mean difference of runs that share a seed with its 95 % interval, p of the paired t-test, and what that says."""
    from scipy import stats

    test = stats.ttest_rel(ours, baseline)
    low, high = (100 * bound for bound in test.confidence_interval(0.95))
    said = ("**yes**" if test.statistic > 0 else "**the opposite**") if test.pvalue < 0.05 else "no"
    p = "< 0.001" if test.pvalue < 0.001 else f"{test.pvalue:.3f}"
    return [f"{(low + high) / 2:+.1f} ({low:+.1f} to {high:+.1f})", p, said]


EFFECT_HEADER = (
    "`uv run experiments/train.py`",
    "seeds",
    "held-out, %, ± standard deviation",
    "paired difference (95 %)",
    "p",
    "effect",
    "",
)


def effect_rows() -> list[list[str]]:
    found = json.loads(EFFECTS.read_text(encoding="utf-8"))
    rows = []
    for preset, what in found.items():
        metric = what["metric"]
        commands = dict.fromkeys(run["command"] for run in what["runs"])
        of = {command: sorted((r for r in what["runs"] if r["command"] == command), key=lambda r: r["seed"]) for command in commands}
        reached = {command: [run["values"][metric] for run in runs] for command, runs in of.items()}
        baseline = next(command for command, runs in of.items() if runs[0]["role"] == "baseline")
        for command, runs in of.items():
            values, role = reached[command], runs[0]["role"]
            figure = f"{METRICS[metric]} {100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f}"
            judged = effect(values, reached[baseline]) if role == "contender" else [role, "", ""]
            rows.append([f"`{command}`", str(len(values)), figure, *judged, beside(preset, [run["values"] for run in runs])])
    return rows


def effects() -> str:
    found = json.loads(EFFECTS.read_text(encoding="utf-8"))
    first = next(iter(found.values()))
    commits, dates = (", ".join(dict.fromkeys(what[name] for what in found.values())) for name in ("commit", "date"))
    return "\n\n".join(
        [
            f"{first['device']}, torch {first['torch']}, timm {first['timm']}, commit {commits}, {dates}; made by "
            "`python tools/measure_effects.py`. The last epoch's figures. Runs of one seed share the split, the data that is drawn and "
            "the order. The effect is there where a paired t-test over the seeds gives p < 0.05 (not corrected for the number of lines).",
            tables.markdown(EFFECT_HEADER, effect_rows()),
        ]
    )


SECTIONS = {
    "losses": losses,
    "families": families,
    "results": results,
    "bench": bench,
    "targets": targets,
    "scaling": scaling,
    "fused": fused,
    "end to end": end_to_end,
    "training": training,
    "detection": detection,
    "effects": effects,
    "several gpus": several_gpus,
    "language model": language_model,
}
FILES = {
    "bench": BENCH,
    "targets": BENCH,
    "results": BENCH,
    "scaling": SCALING,
    "fused": LINEAR,
    "end to end": END_TO_END,
    "detection": DETECTION,
    "effects": EFFECTS,
    "several gpus": SEVERAL_GPUS,
    "language model": LANGUAGE_MODEL,
}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: uv run tools/tables.py --write -->", f"<!-- end of {name} -->"


def renewed(text: str) -> str:
    """A page's text with the tables of today's registry and results."""
    for name, content in SECTIONS.items():
        begin, end = marks(name)
        before, found, rest = text.partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise ValueError(f"the line {end} is missing after {begin}")
            known = name not in FILES or FILES[name].exists()
            text = f"{before}{begin}\n\n{content() if known else 'Not measured yet.'}\n\n{end}{after}"
    return text


def unplaced() -> list[str]:
    """Tables that no page has."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    return [name for name in SECTIONS if marks(name)[0] not in text]


def stale_pages() -> list[Path]:
    return [page for page in PAGES if renewed(text := page.read_text(encoding="utf-8")) != text]


def stale_pictures() -> list[str]:
    """Names of pictures that were drawn from other figures than results/ holds now."""
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


def main(arguments: list[str]) -> int:
    if missing := unplaced():
        print(f"no page has the lines {', '.join(marks(name)[0] for name in missing)}", file=sys.stderr)
        return 1
    if arguments == ["--write"]:
        for page in stale_pages():
            write_text(page, renewed(page.read_text(encoding="utf-8")))
        for name in stale_pictures():
            write_whole(DRAWN / f"{name}.svg", partial(draw_picture, name))
        return 0
    stale = [str(page.relative_to(ROOT)) for page in stale_pages()] + [f"{DRAWN.relative_to(ROOT)}/{name}.svg" for name in stale_pictures()]
    if stale:
        print(f"{', '.join(stale)}: not what the registry and results/ say; run: uv run tools/tables.py --write", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
