"""The documentation's site: it builds strictly, fetches nothing, and looks right on a desktop and on a phone."""

import html
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, WHY_NOT, browser, keep
from pages import ROOT, text_of

pytest.importorskip("zensical", reason="the site needs: uv sync --group docs")
SIZES = {"desktop": (1400, 900), "phone": (390, 844)}
# the widest page of each kind
PICTURED = ("index", "losses/index", "losses/binary", "know/differences", "know/how_it_works", "benchmarks/losses", "benchmarks/effects")
FETCHES = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b(?! rel="canonical")[^>]*\bhref=["']?(?:https?:)?//|@import|url\(["']?https?:"""
)
# tables that their page cuts off where nothing scrolls or nothing says that more follows
CUT = """[...document.querySelectorAll('article table')].filter(table => {
    const frame = table.closest('.md-typeset__scrollwrap'), looks = getComputedStyle(frame)
    return frame.scrollWidth > frame.clientWidth && !(PHONE && looks.overflowX == 'auto' && looks.backgroundImage.includes('gradient'))
}).map(table => table.innerText.slice(0, 80))"""


def build(folder: Path) -> Any:
    """Build the site of a folder's mkdocs.yml, into the folder that it names."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def site():
    """The pages: those that .ci/run has built in its step `documentation`, if it has."""
    if built := os.environ.get("LOSSFORGE_SITE"):
        return Path(built)
    built = build(ROOT)
    assert built.returncode == 0, built.stdout
    return ROOT / "build" / "site"


def named(name: str) -> Any:
    """What Python has under a dotted name. A function may hide the module of its name, as lossforge.losses.check does."""
    place, _, last = name.rpartition(".")
    found = pkgutil.resolve_name(place)
    return getattr(found, last) if hasattr(found, last) else pkgutil.resolve_name(name)


def test_every_page_is_built_and_can_be_searched(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")} == pages | {Path("404")}
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    assert {Path(found["location"].partition("#")[0] or "index.html").with_suffix("") for found in index["items"]} == pages
    listed = re.findall(r"^ +- ([\w/]+)\.md$", text_of("mkdocs.yml").partition("\nnav:")[2], re.M)
    assert sorted(listed) == sorted(str(page) for page in pages), "the navigation of mkdocs.yml has each page once"


def test_what_the_reference_shows_has_a_docstring():
    """mkdocstrings would leave it out without a word."""
    for source in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"^::: (\S+)", source.read_text(encoding="utf-8"), re.M):
            assert inspect.getdoc(named(name)), f"{source.name}: {name}"


def bounds(package: str, name: str) -> tuple[str, str]:
    """The oldest version that a package takes, and the newest: 2.15 of `<2.16`."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    oldest, major, minor = re.search(rf'"{name}>=([\d.]+),<(\d+)\.(\d+)', text).groups()
    return oldest, f"{major}.{int(minor) - 1}"


@pytest.mark.parametrize("page", ["README.md", "docs/know/versions.md"])
def test_supported_versions_are_those_of_the_packages(page):
    text = text_of(page)
    for title, package, name in (("PyTorch", "losses", "torch"), ("Triton", "kernels", "triton")):
        assert f"| {title} | {' to '.join(bounds(package, name))} |" in text


def test_pages_name_their_address_on_the_site(site):
    """Search engines read it; the packages link to it."""
    address = re.search(r"^site_url: (\S+)$", text_of("mkdocs.yml"), re.M)[1]
    for page in ("index.html", "learn/detect.html"):
        assert f'<link rel="canonical" href="{address}{page}">' in (site / page).read_text(encoding="utf-8")
    for package in ("kernels", "losses", "bench"):
        assert f'\nDocumentation = "{address}"\n' in text_of(f"packages/{package}/pyproject.toml")


def test_no_page_fetches_from_elsewhere(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert not (found := FETCHES.search(path.read_text(encoding="utf-8"))), f"{path.relative_to(site)}: {found[0]}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[another](another.md)", "page does not exist"),
        ("[below](#below)", "anchor does not exist"),
        ("[title](other.md#below)", "anchor does not exist"),
        ("::: bare.absent", "Could not collect 'bare.absent'"),
    ],
)
def test_a_mistake_in_a_page_fails_the_build(tmp_path, text, said):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# One page\n\n{text}\n", encoding="utf-8")
    (tmp_path / "docs" / "other.md").write_text("# Another page\n", encoding="utf-8")
    (tmp_path / "bare.py").write_text("", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text("site_name: one page\nplugins: [mkdocstrings]\n", encoding="utf-8")
    built = build(tmp_path)
    assert built.returncode != 0
    assert said in built.stdout + built.stderr


def test_the_reference_shows_options_and_types_in_words(site):
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "losses_iou.html").read_text(encoding="utf-8"))
    assert not re.search(r"Range\(|\*\*options|Unpack", page)
    boxes = page[page.index("generalized_box_iou_loss(") :]
    assert re.search(r"empty:\s+Empty\s+=\s+.zero.", html.unescape(boxes[:2000]))


