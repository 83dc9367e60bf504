"""Contract of the timing model: waits take as long as what they wait for, units serve one warp at a time.

Small kernels whose clocks can be counted by hand from the tables of timing.py; the model is for comparing kernels, so
what is tested is the arithmetic of the replay, not silicon. Expected values come from the rates: an issue slot is one
clock, an exponential of a warp 8 clocks of its sub-partition, a passed mbarrier wakes its waiters after 30.
"""

import xml.etree.ElementTree as ET

import pytest

from fa4build.errors import SimulationError
from fa4build.simulate import GlobalMemory, SimLaunch, run_launch
from fa4build.timing import rates
from fa4build.timing.attention import steady_state
from fa4build.timing.code import Code
from fa4build.timing.replay import Replay
from fa4build.timing.timeline import timeline_svg
from fa4build.timing.trace import Recorder

HEAD = """.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel(.param .b64 p) {
.reg .b32 %r<40>;
.reg .f32 %f<300>;
.reg .b64 %rd<10>;
.reg .pred %p<10>;
"""


def timed(body: str, warps: int = 1, arch: str = "sm100a"):
    """The replay of a kernel of one CTA."""
    recorder = Recorder()
    launch = SimLaunch(
        kernel="kernel", grid=(1, 1, 1), block=(32 * warps, 1, 1), smem=4096, parameters=bytes(8), by_warp=True
    )
    run_launch(HEAD + body + "\nret;\n}\n", launch, GlobalMemory(), recorder=recorder)
    return Replay(recorder, arch).run()


def exponentials(count: int) -> str:
    """Independent ex2 of constants, results kept alive by nothing: dependences do not slow them."""
    return "\n".join(f"ex2.approx.ftz.f32 %f{i}, 0f3F800000;" for i in range(count))


def test_exponentials_of_one_warp_take_eight_clocks_each():
    """100 ex2: the last starts at 99 * 8; one more clock to issue it."""
    assert 99 * 8 + 1 == timed(exponentials(100)).cycles


def test_blackwell_ultra_halves_them():
    """4 clocks each."""
    assert 99 * 4 + 1 == timed(exponentials(100), arch="sm103a").cycles


def test_warps_of_one_sub_partition_share_its_unit():
    """Warps 0 and 4 of five meet in sub-partition 0: twice the clocks; warps 0 to 3 do not."""
    alone, apart, together = (timed(exponentials(64), warps=n).cycles for n in (1, 4, 5))

    assert alone == apart
    assert 127 * 8 + 1 == together


def test_dependent_instructions_wait_for_the_latency():
    """A chain of 10 additions: 9 * (1 clock in the unit + 4 of latency), and the last one's issue."""
    chain = "mov.f32 %f0, 0f3F800000;\n" + "\n".join(f"add.f32 %f{i + 1}, %f{i}, %f{i};" for i in range(10))

    assert 9 * 5 + 1 == timed(chain).cycles


def test_moves_cost_nothing():
    """They become register allocation: the chain through a move is as long as without."""
    direct = "add.f32 %f1, %f0, %f0;\nadd.f32 %f2, %f1, %f1;"
    moved = "add.f32 %f1, %f0, %f0;\nmov.f32 %f5, %f1;\nadd.f32 %f2, %f5, %f5;"

    assert timed(direct).cycles == timed(moved).cycles


def test_a_wait_lasts_until_the_arrival_and_the_wake_up():
    """Warp 0 waits for the arrival of warp 1, which comes after 50 exponentials."""
    body = f"""
mov.u32 %r1, smem;
mov.u32 %r2, %tid.x;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra INITIALISED;
mbarrier.init.shared.b64 [%r1], 32;
INITIALISED:
bar.sync 0;
setp.ge.u32 %p2, %r2, 32;
@%p2 bra ARRIVER;
WAITING:
mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0, 10000000;
@!%p3 bra WAITING;
bra END;
ARRIVER:
{exponentials(50)}
mbarrier.arrive.shared.b64 _, [%r1];
END:
"""
    waiter, arriver = timed(body, warps=2).warps

    assert waiter.waited > 49 * 8
    # The waiter's branch after the wait is its own; between the two ends lie the wake-up and a few issue slots.
    assert arriver.end + rates.MBARRIER_WAKE.value - 10 <= waiter.end <= arriver.end + rates.MBARRIER_WAKE.value + 20


def test_list_scheduling_fills_the_gaps_of_a_chain():
    """Two independent chains take as long as one, though the text has one after the other."""
    first = "\n".join(f"add.f32 %f{i + 1}, %f{i}, %f{i};" for i in range(10))
    second = "\n".join(f"add.f32 %f{i + 101}, %f{i + 100}, %f{i + 100};" for i in range(10))
    start = "mov.f32 %f0, 0f3F800000;\nmov.f32 %f100, 0f3F800000;\n"

    assert timed(start + first).cycles + 1 == timed(start + first + "\n" + second).cycles


def test_regions_end_at_synchronisation_only():
    """A node range of one block is one region, made once."""
    recorder = Recorder()
    launch = SimLaunch(kernel="kernel", grid=(1, 1, 1), block=(32, 1, 1), parameters=bytes(8), by_warp=True)
    run_launch(HEAD + exponentials(3) + "\nret;\n}\n", launch, GlobalMemory(), recorder=recorder)
    code = Code(recorder.program, "sm100a")

    assert code.region(0, 0) is code.region(0, 0)
    assert 3 == sum(step.clocks == 8 for step in code.region(0, 0).steps)


def test_a_phase_that_nothing_completes_is_an_error():
    """A recorded wait without its arrivals: the replay says which warp waits instead of ending early."""
    recorder = Recorder()
    launch = SimLaunch(kernel="kernel", grid=(1, 1, 1), block=(32, 1, 1), parameters=bytes(8), by_warp=True)
    run_launch(HEAD + exponentials(1) + "\nret;\n}\n", launch, GlobalMemory(), recorder=recorder)
    next(iter(recorder.warps.values())).items.insert(0, ("wait", (0, 0, 1024, 0)))

    with pytest.raises(SimulationError, match="warp 0 of CTA 0"):
        Replay(recorder, "sm100a").run()


def test_the_steady_state_is_the_difference_of_two_lengths():
    """80 and 160 exponentials as 8 and 16 blocks of 10: 80 clocks a block, and 8 * 79 + 1 - 640 = -7 besides."""
    short, long = timed(exponentials(80)), timed(exponentials(160))
    steady = steady_state(short, long, (8, 16))

    assert (80.0, -7.0) == (steady.cycles, steady.fixed)
    assert 0.25 == steady.busy["mufu"]  # one of four sub-partitions, always
    assert (10, 10) == (steady.softmax["issue"], steady.softmax["mufu"])
    assert "mufu" == steady.critical


def test_the_timeline_is_one_self_contained_drawing():
    """Well-formed, nothing loaded from elsewhere, colours for light and dark readers."""
    text = timeline_svg(timed(exponentials(100)), start=0, end=500, title="a < b")
    root = ET.fromstring(text)

    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in text
    assert "a &lt; b" in text
    assert not any("href" in name for element in root.iter() for name in element.attrib)
