"""Contract: an encoded plan is trusted only after every count, index, type, op and size was checked.

Whatever the bytes, the decoder refuses or accepts without touching memory that is not its own, and an accepted plan can
be evaluated on any inputs. Refusals are PackError and name the place.
"""

import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from fa4_kernels import plan as encoding
from fa4_kernels.errors import PackError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.conftest import RUNTIME, compile_c
from tests.runtime.fake import Nodes, forward_plan, launch_template, make_plan

FUZZ_SOURCE = Path(__file__).with_name("decoder_fuzz.c")
INCLUDE = f"-I{RUNTIME / 'fa4_kernels'}"
GOOD = encoding.encode_plan(forward_plan("kernel"), {"q": 16})


def tensor(**changes):
    return {"name": "q", "kind": "tensor", "dtype": "bf16", "rank": 4} | changes


def plan_with(nodes=(), args=(), guards=(), grid=None, params=(), **launch):
    """A plan of one launch whose grid is node 0, an i32 constant, and whose other nodes follow it."""
    n = Nodes()
    n("const", "i32", 1)
    for node in nodes:
        n(*node)
    template = launch_template("kernel", grid or [0, 0, 0], params, **launch)
    return make_plan(n, args=args, guards=guards, launches=[template])


def bytes_param(**changes):
    return {"kind": "bytes", "size": 4, "align": 4, "fields": [[0, 0]]} | changes


def map_param(**changes):
    param = {"kind": "tmap", "dtype": "bf16", "addr": 1, "dims": [1, 1], "strides": [1], "box": [64, 8]}
    param |= {"elem_strides": [1, 1], "swizzle": 128, "interleave": 0, "l2_promotion": 128, "oob_fill": "zero"}
    return param | changes


I64 = ("const", "i64", 64)


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        pytest.param(plan_with([("add", "i32", 0, 1)]), "node 1: operand 1 is not an earlier node", id="own value"),
        pytest.param(plan_with([("add", "i32", 0, 7)]), "operand 7 is not an earlier node", id="later value"),
        pytest.param(plan_with([("add", "i64", 0, 0)]), "node 1: op 2 does not take", id="operand of another type"),
        pytest.param(plan_with([("fadd", "i32", 0, 0)]), "op 19 does not take", id="float op on integers"),
        pytest.param(plan_with([("sext", "i32", 0)]), "does not take", id="sext to the same width"),
        pytest.param(plan_with([("bitcast", "f64", 0)]), "does not take", id="bitcast of another width"),
        pytest.param(plan_with([("select", "i32", 0, 0, 0)]), "does not take", id="select by an i32"),
        pytest.param(plan_with([("in", "i32", "q.shape[0]")], [tensor()]), "type 3 for input", id="extent as i32"),
        pytest.param(plan_with(args=[tensor(dtype="bf16", rank=9)]), "rank 9; allowed", id="rank"),
        pytest.param(plan_with(guards=[{"expr": 0, "message": "m"}]), "node 0 is no i1", id="guard of an i32"),
        pytest.param(plan_with(guards=[{"expr": 9, "message": "m"}]), "node 9 is no i1", id="guard out of range"),
        pytest.param(plan_with(grid=[0, 5, 0]), "grid node 5", id="grid out of range"),
        pytest.param(plan_with(block=[1024, 2, 1]), "block or cluster", id="2048 threads"),
        pytest.param(plan_with(block=[0, 1, 1]), "block or cluster", id="no thread"),
        pytest.param(plan_with(cluster=[17, 1, 1]), "block or cluster", id="cluster of 17"),
        pytest.param(plan_with(smem=2 << 20), "shared memory", id="2 MiB of shared memory"),
        pytest.param(plan_with(params=[bytes_param(fields=[[1, 0]])]), "past the end", id="field past the end"),
        pytest.param(plan_with(params=[bytes_param(fields=[[2**32 - 1, 0]])]), "past the end", id="offset that wraps"),
        pytest.param(plan_with(params=[bytes_param(fields=[[0, 4]])]), "field 0: node 4", id="field of no node"),
        pytest.param(plan_with(params=[bytes_param(size=0)]), "0 bytes", id="empty parameter"),
        pytest.param(plan_with(params=[bytes_param(size=40000)]), "40000 bytes", id="parameter of 40 kB"),
        pytest.param(plan_with(params=[bytes_param(size=20000)] * 2), "40000 bytes of parameters", id="40 kB in all"),
        pytest.param(plan_with(params=[bytes_param(align=3)]), "alignment 3", id="alignment 3"),
        pytest.param(plan_with([I64], params=[map_param(addr=0)]), "map 0: address", id="i32 address"),
        pytest.param(plan_with([I64], params=[map_param(box=[64, 257])]), "box out of range", id="box of 257"),
        pytest.param(plan_with([I64], params=[map_param(dtype="i8")]), "launches: ValueError", id="map dtype"),
        pytest.param(plan_with([I64], params=[map_param(strides=[])]), "rank 2 with 0 numbers", id="missing stride"),
        pytest.param(plan_with([I64], params=[map_param(swizzle=16)]), "launches: ValueError", id="swizzle 16"),
        pytest.param(plan_with(params=[{"kind": "scalar"}]), "kind 'scalar'", id="parameter kind"),
        pytest.param(plan_with([("pow", "i32", 0, 0)]), "nodes: KeyError: 'pow'", id="op"),
        pytest.param(plan_with([("const", "i8", 256)]), "256 is no i8", id="constant out of range"),
        pytest.param(plan_with([("const", "f32", 1)]), "1 is no bit string", id="float constant as int"),
        pytest.param(plan_with([("in", "i64", "z.ptr")]), "KeyError: 'z.ptr'", id="unknown leaf"),
    ],
)
def test_a_plan_outside_the_format_is_refused(launcher, document, reason):
    """Each rule of docs/formats.md, section 2, broken alone; the message names the place."""
    with pytest.raises(PackError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        launcher.Plan(encoding.encode_plan(document))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(b"{", "not JSON", id="truncated"),
        pytest.param(b"[]", "not of format", id="a list"),
        pytest.param(b'{"format": "fa4build.launchplan", "version": 2}', "version 2, .* reads version 1", id="newer"),
    ],
)
def test_text_that_is_no_plan_of_this_version_is_refused(text, reason):
    """The version is looked at before anything else in the plan."""
    with pytest.raises(PackError, match=reason):
        encoding.parse_plan(text)


