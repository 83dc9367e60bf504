"""Contract of `fa4build verify --timing`: clocks of a block that no unit could undercut, and a drawing that is kept.

The model takes dense kernels with full or causal masks; what it does not take is refused by name. It proves nothing, so
it leaves no evidence.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fa4build.errors import SimulationError
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import Selection, parse_variant
from fa4build.pipeline import build_matrix
from fa4build.store.cache import Cache
from fa4build.timing.rates import forward_tile_bounds
from fa4build.verify.timed import is_timed, time_variants

NAME = "fwd-sm90a-bf16-hd64-full"


def run_verify(*arguments: str) -> subprocess.CompletedProcess:
    """`fa4build verify ...`, not on a terminal."""
    command = [sys.executable, "-m", "fa4build.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one compiled variant."""
    root = tmp_path_factory.mktemp("cache")
    assert build_matrix(Selection(globs=(NAME,)), Cache(root), 1).exit_code == 0
    return root


@pytest.mark.dsl
def test_a_block_takes_at_least_what_its_units_need(built):
    """Products, exponentials and scaling of a block have least times; a kernel takes longer, but not four times."""
    done = run_verify(NAME, "--timing", "--json", "--cache-dir", str(built))
    (found,) = json.loads(done.stdout)["variants"]
    tuning = tuning_for(parse_variant(NAME))
    # A block of 128 keys, whatever the kernel's own width.
    bounds = forward_tile_bounds("sm90a", tuning.tile_m, 128, 64, 64)
    least = max(bounds["qk"] + bounds["pv"], bounds["mufu"], bounds["fma"])

    assert done.returncode == 0, done.stderr
    assert least <= found["cycles_per_block"] < 4 * least
    assert found["cycles_besides"] > 0
    assert Path(found["timeline"]) == built / "timing" / f"{NAME}.svg"
    assert Path(found["timeline"]).read_text().startswith("<svg")
    assert not (built / "evidence").exists()


@pytest.mark.dsl
def test_the_line_names_the_busiest_units(built):
    """For a reader: clocks, and what is in use most."""
    done = run_verify(NAME, "--timing", "--cache-dir", str(built))

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{NAME}  ")
    assert "cycles per KV block (quick copies: " in done.stdout


def test_it_is_no_proof(tmp_path):
    """Together with proofs it is a mistake."""
    done = run_verify(NAME, "--timing", "--static", "--cache-dir", str(tmp_path))

    assert done.returncode == 2
    assert "--timing verifies nothing" in done.stderr


@pytest.mark.parametrize(
    ("name", "timed"),
    [
        ("fwd-sm100a-bf16-hd128-full", True),
        ("fwd-sm100a-bf16-hd128-causal", True),
        ("fwd-sm100a-bf16-hd128-local", False),
        ("bwd_preprocess-sm100a-bf16-hd128", False),
    ],
)
def test_what_is_timed(name, timed):
    """Attention with a full or causal mask."""
    assert timed is is_timed(parse_variant(name))


def test_what_is_not_timed_is_refused_by_name(tmp_path):
    """Before anything runs."""
    with pytest.raises(SimulationError, match="fwd-sm100a-bf16-hd128-local: the timing model takes dense"):
        next(time_variants([parse_variant("fwd-sm100a-bf16-hd128-local")], Cache(tmp_path)))
