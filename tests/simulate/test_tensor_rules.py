"""Contract of the order of tensor-memory accesses of several threads (PTX ISA 9.7.16.6): each is complete
(`tcgen05.wait::ld`, `wait::st`, a commit), its thread has fenced before it arrived at a barrier, and the next thread
after it waited. Each of these, left out, is told by its rule; with all of them the program is clean.
"""

import numpy as np
import pytest

from fa4build.errors import SimulationError
from tests.simulate.ptx_snippets import result, run

BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"
START = """
    mov.b32 %r5, smem; shr.u32 %r4, %r0, 5; setp.ne.s32 %p1, %r4, 0; @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5+64], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    bar.sync 0; ld.shared.b32 %r7, [%r5+64]; and.b32 %r8, %r4, 3; shl.b32 %r8, %r8, 21; add.s32 %r8, %r8, %r7;
"""
END = "bar.sync 0; @%p1 bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32; FREED:"
# Warps 0 to 3 and 4 to 7 own the same quarters of the lanes. The first four go first.
FIRST = "setp.ge.s32 %p2, %r4, 4; @%p2 bra SECOND;"
SECOND = "bra.uni JOINED; SECOND: bar.sync 1, 256;"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r8];"


def handed_on(first: str, second: str, after: str = AFTER) -> str:
    """`first` by warps 0 to 3, a barrier, `second` by warps 4 to 7."""
    return START + FIRST + first + "bar.arrive 1, 256;" + SECOND + after + second + "JOINED:" + END


def loaded_then_stored(ordered: str, after: str = AFTER) -> str:
    """Warps 0 to 3 store and load, and then `ordered`; warps 4 to 7 overwrite."""
    return handed_on(STORE + WAIT_ST + LOAD + result(0, "%r11") + ordered, STORE + WAIT_ST, after)


def stored_then_loaded(ordered: str, after: str = AFTER) -> str:
    """Warps 0 to 3 store, and then `ordered`; warps 4 to 7 load."""
    return handed_on(STORE + ordered, LOAD + WAIT_LD + result(0, "%r11"), after)


RACE = r"tcgen05\.{second}.* after the (access by )?tcgen05\.{first} of warp \d of CTA 0 at line \d+ `tcgen05\.{first}"
OVERWRITES = RACE.format(first="ld", second="st")
READS = RACE.format(first="st", second="ld")
FAULTS = [
    pytest.param(stored_then_loaded(BEFORE), r"R1 .*tcgen05\.ld.*write by tcgen05\.st of warp", id="store-no-wait"),
    pytest.param(stored_then_loaded(WAIT_ST), rf"R15-before .*{READS}.*no {BEFORE[:-1]}", id="store-no-before"),
    pytest.param(stored_then_loaded(WAIT_ST + BEFORE, ""), rf"R15-after .*{READS}.*no {AFTER[:-1]}", id="no-after"),
    pytest.param(loaded_then_stored(BEFORE), rf"R7w .*{OVERWRITES}.*without a tcgen05\.wait::ld", id="load-no-wait"),
    pytest.param(loaded_then_stored(WAIT_LD), rf"R15-before .*{OVERWRITES}", id="load-no-before"),
    pytest.param(loaded_then_stored(WAIT_LD + BEFORE, ""), rf"R15-after .*{OVERWRITES}", id="overwrite-no-after"),
    pytest.param(
        handed_on(STORE + BEFORE + WAIT_ST, LOAD, AFTER).replace(AFTER, "").replace(SECOND, AFTER + SECOND),
        "R15-after",
        id="fence-by-the-wrong-warps",
    ),
]


def check(body: str, threads: int = 256, **options) -> np.ndarray:
    """Output word of each thread."""
    return run(body, threads=threads, target="sm_100a", checks=True, **options)[:, 0]


@pytest.mark.parametrize(("body", "message"), FAULTS)
def test_what_is_left_out_is_told(body, message):
    """One of wait, fence before the arrival, fence after the wait."""
    with pytest.raises(SimulationError, match=message):
        check(body)


def test_with_all_of_them_the_program_is_clean():
    """Warp 4 + w, lane t reads what warp w, lane t wrote; the overwriting program reads its own."""
    expected = np.arange(256) % 128
    assert (check(stored_then_loaded(WAIT_ST + BEFORE))[128:] == expected[128:]).all()
    assert (check(loaded_then_stored(WAIT_LD + BEFORE))[:128] == expected[:128]).all()


