"""The words of what the native hazard checks found: records of checks.h as the errors and notes of `checks.findings`.

The records come in the order in which things were found. They are told through the same `Findings` that the Python
checks use, with the same rules, keys and texts, so that nothing downstream can tell the two apart.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from fa4build.simulate.checks.findings import Findings
from fa4build.simulate.hardware.gang import WARP

MAX_FINDINGS = 8192  # CHK_MAX_FINDINGS
COLUMNS = 512  # of tensor memory
REGISTER_FILE = 65_536

# Fields of chk_finding.
RECORD = np.dtype(
    [
        *((name, np.int32) for name in ("kind", "site", "other", "cluster", "cta")),
        *((name, np.int32) for name in ("first_warp", "last_warp", "num_warps")),
        *((name, np.int32) for name in ("agent_kind", "agent_a", "agent_b", "lane", "other_lane", "size")),
        ("address", np.int64),
        ("extra", np.int32, 4),
    ]
)

KINDS = (
    *("SHARED_RACE_READ", "SHARED_RACE_WRITE", "SHARED_RACE_OVERWRITE", "SHARED_UNWRITTEN", "SHARED_UNWRITTEN_ASYNC"),
    *("PROXY_READ", "PROXY_WRITE", "BARRIER_BYTES_READ", "BARRIER_BYTES_WRITE", "BARRIER_BYTES_ASYNC"),
    *("GLOBAL_TWICE", "GLOBAL_UNWRITTEN", "TENSOR_RACE_READ", "TENSOR_RACE_WRITE", "TENSOR_RACE_OVERWRITE"),
    *("TENSOR_UNWRITTEN", "TENSOR_LOAD", "TENSOR_FENCE_BEFORE", "TENSOR_FENCE_AFTER", "TENSOR_FREE_WRITE"),
    *("TENSOR_FREE_READ", "EXIT_BULK_READ", "EXIT_BULK_OPEN", "EXIT_WGMMA", "EXIT_BARRIER_BYTES"),
    *("EXIT_BARRIER_HALF", "EXIT_TMEM", "EXIT_BUDGETS", "EXIT_REGISTER_FILE", "UNDEFINED_REGISTER"),
    *("WGMMA_NO_FENCE", "WGMMA_WRITTEN", "TENSOR_LANES", "TENSOR_ORDER", "LANE_RACE", "BARRIER_EARLY"),
    *("ORDER_READ", "ORDER_WRITE", "ORDER_OVERWRITE", "ORDER_PROXY", "ORDER_SUMS"),
    *("PARENT_EARLY", "PARENT_NEVER", "LEFT_TOUCHED", "LEFT_LATE"),
    *("NOTE_UNFENCED_INIT", "NOTE_EARLY_REMOTE", "NOTE_UNOBSERVED", "NOTE_NAMED_LEFT", "NOTE_NAMED_TWICE"),
    *("NOTE_WGMMA_PART", "OUT_OF_ROOM"),
)
"""chk_kind, in its order and without its prefix."""

COMPONENTS = ("warp", "bulk", "cp.async", "wgmma", "mma", "tcgen05.ld", "tcgen05.st", "mbarrier")
"""chk_component_kind, in its order."""

_VERBS = ("reads", "overwrites", "frees")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the texts need to know of the machine that was observed.

    Attributes:
        warps_a_cta: warps of each CTA.
        name_of: a byte offset in shared memory -> its name in reports.
        buffer_name: index of a buffer, as the checks were told of it -> its name.
        ctaid: (index of a cluster, rank in it) -> the CTA's coordinates in the grid.
        operation: number of an asynchronous operation, as chk_bulk_op has it -> what it is, with its PTX line.
        leftover: (cluster, rank) -> tensor memory not freed at exit, first column -> columns.
        budgets: (cluster, rank, first warp of a warpgroup) -> the different histories of setmaxnreg in it, sorted.
        register: index of a register -> its name.
    """

    warps_a_cta: int
    name_of: Callable[[int], str]
    buffer_name: Callable[[int], str]
    ctaid: Callable[[int, int], tuple[int, ...]]
    operation: Callable[[int], str]
    leftover: Callable[[int, int], dict[int, int]]
    budgets: Callable[[int, int, int], list[tuple[int, ...]]]
    register: Callable[[int], str]


