"""What a build tells other programs: a JUnit report, and annotations of GitHub Actions.

Sources: the JUnit format as Jenkins and GitLab read it; "Workflow commands for GitHub Actions".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from fa4build.pipeline import BuildReport

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(report: BuildReport) -> bytes:
    """A test suite with a case for each variant: seconds, and the message of a failure."""
    numbers = {"tests": len(report.outcomes), "failures": report.count("failed"), "skipped": report.count("skipped")}
    attributes = {name: str(value) for name, value in numbers.items()}
    suite = ElementTree.Element("testsuite", {"name": "fa4build matrix", "time": f"{report.seconds:.3f}", **attributes})
    for outcome in report.outcomes:
        case = ElementTree.SubElement(
            suite, "testcase", classname="fa4build.matrix", name=outcome.name, time=f"{outcome.seconds:.3f}"
        )
        if outcome.status == "failed":
            message = _NOT_XML.sub("?", outcome.message)
            failure = ElementTree.SubElement(case, "failure", message=message.partition("\n")[0])
            failure.text = message
        elif outcome.status == "skipped":
            ElementTree.SubElement(case, "skipped")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n"


def annotation_lines(report: BuildReport) -> Iterator[str]:
    """`::error title=ID::message` for each failure."""
    for outcome in report.outcomes:
        if outcome.status == "failed":
            yield f"::error title={_escaped(outcome.name, ':,')}::{_escaped(outcome.message)}"


def _escaped(text: str, more: str = "") -> str:
    """Percent, ends of lines, and in properties colons and commas too."""
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return text
