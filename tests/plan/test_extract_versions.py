"""Contract of extraction across compilers: the same extractor reads what an earlier DSL made, and finds the same plans.

Host functions of flash-attn-4 and quack are compiled by the pinned DSL and, in an environment of its own, by the one
before. Equal arguments, equal guards' verdicts, and equal launches to the byte on random inputs; the text of the host
code, and the machine code, may differ. Needs a package index, and minutes.
"""

import os
import random
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from fa4build.plan import LaunchPlan, canonical_digest, evaluate, failed_guard
from fa4build.plan.extract import extract_plan, validate_plan
from fa4build.plan.extract.vectors import random_inputs

pytestmark = [pytest.mark.upstream, pytest.mark.slow, pytest.mark.timeout(3000)]

ROOT = Path(__file__).resolve().parents[2]
EARLIER = "4.7.1"
INPUTS = 24
CASES = {
    "90": ("fwd_causal", "fwd_local", "fwd_varlen", "fwd_paged", "fwd_sink", "bwd_deterministic", "quack_rmsnorm"),
    "100": ("fwd_full", "fwd_split", "fwd_fp8"),
}
SM_COUNT = "143"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An interpreter with the earlier DSL, and a directory with everything else that is installed here."""
    pytest.importorskip("flash_attn")
    home = tmp_path_factory.mktemp("earlier")
    venv.create(home / "venv", with_pip=True)
    python = home / "venv" / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", f"nvidia-cutlass-dsl[cu13]=={EARLIER}"]
    subprocess.run(command, check=True, timeout=1200)
    others = home / "others"
    others.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith("nvidia_cutlass_dsl") and path.suffix != ".pth":
            (others / path.name).symlink_to(path)
    return python, others


def compiled(python: Path | str, path: list[Path], directory: Path, arch: str) -> None:
    """Compile the cases of one target with an interpreter."""
    directory.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "CUTE_DSL_COMPILER_BACKEND": "legacy"}
    command = [python, "-m", "tests.kernels_toy.compile_upstream", directory, arch, SM_COUNT, *CASES[arch]]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1200)


def plan_of(stem: Path) -> LaunchPlan:
    """The plan of one module, checked against its PTX and cubin."""
    ptx, elf = stem.with_suffix(".ptx").read_text(encoding="utf-8"), stem.with_suffix(".cubin").read_bytes()
    plan = extract_plan(stem.with_suffix(".mlir").read_text(encoding="utf-8"), elf=elf, ptx=ptx, spec={})
    validate_plan(plan, ptx, elf)
    return plan


@pytest.mark.parametrize("arch", sorted(CASES))
def test_two_compilers_give_the_same_launches(earlier, tmp_path, arch):
    """Each module of every case, on inputs that the guards allow."""
    python, others = earlier
    compiled(python, [ROOT, others], tmp_path / "earlier", arch)
    compiled(sys.executable, [ROOT], tmp_path / "pinned", arch)
    names = {side: sorted(path.stem for path in (tmp_path / side).glob("*-?.mlir")) for side in ("earlier", "pinned")}

    assert names["earlier"] == names["pinned"]
    assert len(names["pinned"]) >= len(CASES[arch])
    for name in names["pinned"]:
        old, new = plan_of(tmp_path / "earlier" / name), plan_of(tmp_path / "pinned" / name)
        assert old.args == new.args, name
        rng = random.Random(name)
        for _ in range(INPUTS):
            inputs = random_inputs(new, rng)
            assert failed_guard(old, inputs) is None, (name, inputs)
            assert canonical_digest(evaluate(old, inputs)) == canonical_digest(evaluate(new, inputs)), (name, inputs)