def records_at(address: int, count: int) -> np.ndarray:
    """A copy of `count` records (RECORD) that chk_findings gave."""
    if not count:
        return np.zeros(0, RECORD)
    raw = (ctypes.c_char * (count * RECORD.itemsize)).from_address(address)
    return np.frombuffer(raw, RECORD).copy()


def tell(
    findings: Findings, records: Iterable, machine: Machine, lost: int = 0, *, notes_are_errors: bool = False
) -> None:
    """Adds records to the findings of a launch.

    Args:
        records: rows of RECORD, in their order.
        lost: how many more were found than the checks kept.
        notes_are_errors: as for our own kernels; a rule that is allowed to be broken still gives notes.
    """
    teller = _Teller(findings, machine, notes_are_errors)
    for record in records:
        _TELL[KINDS[int(record["kind"])]](teller, record)
    if lost:
        text = (
            f"more than {MAX_FINDINGS} findings; {lost} further ones were not kept. Mend the first ones and run again"
        )
        findings.error("R0", (), text)


class _Teller:
    """Texts of one launch."""

    def __init__(self, findings: Findings, machine: Machine, notes_are_errors: bool):
        self.findings, self.machine, self.notes_are_errors = findings, machine, notes_are_errors

    def line(self, record) -> str:
        """Where it happened."""
        return self.findings.line(int(record["site"]))

    def other(self, record) -> str:
        """The line on the other side."""
        return self.findings.line(int(record["other"]))

    def place(self, record) -> str:
        """`CTA rank 0 warps 4-7, line 120 `st.shared...``."""
        first, last = int(record["first_warp"]), int(record["last_warp"])
        span = f"warp {first}" if record["num_warps"] == 1 else f"warps {first}-{last}"
        return f"CTA rank {record['cta']} {span}, {self.line(record)}"

    def shared(self, record) -> str:
        """The place in shared memory."""
        return self.machine.name_of(int(record["address"]))

    def ctaid(self, record) -> tuple[int, ...]:
        """The CTA's coordinates."""
        return self.machine.ctaid(int(record["cluster"]), int(record["cta"]))

    def agent(self, record) -> str:
        """The name of the component on the other side."""
        kind, a, b = (int(record[name]) for name in ("agent_kind", "agent_a", "agent_b"))
        if COMPONENTS[kind] == "mbarrier":
            return f"asynchronous copies of mbarrier {self.machine.name_of(b)} of CTA {a}"
        warp = f"warp {a % self.machine.warps_a_cta} of CTA {a // self.machine.warps_a_cta}"
        return warp if kind == 0 else f"{COMPONENTS[kind]} of {warp}"

    def error(self, rule: str, key: tuple, text: str) -> None:
        """An error, once for its key."""
        self.findings.error(rule, key, text)

    def note(self, text: str, key: object = None) -> None:
        """A note of the Python checks, which begins with its rule; once for its key: its text, if there is none."""
        key = text if key is None else key
        if not self.notes_are_errors:
            self.findings.note(key, text)
            return
        rule, rest = text.split(" ", 1)
        self.findings.error(rule, ("note", key), rest)


def _verb(record) -> str:
    return _VERBS[int(record["extra"][0])]


def _pair(record) -> tuple[int, int]:
    return int(record["site"]), int(record["other"])


def _tensor(record) -> str:
    granule = int(record["address"])
    return f"tensor memory lanes {granule // COLUMNS * 32}.., column {granule % COLUMNS}"


# --- shared memory ----------------------------------------------------------------------------------------------------


def _lanes(r) -> str:
    """What is missing where some lanes of the other warp are known to have come so far, but not all that matter."""
    if int(r["extra"][1]) != 1:
        return ""
    return " for all of its lanes: one lane's arrival does not speak for the others; a bar.warp.sync before it would"


def _shared_write(rule: str, verb: str):
    def told(t: _Teller, r) -> None:
        text = f"{t.place(r)}: {verb} {t.shared(r)} while the write by {t.agent(r)} at {t.other(r)} is not known"
        t.error(rule, _pair(r), f"{text} to be complete{_lanes(r)}")

    return told