def written(text: str) -> str:
    """A part of a page without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", text))


def test_no_table_of_contents_lists_what_python_adds_to_a_class(site):
    for path in site.rglob("*.html"):
        contents = re.findall(r'<a href="#[^"]*" class="md-nav__link">(.*?)</a>', path.read_text(encoding="utf-8"), re.S)
        titles = [written(title).strip() for title in contents]
        assert not [title for title in titles if "__" in title or title == "function"], path.name


ROW = re.compile(
    r'<tr class="doc-section-item">\s*<td>\s*<code>(\w+)</code>\s*</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>', re.S
)


def test_the_reference_has_every_argument_once(site):
    """With type, meaning and default, as the signature has them: mkdocs reads the source as an editor does."""
    seen = 0
    for source in (ROOT / "docs" / "reference").glob("*.md"):
        page = (site / "reference" / f"{source.stem}.html").read_text(encoding="utf-8")
        for name in re.findall(r"^::: (lossforge\.losses\.\w+)$", source.read_text(encoding="utf-8"), re.M):
            if not (inspect.isfunction(found := named(name)) or hasattr(found, "option_names")):
                continue
            _, _, rest = page.partition(f'id="{name}"')
            rows = [[written(cell).strip() for cell in row] for row in ROW.findall(rest.partition('<div class="doc doc-object')[0])]
            signature = inspect.signature(found).parameters
            assert [row[0] for row in rows] == list(signature), name
            for row in rows:
                default = signature[row[0]].default
                assert row[1], f"{name}: {row[0]} has no type"
                assert row[2], f"{name}: {row[0]} has no meaning"
                assert row[3] == ("required" if default is inspect.Parameter.empty else repr(default)), f"{name}: {row[0]}"
            seen += 1
    assert seen > 110


def test_examples_are_code(site):
    """As many blocks as the docstrings have examples, and no prompt outside of them."""
    total = 0
    for source in (ROOT / "docs" / "reference").glob("*.md"):
        shown = [inspect.getdoc(named(name)) for name in re.findall(r"^::: (\S+)", source.read_text(encoding="utf-8"), re.M)]
        if source.name == "detection.md":  # the one class whose page shows a method with an example
            shown.append(inspect.getdoc(named("lossforge.losses.DetrCriterion").match))
        examples = sum(len(re.findall(r"(?:\n\n|:\n) *>>>", text)) for text in shown)
        page = (site / "reference" / f"{source.stem}.html").read_text(encoding="utf-8")
        code = re.findall(r'<div class="(?:language-\w+ )?highlight"><pre.*?</pre>', page, re.S)
        assert sum(written(block).startswith(">>> ") for block in code) == examples, source.name
        assert not re.search(r'<blockquote|<details class="example', page), source.name
        total += examples
    assert total >= 64


def test_no_paragraph_runs_options_together(site):
    for path in (site / "reference").glob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.S):
            assert len(re.findall(r"(?:^|\. |\n)\w+(?:, \w+)*: ", written(paragraph))) < 2, f"{path.name}: {written(paragraph)}"


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_an_example_is_copied_without_prompts(site):
    with browser() as running:
        page = running.new_page()
        page.goto((site / "reference" / "preference.html").as_uri())
        code = page.locator(".highlight code:has(.gp)").first
        code.evaluate("code => code.setAttribute('data-md-copying', '')")  # as the copy button does
        copied = code.inner_text()
    assert ">>>" not in copied
    compile(copied, "copied", "exec")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_pages_look_right(site, tmp_path, size):
    """No page is wider than the window, none says an error or asks for what is not in the site's folder; each table fits or scrolls."""
    width, height = SIZES[size]
    said: list[str] = []
    with browser() as running:
        page = running.new_page(viewport={"width": width, "height": height})
        page.on("console", lambda message: message.type == "error" and said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or said.append(request.url))
        page.on("requestfailed", lambda each: "ABORTED" in each.failure or said.append(f"{each.url}: {each.failure}"))  # aborted: left
        for path in sorted(site.rglob("*.html")):
            if path.name == "404.html":  # its links begin at the site's root, which files have not
                continue
            name = path.relative_to(site).with_suffix("").as_posix()
            page.goto(path.as_uri())
            assert not said, f"{name}: {said}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide on a {size} of {width}"
            page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            page.wait_for_function("[...document.querySelectorAll('article table')].every(each => each.closest('.md-typeset__scrollwrap'))")
            cut = page.evaluate(CUT.replace("PHONE", str(size == "phone").lower()))
            assert not cut, f"{name} cuts tables off: {cut}"
            formulas = page.evaluate(
                "['.arithmatex', '.arithmatex .katex-html', '.katex-error'].map(each => document.querySelectorAll(each).length)"
            )
            assert formulas[0] == formulas[1], f"{name}: {formulas[0]} formulas, {formulas[1]} of them set"
            assert not formulas[2], f"{name}: KaTeX refuses a formula"
            broken = page.evaluate("[...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src)")
            assert not broken, f"{name}: {broken}"
            if name in PICTURED:
                picture = tmp_path / f"site-{name.replace('/', '-')}-{size}.png"
                page.screenshot(path=picture)
                keep(picture)


