"""The PTX front end: text to typed instructions.

Names are resolved innermost block first; registers are numbered on first use; what is not understood is a
`SimulationError` that names the line. Nothing is skipped.
"""

import pytest

from fa4build.errors import SimulationError
from fa4build.simulate.ptx.control_flow import basic_blocks, post_dominators
from fa4build.simulate.ptx.instructions import Address, Imm, Pair, Reg, Sink, Symbol, Vector
from fa4build.simulate.ptx.parser import parse_module
from tests.simulate.ptx_snippets import run, text_of


def _instructions(body: str):
    function = parse_module(text_of(body)).entries["snippet"]
    first = next(
        i for i, ins in enumerate(function.instructions) if ins.opcode == "ld.param.b64" and "data" in ins.text
    )
    return function, function.instructions[first + 1 : -1]


def test_header_gives_target_threads_and_parameter_offsets():
    """Module facts come from the directives; parameters are laid out by their alignment."""
    module = parse_module(text_of(""))
    function = module.entries["snippet"]

    assert (module.target, module.version) == ("sm_90a", "9.4")
    assert function.required_threads == 32
    assert [(p.offset, p.size, p.align) for p in function.parameters] == [(0, 8, 8), (8, 8, 8), (16, 8, 8)]


def test_parameters_are_aligned_like_c_structs():
    """A 64-aligned map after 8 bytes starts at 64; a word after it at 192."""
    text = text_of("").replace(
        ".param .u64 snippet_out,",
        ".param .align 4 .b8 s_a[8],\n .param .align 64 .b8 s_b[128],\n .param .u32 s_c,\n .param .u64 snippet_out,",
    )
    offsets = [p.offset for p in parse_module(text).entries["snippet"].parameters]

    assert offsets == [0, 64, 192, 200, 208, 216]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        pytest.param("mov.b32 %r1, -2048;", Imm(-2048), id="negative"),
        pytest.param("mov.b32 %r1, 0x40004040;", Imm(0x40004040), id="hexadecimal"),
        pytest.param("mov.b32 %r1, 4294967295U;", Imm(4294967295), id="unsigned-suffix"),
        pytest.param("mov.b32 %r1, 0f3F800000;", Imm(0x3F800000, is_float=True), id="float-bits"),
        pytest.param("mov.b32 %r1, smem;", Symbol("smem"), id="shared-symbol"),
    ],
)
def test_operand_values(statement, expected):
    """Immediates keep their sign, float immediates their bits; symbols stay symbols."""
    _, (ins,) = _instructions(statement)

    assert ins.operands[1] == expected


def test_operand_shapes():
    """Pairs, sinks, vectors, and addresses with an offset or with coordinates."""
    _, code = _instructions(
        "elect.sync _|%p1, -1;\n"
        "mov.b64 {%r1, %r2}, %rd5;\n"
        "ld.shared.b32 %r3, [%r4+12];\n"
        "ld.shared.b32 %r3, [%r4 + 0x10];\n"
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {%r1, %r2}], [%r4];"
    )
    elect, unpack, load, load_hex, store = code

    assert isinstance(elect.operands[0], Pair)
    assert elect.operands[0].data == Sink()
    assert isinstance(unpack.operands[0], Vector)
    assert len(unpack.operands[0].elements) == 2
    assert load.operands[1] == Address(load.operands[1].base, 12)
    assert load_hex.operands[1].offset == 16
    assert len(store.operands[0].coordinates) == 2


def test_registers_of_a_block_hide_outer_ones_and_end_with_it():
    """Two blocks may declare the same name: they are different registers, and the outer one is untouched."""
    _, code = _instructions("{ .reg .b32 tmp; mov.b32 tmp, 1; }\n{ .reg .b32 tmp; mov.b32 tmp, 2; }\nmov.b32 %r1, 3;")
    registers = [ins.operands[0] for ins in code]

    assert all(isinstance(r, Reg) for r in registers)
    assert len({r.index for r in registers}) == 3


def test_numbered_family_declares_names_from_zero():
    """`.reg .b64 d<2>` declares d0 and d1 and nothing else."""
    with pytest.raises(SimulationError, match="'d2' is not a declared register"):
        _instructions("{ .reg .b64 d<2>; mov.b64 d0, 1; mov.b64 d1, 1; mov.b64 d2, 1; }")


def test_labels_of_inner_blocks_are_found_first():
    """The same label in two blocks: each branch goes to its own, so both words are stored."""
    body = """
    mov.b32 %r1, 0;
    { bra.uni DONE; add.s32 %r1, %r1, 100; DONE: }
    add.s32 %r1, %r1, 1;
    { bra.uni DONE; add.s32 %r1, %r1, 100; DONE: }
    add.s32 %r1, %r1, 1;
    st.global.b32 [%rd0], %r1;
    """

    assert run(body)[0].tolist() == [2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            "frobnicate.b32 %r1, %r2;",
            r"line \d+: opcode 'frobnicate.b32' is not in the simulator's table",
            id="opcode",
        ),
        pytest.param("add.sat.s32 %r1, %r2, %r3;", r"opcode 'add.sat.s32' is not", id="modifier"),
        pytest.param("mov.b32 %r1, %nosuch;", r"line \d+: '%nosuch' is not a declared register", id="register"),
        pytest.param("bra NOWHERE;", r"line \d+: branch to unknown label 'NOWHERE'", id="label"),
        pytest.param(".weird 3;", r"line \d+: unknown directive", id="directive"),
        pytest.param("@%r1 mov.b32 %r2, 1;", r"guard '%r1' is not a declared predicate", id="guard"),
    ],
)
def test_what_is_not_understood_is_an_error_with_the_line(body, message):
    """Unknown opcodes and modifiers, undeclared names and directives never pass silently."""
    with pytest.raises(SimulationError, match=message):
        run(body)


def test_truncated_text_says_so():
    """A file cut off inside a kernel is an error, not a shorter kernel."""
    text = text_of("mov.b32 %r1, 1;")
    with pytest.raises(SimulationError, match="truncated"):
        parse_module(text[: text.rindex("ret")])


def test_other_text_is_no_module():
    """Text without directives is refused."""
    with pytest.raises(SimulationError, match="not a PTX module"):
        parse_module("hello")


def test_parsed_modules_are_cached_by_content():
    """The same text parses once."""
    assert parse_module(text_of("")) is parse_module(text_of(""))


def test_blocks_and_reconvergence_of_a_diamond():
    """if/else: both sides meet at the block after them; a loop's exit post-dominates its body."""
    function, _ = _instructions(
        """
        setp.eq.s32 %p1, %r0, 0;
        @%p1 bra ELSE;
        mov.b32 %r1, 1;
        bra.uni JOIN;
    ELSE:
        mov.b32 %r1, 2;
    JOIN:
        add.s32 %r1, %r1, 1;
        setp.lt.s32 %p2, %r1, 10;
        @%p2 bra JOIN;
        mov.b32 %r2, 3;
        """
    )
    blocks = basic_blocks(function)
    parents = post_dominators(blocks)

    # 0: up to the branch, 1: then, 2: else, 3: join loop, 4: after it; 5 is the exit
    assert [b.successors for b in blocks] == [(2, 1), (3,), (3,), (3, 4), (5,)]
    assert parents == (3, 3, 3, 4, 5)