def _shared_read(t: _Teller, r) -> None:
    text = f"{t.place(r)}: overwrites {t.shared(r)} while the read by {t.agent(r)} at {t.other(r)} is not known"
    t.error("R2", _pair(r), f"{text} to be over{_lanes(r)}")


def _shared_unwritten(t: _Teller, r) -> None:
    t.error("R9", (int(r["site"]),), f"{t.place(r)}: reads shared memory never written, {t.shared(r)}")


def _shared_unwritten_async(t: _Teller, r) -> None:
    t.error("R9", (int(r["site"]),), f"{t.place(r)}: reads {t.shared(r)}, never written")


def _proxy(verb: str):
    def told(t: _Teller, r) -> None:
        text = f"{t.place(r)}: the asynchronous proxy {verb} {t.shared(r)} written by {t.other(r)}"
        t.error("R4", _pair(r), f"{text} without a fence.proxy.async in between")

    return told


def _barrier_bytes(what: str):
    def told(t: _Teller, r) -> None:
        t.error("R5", (int(r["site"]),), f"{t.place(r)}: {what} the bytes of an mbarrier")

    return told


# --- global memory ----------------------------------------------------------------------------------------------------


def _global_twice(t: _Teller, r) -> None:
    where = f"{t.machine.buffer_name(int(r['extra'][0]))} at byte {r['address']}"
    text = f"{t.place(r)}: writes {where}, which another CTA of this launch has written"
    t.error("R3", (int(r["site"]), "global"), text)


def _global_unwritten(t: _Teller, r) -> None:
    where = f"{t.machine.buffer_name(int(r['extra'][0]))} at byte {r['address']}"
    t.error("R9", (int(r["site"]),), f"{t.place(r)}: reads {where}, never written")


# --- order of global memory, between clusters and kernels -------------------------------------------------------------


def _global_place(t: _Teller, r) -> str:
    return f"{t.machine.buffer_name(int(r['extra'][0]))} at byte {r['address']}"


def _someone(t: _Teller, cluster: int, slot: int) -> str:
    rank = slot // t.machine.warps_a_cta
    return f"warp {slot % t.machine.warps_a_cta} of CTA rank {rank} of cluster {cluster}"


def _other_access(t: _Teller, r, what: str) -> str:
    how = "asynchronous " if int(r["extra"][3]) & 1 else ""
    return f"the {how}{what} by {_someone(t, int(r['extra'][1]), int(r['extra'][2]))} at {t.other(r)}"


def _order(rule: str, verb: str, what: str, end: str):
    def told(t: _Teller, r) -> None:
        text = f"cluster {r['cluster']} {t.place(r)}: {verb} {_global_place(t, r)} while {_other_access(t, r, what)}"
        text += f" is not known to be {end}: no release and acquire of a scope that holds both order the two"
        t.error(rule, (*_pair(r), "order"), text)

    return told


def _order_proxy(t: _Teller, r) -> None:
    verb = "writes" if r["size"] else "reads"
    text = f"cluster {r['cluster']} {t.place(r)}: the asynchronous proxy {verb} {_global_place(t, r)} behind"
    text += f" {_other_access(t, r, 'access')} without a fence.proxy.async of global memory on each asynchronous side"
    t.error("R4", (*_pair(r), "order"), text)


def _order_sums(t: _Teller, r) -> None:
    text = f"cluster {r['cluster']} {t.place(r)}: adds to {_global_place(t, r)}, and so does"
    text += f" {_other_access(t, r, 'addition')}, in no order: the bits of the sum change from run to run"
    t.error("R16", _pair(r), text)


def _parent_early(t: _Teller, r) -> None:
    verb = "writes" if r["size"] else "reads"
    text = f"{t.place(r)}: {verb} {_global_place(t, r)} before griddepcontrol.wait: the kernel in front may be running"
    t.error("R17", (int(r["site"]),), text)


def _parent_never(t: _Teller, r) -> None:
    text = "launched as a dependent of the kernel in front, but no thread executes griddepcontrol.wait: whoever waits"
    t.error("R17", ("never",), f"{text} for this kernel does not wait for that one")


