"""Runs a launch in the native engine: the same call, errors and report as `simulate.launch.run_launch`."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fa4build.errors import SimulationError
from fa4build.simulate.checks.findings import LIMIT, Findings
from fa4build.simulate.checks.undefined import UndefinedUse, undefined_uses
from fa4build.simulate.hardware import tensor_map
from fa4build.simulate.hardware.global_memory import GlobalMemory
from fa4build.simulate.launch import INSTRUCTION_LIMIT, RunReport, SimLaunch, _validate
from fa4build.simulate.native.build import library
from fa4build.simulate.native.executed import place_for_marks
from fa4build.simulate.native.found import tell_found
from fa4build.simulate.native.orders import FIELDS, ORDERS, Order, order_named
from fa4build.simulate.native.program import Program, program_for
from fa4build.simulate.native.roles import mask_of
from fa4build.simulate.native.room import clusters_in_flight
from fa4build.simulate.native.tables import table

_POINTER = ctypes.c_void_p
_ONE_AT_A_TIME = threading.Lock()  # the engine keeps scratch memory of its own
MAX_CTAS = 16  # of a cluster; core.h
RUN_DONE, RUN_FAULT, RUN_DEADLOCK, RUN_BAD_MAP = range(4)
RULES = 0x100 | 1 | 2 | 4 | 32  # CHECKS_ON and CHK_RULES_LANES, _SCOPES, _SPACES, _ORDER of checks.h
RULES_SUMS, RULES_PARENT = 64, 128
ASSUMPTIONS = {"tcgen05-issue-order": 8, "mbarrier-default-scope": 16, "shuffle-ends-reads": 512}
"""What is taken for granted beyond the PTX manual (docs/what-is-proven.md); the values are CHK_RULES_* to look at it.

