"""README.md is short; tables, pictures and the repository's tree are current. Commands and examples of all pages: test_pages.py."""

import json
import re

import pytest
import tables
from pages import ROOT, blocks_of, commands_of, text_of

DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def test_the_first_commands_are_there():
    commands = {line.partition("#")[0].strip() for name in DOCUMENTS for line in commands_of(name)}
    assert {"uv run experiments/train.py loss=focal model=resnet50", "uv run pytest packages/", "uv run mlflow ui"} <= commands


def test_tables_and_pictures_are_the_registrys_and_the_results():
    assert not [page for page, text in tables.files().items() if page.read_text(encoding="utf-8") != text]
    assert not tables.stale_drawings(), "run: uv run tools/generate.py"


def test_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 180


def test_the_figures_of_log_probabilities_are_the_results():
    figures, errors = [], []
    of_time = {"loss": "selective_log_softmax", "variant": "with entropy", "use": "llama3-8b"}
    of_error = {"loss": "logps", "deviation": 4.0, "offset": 0.0, "classes": tables.CLASSES_SHOWN}
    for who in ("lossforge", "trl"):
        time, error = (
            next(row for row in rows if {**case, "contender": who}.items() <= row.items())
            for rows, case in ((rows_of("linear-h100.json"), of_time), (rows_of("precision-h100.json"), of_error))
        )
        assert time["shape"] == [8192, 4096, 128256]
        figures.append(f"{time['ms']:.1f} ms, {time['peak_mib']:,.0f} MiB")
        errors.append(f"{error['value']:.1e}")
    section = text_of("README.md").partition("## Train language models")[2].partition("\n## ")[0]
    for both in (figures, errors):
        assert f"{both[0]}; TRL's own {both[1]}." in section


def rows_of(name):
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))["rows"]


def test_other_results_make_tables_and_pictures_stale(tmp_path, monkeypatch):
    report = json.loads((ROOT / "results" / "bench-h200.json").read_text(encoding="utf-8"))
    row = next(r for r in report["rows"] if r["contender"] == "lossforge")
    row["ms"] = row["graph_ms"] = 12.345
    other = tmp_path / "bench.json"
    other.write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setitem(tables.SECTIONS, "bench", (tables.bench, other))
    assert "12.345" in tables.renewed(text_of("docs/benchmarks/losses.md"))
    _, draw, rows = tables.PICTURES["time"]
    monkeypatch.setitem(tables.PICTURES, "time", (other, draw, rows))
    assert [path.name for path in tables.stale_drawings()] == ["time.svg"]


def test_every_path_of_the_tree_exists():
    (tree,) = (block.code for block in blocks_of("docs/know/repository.md") if block.language == "text")
    folders: list[str] = []
    for line in tree.splitlines():
        depth, names = (len(line) - len(line.lstrip())) // 2, line.split("  ")
        name = next(part for part in names if part.strip()).strip()
        del folders[depth:]
        for each in name.split(", "):
            assert (ROOT / "/".join([*folders, each])).exists(), "/".join([*folders, each])
        folders.append(name.rstrip("/"))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_no_place_of_one_machine(name):
    assert not re.search(r"(?<![\w.:/])/(work|home|root|usr|opt|tmp)/", text_of(name))
    assert not re.search(r"/simple\b|\b(index|find)-(url|links)\b", text_of(name))
