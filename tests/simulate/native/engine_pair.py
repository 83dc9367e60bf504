"""Runs small PTX bodies in both engines of the simulator, and says what each made of them."""

import re
from dataclasses import dataclass, field

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate import launch as python_launch
from fa4build.simulate.native import run as native_run
from tests.simulate import ptx_snippets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """Output words, data and notes after a run, or the text of its error."""

    words: np.ndarray
    data: np.ndarray
    notes: tuple[str, ...] = ()
    error: str = ""


ENGINES = {"python": python_launch.run_launch, "native": native_run.run_launch}


def run_in(engine: str, body: str, *inputs, monkeypatch, data=None, words=1, threads=32, grid=1, **options) -> Outcome:
    """Runs a body as `ptx_snippets.run_report` does, in one engine."""
    monkeypatch.setattr(ptx_snippets, "run_launch", ENGINES[engine])
    out = np.zeros((threads * grid, words), np.uint32)
    shared = np.zeros(1, np.uint32) if data is None else data.copy()
    options = {"threads": threads, "words": words, "grid": grid, "out": out, **options}
    try:
        report = ptx_snippets.run_report(body, *inputs, data=None if data is None else shared, **options)
    except SimulationError as error:
        return Outcome(words=out, data=shared, error=str(error))
    return Outcome(words=out, data=shared, notes=report.notes)


def both(body: str, *inputs, monkeypatch, **options) -> tuple[Outcome, Outcome]:
    """What the Python and the native engine make of a body."""
    return tuple(run_in(engine, body, *inputs, monkeypatch=monkeypatch, **options) for engine in ENGINES)


def assert_equal(body: str, *inputs, monkeypatch, **options) -> Outcome:
    """Both engines end with the same words, memory, notes and error; returns what the native one did."""
    python, native = both(body, *inputs, monkeypatch=monkeypatch, **options)
    assert python.error == native.error
    assert python.notes == native.notes
    assert with_one_nan(python.words).tolist() == with_one_nan(native.words).tolist()
    assert python.data.tobytes() == native.data.tobytes()
    return native


def with_one_nan(words: np.ndarray) -> np.ndarray:
    """Words that are a negative NaN of f32 by the processor become the canonical one of PTX, 0x7FFFFFFF."""
    return np.where(words == 0xFFC00000, np.uint32(0x7FFFFFFF), words)


@dataclass(slots=True)
class Values:
    """Operands that are likely to go wrong, and random ones."""

    seed: int = 7
    edges: tuple[int, ...] = (
        *(0, 1, 2, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000),
        *(0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x00800000, 0x00000001),
    )
    _generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)

    def words(self, count: int) -> np.ndarray:
        """Half edges, half random."""
        random = self._generator.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
        edges = self._generator.choice(np.array(self.edges, np.uint32), count)
        return np.where(self._generator.random(count) < 0.5, edges, random)

    def floats(self, count: int) -> np.ndarray:
        """Bits of floats of all sizes; no NaN, whose payloads are not modelled."""
        exponent = self._generator.integers(-40, 40, count)
        values = self._generator.standard_normal(count) * 2.0**exponent
        bits = values.astype(np.float32).view(np.uint32)
        special = np.array([0, 0x80000000, 0x3F800000, 0x00000001, 0x80000003, 0x7F7FFFFF, 0x7F800000], np.uint32)
        return np.where(self._generator.random(count) < 0.2, self._generator.choice(special, count), bits)


def without_places(text: str) -> str:
    """A message without the warps of gangs: the native engine names one where the Python engine names several."""
    return re.sub(r"(?:role of line \d+, )?warps? \d+(?:-\d+)?", "warps", text)
