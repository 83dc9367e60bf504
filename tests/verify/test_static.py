"""Contract of fa4build.verify.static.

A kernel keeps absolute limits (target, spills, local memory, shared and tensor memory, register budgets), whatever it
did before. Beside them stands a baseline: a figure beyond its tolerance is a failure that names figure, baseline, value
and tolerance; a better one is only told. Updating replaces the rows that were measured and nothing else.
"""

import dataclasses
import json

import pytest

from fa4build.errors import Fa4BuildError, SimulationError
from fa4build.matrix.arch import arch_named
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import parse_variant
from fa4build.verify.static import (
    BASELINE_DIR,
    CLASSES,
    StaticFigures,
    _counts_by_class,
    _opcodes,
    _sass_mix,
    baseline_changes,
    broken_limits,
    compare,
    read_baseline,
    tmem_columns,
    updated_baseline,
    write_baseline,
)

SM90 = arch_named("sm90a")
TUNING = tuning_for(parse_variant("fwd-sm90a-bf16-hd128-full"))  # 2 consumers of 240, 1 producer of 24 registers

# 168 registers x 384 threads = 64512 = 2 * 128 * 240 + 128 * 24.
RIGHT = StaticFigures(
    target="sm_90a",
    threads=384,
    registers=168,
    budgets=(24, 240),
    spill_bytes=0,
    local_bytes=0,
    shared_bytes=165888,
    tmem_columns=0,
    code_bytes=24832,
    instructions={**dict.fromkeys(CLASSES, 0), "mma": 32, "mufu": 134, "alu": 1000},
)
BASELINE = {name: number for name, number in RIGHT.flat().items() if number}


def changed(**fields: object) -> StaticFigures:
    """The right kernel with other figures."""
    return dataclasses.replace(RIGHT, **fields)


def test_a_right_kernel_breaks_nothing():
    """Limits and baseline both."""
    assert broken_limits(RIGHT, SM90, TUNING) == ()
    assert compare(RIGHT, BASELINE) == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({"target": "sm_100a"}, "cubin is for sm_100a; sm90a needs sm_90a", id="target"),
        pytest.param({"spill_bytes": 8}, "8 bytes of registers spill; 0 are allowed", id="spills"),
        pytest.param({"local_bytes": 16}, "16 bytes of local memory a thread; 0 are allowed", id="local memory"),
        pytest.param({"shared_bytes": 232449}, "232449 bytes of shared memory; sm90a has 232448", id="shared memory"),
        pytest.param({"tmem_columns": 512}, "512 columns of tensor memory; sm90a has 0", id="tensor memory"),
        # 176 x 384 = 67584 > 65536
        pytest.param({"registers": 176}, "176 registers x 384 threads; sm90a has 65536", id="registers"),
        pytest.param(
            {"budgets": (24, 232, 240)}, "setmaxnreg asks for [232] registers; the roles' budgets are", id="budget"
        ),
        pytest.param({"budgets": (24,)}, "no setmaxnreg for the budgets [240]; the kernel has [24]", id="no budget"),
        # 160 x 384 = 61440 < 64512: the last warpgroup that asks for more never gets it
        pytest.param({"registers": 160}, "setmaxnreg would wait for ever", id="pool too small"),
    ],
)
def test_a_broken_limit_is_named_with_value_and_what_is_allowed(fields, said):
    """One sentence each."""
    (sentence,) = broken_limits(changed(**fields), SM90, TUNING)

    assert said in sentence


@pytest.mark.parametrize(
    ("figure", "baseline", "now", "is_worse"),
    [
        pytest.param("registers", 168, 169, True, id="registers: no tolerance"),
        pytest.param("code_bytes", 10000, 10200, False, id="code: 2 percent"),
        pytest.param("code_bytes", 10000, 10201, True, id="code: more than 2 percent"),
        pytest.param("instructions.mma", 32, 33, True, id="matrix instructions: none more"),
        pytest.param("instructions.alu", 1000, 1020, False, id="count: 2 percent"),
        pytest.param("instructions.alu", 1000, 1021, True, id="count: more than 2 percent"),
        pytest.param("instructions.fence", 10, 18, False, id="small count: 8 more"),
        pytest.param("instructions.fence", 10, 19, True, id="small count: 9 more"),
        pytest.param("registers", 168, 160, False, id="less is better"),
    ],
)
def test_the_tolerance_of_each_figure(figure, baseline, now, is_worse):
    """At its edge, and one step beyond."""
    if "." in figure:
        figures = changed(instructions={**RIGHT.instructions, figure.split(".")[1]: now})
    else:
        figures = changed(**{figure: now})
    (difference,) = compare(figures, {**BASELINE, figure: baseline})

    assert difference.is_worse is is_worse
    assert str(difference).startswith(f"{figure} {baseline} -> {now}")


def test_what_the_baseline_does_not_know_counts_as_zero_there():
    """A kernel that starts to spill has no old row for it."""
    (difference,) = compare(changed(spill_bytes=8), BASELINE)

    assert (difference.figure, difference.baseline, difference.is_worse) == ("spill_bytes", 0, True)


