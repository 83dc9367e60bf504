"""Contract of the digest under which a proof is kept: it covers every module that a proof runs, so that none of them
can change and leave old proofs standing; and nothing that a proof does not run, so that work on the timing model does
not undo them all.
"""

import subprocess
import sys
from pathlib import Path

from fa4build.verify_simulate import proof_files

ROOT = Path(__file__).resolve().parents[2]
PROVE_ONE = """
import sys
from fa4build.acceptance import Case
from tests.simulate.mutations.kernels import kept

kernel = kept("fwd-sm90a-bf16-hd64-full")
assert kernel.report(kernel.ptx, Case(name="tiny", seqlen_q=2, seqlen_k=3)) == ""
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("fa4build") and module.__file__))
"""
# They name variants, targets and errors, and make plans; what a proof takes from them is in its request: the variant,
# the plan as text.
NAMES_AND_PLANS = {
    *("arch.py", "axes.py", "errors.py", "selection.py", "spec.py", "variants.py"),
    *("launch_plan.py", "plan_builder.py", "plan_render.py", "signature.py", "abi.py", "__init__.py"),
}


def test_every_module_that_a_proof_runs_is_in_its_digest():
    """A proof in a process of its own; what it has imported, but for modules that only name things."""
    command = [sys.executable, "-c", PROVE_ONE]
    done = subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True, text=True)
    imported = {Path(name) for name in done.stdout.split()}

    assert len([path for path in imported if "simulate" in path.parts]) > 30
    missing = {path for path in imported - set(proof_files()) if path.name not in NAMES_AND_PLANS}
    assert set() == missing


def test_the_timing_model_is_not_in_it():
    """It cannot change what a proof says, and no module of a proof imports it."""
    names = {path.name for path in proof_files()}

    assert {"mufu.py", "h200_ex2_1to2_delta.npy.xz", "shadow.py", "verify_runs.py"} <= names
    assert not [name for name in names if name.startswith(("timing", "timeline"))]
    assert list((ROOT / "fa4build" / "simulate").glob("timing*.py"))