SEARCHED = {
    "nan loss": "troubleshooting",
    "custom loss": "learn/write_your_own_loss",
    "class weights": "learn/replace_your_loss",
    "label smoothing": "learn/replace_your_loss",
    "cite": "cite",
    "out of memory": "troubleshooting",
    "distributed": "use_with/ddp",
    "which loss": "losses/index",
    "install": "install",
    "windows": "install",
    "license": "troubleshooting",
    "ROCm": "troubleshooting",
    "slower than torch": "troubleshooting",
    "mixed precision": "use_with/mixed_precision",
    "torch.compile": "use_with/torch_compile",
    "fsdp": "use_with/fsdp2",
    "liger": "use_with/from_liger",
    "unsloth": "use_with/index",
    "yolo": "use_with/ultralytics",
    "dpo": "learn/preferences_and_policies",
    "focal loss": "losses/binary",
    "dice loss": "losses/dice",
    "contrastive loss": "losses/contrastive",
    "distillation": "losses/divergence",
    "imbalanced classes": "learn/train_on_your_images",
    "own dataset": "your_own",
    "onnx": "learn/evaluate_and_predict",
    "resume training": "learn/resume",
    "early stopping": "learn/first_training",
    "hyperparameter search": "learn/sweep_and_compare",
    "mlflow": "learn/mlflow",
    "deterministic": "know/determinism",
    "colab": "app",
}
"""What a person looks for, and the page that search finds first."""


def linked(site: Path, page: str) -> set[str]:
    """The pages to which a page's text links, without the navigation."""
    article = re.search(r"<article.*?</article>", (site / f"{page}.html").read_text(encoding="utf-8"), re.S)[0]
    targets = {(site / page).parent / link for link in re.findall(r"""<a [^>]*href=["']?([\w./-]+)\.html""", article)}
    return {str(Path(os.path.normpath(target)).relative_to(site)) for target in targets}


def test_what_people_look_for_is_two_clicks_from_the_front_page(site):
    """By links in the text, because the navigation is closed on a phone. Three clicks lead to every page."""
    one = linked(site, "index")
    two = one.union(*(linked(site, page) for page in one))
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")} - {"404", "index"}
    assert {*SEARCHED.values()} <= two
    assert pages <= two.union(*(linked(site, page) for page in two))


@pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)
def test_search_finds_what_people_look_for_in_pages_that_are_opened_as_files(site):
    found = {}
    with browser() as running:
        page = running.new_page(viewport={"width": 1400, "height": 900})
        page.goto((site / "index.html").as_uri())
        page.wait_for_function("window.__md_scope")  # until the script of the theme listens
        page.keyboard.press("/")
        for query in SEARCHED:
            page.get_by_role("combobox", name="Search").fill(query)
            first = page.locator(f"[role=option][aria-posinset='1'][href*='?h={query.replace(' ', '+')}']")
            found[query] = first.get_attribute("href", timeout=60_000).removeprefix(site.as_uri() + "/").partition(".html")[0]
    assert found == SEARCHED