tcgen05-issue-order: products of one thread read and write tensor memory in the order in which they were issued, also
where their accumulators or shapes differ.
mbarrier-default-scope: an mbarrier instruction that names no scope releases and acquires for the whole cluster. The
manual's default is the CTA.
shuffle-ends-reads: when all lanes of a warp meet in shfl.sync or vote.sync, their reads of shared memory before it are
over. The manual gives these instructions no memory ordering.
"""
_MAP_CHECK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint8))


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("data", _POINTER),
        ("written", _POINTER),
        ("read_only", ctypes.c_int32),
        ("spare", ctypes.c_int32),
        ("name", ctypes.c_char_p),
    ]


class _SharedName(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("start", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stride", ctypes.c_int64),
    ]


class _Tables(ctypes.Structure):
    _fields_ = [("ex2", _POINTER), ("rcp_delta", _POINTER), ("squares", _POINTER)]


class _Order(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32 if name == "starved" else ctypes.c_int32) for name in FIELDS]


_THREE = ctypes.c_int32 * 3


class _Launch(ctypes.Structure):
    """`Launch` of core.h."""

    _fields_ = [
        ("code", _POINTER),
        ("num_code", ctypes.c_int64),
        ("constants", _POINTER),
        ("lists", _POINTER),
        ("track_start", _POINTER),
        ("track", _POINTER),
        ("product_start", _POINTER),
        ("product", _POINTER),
        ("num_registers", ctypes.c_int64),
        ("part_start", _POINTER),
        ("part", _POINTER),
        ("num_parts", ctypes.c_int64),
        ("specials", _POINTER),
        ("num_specials", ctypes.c_int64),
        ("register_bytes", ctypes.c_int64),
        ("texts", _POINTER),
        ("faults", _POINTER),
        ("parameters", ctypes.c_char_p),
        ("parameter_bytes", ctypes.c_int64),
        ("local_bytes", ctypes.c_int64),
        ("buffers", _POINTER),
        ("num_buffers", ctypes.c_int64),
        ("tables", _Tables),
        ("map_is_legal", _MAP_CHECK),
        ("shared_names", _POINTER),
        ("num_shared_names", ctypes.c_int64),
        ("grid", _THREE),
        ("block", _THREE),
        ("cluster", _THREE),
        ("smem", ctypes.c_int32),
        ("registers", ctypes.c_int32),
        ("order", _Order),
        ("seed", ctypes.c_uint64),
        ("concurrent_clusters", ctypes.c_int32),
        ("checks", ctypes.c_int32),
        ("instruction_limit", ctypes.c_int64),
        ("warp_instructions", ctypes.c_int64),
        ("status", ctypes.c_int32),
        ("fault_site", ctypes.c_int32),
        ("fault_cta", _THREE),
        ("fault_rank", ctypes.c_int32),
        ("fault_warp", ctypes.c_int32),
        ("fault_pc", ctypes.c_int32),
        ("fault_role", ctypes.c_int32),
        ("report", ctypes.c_char_p),
        ("map_address", ctypes.c_uint64),
        ("findings", _POINTER),
        ("op_names", _POINTER),
        ("num_op_names", ctypes.c_int64),
        ("details", _POINTER),
        ("num_details", ctypes.c_int64),
        ("has_hazards", ctypes.c_int32),
        ("keep_going", ctypes.c_int32),
        ("executed", _POINTER),
    ]


def run_launch(
    ptx: str,
    launch: SimLaunch,
    memory: GlobalMemory,
    *,
    checks: bool = False,
    allowed: tuple[str, ...] = (),
    schedule: str | Order = "eager",
    seed: int = 0,
    contract: bool = True,
    concurrent_clusters: int = 1,
    without: tuple[str, ...] = (),
) -> RunReport:
    """Executes a kernel. Arguments, errors and results as `simulate.launch.run_launch`.

    Args:
        schedule: also a name that `orders.order_named` knows, or an `Order`.
        without: names of `ASSUMPTIONS` that are not made.
    Raises: SimulationError.
    """
    order = schedule if isinstance(schedule, Order) else order_named(schedule)
    if order is None:
        raise SimulationError(f"schedule {schedule!r} is unknown; allowed: {', '.join(ORDERS)}, role n starved")
    if unknown := sorted(set(without) - set(ASSUMPTIONS)):
        raise SimulationError(f"assumption {unknown[0]!r} is unknown; allowed: {', '.join(ASSUMPTIONS)}")
    program = program_for(ptx, launch.kernel, contract=contract)
    _validate(launch, program.function)
    if (ctas := launch.cluster[0] * launch.cluster[1] * launch.cluster[2]) > MAX_CTAS:
        raise SimulationError(f"{launch.kernel}: a cluster of {ctas} CTAs; the native engine runs up to {MAX_CTAS}")
    if order.role >= 0:
        order = replace(order, starved=order.starved | mask_of(program, launch.block, order.role))
    memory.begin_launch()
    findings = Findings(launch.kernel, program.function.instructions, allowed)
    if checks:
        _report_undefined(program, findings)
    rules = _rules(launch) | sum(ASSUMPTIONS[name] for name in set(without)) if checks else 0
    clusters = max(concurrent_clusters, _room(launch))
    job = _Job(program, launch, memory, checks=rules, order=order, seed=seed, clusters=clusters)
    job.raw.has_hazards, job.raw.keep_going = bool(findings.errors), bool(allowed)
    job.raw.executed = place_for_marks(ptx, launch.kernel, len(job.records))
    return job.run(findings)


def _room(launch: SimLaunch) -> int:
    """Clusters that the launch's multiprocessors have room for."""
    if not launch.multiprocessors:
        return 1
    facts = {"smem": launch.smem, "registers": launch.registers or 0, "multiprocessors": launch.multiprocessors}
    return clusters_in_flight(launch.block, launch.cluster, **facts)


def _rules(launch: SimLaunch) -> int:
    """CHK_RULES_* that a launch is held to."""
    return RULES | (0 if launch.free_sums else RULES_SUMS) | (RULES_PARENT if launch.dependent else 0)


@lru_cache(maxsize=8)
def _undefined(program: Program) -> tuple[UndefinedUse, ...]:
    return undefined_uses(program.function, program.blocks)


def _report_undefined(program: Program, findings: Findings) -> None:
    for use in _undefined(program):
        name = program.function.register_names[use.register]
        text = f"{findings.line(use.site)}: some path comes here before {name} has been written"
        findings.error("R9-register", (use.site,), text)


