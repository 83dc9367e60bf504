"""Records what the machine tells the Python checks, as a stream that the native checks replay (checks_replay.h)."""

import re
from array import array
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fa4build.simulate.checks.findings import Findings
from fa4build.simulate.checks.observer import Observer
from fa4build.simulate.hardware.gang import WARP
from fa4build.simulate.native.check_texts import Machine, tell
from fa4build.simulate.translate.emitter import read_registers, written_registers
from tests.simulate.native import checks_library as native

EVENTS = (
    *("CLUSTER_BEGIN", "CLUSTER_END", "SHARED", "GLOBAL", "TMEM", "TMEM_FREED", "ISSUE", "WAITED", "TMEM_WAIT"),
    *("CLOCK_TAKE", "CLOCK_RELEASE", "DEFERRED", "CREATED", "ARRIVE", "PASSED", "NAMED_ARRIVE", "NAMED_COMPLETED"),
    *("NAMED_PASSED", "CLUSTER_ARRIVE", "CLUSTER_COMPLETED", "CLUSTER_PASSED", "FENCE", "WARP_BARRIER", "ATOMIC"),
    *("ACQUIRE", "WARP_EXIT", "CTA_EXIT", "REPORT"),
)
"""chk_event, in its order."""

NUMBER = {name: index for index, name in enumerate(EVENTS)}
_CHANNELS = {"bulk": 1, "cp.async": 2, "wgmma": 3, "mma": 4, "mbarrier": 7}
_SPAN, _UNITS, _BLOCK, _RANGE, _GLOBAL_UNITS = range(5)
_ORDERS = {None: 0, "relaxed": 0, "acquire": 1, "release": 2, "acq_rel": 3}
_TMEM_ORDERS = {"ld": 0, "st": 1, "before": 2, "after": 3}
_RELAXED, _RELEASE, _ACQUIRE, _GPU = 0, 2, 1, 2
_NO_FENCE, _WRITTEN, _TWICE, _PART = 30, 31, 37, 38  # kinds of findings that the machine makes itself


@dataclass
class Recording:
    """One launch: the events, what the machine was, and what the Python checks said of it."""

    observer: Observer
    words: array = field(default_factory=lambda: array("q"))
    buffers: list = field(default_factory=list)  # (name, base, bytes, words written before the launch or None)
    memory: object = None
    ctaids: dict = field(default_factory=dict)
    names: tuple = ()  # the launch's table of shared memory, by way of a CTA
    warps_a_cta: int = 1
    operations: list = field(default_factory=list)
    leftovers: dict = field(default_factory=dict)
    budgets: dict = field(default_factory=dict)
    events: int = 0

    def machine(self) -> Machine:
        """What the texts need to know."""
        return Machine(
            warps_a_cta=self.warps_a_cta,
            name_of=self.names.name_of if self.names else str,
            buffer_name=lambda i: self.buffers[i][0],
            ctaid=lambda cluster, rank: self.ctaids[cluster, rank],
            operation=lambda i: self.operations[i],
            leftover=lambda cluster, rank: self.leftovers[cluster, rank],
            budgets=lambda cluster, rank, first: self.budgets[cluster, rank, first],
            register=lambda i: self.observer.program.function.register_names[i],
        )

    def python_findings(self) -> tuple[list[str], list[str]]:
        """Errors and notes of the Python checks."""
        return self.observer.findings.errors, self.observer.findings.notes

    def native_findings(self) -> tuple[list[str], list[str]]:
        """Errors and notes of the native checks, and nothing refused on the way."""
        written = [None if w is None else w.copy() for *_, w in self.buffers]
        rows = [(base, size, w) for (_, base, size, _), w in zip(self.buffers, written, strict=True)]
        program = self.observer.program
        findings = Findings(program.function.name, program.function.instructions, self.observer.findings.allowed)
        with native.Launch(rows) as launch:
            assert launch.undefined(code_of(program)) == native.OK
            status, done = launch.replay(np.frombuffer(self.words, np.int64))
            assert (status, done.refused, done.events) == (native.OK, 0, self.events)
            tell(findings, launch.records()[0], self.machine(), launch.records()[1])
        self._compare_written(written)
        return findings.errors, findings.notes

    def _compare_written(self, written: list) -> None:
        for buffer, mine in zip(self.memory.buffers if self.memory else (), written, strict=True):
            if mine is not None:
                assert np.array_equal(buffer.written, mine), buffer.name


