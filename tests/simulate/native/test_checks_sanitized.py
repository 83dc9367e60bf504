"""Contract of the native hazard checks on bad input: no stream of events makes them touch memory that is not theirs.

Recorded streams, whole and damaged, run under the address and undefined-behaviour sanitizers of the system's C
compiler; without one there is nothing to run.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.simulate.native import checks_library, checks_machine
from tests.simulate.native.checks_recorder import RecordingObserver

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("clang")
_FLAGS = ("-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory) -> Path:
    """The checks with sanitizers, as a program that replays and damages streams."""
    if COMPILER is None:
        pytest.skip("no gcc or clang here")
    target = tmp_path_factory.mktemp("fuzz") / "checks_fuzz"
    command = [COMPILER, *_FLAGS, f"-I{checks_library.ROOM}", str(HERE / "checks_fuzz.c")]
    built = subprocess.run([*command, *map(str, checks_library.sources()), "-o", str(target)], capture_output=True)
    if built.returncode and b"sanitize" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr.decode()
    return target


def write_stream(path: Path, recording) -> None:
    """A recording as checks_fuzz.c reads it."""
    head = [len(recording.buffers)]
    for _, base, size, written in recording.buffers:
        head += [base, size, written is not None]
    np.concatenate([np.array(head, np.int64), np.frombuffer(recording.words, np.int64)]).tofile(path)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_are_refused_and_never_touch_foreign_memory(seed, fuzzer, tmp_path):
    """Words, lengths, numbers and ends of events changed, a thousand times."""
    paths = []
    for k in range(5):
        observer = RecordingObserver(checks_machine.program())
        checks_machine.Machine(1000 + 10 * seed + k, observer).run(150)
        paths.append(tmp_path / f"stream{k}.bin")
        write_stream(paths[-1], observer.recording)
    environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1")
    ran = subprocess.run([fuzzer, str(seed), "200", *paths], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.count("events refused") == len(paths)