def _left_touched(t: _Teller, r) -> None:
    what = ("access", "copy", "tcgen05.commit")[int(r["extra"][0])]
    by = "" if what == "copy" else f" by {_someone(t, int(r['cluster']), int(r['extra'][1]))}"
    at = "" if r["site"] < 0 else f" at {t.line(r)}"
    text = f"CTA {t.ctaid(r)} exits while the {what}{by}{at} that touches its shared memory is not known to be over"
    t.error("R12", (what, int(r["site"]), int(r["extra"][1]) if what != "copy" else -1, "left"), text)


def _left_late(t: _Teller, r) -> None:
    by = _someone(t, int(r["cluster"]), int(r["extra"][1]))
    t.error("R12", ("late",), f"a tcgen05.commit by {by} arrives in CTA {t.ctaid(r)}, which has exited")


# --- tensor memory ----------------------------------------------------------------------------------------------------


def _tensor_race(rule: str, verb: str, what: str, end: str):
    def told(t: _Teller, r) -> None:
        text = f"{t.place(r)}: {verb} {_tensor(r)} while the {what} by {t.agent(r)} at {t.other(r)} is not known"
        t.error(rule, _pair(r), f"{text} to be {end}")

    return told


def _tensor_unwritten(t: _Teller, r) -> None:
    t.error("R9", (int(r["site"]),), f"{t.place(r)}: reads {_tensor(r)}, never written")


def _tensor_load(t: _Teller, r) -> None:
    text = f"{t.place(r)}: {_verb(r)} {_tensor(r)} after the {t.agent(r)} at {t.other(r)} without a tcgen05.wait::ld"
    t.error("R7w", _pair(r), f"{text} in between: its value was used, but the load is not known to be complete")


def _tensor_fence(rule: str, missing: str):
    def told(t: _Teller, r) -> None:
        text = f"{t.place(r)}: {_verb(r)} {_tensor(r)} after the access by {t.agent(r)} at {t.other(r)}; a barrier"
        t.error(rule, _pair(r), f"{text} orders the threads, but there is no {missing}")

    return told


# --- exits ------------------------------------------------------------------------------------------------------------


def _exit_bulk_read(t: _Teller, r) -> None:
    what = t.machine.operation(int(r["extra"][0]))
    text = f"CTA {t.ctaid(r)} warp {r['first_warp']} exits while {what} may still read shared memory"
    t.error("R12", (what,), text)


def _exit_bulk_open(t: _Teller, r) -> None:
    what = t.machine.operation(int(r["extra"][0]))
    t.error("R12", (what,), f"CTA {t.ctaid(r)} warp {r['first_warp']} exits with an uncommitted {what}")


def _exit_wgmma(t: _Teller, r) -> None:
    warp = int(r["first_warp"])
    t.error("R8", (warp,), f"CTA {t.ctaid(r)} warp {warp} exits with wgmma operations not waited for")


def _exit_barrier(words: str):
    def told(t: _Teller, r) -> None:
        phase, pending, expected = r["extra"][:3].tolist()
        state = f"phase {phase}, {pending} of {expected} arrivals pending, {r['size']} bytes outstanding"
        text = f"CTA {t.ctaid(r)} exits with {words.format(t.shared(r))}: {state}"
        t.error("R5-exit", (int(r["address"]),), text)

    return told


def _exit_tmem(t: _Teller, r) -> None:
    left = t.machine.leftover(int(r["cluster"]), int(r["cta"]))
    t.error("R6", (int(r["cta"]),), f"CTA {t.ctaid(r)} exits with tensor memory not freed: {left}")


def _exit_budgets(t: _Teller, r) -> None:
    cta, first = int(r["cta"]), int(r["first_warp"])
    histories = t.machine.budgets(int(r["cluster"]), cta, first)
    text = f"warps {first}-{first + 3} have unequal register budgets: setmaxnreg {histories}"
    t.error("R14", (cta, first), text)


def _exit_register_file(t: _Teller, r) -> None:
    text = f"setmaxnreg asks for {r['extra'][0]} registers in all; a multiprocessor has {REGISTER_FILE}"
    t.error("R14", (int(r["cta"]),), text)


