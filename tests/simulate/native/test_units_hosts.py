"""Contract: the numeric units give equal bits on every host, and touch nothing that is not theirs.

`units_driver.c` digests the results of every unit. It is built for several processors; what neither this machine
nor an emulator on its PATH can run is only compiled.
"""

import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.simulate.native.units_library import FLAGS, SAFETY, build, compile_only

DRIVER = Path(__file__).parent / "units_driver.c"
PROGRAM = tuple(flag for flag in FLAGS if flag not in ("-fPIC", "-shared"))
X86 = "x86_64"
ARM = "aarch64"


def digests(flags: tuple[str, ...], runner: tuple[str, ...] = ()) -> str:
    """What the driver prints when built with these flags."""
    program = build(flags, (DRIVER,), "")
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@cache
def reference() -> str:
    """Of this host, with all that its processor has."""
    return digests(PROGRAM)


def runner_of(target: str, features: tuple[str, ...]) -> tuple[str, ...] | None:
    """How to run a program of a target here; None: not at all."""
    if platform.machine() == target:
        info = Path("/proc/cpuinfo")
        known = info.read_text(encoding="utf-8").split() if info.exists() else ()
        return () if all(feature in known for feature in features) else None
    for name in (f"qemu-{target}", f"qemu-{target}-static"):
        if path := shutil.which(name):
            return (path,)
    return None


@pytest.mark.parametrize(
    ("target", "processor", "features"),
    [
        (X86, "x86_64", ()),
        (X86, "x86_64_v3", ("avx2", "fma")),
        (X86, "x86_64_v4", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
        (ARM, "baseline", ()),
    ],
)
def test_bits_are_equal_on_every_processor(target, processor, features):
    """Without and with AVX2, FMA, AVX-512; with NEON."""
    runner = runner_of(target, features)
    at_home = target == platform.machine()  # with the C library that is here; another one takes minutes to build
    flags = (*PROGRAM, *(() if at_home else ("-target", f"{target}-linux-musl")), f"-mcpu={processor}")
    if runner is None:
        compile_only(flags)
        pytest.skip(f"compiled; nothing here runs {target} with {', '.join(features) or 'its instructions'}")
    assert digests(flags, runner) == reference()


def test_float64_and_113_bits_decide_alike():
    """tanh, sin and cos when float64 is never trusted."""
    assert digests((*PROGRAM, "-DDOUBT=0.5")) == reference()


def test_the_driver_is_free_of_undefined_behaviour():
    """Bounds of arrays, shifts, conversions, alignment: anything of that kind ends the program."""
    assert digests(SAFETY) == reference()
