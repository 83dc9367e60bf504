"""What is slow: each measured problem as a ratio of ours to the best of the others, the worst first."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fa4build.report.benchmarks import Benchmark, Panel
from fa4build.report.libraries import look_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One problem at one length.

    Attributes:
        list, problem: name of the list of measurements, and its panel, `head_dim 64, causal`.
        ours, best: values in `unit`. best_name: of the library, for people.
        ratio: of speeds, above 1 where ours is the faster one, whatever the unit.
    """

    source: str
    list: str
    problem: str
    seqlen: int
    unit: str
    ours: float
    best: float
    best_name: str
    ratio: float

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes a row of two reports the same."""
        return self.list, self.problem, self.seqlen


def ratios(benchmarks: Iterable[Benchmark]) -> tuple[Ratio, ...]:
    """All of them, slowest first. Only plain runs are compared, deterministic and varlen ones compute another thing."""
    found = (row for benchmark in benchmarks for panel in benchmark.panels for row in _of_panel(benchmark, panel))
    return tuple(sorted(found, key=lambda row: (row.ratio, row.key)))


def _of_panel(benchmark: Benchmark, panel: Panel) -> Iterator[Ratio]:
    ours = next((name for name in panel.series if look_of(name).is_ours and look_of(name).is_plain), None)
    others = [name for name in panel.series if look_of(name).is_plain and not look_of(name).is_ours]
    if ours is None or unit_of(benchmark.name) not in _RISING:
        return
    for seqlen, value in panel.series[ours]:
        peers = {name: dict(panel.series[name])[seqlen] for name in others if seqlen in dict(panel.series[name])}
        if not peers or min(value, *peers.values()) <= 0:
            continue
        rises = _RISING[unit_of(benchmark.name)]
        best = (max if rises else min)(peers, key=lambda name: peers[name])
        yield Ratio(
            source=benchmark.source,
            list=_without_unit(benchmark.name),
            problem=panel.title,
            seqlen=seqlen,
            unit=unit_of(benchmark.name),
            ours=value,
            best=peers[best],
            best_name=look_of(best).label,
            ratio=value / peers[best] if rises else peers[best] / value,
        )


_UNITS = (("tflops", "TFLOP/s"), ("_us", "microseconds"), ("_ms", "milliseconds"), ("cycles", "cycles"))
_RISING = {"TFLOP/s": True, "microseconds": False, "milliseconds": False, "cycles": False}


def _without_unit(name: str) -> str:
    """`forward` of `forward_tflops`."""
    suffix = next((suffix for suffix, _ in _UNITS if name.endswith(suffix)), "")
    return name.removesuffix(suffix).strip("_").replace("_", " ") or name


def unit_of(name: str) -> str:
    """The unit that the name of a list ends with."""
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), name.replace("_", " "))
