"""Times of the simulator's numeric units: C beside numpy, for one warp or one product.

    python benchmarks/simulator_units.py

numpy is given the 128 lanes of a warpgroup at once, as the Python engine does; its time is divided by four.
"""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fa4build.simulate.instructions.float_alu import fma32, fmax
from fa4build.simulate.units import float_formats as ff
from fa4build.simulate.units import lg2_unit, mufu
from fa4build.simulate.units.tensor_core import mma_tile

HERE = Path(__file__).resolve().parent
NATIVE = HERE.parent / "fa4build" / "simulate" / "native"
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno")
LANES = 128


def native_times(folder: Path) -> dict[str, float]:
    """Nanoseconds of one call, by name. Raises: CalledProcessError if the compiler fails."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise SystemExit("ziglang is not installed; it brings the C compiler. Run: pip install ziglang")
    program = folder / "simulator_units"
    sources = [str(p) for p in (*sorted(NATIVE.glob("units_*.c")), HERE / "simulator_units.c")]
    compiler = Path(spec.origin).parent / "zig"
    subprocess.run([compiler, "cc", *FLAGS, f"-I{NATIVE}", *sources, "-o", str(program)], check=True)
    tables = {"ex2": mufu.ex2_table(), "rcp": mufu._rcp_delta(), "squares": lg2_unit.squares()}
    for name, table in tables.items():
        (folder / name).write_bytes(table.tobytes())
    done = subprocess.run([program, *(folder / n for n in tables)], check=True, capture_output=True, text=True)
    return {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}


def numpy_calls() -> dict[str, Callable[[], object]]:
    """The same work in numpy, of a warpgroup or of one product."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.uniform(-8, 8, LANES).astype(np.float32) for _ in range(3))
    x, y, z = (v.view(np.uint32) for v in (a, b, c))
    shift = np.uint32(16)
    calls: dict[str, Callable[[], object]] = {
        "add_f32": lambda: a + b,
        "add_f32_rz": lambda: ff.add_f32(x, y, "rz"),
        "mul_f32": lambda: a * b,
        "fma_f32": lambda: fma32(a, b, c),
        "fma_f32_rm": lambda: ff.fma_f32(x, y, z, "rm"),
        "fma_f32x2": lambda: (fma32(a, b, c), fma32(b, a, c)),
        "max_f32": lambda: fmax(a, b),
        "bf16x2": lambda: ff.f32_to_bf16_rn(x) | ff.f32_to_bf16_rn(y).astype(np.uint32) << shift,
        "f16x2": lambda: ff.f32_to_f16_rn(x) | ff.f32_to_f16_rn(y).astype(np.uint32) << shift,
        "e4m3x2": lambda: (
            ff.f32_to_e4m3_rn_satfinite(x) | ff.f32_to_e4m3_rn_satfinite(y).astype(np.uint16) << np.uint16(8)
        ),
        "ex2_ftz": lambda: mufu.ex2_ftz(x),
        "lg2_ftz": lambda: mufu.lg2_ftz(x),
        "rcp_ftz": lambda: mufu.rcp_ftz(x),
        "tanh": lambda: mufu.tanh_approx(x),
        "sin": lambda: mufu.sin_approx(x),
    }
    products = ((64, 128, 64, "bf16"), (64, 256, 16, "bf16"), (64, 256, 16, "f16"), (128, 256, 16, "bf16"))
    for m, n, k, kind in (*products, (256, 256, 16, "bf16")):
        left, right = (ff.f32_to_bf16_rn(rng.uniform(-8, 8, (rows, k)).astype(np.float32)) for rows in (m, n))
        total = np.zeros((m, n), np.uint32)
        calls[f"mma_{kind}_{m}x{n}x{k}"] = lambda a=left, b=right, c=total, t=kind: mma_tile(a, b, c, t)
    return calls


def seconds_of(call: Callable[[], object]) -> float:
    """The best of several rounds."""
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(5):
            call()
        best = min(best, (time.perf_counter() - start) / 5)
    return best


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        native = native_times(Path(folder))
    print(f"{'unit':<22}{'C, ns':>12}{'numpy, ns':>14}{'numpy / C':>12}")
    for name, call in numpy_calls().items():
        python = 1e9 * seconds_of(call) / (1 if name.startswith("mma") else LANES // 32)
        print(f"{name:<22}{native[name]:>12.1f}{python:>14.1f}{python / native[name]:>12.1f}")


if __name__ == "__main__":
    main()
