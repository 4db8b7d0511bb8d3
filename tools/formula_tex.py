"""Formulas of docstrings, which are written in Unicode, as TeX for the pages."""

import re

LETTERS = {
    **dict(zip("αβγδεθ", (r"\alpha ", r"\beta ", r"\gamma ", r"\delta ", r"\varepsilon ", r"\theta "), strict=True)),
    **dict(zip("λπρστψ", (r"\lambda ", r"\pi ", r"\rho ", r"\sigma ", r"\tau ", r"\psi "), strict=True)),
    **dict(zip("μν′≠", (r"\mu ", r"\nu ", "'", r"\ne "), strict=True)),
    "Σ": r"\sum ",
    "½": r"\tfrac12 ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "·": r"\cdot ",
    "…": r"\ldots ",
    "‖": r"\,\Vert\,",
    "√": r"\surd ",
}
LOWER = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ᵢⱼₖₙₒₚ", "0123456789+-ijknop", strict=True))
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺ᵏᵀ", "0123456789+kT", strict=True))
FUNCTIONS = ("ln", "exp", "max", "min", "cos", "cosh")
WORDS = ("if", "else", "elsewhere", "where", "and")
TAIL = re.compile(r" (?=(?:over the|for k from) )")
"""Where the mathematics ends and a phrase begins."""
TOKEN = re.compile(
    rf"(?P<lower>[{''.join(LOWER)}]+(?:,[{''.join(LOWER)}]+)*)|(?P<raised>[{''.join(RAISED)}]+)|(?P<power>\^(?:\((?P<inner>[^()]*)\)|(?P<one>\w[{''.join(LOWER)}]*)))"
    r"|(?P<word>[A-Za-z]+)(?:_(?P<index>[A-Za-z]+))?|_(?P<under>[A-Za-z]+)|(?P<other>.)"
)


def tex(formula: str) -> str:
    """Return a formula of a docstring in TeX.

    Raises:
        ValueError: it has a character for which TeX is not known.
    """
    mathematics, *phrase = TAIL.split(formula, maxsplit=1)
    written = TOKEN.sub(_token, mathematics) + "".join(rf"\quad\text{{{each}}}" for each in phrase)
    if not written.isascii():
        raise ValueError(f"{formula}: no TeX is known for {sorted(each for each in written if not each.isascii())}; add it to LETTERS")
    return re.sub(r"  +", " ", written).strip()


def _token(found: re.Match[str]) -> str:
    if found["lower"]:
        return f"_{{{''.join(LOWER.get(each, each) for each in found['lower'])}}}"
    if found["raised"]:
        return f"^{{{''.join(RAISED[each] for each in found['raised'])}}}"
    if found["power"]:
        return f"^{{{tex(found['inner'] or found['one'])}}}"
    if found["word"]:
        return _word(found["word"], found["index"])
    if found["under"]:
        return f"_{{{_roman(found['under'])}}}"
    return LETTERS.get(found["other"], found["other"])


def _word(word: str, index: str | None) -> str:
    if len(word) == 1 and len(index or "") == 1:
        return f"{word}_{{{index}}}"
    if index:
        return rf"\text{{{word}\_{index}}}"
    if word in FUNCTIONS:
        return rf"\{word} "
    if word in WORDS:
        return rf"\text{{ {word} }}"
    return word if len(word) == 1 else rf"\operatorname{{{word}}}"


def _roman(index: str) -> str:
    return index if len(index) == 1 else rf"\text{{{index}}}"