def test_every_truncation_is_refused(launcher):
    """No prefix of an encoded plan passes for a plan."""
    for size in range(len(GOOD)):
        with pytest.raises(PackError, match="launch plan refused"):
            launcher.Plan(GOOD[:size])


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(launcher, data):
    """Bytes without the magic number, or whose counts do not match their length."""
    with pytest.raises(PackError, match="launch plan refused"):
        launcher.Plan(data)


def mutations(count, seed):
    """Encoded plans with a few words or bytes changed, cut, or repeated."""
    chance = random.Random(seed)
    interesting = [0, 1, 2, 3, 5, 7, 63, 64, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    for _ in range(count):
        data = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(0, len(data) // 4) * 4
            kind = chance.randrange(4)
            if kind == 0:
                struct.pack_into("<I", data, place, chance.choice(interesting))
            elif kind == 1:
                data[chance.randrange(len(data))] = chance.randrange(256)
            elif kind == 2:
                (word,) = struct.unpack_from("<I", data, place)
                struct.pack_into("<I", data, place, (word + chance.choice((-1, 1, 4))) % 2**32)
            else:
                other = chance.randrange(0, len(data) // 4) * 4
                data[place : place + 4] = data[other : other + 4]
        if chance.random() < 0.05:
            data = data[: chance.randrange(len(data))]
        yield bytes(data)


def undefined_behaviour_build(program):
    """The fuzz program under UBSan, which the `ziglang` compiler brings."""
    sanitizers = ("-fsanitize=undefined", "-fno-sanitize-trap=undefined", "-fno-sanitize-recover=all")
    compile_c(FUZZ_SOURCE, program, INCLUDE, "-Wno-unused-function", *sanitizers)


def address_build(program):
    """The fuzz program under ASan, which needs a C compiler of the machine."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    flags = ("-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", INCLUDE)
    command = [compiler, *flags, str(FUZZ_SOURCE), "-o", str(program)]
    if compiler is None or subprocess.run(command, capture_output=True, timeout=300).returncode != 0:
        pytest.skip("no C compiler with the address sanitizer on this machine")


@pytest.mark.parametrize("build", [undefined_behaviour_build, address_build])
def test_mutated_plans_never_touch_foreign_memory(tmp_path, build):
    """20,000 damaged plans under a sanitizer: no report; some are accepted, and evaluated."""
    build(tmp_path / "decoder_fuzz")
    corpus = tmp_path / "corpus"
    corpus.write_bytes(b"".join(struct.pack("<I", len(data)) + data for data in [GOOD, *mutations(20000, seed=4)]))

    result = subprocess.run([tmp_path / "decoder_fuzz", corpus], capture_output=True, text=True, timeout=300)

    assert result.returncode == 0, result.stderr[-2000:]
    accepted, refused = map(int, result.stdout.split())
    assert accepted + refused == 20001
    assert accepted > 200
    assert refused > 5000
