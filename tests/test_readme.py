"""README.md is short; tables, pictures and the repository's tree are current. Commands and examples of all pages: test_pages.py."""

import json
import re
import statistics

import pytest
import reported
import tables
from measure_precision import FULL
from pages import ROOT, blocks_of, commands_of, text_of

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "experiments/README.md")


def test_the_first_commands_are_there():
    commands = {line.partition("#")[0].strip() for name in DOCUMENTS for line in commands_of(name)}
    assert {"uv run experiments/train.py loss=focal model=resnet50", "uv run pytest packages/", "uv run mlflow ui"} <= commands


def test_tables_and_pictures_are_the_registrys_and_the_results():
    assert not [page for page, text in tables.files().items() if page.read_text(encoding="utf-8") != text]
    assert not tables.stale_drawings(), "run: uv run tools/generate.py"


def test_the_readme_is_short_and_has_both_doors_on_its_first_screen():
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 120
    first = "\n".join(lines[:26])
    for what in ("experiment=quick", "(#use-the-losses-in-your-code)", "(experiments/README.md)", "(docs/pictures/", "(docs/cite.md)"):
        assert what in first
    assert first.index("experiment=quick") < first.index("model=resnet50")


def section(title):
    return text_of("README.md").partition(f"## {title}")[2].partition("\n## ")[0]


def size(shape):
    tokens, features, classes = (f"{each:,}" for each in shape)
    return f"{tokens} tokens × {features} features → {classes} classes"


def test_the_errors_of_log_probabilities_are_the_results():
    of_error = {"loss": "logps", "deviation": 4.0, "offset": 0.0, "classes": reported.CLASSES_SHOWN}
    rows = rows_of("precision-h200.json")
    ours, theirs = (next(row for row in rows if {**of_error, "contender": who}.items() <= row.items()) for who in ("lossforge", "trl"))
    said = " ".join(section("Use the losses in your code").split())
    assert (
        f"{size((*FULL[:2], ours['classes']))}, logits of standard deviation 4: {ours['value']:.1e}; TRL's own {theirs['value']:.1e}."
        in said
    )


@pytest.fixture(scope="module")
def against_us():
    """Return the page of figures that speak for another library."""
    return text_of("docs/know/when_not.md")


def row_of(file, **case):
    return next(row for row in rows_of(file) if case.items() <= row.items())


def test_figures_that_speak_against_us_are_the_results(against_us):
    resnet = json.loads((ROOT / "results/throughput-h100.json").read_text())["resnet50"]["rows"]
    classifier = {row["by"]: row["images_per_second"] for row in resnet if row["data"] == "loop"}
    assert f"{classifier['lossforge']:,.0f} images/s with ours, {classifier['timm']:,.0f} with timm's" in against_us
    small = [row_of("bench-h200.json", loss="ce", shape=[64, 10], contender=who) for who in ("lossforge", "torch", "torch.compile")]
    host = "{:.0f} µs for ours, {:.0f} µs for torch's and {:.0f} µs for torch.compile's"
    assert host.format(*(each["host_us"] for each in small)) in against_us
    ours, _, compiled = (1000 * each["ms"] for each in small)
    assert f"ours takes {ours:.0f} µs and torch.compile's {compiled:.0f} µs" in against_us
    problem = "distribution_balanced 4096x9605 fp32"
    ours, compiled = (row_of("kernels-earned-h200.json", problem=problem, contender=who) for who in ("lossforge", "torch.compile"))
    text = "takes {:.2f} ms and {:.0f} MiB, by a kernel it took {:.2f} ms and {:.0f} MiB"
    assert text.format(compiled["ms"], compiled["peak_mib"], ours["ms"], ours["peak_mib"]) in against_us
    case = {"loss": "selective_log_softmax", "variant": "with entropy", "use": "llama3-8b"}
    compiled, ours = (row_of("linear-h200.json", **case, contender=who) for who in ("torch.compile", "lossforge"))
    assert f"{compiled['ms']:.1f} ms for torch.compile, {ours['ms']:.1f} ms for ours" in against_us
    assert f"It takes {compiled['peak_mib']:,.0f} MiB, ours {ours['peak_mib']:,.0f} MiB" in against_us
    case = {"loss": "multi_similarity", "use": "views-8192"}
    compiled, ours = (row_of("metric-learning-h200.json", **case, contender=who) for who in ("torch.compile", "lossforge"))
    assert compiled["ms"] < ours["ms"]
    theirs, ours = (f"{each['ms']:.2f} ms and {each['peak_mib']:,.0f} MiB for" for each in (compiled, ours))
    assert f"{theirs} torch.compile, {ours} ours" in against_us
    first = [each["first_ms"] for each in rows_of("bench-h200.json") if each["contender"] == "lossforge"]
    assert f"{max(first) / 1000:.0f} s for the slowest" in against_us
    assert 0.4 < statistics.median(first) / 1000 < 0.55  # "half a second for half of them"