# --- code and machine -------------------------------------------------------------------------------------------------


def _undefined(t: _Teller, r) -> None:
    name = t.machine.register(int(r["extra"][0]))
    text = f"{t.line(r)}: some path comes here before {name} has been written"
    t.error("R9-register", (int(r["site"]),), text)


def _wgmma(t: _Teller, r, text: str) -> None:
    ins = t.findings.instructions[int(r["site"])]
    t.error("R8", (int(r["site"]),), f"{ins.opcode} at line {ins.line}: {text}")


def _wgmma_no_fence(t: _Teller, r) -> None:
    _wgmma(t, r, "no wgmma.fence before it")


def _wgmma_written(t: _Teller, r) -> None:
    names = ", ".join(t.machine.register(k) for k in r["extra"].tolist() if k >= 0)
    what = "accumulator" if r["size"] else "A fragment"
    how = "read" if r["lane"] == 1 else "written"
    _wgmma(t, r, f"{what} registers ({names}, ...) were {how} after the last wgmma.fence")


def _lane_race(t: _Teller, r) -> None:
    what = "read" if r["extra"][1] else "wrote"
    lane = int(r["other_lane"])
    other = f"lane {lane} of the same warp" if lane < WARP else "other lanes of the same warp"
    text = f"{t.place(r)}: lane {r['lane']} {_verb(r)} {t.shared(r)}, which {other} {what} at {t.other(r)}"
    t.error(
        "R10", _pair(r), f"{text}; no bar.warp.sync or barrier orders the two (shuffles, votes and elections do not)"
    )


def _tensor_lanes(t: _Teller, r) -> None:
    text = (
        f"{t.place(r)}: thread {r['lane']} of the warp issues this behind tcgen05 products of thread {r['other_lane']}"
    )
    t.error("R7-lane", (int(r["site"]),), f"{text}; their order, and what a commit covers, is a thread's own")


def _tensor_order(t: _Teller, r) -> None:
    text = f"{t.place(r)}: {_verb(r)} {_tensor(r)} behind {t.other(r)} of the same thread, with another accumulator or"
    t.error("R7-order", _pair(r), f"{text} shape: PTX does not order the two without a commit and a wait")


def _barrier_early(t: _Teller, r) -> None:
    text = (
        f"{t.place(r)}: uses mbarrier {t.shared(r)} of CTA rank {r['extra'][0]}, whose initialisation at {t.other(r)}"
    )
    t.error("R5", _pair(r), f"{text} is not known to have come first")


def _out_of_room(t: _Teller, r) -> None:
    t.error("R0", (), "the checks ran out of room for this cluster; what was not looked at may be wrong")


# --- notes ------------------------------------------------------------------------------------------------------------


def _unfenced_init(t: _Teller, r) -> None:
    user = "an asynchronous arrival" if r["site"] < 0 else t.line(r)
    text = f"R5 {user} uses mbarrier {t.shared(r)} of CTA rank {r['extra'][0]}, initialised at {t.other(r)}"
    t.note(f"{text} without a fence.mbarrier_init behind it")


def _early_remote(t: _Teller, r) -> None:
    t.note(f"R13 {t.line(r)}: arrives at CTA rank {r['extra'][0]} before any cluster barrier was passed")


def _unobserved(t: _Teller, r) -> None:
    phase = int(r["extra"][0])
    text = f"R5 {t.line(r)}: first arrival of phase {phase} at mbarrier {t.shared(r)}, but no wait has observed"
    t.note(f"{text} the end of phase {phase - 1}", ("R5", int(r["site"]), int(r["address"])))


def _named_left(t: _Teller, r) -> None:
    index, arrived, required = r["extra"][:3].tolist()
    text = f"R14 CTA {t.ctaid(r)} exits with {arrived * WARP} of {required} threads"
    t.note(f"{text} arrived at named barrier {index}")


def _named_twice(t: _Teller, r) -> None:
    line = t.findings.instructions[int(r["site"])].line
    text = f"R14 barrier {r['extra'][0]} at line {line}: a warp arrives twice in one generation; the"
    t.note(f"{text} hardware counts both")


