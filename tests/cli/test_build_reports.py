"""Contract of what a build tells other programs: JUnit that parses, annotations that stay on their line."""

from xml.etree import ElementTree

from fa4build.cli.build_reports import annotation_lines, junit_text
from fa4build.pipeline import BuildReport, Outcome

REPORT = BuildReport(
    outcomes=(
        Outcome(name="a", key="k", status="compiled", seconds=1.5),
        Outcome(name="b", key="k", status="cached"),
        Outcome(name="c", key="k", status="failed", message="c: ptxas died: 100%\n<log> \x1b[1m & more", exit_code=5),
        Outcome(name="d", key="k", status="skipped"),
    ),
    seconds=2.25,
    workers=1,
)


def test_junit_has_a_case_for_each_variant():
    """Counts, seconds, the first line of a message as its summary; what XML cannot hold is replaced."""
    suite = ElementTree.fromstring(junit_text(REPORT))
    cases = {case.get("name"): case for case in suite}

    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "1")
    assert list(cases) == ["a", "b", "c", "d"]
    assert cases["a"].get("time") == "1.500"
    assert [child.tag for child in cases["d"]] == ["skipped"]
    (failure,) = cases["c"]
    assert failure.get("message") == "c: ptxas died: 100%"
    assert failure.text == "c: ptxas died: 100%\n<log> ?[1m & more"


def test_an_annotation_is_one_line():
    """Ends of lines and percent signs are escaped."""
    (line,) = annotation_lines(REPORT)

    assert line == "::error title=c::c: ptxas died: 100%25%0A<log> \x1b[1m & more"
