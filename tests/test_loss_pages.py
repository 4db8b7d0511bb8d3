"""What the pages of losses say of arguments follows from signatures and docstrings."""

import inspect
import re
import sys

import pytest
from pages import ROOT, text_of

sys.path.append(str(ROOT / "tools"))
from formula_tex import tex
from loss_pages import OF_TORCH, about, arguments, section
from reported import BENCH
from tables import family_of, on_pages

import lossforge.losses
from lossforge.bench.report import load
from lossforge.losses.registry import LOSSES

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


@pytest.mark.parametrize("name", LOSSES)
def test_every_argument_is_there_with_its_meaning(name):
    said = arguments(LOSSES[name].function, LOSSES[name].definition)
    rows = {cells[0].strip("` "): cells[2].strip() for line in said.splitlines()[2:] if (cells := re.split(r"(?<!\\)\|", line)[1:-1])}
    own = [each for each, p in inspect.signature(LOSSES[name].definition).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert [each for each in rows if each in own] == [each for each in own if each not in OF_TORCH]
    assert all(rows.values())


def test_defaults_are_the_signatures():
    said = arguments(LOSSES["focal"].function, LOSSES["focal"].definition)
    assert "| `gamma` | `2.0` | γ of at least 0, the focusing exponent: the larger, the less easy examples count. |" in said
    assert "| `inputs` |  | logits" in said
    assert '`empty="nan"`, `gradient=None`' in said


@pytest.mark.parametrize("declared", [each for each in on_pages() if not each.name], ids=lambda each: each.definition.__name__)
def test_a_function_outside_of_the_registry_tells_its_arguments_too(declared):
    said = section(declared, load(BENCH))
    names = [name for name, p in inspect.signature(declared.definition).parameters.items() if p.kind is not p.VAR_KEYWORD]
    assert re.findall(r"^\| `(\w+)` \|", said, re.M)[: len(names)] == names
    assert any(said in page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "losses").glob("*.md"))
    assert f"#{declared.definition.__name__})" in text_of("docs/losses/index.md")


@pytest.mark.parametrize(
    ("formula", "written"),
    [
        ("L = -w [c y (1 - p)^γ₊ ln p]", r"L = -w [c y (1 - p)^{\gamma _{+}} \ln p]"),
        ("L = ½ (ln Σⱼ exp xᵢⱼ - xᵢ,ᵢ₊ₒ)", r"L = \tfrac12 (\ln \sum _{j} \exp x_{ij} - x_{i,i+o})"),
        ("L = w [d² if |d| ≤ δ else z_loss]", r"L = w [d^{2} \text{ if } |d| \le \delta \text{ else } \text{z\_loss}]"),
        ("L = Σ gₖ eₖ over the pixels k", r"L = \sum g_{k} e_{k}\quad\text{over the pixels k}"),
        ("L = λ_dice softplus(x)^(α/2)", r"L = \lambda _{\text{dice}} \operatorname{softplus}(x)^{\alpha /2}"),
    ],
)
def test_a_formula_is_written_in_tex(formula, written):
    assert tex(formula) == written


def test_a_character_without_tex_is_refused():
    with pytest.raises(ValueError, match=r"no TeX is known for .'∂'"):
        tex("L = ∂x")


def test_every_public_name_is_in_the_reference_once_on_the_page_of_its_family():
    entries = {page.stem: re.findall(r"^::: lossforge\.losses\.(\S+)$", text_of(f"docs/reference/{page.name}"), re.M) for page in REFERENCE}
    places = {name: [page for page, names in entries.items() if {name, f"{name}.{name}"} & {*names}] for name in lossforge.losses.__all__}
    assert not {name: pages for name, pages in places.items() if len(pages) != 1}
    families = {each.definition.__name__: f"losses_{family_of(each)}" for each in on_pages()}
    assert not {name: places[name] for name, page in families.items() if places[name] != [page]}


def test_the_page_of_all_losses_names_every_loss():
    page = text_of("docs/losses/index.md")
    losses = [name for name in lossforge.losses.__all__ if name.endswith("_loss")]
    assert len(losses) > 60
    assert not [name for name in losses if not re.search(rf"`{name}`", page)]


def test_mathematics_alone_is_shown_as_code():
    said = about(lossforge.losses.siglip_loss)
    assert "```text\nL = w softplus(-z x), z = 1" in said
    assert "\n\nThe logits are x = scale" in said
    assert "```text\nv = map_alpha + " in about(lossforge.losses.distribution_balanced_loss)


def test_the_templates_are_counted():
    page = text_of("docs/know/how_it_works.md")
    rows = re.findall(r"^\| \[\w+\]\(template_", page, re.M)
    assert f"There are {({16: 'sixteen', 17: 'seventeen'})[len(rows)]}:" in page
