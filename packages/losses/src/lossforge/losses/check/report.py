"""What a check found, and how it reads."""

from dataclasses import dataclass, field

MARKS = {True: "ok", False: "FAIL", None: "skip"}


@dataclass(frozen=True)
class Finding:
    """passed: None where it could not be checked, and `detail` says why."""

    section: str
    name: str
    passed: bool | None
    detail: str = ""


@dataclass
class Report:
    """Of one loss. `print(report)` shows all of it; it is true where nothing failed."""

    subject: str
    findings: list[Finding] = field(default_factory=list)

    def add(self, section: str, name: str, passed: bool | None, detail: str = "") -> None:
        self.findings.append(Finding(section, name, passed, detail))

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if f.passed is False]

    @property
    def passed(self) -> bool:
        return not self.failures

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines, width = [f"Check of {self.subject}"], max((len(f.name) for f in self.findings), default=0)
        section = ""
        for f in self.findings:
            if f.section != section:
                section = f.section
                lines += ["", section]
            lines.append(f"  {MARKS[f.passed]:<4}  {f.name:<{width}}  {f.detail}".rstrip())
        counts = {mark: sum(f.passed is passed for f in self.findings) for passed, mark in MARKS.items()}
        return "\n".join([*lines, "", f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} could not be checked"])