def test_statements_are_counted_by_class_without_predicates_labels_and_comments():
    """Inline assembly has several statements in a line."""
    ptx = """
    $L__BB0_1: @%p1 bra $L__BB0_2;  // ex2.approx.ftz.f32 in a comment
    { .reg .pred P1; LAB: mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0; @P1 bra.uni DONE; bra.uni LAB; DONE: }
    @!%p2 fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4; max.f32 %r1, %r2, %r3; ex2.approx.ftz.f32 %r1, %r2;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1, 0, 0;
    wgmma.wait_group.sync.aligned 0; cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r1}], [%r2];
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {%r1}, [%r2]; tcgen05.commit.cta_group::1.b64 [%r1];
    ld.shared.b32 %r1, [%r2]; st.global.b32 [%rd1], %r1; ret;
    """
    counts = {name: count for name, count in _counts_by_class(_opcodes(ptx)).items() if count}

    assert counts == {
        "branch": 4,
        "mbarrier": 2,
        "fma": 1,
        "alu": 1,
        "mufu": 1,
        "mma": 1,
        "fence": 3,
        "tma": 1,
        "tmem_load": 1,
        "shared_load": 1,
        "global": 1,
    }


DISASSEMBLED = """#!/bin/sh
cat <<'TEXT'
.text.kernel_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/             @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;
.L_x_1:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
TEXT
"""


def test_machine_instructions_are_counted_by_opcode(tmp_path):
    """Behind predicates, without modifiers; the disassembler is a program that is given."""
    program = tmp_path / "nvdisasm"
    program.write_text(DISASSEMBLED)
    program.chmod(0o755)

    assert _sass_mix(b"cubin", program) == {"BRA": 1, "HGMMA": 2, "LDC": 1, "UIADD3": 1}


def test_a_failing_disassembler_is_an_error(tmp_path):
    """Its own words are kept."""
    program = tmp_path / "nvdisasm"
    program.write_text("#!/bin/sh\necho 'no cubin' >&2\nexit 3\n")
    program.chmod(0o755)

    with pytest.raises(Fa4BuildError, match=r"failed \(3\): no cubin"):
        _sass_mix(b"cubin", program)


def test_tensor_memory_columns_are_read_through_the_register_that_holds_them():
    """As the compiler writes it, and as a literal."""
    moved = "mov.b32 %r419, 512; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 \t[%r9], %r419;"
    literal = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r9], 256;"

    assert tmem_columns("add.s32 %r1, %r2, %r3;") == 0
    assert tmem_columns(moved) == 512
    assert tmem_columns(literal) == 256


def test_tensor_memory_of_several_entries_is_that_of_the_greediest():
    """They run one after the other, and each has registers of its own: the same name is another one."""
    entry = ".visible .entry k_{0}() {{ mov.b32 %r1, {1}; tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r9], %r1; }}"

    assert tmem_columns(entry.format(0, 256) + entry.format(1, 512) + entry.format(2, 128)) == 512


def test_an_allocation_of_unknown_size_is_an_error_not_zero():
    """The number comes from memory."""
    with pytest.raises(SimulationError, match="not a literal"):
        tmem_columns("ld.shared.b32 %r1, [%r2]; tcgen05.alloc.cta_group::1.sync.aligned.b32 [%r9], %r1;")


def test_a_baseline_reads_back_as_written(tmp_path):
    """One line a variant, zeros left out."""
    path = tmp_path / "sm90a.json"
    baseline = updated_baseline({}, {"b": RIGHT, "a": changed(registers=160)}, known=("a", "b"))
    write_baseline(path, baseline)

    assert read_baseline(path) == {"a": {**BASELINE, "registers": 160}, "b": BASELINE}
    assert [line[:4] for line in path.read_text().splitlines()[1:-1]] == [' "a"', ' "b"']


def test_an_update_replaces_measured_rows_keeps_others_and_drops_what_no_longer_exists():
    """`old` was measured before, `gone` is in no matrix any more. `known` may be read only once."""
    before = {"gone": {"registers": 128}, "old": {"registers": 128}, "new": {"registers": 255}}
    after = updated_baseline(before, {"new": RIGHT}, known=iter(("new", "old")))

    assert after == {"old": {"registers": 128}, "new": BASELINE}
    assert baseline_changes(before, after)[0] == "gone: removed"
    assert "registers 255 -> 168" in baseline_changes(before, after)[1]


def test_a_missing_baseline_is_empty_and_a_damaged_one_an_error(tmp_path):
    """A lost baseline must not look like a passed comparison."""
    damaged = tmp_path / "sm90a.json"
    damaged.write_text('{"schema": 2, "variants": {}}')

    assert read_baseline(tmp_path / "sm100a.json") == {}
    with pytest.raises(Fa4BuildError, match="schema 2, this fa4build reads 1"):
        read_baseline(damaged)


@pytest.mark.parametrize("path", sorted(BASELINE_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_stored_baselines_name_variants_of_their_target_and_are_canonical(path, tmp_path):
    """What is committed is what the code would write."""
    baseline = read_baseline(path)
    write_baseline(tmp_path / path.name, baseline)

    assert {parse_variant(name).arch for name in baseline} == {path.stem}
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    assert json.loads(path.read_bytes())["schema"] == 1
