"""Contract of the native engine's build: one library for each state of sources, flags, compiler and processor; comments
cost nothing; a compiler that fails is a ToolchainError with its words, and nothing is left behind.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError, ToolchainError
from fa4build.simulate.native import build, tables
from fa4build.simulate.units import lg2_unit, mufu


def test_comments_and_layout_are_no_tokens():
    """Only what the compiler sees counts; the ends of preprocessor lines do."""
    assert build.tokens("int a; /* one\n two */ int b;\n") == build.tokens("int a;  int   b;")
    assert build.tokens('x = "a  b";') != build.tokens('x = "a b";')
    assert build.tokens("#define A 1\nint a;") != build.tokens("#define A\n1 int a;")


def test_another_flag_or_processor_is_another_library(monkeypatch):
    """A cache shared between hosts never gives one the instructions of the other."""
    before = build.digest()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    with_flag = build.digest()
    monkeypatch.setattr(build, "_processor", lambda: "another")

    assert len({before, with_flag, build.digest()}) == 3


def test_a_library_that_is_there_is_not_built_again(tmp_path, monkeypatch):
    """The file under the digest is taken as it is."""
    ready = tmp_path / f"simulator-{build.digest()[:32]}.so"
    ready.write_bytes(b"ready")
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled"))

    assert build.build(tmp_path) == ready


def test_a_failing_compiler_is_an_error_in_its_words_and_leaves_nothing(tmp_path, monkeypatch):
    """No half-made library can be taken for a whole one."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-include", "no_such_header.h"))

    with pytest.raises(ToolchainError, match=r"no_such_header\.h"):
        build.build(tmp_path)

    assert not list(tmp_path.glob("*.so"))


@pytest.mark.parametrize(("name", "make"), [("rcp_delta", mufu._rcp_delta), ("squares", lg2_unit.squares)])
def test_a_table_is_made_once_and_then_mapped(name, make, tmp_path, monkeypatch):
    """Its file holds what the Python units compute."""
    first = tables.load(name, tmp_path)
    monkeypatch.setitem(tables._MAKERS, name, (lambda: pytest.fail("made again"), first.dtype.type))

    assert np.array_equal(tables.load(name, tmp_path), make())
    assert isinstance(first, np.memmap)


def test_a_table_of_another_type_is_refused(tmp_path, monkeypatch):
    """The engine would read it as something else."""
    monkeypatch.setitem(tables._MAKERS, "squares", (lambda: np.zeros(4, np.int32), np.int64))

    with pytest.raises(SimulationError, match="squares has int32; the native engine reads int64"):
        tables.load("squares", tmp_path)


def test_floating_point_stays_as_written():
    """Nothing may fuse, reorder or approximate."""
    assert "-ffp-contract=off" in build.FLAGS
    assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(build.FLAGS)
