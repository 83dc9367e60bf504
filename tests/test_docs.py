"""Contract of the documentation.

Every command that a page shows is run: ```console blocks, line by line, page by page, each page in an empty directory
of its own and all with one cache. Lines below a command are what it prints; `...` stands for anything. A command that
cannot run without a GPU or a network is listed in NOT_RUN with its reason. Files a page shows are there for its
commands. Links between pages lead somewhere, and docs/reference.md is what the commands say now.
"""

import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from fa4build.cli.reference import reference
from tests.artifacts import COMPILER_CACHE

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(page for page in [ROOT / "README.md"] if page.exists())])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

NOT_RUN = {
    "make ": "sets up an environment of its own; the workflows run it",
    "pip install --no-index --find-links dist fa4-kernels[sm100]": "installs what the make before it has built",
    "pip download ": "needs a network",
    "fa4build bundle out --arch sm90 --include torch-wheels": "includes what the download before it has fetched",
    "python device/prove_forward.py": "needs a GPU",
    "python -m fa4_kernels run program.py": "needs fa4_kernels installed; tests/runtime/test_stack_modules.py runs it",
    "git apply hd80.diff": "changes the sources; tests/end_to_end/test_add_a_value.py runs the commands of that page",
    "fa4build list --select 'fwd-sm90a-*-hd80-*'": "needs that diff",
    "fa4build matrix --select fwd-sm90a-bf16-hd80-full": "needs that diff",
    "fa4build verify --simulate fwd-sm90a-bf16-hd80-full": "needs that diff",
    "FA4_KERNELS_RECORD=/var/tmp/misses.jsonl python train.py": "needs a GPU",
}
"""Commands that are not run, by how they begin, and why."""

SLOW = (
    "fa4build verify --simulate",
    "fa4build numerics\n",
    # Seven compiles, and what needs their wheel.
    "fa4build wheel --spec serving.toml --out wheels",
    "find wheels ",
    "pip install --quiet --no-index --find-links wheels ",
    "python -m fa4_kernels serves ",
)
"""Commands that take longer than a few seconds: their pages also run in the slow suite, whole."""

_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>[\w-]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Command:
    """One line after `$ `, with what the page says it prints."""

    line: str
    output: tuple[str, ...]

    @property
    def reason_not_to_run(self) -> str | None:
        """Why it is not run here, None if it is."""
        return next((reason for start, reason in NOT_RUN.items() if self.line.startswith(start)), None)

    @property
    def is_slow(self) -> bool:
        """Whether it belongs to the slow suite."""
        return f"{self.line}\n".startswith(SLOW)


def blocks(page: Path) -> list[re.Match[str]]:
    """Fenced blocks of a page."""
    return list(_BLOCK.finditer(page.read_text(encoding="utf-8")))


def commands(page: Path) -> list[Command]:
    """Every command of a page, in order. A line that ends with a backslash goes on."""
    found: list[Command] = []
    for block in blocks(page):
        if block["kind"] != "console":
            continue
        for line in re.sub(r"\\\n", " ", block["text"]).splitlines():
            if line.startswith("$ "):
                found.append(Command(line=line[2:].strip(), output=()))
            else:
                found[-1] = Command(line=found[-1].line, output=(*found[-1].output, line))
    return found


def files(page: Path) -> dict[str, str]:
    """Files that a page shows: a block below `<!-- file: NAME -->`."""
    return {block["file"]: block["text"] for block in blocks(page) if block["file"]}


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all pages. The C compiler's part of it is that of the other tests."""
    directory = tmp_path_factory.mktemp("cache")
    COMPILER_CACHE.mkdir(parents=True, exist_ok=True)
    (directory / "zig").symlink_to(COMPILER_CACHE)
    return directory


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> dict[str, str]:
    """`fa4build` is this checkout's; `python` and `pip` are of an environment of the page's own, which sees what is
    installed here, torch among it."""
    tools, own = tmp_path_factory.mktemp("tools"), tmp_path_factory.mktemp("environment")
    venv.create(own, symlinks=True)
    (site,) = own.glob("lib/python3*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = own / "bin" / "python"
    commands = {
        "fa4build": f'"{sys.executable}" -m fa4build.cli',
        "python": f'"{python}"',
        "pip": f'"{sys.executable}" -m pip --disable-pip-version-check --python "{python}"',
    }
    for name, command in commands.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "FA4BUILD_CACHE_DIR": str(cache_dir),
        "HOME": str(tmp_path_factory.mktemp("home")),
        "LC_ALL": "C.UTF-8",
    }


