"""What the checks of the native engine have found, told in the words of the Python checks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from fa4build.simulate.checks.findings import Findings
from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.instructions.memory import SHARED_BASE
from fa4build.simulate.launch import SimLaunch
from fa4build.simulate.native.check_texts import Machine, records_at, tell
from fa4build.simulate.native.program import Program

_CTA, _TENSOR_MEMORY, _REGISTERS = 1, 2, 3  # DETAIL_* of core.h


def tell_found(
    engine: ctypes.CDLL, raw, findings: Findings, program: Program, launch: SimLaunch, memory: GlobalMemory
) -> None:
    """Adds what a run found to `findings`. raw: the `Launch` after the run, before it is released."""
    place, lost = ctypes.c_void_p(), ctypes.c_size_t()
    count = engine.chk_findings(raw.findings, ctypes.byref(place), ctypes.byref(lost))
    if not count and not lost.value:
        return
    details = _Details(raw)
    names = [_text(raw.op_names, k) for k in range(raw.num_op_names)]
    machine = Machine(
        warps_a_cta=-(-launch.block[0] * launch.block[1] * launch.block[2] // 32),
        name_of=lambda offset: name_of(launch, offset),
        buffer_name=lambda index: memory.buffers[index].name,
        ctaid=lambda cluster, rank: details.ctaids.get((cluster, rank), (0, 0, 0)),
        operation=lambda number: names[number],
        leftover=lambda cluster, rank: details.leftovers.get((cluster, rank), {}),
        budgets=details.budgets,
        register=lambda index: program.function.register_names[index],
    )
    tell(findings, records_at(place.value or 0, count), machine, lost.value, notes_are_errors=True)


def name_of(launch: SimLaunch, offset: int) -> str:
    """As `Cta.name_of`."""
    relative = offset - SHARED_BASE
    for name, start, size, stride in launch.shared_names:
        if start <= relative < start + size:
            return f"{name}[{(relative - start) // stride}]" if size > stride else name
    return f"smem+{relative}"


def _text(table: int, index: int) -> str:
    return ctypes.cast(table, ctypes.POINTER(ctypes.c_char_p))[index].decode(errors="replace")


class _Details:
    """Coordinates of CTAs, tensor memory left over, budgets of registers, by (cluster, rank)."""

    def __init__(self, raw):
        self.ctaids: dict[tuple[int, int], tuple[int, ...]] = {}
        self.leftovers: dict[tuple[int, int], dict[int, int]] = {}
        self.histories: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        for kind, (cluster, rank, *values) in _rows(raw):
            if kind == _CTA:
                self.ctaids[cluster, rank] = tuple(values)
            elif kind == _TENSOR_MEMORY:
                self.leftovers.setdefault((cluster, rank), {})[values[0]] = values[1]
            elif kind == _REGISTERS:
                self.histories.setdefault((cluster, rank), {})[values[0]] = tuple(values[1:])

    def budgets(self, cluster: int, rank: int, first: int) -> list[tuple[int, ...]]:
        """The different histories in a warpgroup."""
        known = self.histories.get((cluster, rank), {})
        return sorted({known[w] for w in range(first, first + 4) if w in known})


def _rows(raw) -> Iterator[tuple[int, list[int]]]:
    values = ctypes.cast(raw.details, ctypes.POINTER(ctypes.c_int32))
    position = 0
    while position < raw.num_details:
        kind, length = values[position], values[position + 1]
        yield kind, list(values[position + 2 : position + 2 + length])
        position += 2 + length
