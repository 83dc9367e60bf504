"""Contract of an installed fa4build: it knows what the checkout knows.

The wheel brings the committed evidence, so that the same cubins have the same evidence wherever they are packed. The
source distribution holds everything that the README refers to.
"""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fa4build.cli.commit import commit_of

pytest.importorskip("hatchling", reason="the build backend of this project")

ROOT = Path(__file__).resolve().parents[2]
TELL = """
import hashlib, json
from fa4build.store.evidence import committed_in
from fa4build.shipping.release import committed_evidence
found = committed_in(committed_evidence())
rows = {level: dict(sorted(getattr(found, level).items())) for level in ("silicon", "simulated")}
print(*(len(row) for row in rows.values()), hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest())
"""


def told(path: Path, directory: Path) -> str:
    """What a fa4build on this path knows, asked in a directory that is no checkout."""
    code = f"import sys; sys.path.insert(0, {str(path)!r})\n{TELL}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=directory, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and source distribution."""
    out = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


def test_an_installed_fa4build_has_the_evidence_of_the_checkout(built: Path, tmp_path: Path) -> None:
    """Unpacked as pip does into a fresh target: the same records of both kinds, and there are some."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    installed = told(tmp_path / "site", tmp_path)

    assert installed == told(ROOT, tmp_path)
    assert not installed.startswith("0 0")


def test_the_source_distribution_holds_what_the_readme_refers_to(built: Path) -> None:
    """Every relative link and image of README and CONTRIBUTING."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = {parent.as_posix() for name in names for parent in Path(name).parents}
    for page in ("README.md", "CONTRIBUTING.md"):
        links = re.findall(r"(?:\]\(|src=\"|srcset=\")([^)#\" ]+)", (ROOT / page).read_text(encoding="utf-8"))
        missing = {x for x in links if "://" not in x and x.rstrip("/") not in names | folders}
        assert page in names
        assert not missing
    assert {"Makefile", "evidence/sm90a/simulated.json"} <= names


def test_both_distributions_name_the_commit_that_they_were_built_from(built: Path) -> None:
    """`fa4build --version` of an installed one reads it; without a checkout there is no such file."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = [archive.read(name) for name in archive.namelist() if name == "fa4build/commit.txt"]
    with tarfile.open(sdist) as archive:
        in_sdist = [name for name in archive.getnames() if name.endswith("/fa4build/commit.txt")]
    commit = commit_of(ROOT)

    assert in_wheel == ([] if commit is None else [f"{commit}\n".encode()])
    assert len(in_sdist) == len(in_wheel)