def test_a_warp_needs_no_fence_for_its_own_accesses():
    """Program order and the waits are enough."""
    assert (check(START + STORE + WAIT_ST + LOAD + WAIT_LD + result(0, "%r11") + END, threads=128) < 128).all()


def test_a_warp_must_wait_for_its_own_load_before_it_overwrites():
    """ld and st of one thread are not ordered by themselves."""
    body = START + STORE + WAIT_ST + LOAD + result(0, "%r11") + STORE + WAIT_ST + END
    with pytest.raises(SimulationError, match=r"R7w .*tcgen05\.st.*overwrites"):
        check(body, threads=128)


def test_a_third_warp_passes_the_order_on_without_fences():
    """Only the threads whose accesses are ordered fence; barriers are transitive."""
    body = (
        START
        + "setp.ge.s32 %p2, %r4, 4; @%p2 bra SECOND; setp.ge.s32 %p3, %r4, 1; @%p3 bra JOINED;"
        + STORE + WAIT_ST + BEFORE
        + "bar.arrive 1, 64; bra.uni JOINED; SECOND: setp.eq.s32 %p3, %r4, 5; @%p3 bra PASS;"
        + "setp.ne.s32 %p3, %r4, 4; @%p3 bra JOINED; bar.sync 2, 64;"
        + AFTER + LOAD + WAIT_LD + result(0, "%r11")
        + "bra.uni JOINED; PASS: bar.sync 1, 64; bar.arrive 2, 64; JOINED:"
        + END
    )  # fmt: skip
    assert check(body)[128:160].tolist() == list(range(32))
    with pytest.raises(SimulationError, match=r"R15-after"):
        check(body.replace(AFTER, ""))


FREE_AT_ONCE = "@%p1 bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32; FREED:"
# Warps 1 to 3 are still at it when warp 0 frees.
FREED_TOO_EARLY = [
    pytest.param(STORE + WAIT_ST + FREE_AT_ONCE, r"R6-free .*dealloc.*write by tcgen05\.st of warp 1", id="store"),
    pytest.param(
        STORE + WAIT_ST + "bar.sync 0;" + LOAD + WAIT_LD + result(0, "%r11") + FREE_AT_ONCE,
        r"R6-free .*dealloc.*frees tensor memory lanes 32.*read by warp 1 of CTA 0 at line \d+ `tcgen05\.ld",
        id="load",
    ),
    pytest.param(
        STORE + WAIT_ST + LOAD + result(0, "%r11") + "bar.sync 0;" + FREE_AT_ONCE,
        r"R7w .*dealloc.*frees tensor memory .*tcgen05\.ld.*without a tcgen05\.wait::ld",
        id="load-no-wait",
    ),
]


@pytest.mark.parametrize(("body", "message"), FREED_TOO_EARLY)
def test_tensor_memory_is_freed_after_its_last_use(body, message):
    """dealloc hands the columns to whoever allocates next: all uses of all warps must be over, and known to be."""
    with pytest.raises(SimulationError, match=message):
        check(START + body, threads=128)
    repaired = body.replace(FREE_AT_ONCE, WAIT_LD + "bar.sync 0;" + FREE_AT_ONCE)
    check(START + repaired, threads=128)


def test_only_the_freed_columns_are_undefined():
    """Two blocks of 32 columns, the first freed: the second keeps its content."""
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5+64], 32;"
    body = START.replace(alloc, alloc + alloc.replace("64", "80")) + (
        "ld.shared.b32 %r9, [%r5+80]; add.s32 %r8, %r8, 32; @%p1 bra.uni KEPT;"
        "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32; KEPT:"
    ).replace("@%p1 bra.uni KEPT;", STORE + WAIT_ST + "@%p1 bra KEPT;")
    body += LOAD + WAIT_LD + result(0, "%r11") + "bar.sync 0; @%p1 bra FREED;"
    body += "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r9, 32; FREED:"

    assert check(body, threads=128).tolist() == list(range(128))


@pytest.mark.parametrize("rule", ["R7w", "R15-before", "R15-after"])
def test_kernels_that_do_without_can_be_allowed_to(rule):
    """Known good kernels have none of these: the findings become notes, one rule at a time."""
    body = {
        "R7w": loaded_then_stored(BEFORE),
        "R15-before": stored_then_loaded(WAIT_ST),
        "R15-after": stored_then_loaded(WAIT_ST + BEFORE, ""),
    }[rule]
    check(body, allowed=(rule,))
    with pytest.raises(SimulationError, match=rule):
        check(body)