def _wgmma_part(t: _Teller, r) -> None:
    line = t.findings.instructions[int(r["site"])].line
    text = f"R14 wgmma.wait_group at line {line} is executed by part of a warpgroup; PTX wants all"
    t.note(f"{text} four warps at it together")


_TELL: dict[str, Callable] = {
    "SHARED_RACE_READ": _shared_write("R1", "reads"),
    "SHARED_RACE_WRITE": _shared_write("R3", "writes"),
    "SHARED_RACE_OVERWRITE": _shared_read,
    "SHARED_UNWRITTEN": _shared_unwritten,
    "SHARED_UNWRITTEN_ASYNC": _shared_unwritten_async,
    "PROXY_READ": _proxy("reads"),
    "PROXY_WRITE": _proxy("overwrites"),
    "BARRIER_BYTES_READ": _barrier_bytes("generic read of"),
    "BARRIER_BYTES_WRITE": _barrier_bytes("generic write to"),
    "BARRIER_BYTES_ASYNC": _barrier_bytes("an asynchronous write covers"),
    "GLOBAL_TWICE": _global_twice,
    "GLOBAL_UNWRITTEN": _global_unwritten,
    "ORDER_READ": _order("R1", "reads", "write", "complete"),
    "ORDER_WRITE": _order("R3", "writes", "write", "complete"),
    "ORDER_OVERWRITE": _order("R2", "overwrites", "read", "over"),
    "ORDER_PROXY": _order_proxy,
    "ORDER_SUMS": _order_sums,
    "PARENT_EARLY": _parent_early,
    "PARENT_NEVER": _parent_never,
    "LEFT_TOUCHED": _left_touched,
    "LEFT_LATE": _left_late,
    "TENSOR_RACE_READ": _tensor_race("R1", "reads", "write", "complete"),
    "TENSOR_RACE_WRITE": _tensor_race("R3", "overwrites", "write", "complete"),
    "TENSOR_RACE_OVERWRITE": _tensor_race("R2", "overwrites", "read", "over"),
    "TENSOR_UNWRITTEN": _tensor_unwritten,
    "TENSOR_LOAD": _tensor_load,
    "TENSOR_FENCE_BEFORE": _tensor_fence(
        "R15-before", "tcgen05.fence::before_thread_sync between that access and its thread's arrival"
    ),
    "TENSOR_FENCE_AFTER": _tensor_fence(
        "R15-after", "tcgen05.fence::after_thread_sync between that barrier and this instruction"
    ),
    "TENSOR_FREE_WRITE": _tensor_race("R6-free", "frees", "write", "over"),
    "TENSOR_FREE_READ": _tensor_race("R6-free", "frees", "read", "over"),
    "EXIT_BULK_READ": _exit_bulk_read,
    "EXIT_BULK_OPEN": _exit_bulk_open,
    "EXIT_WGMMA": _exit_wgmma,
    "EXIT_BARRIER_BYTES": _exit_barrier("mbarrier {} unbalanced"),
    "EXIT_BARRIER_HALF": _exit_barrier("a half-complete phase of mbarrier {}"),
    "EXIT_TMEM": _exit_tmem,
    "EXIT_BUDGETS": _exit_budgets,
    "EXIT_REGISTER_FILE": _exit_register_file,
    "UNDEFINED_REGISTER": _undefined,
    "WGMMA_NO_FENCE": _wgmma_no_fence,
    "WGMMA_WRITTEN": _wgmma_written,
    "TENSOR_LANES": _tensor_lanes,
    "TENSOR_ORDER": _tensor_order,
    "LANE_RACE": _lane_race,
    "BARRIER_EARLY": _barrier_early,
    "NOTE_UNFENCED_INIT": _unfenced_init,
    "NOTE_EARLY_REMOTE": _early_remote,
    "NOTE_UNOBSERVED": _unobserved,
    "NOTE_NAMED_LEFT": _named_left,
    "NOTE_NAMED_TWICE": _named_twice,
    "NOTE_WGMMA_PART": _wgmma_part,
    "OUT_OF_ROOM": _out_of_room,
}
