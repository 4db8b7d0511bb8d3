"""What a check found, and how it reads."""

from collections.abc import Callable
from dataclasses import dataclass, field

MARKS = {True: "ok", False: "FAIL", None: "skip"}
WIDTH = 54
"""Of the names of findings, of which the longest has 54 characters."""


@dataclass(frozen=True)
class Finding:
    """passed: None where it could not be checked, and `detail` says why."""

    section: str
    name: str
    passed: bool | None
    detail: str = ""

    def __str__(self) -> str:
        return f"  {MARKS[self.passed]:<4}  {self.name:<{WIDTH}}  {self.detail}".rstrip()


@dataclass
class Report:
    """Of one loss. `print(report)` shows all of it; it is true where nothing failed. show: is told each line once it is known."""

    subject: str
    findings: list[Finding] = field(default_factory=list)
    show: Callable[[str], None] = field(default=lambda line: None, repr=False)

    def __post_init__(self) -> None:
        self.show(self.title)

    @property
    def title(self) -> str:
        return f"Check of {self.subject}"

    def add(self, section: str, name: str, passed: bool | None, detail: str = "") -> None:
        finding = Finding(section, name, passed, detail)
        if not self.findings or self.findings[-1].section != section:
            self.show(f"\n{section}")
        self.show(str(finding))
        self.findings.append(finding)

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
        lines, section = [self.title], ""
        for f in self.findings:
            if f.section != section:
                section = f.section
                lines += ["", section]
            lines.append(str(f))
        return "\n".join([*lines, "", self.counts])