def run_page(page: Path, folder: Path, environment: dict[str, str], *, slow: bool) -> None:
    """Runs what a page shows; fails at the first command that ends badly or prints something else."""
    for name, text in files(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    for command in commands(page):
        if command.reason_not_to_run or (command.is_slow and not slow):
            continue
        expects_failure = command.line.endswith("|| true")
        done = subprocess.run(
            ["bash", "-c", command.line], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
        )
        shown = done.stdout + done.stderr
        assert done.returncode == 0 or expects_failure, f"$ {command.line}\n{shown}"
        assert printed(command.output, shown), (
            f"$ {command.line}\nthe page says:\n{command.output}\nit prints:\n{shown}"
        )


def printed(expected: tuple[str, ...], shown: str) -> bool:
    """Whether the lines occur in this order; `...` stands for anything, within a line or for lines."""
    pattern = ".*".join(
        r"\s+".join(map(re.escape, part.split())) for line in expected for part in line.split("...") if part.strip()
    )
    return re.search(pattern, shown, re.DOTALL) is not None


RUNNING = [
    name for name, page in zip(NAMES, PAGES, strict=True) if any(not c.reason_not_to_run for c in commands(page))
]


@pytest.mark.dsl
@pytest.mark.parametrize("name", RUNNING)
def test_every_command_of_a_page_works(name, tmp_path, environment):
    """Those that take seconds."""
    run_page(ROOT / name, tmp_path, environment, slow=False)


@pytest.mark.dsl
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUNNING if any(c.is_slow for c in commands(ROOT / name))])
def test_every_command_of_a_page_works_the_slow_ones_too(name, tmp_path, environment):
    """Whole pages, with simulations."""
    run_page(ROOT / name, tmp_path, environment, slow=True)


@pytest.mark.parametrize(
    ("expected", "shown", "fits"),
    [
        (("a b",), "x\na  b\n", True),
        (("a ... c",), "a b c", True),
        (("a", "...", "c"), "a\nb\nc", True),
        (("c", "a"), "a\nc", False),
        (("a b",), "a x b", False),
        ((), "anything", True),
    ],
)
def test_the_runner_compares_what_is_printed(expected, shown, fits):
    """It can fail: order and words count, spaces do not."""
    assert fits == printed(expected, shown)


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_shown_in_blocks_that_are_run(name):
    """No block of another kind holds commands, and a console block starts with one."""
    for block in blocks(ROOT / name):
        assert block["kind"] not in ("bash", "sh", "shell"), f"{name}: use ```console"
        if block["kind"] == "console":
            assert block["text"].startswith("$ "), name
        if block["kind"] == "python":
            ast.parse(block["text"])


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_not_hidden_in_indented_text(name):
    """Outside of fences, four spaces make a block that nothing here would run; docs/reference.md has fences alone."""
    text = _BLOCK.sub("", (ROOT / name).read_text(encoding="utf-8"))
    programs = r"fa4build|pip|python|sh|make|[A-Z0-9_]+=\S+ \w+"

    assert re.findall(rf"^ {{4,}}(?:\$ )?(?:{programs}) .*", text, re.MULTILINE) == []


def test_every_reason_not_to_run_a_command_is_needed():
    """The list is as short as it can be."""
    lines = [command.line for page in PAGES for command in commands(page)]

    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []


@pytest.mark.parametrize("name", NAMES)
def test_links_between_pages_lead_somewhere(name):
    """Relative ones; addresses on the web are not followed."""
    page = ROOT / name
    missing = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]

    assert [] == missing


def test_every_page_is_reached_from_the_index():
    """docs/README.md links each page of docs/, so that none is lost."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in _LINK.findall(index)}
    pages = {page.resolve() for page in PAGES if page.is_relative_to(ROOT / "docs")}

    assert pages - linked == {(ROOT / "docs" / "README.md").resolve()}


def test_the_command_reference_is_current():
    """Made anew by: python -m fa4build.cli.reference docs/reference.md"""
    assert reference() == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


def test_decisions_are_short():
    """Half a page each: what was decided, why, and what it costs."""
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert len(text.split()) <= 330, page.name
        for heading in ("**Decision.**", "**Why.**", "**Cost.**"):
            assert heading in text, f"{page.name} lacks {heading}"


COMPLETE = """
from fa4build.cli import main
main()
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [("fa4build nu", {"numerics"}), ("fa4build cache ex", {"export"}), ("fa4build report --o", {"--out"})],
)
def test_the_shell_completes_commands_and_options(words, offered):
    """As bash asks, after `eval "$(_FA4BUILD_COMPLETE=bash_source fa4build)"`."""
    environment = {
        **os.environ,
        "_FA4BUILD_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert offered == {line.partition(",")[2] for line in done.stdout.split()}