class _Job:
    """One call of the library, with everything that it points to."""

    def __init__(self, program: Program, launch: SimLaunch, memory: GlobalMemory, *, checks, order, seed, clusters):
        self.program, self.launch, self.memory, self.checks = program, launch, memory, checks
        self.bad_map: SimulationError | None = None
        self.map_check = _MAP_CHECK(self._map_is_legal)
        self.records = program.records.copy()
        self.buffers = _buffers(memory)
        self.names = _shared_names(launch)
        self.texts, self.faults = _texts(program)
        function = program.function
        self.raw = _Launch(
            code=self.records.ctypes.data,
            num_code=len(self.records),
            constants=_aligned(program).ctypes.data,
            lists=program.lists.ctypes.data,
            track_start=program.tracked[0].ctypes.data,
            track=program.tracked[1].ctypes.data,
            product_start=program.products[0].ctypes.data,
            product=program.products[1].ctypes.data,
            num_registers=len(function.register_names),
            part_start=program.parts[0].ctypes.data,
            part=program.parts[1].ctypes.data,
            num_parts=len(program.parts[0]) - 3,
            specials=program.specials.ctypes.data,
            num_specials=len(program.specials),
            register_bytes=program.register_bytes,
            texts=ctypes.cast(self.texts, _POINTER),
            faults=ctypes.cast(self.faults, _POINTER),
            parameters=launch.parameters,
            parameter_bytes=len(launch.parameters),
            local_bytes=max(function.local_bytes, 1),
            buffers=ctypes.cast(self.buffers, _POINTER),
            num_buffers=len(memory.buffers),
            tables=_tables(),
            map_is_legal=self.map_check,
            shared_names=ctypes.cast(self.names, _POINTER),
            num_shared_names=len(launch.shared_names),
            grid=_THREE(*launch.grid),
            block=_THREE(*launch.block),
            cluster=_THREE(*launch.cluster),
            smem=launch.smem,
            registers=-1 if launch.registers is None else launch.registers,
            order=_Order(*(getattr(order, name) for name in FIELDS)),
            seed=seed & (1 << 64) - 1,
            concurrent_clusters=concurrent_or_one(clusters),
            checks=checks,
            instruction_limit=INSTRUCTION_LIMIT,
        )

    def _map_is_legal(self, address) -> int:
        try:
            tensor_map.unpack(bytes(address[: tensor_map.SIZE_BYTES]))
        except SimulationError as error:
            self.bad_map = error
            return 0
        return 1

    def run(self, findings: Findings) -> RunReport:
        """Runs, and turns what the engine tells into errors or the report."""
        engine = library()
        pointer = ctypes.addressof(self.raw)
        with _ONE_AT_A_TIME:
            status = engine.sim_run(pointer)
        try:
            if status == RUN_BAD_MAP and self.bad_map is not None:
                raise self.bad_map
            if self.checks:
                tell_found(engine, self.raw, findings, self.program, self.launch, self.memory)
            if status in (RUN_FAULT, RUN_DEADLOCK):
                raise SimulationError(
                    f"{self.launch.kernel}: {self.raw.report.decode(errors='replace')}{_also(findings)}"
                )
            findings.raise_if_any()
        finally:
            engine.sim_release(pointer)
        notes = tuple(findings.notes)
        return RunReport(kernel=self.launch.kernel, warp_instructions=self.raw.warp_instructions, notes=notes)


def _also(findings: Findings) -> str:
    """Hazards that were found before a run ended in a fault or a deadlock: they may well be its cause."""
    if not findings.errors:
        return ""
    return "\n  hazards found before that:\n  " + "\n  ".join(findings.errors[:LIMIT])


def concurrent_or_one(clusters: int) -> int:
    """At least one cluster is in flight."""
    return max(clusters, 1)


def _tables() -> _Tables:
    return _Tables(**{name: table(name).ctypes.data for name in ("ex2", "rcp_delta", "squares")})


@lru_cache(maxsize=8)
def _aligned(program: Program) -> np.ndarray:
    """The constants at a multiple of 256 bytes, as vectors want them."""
    room = np.zeros(len(program.constants) + 512, np.uint8)
    start = -room.ctypes.data % 256
    place = room[start : start + len(program.constants) + 256]
    place[: len(program.constants)] = program.constants
    return place


@lru_cache(maxsize=8)
def _texts(program: Program) -> tuple:
    """Texts of the instructions, and of the faults that lie in the code."""
    return _strings([ins.text for ins in program.function.instructions]), _strings(list(program.texts))


def _strings(texts: list[str]):
    return (ctypes.c_char_p * max(len(texts), 1))(*(text.encode() for text in texts))


def _buffers(memory: GlobalMemory):
    return (_Buffer * max(len(memory.buffers), 1))(
        *(
            _Buffer(
                base=b.base,
                size=b.size,
                data=b.data.ctypes.data,
                written=None if b.written is None else b.written.ctypes.data,
                read_only=int(b.read_only),
                name=b.name.encode(),
            )
            for b in memory.buffers
        )
    )


def _shared_names(launch: SimLaunch):
    names = launch.shared_names
    return (_SharedName * max(len(names), 1))(*(_SharedName(n.encode(), s, z, t) for n, s, z, t in names))
