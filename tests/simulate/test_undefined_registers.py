"""Contract of R9-register: code that may use a register before it has been written is told, whatever the inputs do; a
copy of an undefined register is no use, and what comes of the copy is.
"""

import re

import pytest

from fa4build.errors import SimulationError
from tests.simulate.mutations.kernels import NAMES, kept
from tests.simulate.ptx_snippets import result, run

USED = [
    pytest.param("add.s32 %r9, %r8, 1;" + result(0, "%r9"), "%r8", id="arithmetic"),
    pytest.param(result(0, "%r8"), "%r8", id="store"),
    pytest.param("@%p3 mov.b32 %r8, 1; mov.b32 %r9, 2;" + result(0, "%r9"), "%p3", id="predicate"),
    pytest.param("setp.ne.s32 %p1, %r0, 40; @%p1 mov.b32 %r8, 1;" + result(0, "%r8"), "%r8", id="guarded-write"),
    pytest.param("mov.b32 %r9, %r8; add.s32 %r9, %r9, 1;" + result(0, "%r9"), "%r9", id="through-a-copy"),
    pytest.param(
        "setp.eq.s32 %p1, %r0, 40; @%p1 bra LATER; mov.b32 %r8, 1; LATER:" + result(0, "%r8"), "%r8", id="one-way-round"
    ),
    pytest.param("mov.b64 %rd9, {%r8, %r0}; add.s64 %rd9, %rd9, 1; cvt.u32.u64 %r9, %rd9;" + result(0, "%r9"), "%rd9",
                 id="packed"),
]  # fmt: skip
UNUSED = [
    pytest.param("mov.b32 %r9, %r8; mov.b32 %r9, 2;" + result(0, "%r9"), id="copy-overwritten"),
    pytest.param("mov.b32 %r9, %r8; mov.b32 %r10, 2;" + result(0, "%r10"), id="copy-unused"),
    pytest.param(
        "setp.eq.s32 %p1, %r0, 40; @%p1 bra OTHER; mov.b32 %r8, 1; bra LATER; OTHER: mov.b32 %r8, 2; LATER:"
        + result(0, "%r8"),
        id="written-either-way",
    ),
    pytest.param("bra LATER; " + result(0, "%r8") + "LATER: mov.b32 %r8, 1;" + result(0, "%r8"), id="never-reached"),
]


@pytest.mark.parametrize(("body", "register"), USED)
def test_a_use_that_some_path_reaches_first_is_told(body, register):
    """With the register's name; no thread of these takes the path."""
    with pytest.raises(SimulationError, match=rf"R9-register line \d+ .*before {register} has been written"):
        run(body, checks=True)


@pytest.mark.parametrize("body", UNUSED)
def test_what_is_never_used_is_not(body):
    """Copies without consequence, and code that nothing reaches."""
    run(body, checks=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_statement_taken_out_of_a_kernel_is_told_where_its_result_is_used(name):
    """One at a time, of statements whose register is named only once before a comma: each is told, without a run."""
    from fa4build.simulate.checks.undefined import undefined_uses
    from fa4build.simulate.ptx.control_flow import basic_blocks
    from fa4build.simulate.ptx.parser import parse_module

    def uses(ptx: str) -> int:
        (function,) = parse_module(ptx).entries.values()
        return len(undefined_uses(function, basic_blocks(function)))

    ptx = kept(name).ptx
    statements = re.finditer(r"^\s*(?:add|mul|shl|and|or)\.\w+ \s*(%r\d+), [^;]*;", ptx, re.MULTILINE)
    definitions = [found for found in statements if len(re.findall(rf"\s{found[1]},", ptx)) == 1][::15]

    assert uses(ptx) == 0
    assert len(definitions) > 5
    for found in definitions:
        assert uses(ptx[: found.start()] + ptx[found.end() :]) > 0, found[0]