def rows_of(name):
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))["rows"]


def test_other_results_make_tables_and_pictures_stale(tmp_path, monkeypatch):
    report = json.loads((ROOT / "results" / "bench-h200.json").read_text(encoding="utf-8"))
    row = next(r for r in report["rows"] if r["contender"] == "lossforge")
    row["ms"] = 12.345
    other = tmp_path / "bench.json"
    other.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setitem(tables.SECTIONS, "bench", (reported.bench, other))
    assert "12.345" in tables.renewed(text_of("docs/benchmarks/losses.md"))
    _, draw, rows = tables.PICTURES["time"]
    monkeypatch.setitem(tables.PICTURES, "time", (other, draw, rows))
    assert [path.name for path in tables.stale_drawings()] == ["time.svg"]


def test_long_tables_are_folded_and_keep_their_rows():
    rows = [[f"{name}, {n}", "1" if name == "focal" else ""] for name in ("focal", "mse", "other", "huber") for n in range(12)]
    table = reported.tables.markdown(("loss", "ms"), rows)
    text = tables.folded(f"Before.\n\n{table}\n\nAfter.")
    assert re.findall(r"<summary>(.*)</summary>", text) == ["Classification: 12 rows", "Regression: 24 rows", "other: 12 rows"]
    assert [line for line in text.splitlines() if re.search(r", \d", line)] == [
        reported.tables.markdown((row[0],) if not row[1] else row, []).splitlines()[0] for row in (*rows[:24], *rows[36:], *rows[24:36])
    ]
    assert tables.folded(short := reported.tables.markdown(("loss", "ms"), rows[:30])) == short


def test_the_map_has_every_room_on_one_screen():
    (tree,) = (block.code for block in blocks_of("docs/know/repository.md") if block.language == "text")
    assert len(tree.splitlines()) <= 45
    assert max(map(len, tree.splitlines())) <= 100
    named: set[str] = set()
    folders: list[str] = []
    for line in tree.splitlines():
        depth, names = (len(line) - len(line.lstrip())) // 2, line.split("  ")
        name = next(part for part in names if part.strip()).strip()
        del folders[depth:]
        for each in name.split(", "):
            named.add("/".join([*folders, each]))
        folders.append(name)
    assert not [path for path in named if not (ROOT / path).exists()]
    rooms = {path for name in ("kernels", "losses", "bench") for path in (ROOT / "packages" / name / "src" / "lossforge").glob("*/*/")}
    rooms |= {*(ROOT / "experiments" / "lab").glob("*/")}
    rooms = {str(path.relative_to(ROOT)) for path in rooms if (path / "__init__.py").exists() or any(path.glob("*.py"))}
    assert not rooms - named


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_no_place_of_one_machine(name):
    assert not re.search(r"(?<![\w.:/])/(work|home|root|usr|opt|tmp)/", text_of(name))
    assert not re.search(r"/simple\b|\b(index|find)-(url|links)\b", text_of(name))
