"""The findings of a check, and their text."""

from collections.abc import Callable
from dataclasses import dataclass, field

MARKS = {True: "ok", False: "FAIL", None: "skip"}
WIDTH = 54
"""Width of the column of names; the longest has 54 characters."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        section: part of the report.
        name: of the check.
        passed: None if it could not be checked; then `detail` says why.
        detail: figures, or the reason.
    """

    section: str
    name: str
    passed: bool | None
    detail: str = ""

    def __str__(self) -> str:
        return f"  {MARKS[self.passed]:<4}  {self.name:<{WIDTH}}  {self.detail}".rstrip()


@dataclass
class Report:
    """The findings for one loss. `print(report)` shows all; it is true if nothing failed. show: gets each line as soon as it is known."""

    subject: str
    findings: list[Finding] = field(default_factory=list)
    show: Callable[[str], None] = field(default=lambda line: None, repr=False)
    lines: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._say(f"Check of {self.subject}")

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self.show(line)

    def add(self, section: str, name: str, passed: bool | None, detail: str = "") -> None:
        if not self.findings or self.findings[-1].section != section:
            self._say(f"\n{section}")
        self.findings.append(Finding(section, name, passed, detail))
        self._say(str(self.findings[-1]))

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.passed is False]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def counts(self) -> str:
        counts = {mark: sum(f.passed is passed for f in self.findings) for passed, mark in MARKS.items()}
        return f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} could not be checked"

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return "\n".join([*self.lines, "", self.counts])