def code_of(program) -> native.Code:
    """A program as chk_undefined takes it."""
    from fa4build.simulate.checks.undefined import _is_move, _used

    instructions, blocks = program.function.instructions, program.blocks
    flags = [native.IS_MOVE * _is_move(ins) | native.IS_GUARDED * (ins.guard is not None) for ins in instructions]
    arrays = {"flags": np.array(flags or [0], np.uint8)}
    arrays["used_start"], arrays["used"] = native.lists([_used(ins) for ins in instructions])
    arrays["read_start"], arrays["read"] = native.lists(
        [list(read_registers(ins)) if _is_move(ins) else [] for ins in instructions]
    )
    arrays["written_start"], arrays["written"] = native.lists([list(written_registers(i)) for i in instructions])
    arrays["block_start"] = np.array([block.start for block in blocks], np.uint32)
    arrays["block_stop"] = np.array([block.stop for block in blocks], np.uint32)
    arrays["next_start"], arrays["next"] = native.lists([list(block.successors) for block in blocks])
    code = native.Code(len(program.function.register_names), len(instructions), len(blocks))
    for name, values in arrays.items():
        setattr(code, name, values.ctypes.data)
    code.arrays = arrays
    return code


class RecordingObserver(Observer):
    """The Python checks, with a record of everything they were told."""

    made: ClassVar[list[Recording]] = []

    def __init__(self, program, allowed: tuple[str, ...] = ()):
        self._is_inside = True
        super().__init__(program, allowed)
        self._is_inside = False
        self._numbers: dict[int, int] = {}
        self._kept: list = []
        self._begun: set[int] = set()
        self._clocks: dict[int, list[int]] = {}
        self.recording = Recording(self)
        self.made.append(self.recording)

    # --- words --------------------------------------------------------------------------------------------------------

    def _put(self, event: str, values) -> None:
        values = [int(v) for v in values]
        self.recording.words.extend((NUMBER[event], len(values), *values))
        self.recording.events += 1

    def _number(self, thing) -> int:
        """The number of an operation, barrier or clock; it is kept alive, so that its id stays its own."""
        number = self._numbers.get(id(thing))
        if number is None:
            number = self._numbers[id(thing)] = len(self._kept)
            self._kept.append(thing)
        return number

    def _cluster(self, cluster) -> int:
        if cluster.index not in self._begun:
            self._begun.add(cluster.index)
            self._begin(cluster)
        return cluster.index

    def _begin(self, cluster) -> None:
        record, cta = self.recording, cluster.ctas[0]
        if record.memory is None:
            record.memory = cluster.memory
            for b in cluster.memory.buffers:
                record.buffers.append((b.name, b.base, b.size, None if b.written is None else b.written.copy()))
        record.names, record.warps_a_cta = cta, len(cta.warps)
        for each in cluster.ctas:
            record.ctaids[cluster.index, each.rank] = each.ctaid
        sizes = (len(cluster.ctas), len(cta.warps), cta.shared_limit)
        self._put("CLUSTER_BEGIN", (cluster.index, cluster.index, *sizes))

    def _gang(self, g, mask) -> list[int]:
        if mask is None:
            masks = [0xFFFFFFFF] * len(g.warps)
        else:
            masks = np.packbits(np.asarray(mask).reshape(-1, WARP), axis=1, bitorder="little").view("<u4").ravel()
        return [self._cluster(g.cta.cluster), g.cta.rank, len(g.warps), *(w.index for w in g.warps), *masks]

    # --- memory -------------------------------------------------------------------------------------------------------

    def shared_access(self, g, offset, size, mask, site, is_write):
        self._put("SHARED", (*self._gang(g, mask), size, site, is_write, len(offset), *offset.tolist()))
        super().shared_access(g, offset, size, mask, site, is_write)

    def global_access(self, g, address, size, mask, site, is_write):
        self._put("GLOBAL", (*self._gang(g, mask), size, site, is_write, len(address), *_signed(address)))
        super().global_access(g, address, size, mask, site, is_write)

    def tmem_access(self, g, warp, address, width, is_write, site):
        self._put("TMEM", (*self._gang(g, None), warp.index, address, width, is_write, site))
        super().tmem_access(g, warp, address, width, is_write, site)

    def tmem_wait(self, g, mask, kind):
        self._put("TMEM_WAIT", (*self._gang(g, mask), _TMEM_ORDERS[kind]))
        super().tmem_wait(g, mask, kind)

    def tmem_freed(self, g, mask, column, num_cols, site):
        self._put("TMEM_FREED", (*self._gang(g, mask), column, num_cols, site))
        super().tmem_freed(g, mask, column, num_cols, site)

    # --- asynchronous operations --------------------------------------------------------------------------------------

    def issue(self, g, warp, op, channel, reads, writes, site):
        is_name = isinstance(channel, str)
        head = [*self._gang(g, None), self._number(op), warp.index, _CHANNELS[channel if is_name else "mbarrier"]]
        head += [-1, 0] if is_name else [self._number(channel), channel.phase]
        operands = [word for operand in (*reads, *writes) for word in self._operand(*operand)]
        self._put("ISSUE", (*head, site, len(reads), len(writes), *operands))
        super().issue(g, warp, op, channel, reads, writes, site)

    def _operand(self, space, owner, where) -> list[int]:
        # kind, cta, first, lanes, column, unit bytes, address, count, list
        if space == "smem":
            where = where.tolist()
            if where and where == list(range(where[0], where[0] + len(where))):
                return [_SPAN, owner.rank, where[0], 0, 0, 0, 0, len(where)]
            return [_UNITS, owner.rank, 0, 0, 0, 0, 0, len(where), *where]
        if space == "tmem":
            lane, lanes, column, columns = where
            return [_BLOCK, owner.rank, lane, lanes, column, 0, 0, columns]
        if space == "gmem":
            return [_RANGE, 0, 0, 0, 0, 0, *_signed(np.array([owner], np.uint64)), where]
        addresses = owner.global_addresses if owner.valid is None else owner.global_addresses[owner.valid]
        if not self.recording.memory.has_unwritten:
            addresses = addresses[:0]
        return [_GLOBAL_UNITS, 0, 0, 0, 0, owner.unit_bytes, 0, len(addresses), *_signed(addresses)]

    def ops_waited(self, g, mask, ops, what):
        self._put("WAITED", (*self._gang(g, mask), len(ops), *map(self._number, ops)))
        super().ops_waited(g, mask, ops, what)

    def _with_channel(self, warp, channel):
        cluster = self._cluster(warp.cta.cluster)
        clock = super()._with_channel(warp, channel)
        number = self._number(clock)
        self._clocks.setdefault(cluster, []).append(number)
        self._put("CLOCK_TAKE", (cluster, warp.cta.rank, warp.index, _CHANNELS[channel], number))
        return clock

    def deferred_arrive(self, barrier, clock):
        head = (self._cluster(barrier.cta.cluster), self._number(barrier), barrier.phase)
        self._put("DEFERRED", (*head, self._number(clock)))
        self._is_inside = True
        super().deferred_arrive(barrier, clock)
        self._is_inside = False

    # --- barriers and fences ------------------------------------------------------------------------------------------

    def barrier_created(self, g, mask, barrier, site):
        self._put("CREATED", (*self._gang(g, mask), barrier.offset, site, self._number(barrier)))
        super().barrier_created(g, mask, barrier, site)

    def arrive(self, g, mask, barrier, site):
        state = (self._number(barrier), barrier.phase, barrier.pending, barrier.expected)
        self._put("ARRIVE", (*self._gang(g, mask), *state, _RELEASE, 0, site))
        super().arrive(g, mask, barrier, site)

    def wait_passed(self, g, mask, barrier, parity, site):
        self._put("PASSED", (*self._gang(g, mask), self._number(barrier), barrier.phase, _ACQUIRE, 0, site))
        super().wait_passed(g, mask, barrier, parity, site)

    def named_arrive(self, g, mask, barrier, generation, is_sync):
        self._put("NAMED_ARRIVE", (*self._gang(g, mask), barrier.index, generation, is_sync))
        self._is_inside = True
        super().named_arrive(g, mask, barrier, generation, is_sync)
        self._is_inside = False

    def named_completed(self, g, barrier, generation):
        self._put("NAMED_COMPLETED", (self._cluster(g.cta.cluster), g.cta.rank, barrier.index, generation))
        super().named_completed(g, barrier, generation)

    def named_passed(self, g, mask, barrier, generation):
        self._put("NAMED_PASSED", (*self._gang(g, mask), barrier.index, generation))
        super().named_passed(g, mask, barrier, generation)

    def cluster_arrive(self, g, mask, barrier, relaxed):
        self._put("CLUSTER_ARRIVE", (*self._gang(g, mask), _RELAXED if relaxed else _RELEASE, 1))
        self._is_inside = True
        super().cluster_arrive(g, mask, barrier, relaxed)
        self._is_inside = False

    def cluster_completed(self, barrier):
        self._put("CLUSTER_COMPLETED", (self._cluster(barrier.cluster),))
        super().cluster_completed(barrier)

    def cluster_passed(self, g, mask, barrier):
        self._put("CLUSTER_PASSED", self._gang(g, mask))
        super().cluster_passed(g, mask, barrier)

    def fence(self, g, kind, mask):
        number = 1 if kind.startswith(".proxy.async") else 2 if kind.startswith(".mbarrier_init") else 0
        self._put("FENCE", (*self._gang(g, mask), number, 7, 3, 0))
        super().fence(g, kind, mask)

    def warp_barrier(self, g, mask):
        if not self._is_inside:
            self._put("WARP_BARRIER", self._gang(g, mask))
        super().warp_barrier(g, mask)

    def atomic(self, g, mask, addresses, order, is_global, site):
        if is_global:
            words = list(set(addresses.tolist()))  # in the order in which the Python checks take them
            signed = _signed(np.array(words, np.uint64))
            self._put("ATOMIC", (*self._gang(g, mask), _ORDERS[order], _GPU, site, len(words), *signed))
        super().atomic(g, mask, addresses, order, is_global, site)

    def acquire(self, g, addresses, mask):
        words = _signed(np.array(list(set(addresses.tolist())), np.uint64))
        self._put("ACQUIRE", (*self._gang(g, mask), _ACQUIRE, _GPU, len(words), *words))
        super().acquire(g, addresses, mask)

    # --- what the machine finds itself --------------------------------------------------------------------------------

    def error(self, rule, site, text):
        if rule == "R8":
            self._report_wgmma(site, text)
        super().error(rule, site, text)

    def _report_wgmma(self, site: int, text: str) -> None:
        changed = re.search(r"(accumulator|A fragment) registers \((.*), \.\.\.\)", text)
        if changed is None:
            self._put("REPORT", (_NO_FENCE, site, -1, -1, -1, -1, 0))
            return
        names = self.program.function.register_names
        registers = [names.index(name) for name in changed[2].split(", ")]
        registers += [-1] * (4 - len(registers))
        self._put("REPORT", (_WRITTEN, site, *registers, changed[1] == "accumulator"))

    def note(self, text):
        twice = re.match(r"R14 barrier (\d+) at line (\d+): a warp arrives twice", text)
        part = re.match(r"R14 wgmma.wait_group at line (\d+) is executed by part", text)
        if twice:
            self._put("REPORT", (_TWICE, self._site_of(int(twice[2])), int(twice[1]), -1, -1, -1, 0))
        if part:
            self._put("REPORT", (_PART, self._site_of(int(part[1])), -1, -1, -1, -1, 0))
        super().note(text)

    def _site_of(self, line: int) -> int:
        return next(i for i, ins in enumerate(self.program.function.instructions) if ins.line == line)

    # --- the end ------------------------------------------------------------------------------------------------------

    def lanes_exit(self, g, mask):
        masks = self._gang(g, mask)[3 + len(g.warps) :]
        for warp, leaving in zip(g.warps, masks, strict=True):
            if leaving:
                self._put("WARP_EXIT", self._warp_exit(warp, int(leaving)))
        super().lanes_exit(g, mask)

    def _warp_exit(self, warp, leaving: int) -> list[int]:
        grouped = [(lane, op) for lane, groups in warp.bulk_groups.items() for group in groups for op in group]
        opened = [(lane, op) for lane, ops in warp.bulk_open.items() for op in ops]
        pending = bool(warp.wgmma_open or any(warp.wgmma_groups))
        words = [self._cluster(warp.cta.cluster), warp.cta.rank, warp.index, leaving, pending]
        words += [len(grouped), len(opened)]
        for lane, op in grouped + opened:
            self.recording.operations.append(op.describe)
            told = -1 if op.token is None else self._number(op)
            words += [lane, len(self.recording.operations) - 1, told, op.has_read, op.committed]
        return words

    def cluster_exit(self, cluster):
        for cta in cluster.ctas:
            self._put("CTA_EXIT", self._cta_exit(cluster, cta))
        for number in self._clocks.pop(cluster.index, ()):
            self._put("CLOCK_RELEASE", (cluster.index, number))
        self._put("CLUSTER_END", (cluster.index,))
        super().cluster_exit(cluster)

    def _cta_exit(self, cluster, cta) -> list[int]:
        record = self.recording
        left = {} if cta.tmem is None else cta.tmem.allocator.leftover()
        record.leftovers[cluster.index, cta.rank] = left
        words = [self._cluster(cluster), cta.rank, len(left)]
        for named in cta.named:
            words += [len(named.arrived), named.required or 0]
        words.append(len(cta.mbarriers))
        for barrier in cta.mbarriers.values():
            words += [barrier.offset, barrier.phase, barrier.pending, barrier.expected, barrier.tx]
        for first in range(0, len(cta.warps), 4):
            histories = {tuple(w.register_history) for w in cta.warps[first : first + 4]}
            record.budgets[cluster.index, cta.rank, first] = sorted(histories)
        for warp in cta.warps:
            words += [len(warp.register_history), *warp.register_history]
        return words


def _signed(addresses: np.ndarray) -> list[int]:
    return addresses.astype(np.uint64).view(np.int64).tolist()


def compare(recording: Recording) -> None:
    """Both twins found the same, in the same words and order. Lanes of a warp (R10) are clocks of their own in C, with
    rules that the Python checks do not have (tests/simulate/native/test_lane_clocks.py)."""
    errors, notes = recording.native_findings()
    assert errors == recording.python_findings()[0]
    assert notes == [note for note in recording.python_findings()[1] if not note.startswith("R10")]
