"""Contract of the mutants: one for each way in which a synchronisation of a kernel can be missing, weak or off by one.

A mutant is the PTX text with one statement changed; it is read by the same parser. Whatever orders something has a rule
here, or the text is refused: nothing is passed over in silence.
"""

import pytest

from fa4build.errors import SimulationError
from fa4build.simulate.ptx.parser import parse_module
from fa4build.verify.mutation.mutants import NOTHING, mutants_of
from fa4build.verify.mutation.operations import operations_of, synchronises
from tests.simulate.mutations.kernels import kept
from tests.simulate.ptx_snippets import text_of

KEPT = (
    *("fwd-sm90a-bf16-hd64-full", "fwd_combine-sm90a-bf16-hd64", "fwd-sm100a-bf16-hd128-full-2cta"),
    *("bwd-sm90a-bf16-hd128-full-deterministic", "bwd-sm100a-bf16-hd128-full-2cta-deterministic"),
)


def changes(statement: str, *, context: str = "") -> dict[str, str]:
    """What is done to a statement -> the statement then."""
    text = f"{context} {statement}"
    number = len(operations_of(f"{context} "))
    found = [mutant for mutant in mutants_of(text) if mutant.number == number]
    return {mutant.change: mutant.applied(text)[len(context) + 1 :] for mutant in found}


@pytest.mark.parametrize("name", KEPT)
def test_every_operation_of_a_kernel_that_orders_something_is_found(name):
    """The text and the parsed function have the same ones, line by line."""
    (function,) = parse_module(kept(name).ptx).entries.values()
    parsed = [(ins.line, ins.opcode) for ins in function.instructions if synchronises(ins.opcode)]

    assert [(op.line, op.opcode) for op in operations_of(kept(name).ptx)] == parsed


def test_comments_hide_no_operation_and_are_none():
    """`bar.sync 0;` in a comment is no barrier; lines are counted through comments."""
    (op,) = operations_of("// bar.sync 0;\n/* elect.sync %r1|%p1, -1;\n */ @!%p2 bar.sync 1, 256; // more\n")

    assert (op.line, op.guard, op.opcode, op.operands) == (3, "@!%p2 ", "bar.sync", ("1", "256"))


@pytest.mark.parametrize("name", KEPT)
def test_every_mutant_is_one_that_the_parser_reads_and_differs_from_the_kernel(name):
    """Some of them: none is a mutant in name alone."""
    ptx = kept(name).ptx
    for mutant in mutants_of(ptx)[::90]:
        changed = mutant.applied(ptx)

        assert changed != ptx
        assert parse_module(changed).entries


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("fence.proxy.async.shared::cta;", {"removed": NOTHING, "of global": "fence.proxy.async.global ;"}),
        ("wgmma.wait_group.sync.aligned 1;", {"one more may be open": "wgmma.wait_group.sync.aligned 2;"}),
        ("cp.async.bulk.wait_group 0;", {"only reads are over": "cp.async.bulk.wait_group.read 0;"}),
        ("bar.sync 1, 256;", {"count -32": "bar.sync 1, 224;", "arrives and does not wait": "bar.arrive 1, 256;"}),
        ("red.release.gpu.global.add.s32 [%rd1], 1;", {"scope cta": "red.release.cta.global.add.s32 [%rd1], 1;"}),
        ("ld.acquire.gpu.global.b32 %r1, [%rd1];", {"relaxed": "ld.relaxed.gpu.global.b32 %r1, [%rd1];"}),
        ("griddepcontrol.wait;", {"removed": NOTHING}),
        ("mbarrier.init.shared.b64 [%r1], 3;", {"count +1": "mbarrier.init.shared.b64 [%r1], 4;"}),
        ("setmaxnreg.dec.sync.aligned.u32 32;", {"count +8": "setmaxnreg.dec.sync.aligned.u32 40;"}),
        (
            "mbarrier.arrive.shared::cluster.b64 _, [%r1], %r2;",
            {"releases for its CTA": "mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r1], %r2;"},
        ),
        (
            "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], 512;",
            {"bytes not announced": "mbarrier.arrive.shared.b64 %rd1, [%r1];", "removed": "mov.b64 %rd1, 0;"},
        ),
        (
            "mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 1000;",
            {
                "removed": "setp.eq.s32 P1, 0, 0;",
                "the other parity": "{ .reg .b32 n_; xor.b32 n_, %r2, 1; "
                "mbarrier.try_wait.parity.shared.b64 P1, [%r1], n_, 1000; }",
            },
        ),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
def test_an_operation_is_removed_weakened_and_off_by_one(statement, expected):
    """One statement, the changes that are its own."""
    found = changes(statement)

    assert {change: found.get(change) for change in expected} == expected


def test_a_guard_stays_with_the_changed_operation():
    """What was done by some lanes is done wrong by the same."""
    assert changes("@%p1 cp.async.bulk.wait_group 0;")["one more may be open"] == "@%p1 cp.async.bulk.wait_group 1;"


def test_a_cluster_barrier_is_also_removed_with_its_wait():
    """One half alone is a deadlock; without both, nothing holds."""
    text = "barrier.cluster.arrive; bar.sync 0; barrier.cluster.wait;"
    (both,) = [mutant for mutant in mutants_of(text) if mutant.change == "removed with its wait"]

    assert both.applied(text) == f"{NOTHING} bar.sync 0; {NOTHING}"


def test_waits_that_acquire_for_their_cta_are_a_fault_of_clusters_alone():
    """Without a cluster barrier there is one CTA, and its scope is wide enough."""
    wait = "mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 1000;"

    assert "acquires for its CTA" not in changes(wait)
    assert "acquires for its CTA" in changes(wait, context="barrier.cluster.arrive;")


def test_lane_0_stands_for_the_elected_one_only_where_that_is_a_fault():
    """An election orders no memory, so any lane may load or arrive; bulk groups and commits are a thread's own."""
    assert "lane 0 without an election" in changes("elect.sync %r1|%p1, -1; cp.async.bulk.commit_group;")
    assert "lane 0 without an election" not in changes("elect.sync %r1|%p1, -1; fence.proxy.async;")


def test_of_copies_of_an_unrolled_loop_the_first_and_the_last_are_changed():
    """Copies differ in registers and numbers; barriers that are initialised are places of their own."""
    step = "add.s32 %r{0}, %r{0}, {0}; shl.b32 %r{0}, %r{0}, {0}; bar.warp.sync -1; xor.b32 %r{0}, %r{0}, {0}; "
    text = "".join(step.format(100 + number) for number in range(20))
    inits = "".join(f"mbarrier.init.shared.b64 [%r1+{8 * number}], 1; " for number in range(20))

    assert len({mutant.number for mutant in mutants_of(text)}) < 8
    assert len({mutant.number for mutant in mutants_of(inits)}) == 20


def test_an_operation_without_a_rule_is_refused():
    """Somebody adds a rule; nobody believes that it was tried."""
    with pytest.raises(SimulationError, match=r"PTX line 2: no mutation rule for mbarrier\.test_wait\.shared\.b64"):
        mutants_of("\nmbarrier.test_wait.shared.b64 p, [%r1], %rd1;")


def test_a_snippet_with_a_changed_operation_is_a_module():
    """Mutants keep the module around them."""
    text = text_of("bar.warp.sync -1;")
    (mutant,) = mutants_of(text)

    assert parse_module(mutant.applied(text)).entries["snippet"].instructions[-2].opcode == "mov.b32"
