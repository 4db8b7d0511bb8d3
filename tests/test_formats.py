"""Names from outside are text and nothing else: in Markdown, CSV, HTML, SVG, and on a terminal."""

import csv
import io
import re
from contextlib import redirect_stdout
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from mlflow_journal import Journal

import compare
from lab.base.errors import UserError
from lab.base.formats import csv_cell, csv_row, markdown_code, markdown_text, visible
from lab.run.frames import write_rows
from lab.training.console import Console

HOSTILE = [
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![a](http://evil/a.png)"),
    *("<javascript:alert(1)>", "`a`", "**a**", "_a_", "~~a~~", "a|b", "a\\|b", "a\n\n# b", "&lt;b&gt;"),
    *("- a", "1. a", "# a", "> a", "\\[a](b)"),
    *("=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "=HYPERLINK(A1)", "＝1+1"),
    *("[red]a[/red]", "[link=http://evil]a[/link]", ":smile:", "\x1b]8;;http://evil\x07a", "\x9b31m"),
    *("\u202eabc", "$\\x$", "a$b$c", "tiny_resnet"),
]


def rendered(text: str) -> str:
    """As CommonMark with tables and strikethrough shows it, HTML let through."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(text)


class Shown(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src") or name.startswith("on")]

    def handle_data(self, data):
        self.text += data


def shown(html: str) -> Shown:
    found = Shown()
    found.feed(html)
    return found


def plain(text: str) -> str:
    """What a reader is to see of a name."""
    return " ".join(visible(text).split())


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_markdown_shows_a_text_as_it_is(text):
    line = shown(rendered(f"- {markdown_text(text)}\n"))
    assert (line.tags, line.links, line.text.strip()) == (["ul", "li"], [], plain(text))
    table = shown(rendered(f"| a | b |\n| --- | --- |\n| {markdown_text(text)} | **{markdown_text(text)}** |\n"))
    assert table.tags == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td", "strong"]
    assert table.links == []
    assert table.text.split()[2:] == 2 * plain(text).split()


def test_a_block_of_code_holds_any_fence():
    text = "uv run a.py 'name=```\n<script>'"
    found = shown(rendered(markdown_code(text, "sh")))
    assert (found.tags, found.text.strip()) == (["pre", "code"], text)
    assert markdown_code("ls", "sh") == "```sh\nls\n```"


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_cell_is_no_formula(text):
    made = csv_cell(text)
    assert made.removeprefix("'") == visible(text)
    assert made[0] not in "=+-@\t\r\n＝＋－＠"
    assert (made != visible(text)) == (text[0] in "=+-@\t\r\n＝")


@pytest.mark.parametrize("value", [-1.5, 3, None, True, "-0.5", "+1e-3", "-inf", "a=b", ""])
def test_numbers_stay_numbers(value):
    assert csv_cell(value) is value
    assert csv_row({"=a": value}) == {"'=a": value}


def test_per_class_tables_of_an_evaluation(tmp_path):
    rows = [{"class": name, "ap": -0.5} for name in HOSTILE]
    with write_rows(tmp_path / "per_class.csv", rows).open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert [row["class"].removeprefix("'") for row in read] == [visible(name) for name in HOSTILE]
    assert {row["ap"] for row in read} == {"-0.5"}
    assert not [row for row in read if row["class"].startswith(("=", "+", "-", "@", "\t", "\r"))]


def test_a_file_name_that_is_not_utf_8_is_written_with_its_bytes_as_escapes(tmp_path):
    name = b"caf\xe9.jpg".decode(errors="surrogateescape")
    assert write_rows(tmp_path / "a.csv", [{"sample": name}]).read_text(encoding="utf-8").split() == ["sample", "caf\\udce9.jpg"]
    assert visible(name) == "caf\\udce9.jpg"


def test_the_console_takes_names_as_text(capsys):
    console = Console(1)
    for name in HOSTILE:
        console.say(name)
        console.table(name, {name: name})
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    for name in ("[red]a[/red]", "[link=http://evil]a[/link]", ":smile:", "\\x1b]8;;http://evil\\x07a", "\\u202eabc"):
        assert out.count(name) == 4, name


def test_an_error_takes_names_as_text():
    assert str(UserError("bad \x1b[31mname\n")) == "bad \\x1b[31mname\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison whose losses, runs and settings are called by whoever made the runs."""
    journal = Journal(tmp_path_factory.mktemp("journal"))
    costs = {"images_per_second": 100.0, "train/peak_process_mib": 512.0}
    for loss, model in (("ce", "m"), *((name, "m") for name in HOSTILE), *(("ce", name) for name in HOSTILE[:6])):
        for seed in (0, 1):
            given = {"name": f"{loss}{model}", "settings": {"optim.lr": loss}, "curve": {1: 0.1, 2: 0.5 + seed / 10}}
            journal.run(loss, model, seed, 0.5 + seed / 10, metrics=costs, **given)
    journal.run("ce", "m", 0, None, status="FAILED", tags={"error": HOSTILE[0]}, name=HOSTILE[2])
    runs = tmp_path_factory.mktemp("runs")
    with redirect_stdout(io.StringIO()) as out:
        assert compare.main(["tracking=none", f"tracking.uri={journal.uri}", f"runs={runs}"]) == 0
    (made,) = runs.iterdir()
    (made / "out.txt").write_text(out.getvalue(), encoding="utf-8")
    return made


def read(folder, name):
    return (folder / name).read_text(encoding="utf-8")


def test_a_comparison_in_markdown_and_on_the_terminal(folder):
    found = shown(rendered(read(folder, "comparison.md")))
    assert set(found.tags) <= {"h2", "table", "thead", "tbody", "tr", "th", "td", "strong", "p", "ul", "li"}
    assert found.links == []
    assert [name for name in HOSTILE if plain(name) not in found.text] == []
    out = read(folder, "out.txt")
    assert "\x1b" not in out
    assert "[red]a[/red]" in out


@pytest.mark.parametrize("name", ["comparison.csv", "runs.csv"])
def test_a_comparison_in_csv(folder, name):
    rows = list(csv.reader(io.StringIO(read(folder, name))))
    for cell in (cell for row in rows for cell in row):
        if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝")):
            float(cell)


def test_a_comparison_as_a_page(folder):
    page = read(folder, "comparison.html")
    found = shown(page)
    assert not {"script", "img", "b"} & set(found.tags)
    assert all(link.startswith(("http://127.0.0.1:5000/#/", "#")) for link in found.links), found.links
    assert [name for name in HOSTILE if plain(name) not in " ".join(found.text.split())] == []
    assert re.search("<title>ce, &lt;script&gt;alert", page)


@pytest.mark.parametrize("name", ["curves.svg", "differences.svg", "tradeoff.svg"])
def test_a_comparison_in_pictures(folder, name):
    """A `$` begins no formula, which matplotlib may not understand."""
    tree = ElementTree.parse(folder / name)
    texts = ["".join(element.itertext()) for element in tree.iter() if element.tag.endswith("}text")]
    assert {element.tag.rpartition("}")[2] for element in tree.iter()} & {"script", "a"} == set()
    assert any("a$b$c" in text for text in texts)
