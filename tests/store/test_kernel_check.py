"""Contract of the check at every door: bytes are a kernel only if they say themselves what is said of them.

Rubbish, a torn cubin, another kernel's or target's cubin, other registers, stack, shared memory or parameters, the plan
of another cubin: each is one error that names the kernel, what was found and what was expected. Packs, wheels, bundles
and `inspect` refuse it before anything is signed or written; a shared cache takes it for absent.
"""

import dataclasses
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions, Cubin
from fa4build.compiling.cubin import read_cubin
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import WheelError
from fa4build.matrix.arch import arch_named
from fa4build.plan import plan_to_json
from fa4build.plan.validate import read_parameter_tables
from fa4build.runtime.fa4_kernels.abi import ABI_HASH
from fa4build.shipping.bundle import write_bundle
from fa4build.shipping.inspect import inspect_file
from fa4build.shipping.pack import Artifact, build_pack, read_pack, write_pack
from fa4build.shipping.release import write_wheels
from fa4build.shipping.signing import new_key
from fa4build.shipping.wheel import prepare_pack_wheel
from fa4build.store.cache import Cache
from fa4build.store.kernel_check import Claim, check_kernel, read_contents
from tests.artifacts import TOOLCHAIN, made_up_artifact, with_code
from tests.cubins import MadeUpEntry, made_up_cubin, made_up_plan
from tests.shipping.test_release import TWO, fill, objects_of
from tests.toy import toy_request

ARCH = arch_named("sm90")
GOOD = made_up_artifact()
OTHER = made_up_artifact(mask="full")
SYMBOL = GOOD.facts.symbols[0]
REMEDY = "Get it again."


def claim(artifact: Artifact = GOOD, **changes: object) -> Claim:
    """What the facts of an artifact say."""
    names = ("id", "target", "symbols", "registers", "spill_bytes", "shared_bytes")
    return Claim(**{name: getattr(artifact.facts, name) for name in names} | changes)


def with_entry(**changes: object) -> tuple[bytes, bytes]:
    """Cubin and matching plan of GOOD, with another entry than its facts describe."""
    cubin = made_up_cubin({SYMBOL: MadeUpEntry(**changes)})
    return cubin, made_up_plan(cubin, [SYMBOL])


def other_target() -> tuple[bytes, bytes]:
    cubin = made_up_cubin({SYMBOL: MadeUpEntry()}, target="sm_100a")
    return cubin, made_up_plan(cubin, [SYMBOL])


def two_entries() -> tuple[bytes, bytes]:
    cubin = made_up_cubin({SYMBOL: MadeUpEntry(), "extra": MadeUpEntry()})
    return cubin, made_up_plan(cubin, [SYMBOL])


def flipped_count() -> bytes:
    """One register count changed in the file, digest of the plan and all."""
    record = struct.pack("<BBHII", 4, 0x2F, 8, 1, 168)
    return GOOD.cubin.replace(record, record[:-4] + struct.pack("<I", 169))


FOREIGN = {
    "rubbish": ((b"0123456789abcdef", GOOD.plan), "its 16 bytes are no complete cubin"),
    "empty": ((b"", GOOD.plan), "its 0 bytes are no complete cubin"),
    "host library": ((GOOD.cubin[:18] + b"\x3e" + GOOD.cubin[19:], GOOD.plan), "not a 64-bit ELF file for CUDA"),
    "torn": ((GOOD.cubin[:-200], GOOD.plan), "cut short"),
    "torn header": ((GOOD.cubin[:40], GOOD.plan), "cut short"),
    "other kernel": ((OTHER.cubin, OTHER.plan), "its cubin has the entries fwd_sm90a_bf16_hd128_full_0, expected is"),
    "other target": (other_target(), "its cubin is for sm_100a, expected is one for sm_90a"),
    "more entries": (two_entries(), "its cubin has the entries extra, fwd_sm90a_bf16_hd128_causal_0, expected is"),
    "registers": (with_entry(registers=167), "takes 167 registers a thread, its facts say 168"),
    "one count": ((flipped_count(), GOOD.plan), "launch plan was read from cubin"),
    "shared memory": (with_entry(shared_bytes=512), "take 200512 bytes of shared memory, its facts say 200000"),
    "parameters": (with_entry(params=(8, 4, 4)), "packs 2 parameters in 12 bytes, its cubin takes 3 in 16"),
    "order of parameters": (with_entry(params=(4, 8)), "packs 2 parameters in 12 bytes"),
    "block": (with_entry(block=(128, 1, 1)), "has blocks of .*384.* threads, its cubin of .*128"),
    "no plan": ((GOOD.cubin, b"{}"), "its launch plan is none"),
    "other plan": ((GOOD.cubin, OTHER.plan), "its launch plan launches fwd_sm90a_bf16_hd128_full_0"),
    "plan of another compile": (
        (GOOD.cubin, made_up_plan(OTHER.cubin, [SYMBOL])),
        "its launch plan was read from cubin .*, here is cubin",
    ),
}
foreign = pytest.mark.parametrize(("blobs", "message"), FOREIGN.values(), ids=FOREIGN)


def test_a_kernel_that_is_what_it_is_said_to_be_passes() -> None:
    """Cubin, plan and facts of one compile."""
    check_kernel(claim(), GOOD.cubin, GOOD.plan, remedy=REMEDY)


@foreign
def test_anything_else_is_one_error(blobs: tuple[bytes, bytes], message: str) -> None:
    """Which kernel, what is wrong, what to do; in one line."""
    with pytest.raises(WheelError, match=message) as raised:
        check_kernel(claim(), *blobs, remedy=REMEDY)

    assert str(raised.value).startswith("kernel fwd-sm90a-bf16-hd128-causal: ")
    assert str(raised.value).endswith(f"It is refused. {REMEDY}")
    assert "\n" not in str(raised.value)


def test_spills_need_a_stack() -> None:
    """Facts that say 64 bytes spill, of a cubin without a stack."""
    with pytest.raises(WheelError, match="64 bytes of registers spill, its cubin has no stack"):
        check_kernel(claim(spill_bytes=64), GOOD.cubin, GOOD.plan, remedy=REMEDY)


@foreign
def test_no_pack_wheel_is_made_of_it(tmp_path: Path, blobs: tuple[bytes, bytes], message: str) -> None:
    """Signed or not: nothing lies in the output directory afterwards, also where a wheel of these inputs would."""
    bad = dataclasses.replace(GOOD, cubin=blobs[0], plan=blobs[1])
    key = new_key(tmp_path / "keys", "k")[2]
    with pytest.raises(WheelError, match=message):
        prepare_pack_wheel([OTHER, bad], arch=ARCH, toolchain=TOOLCHAIN, out_dir=tmp_path / "dist", sign=key)

    assert not (tmp_path / "dist").exists()


def sealed_wheel(directory: Path, monkeypatch: pytest.MonkeyPatch, artifacts: list[Artifact]) -> Path:
    """A wheel of a builder that checks nothing: every digest in it is right."""
    with monkeypatch.context() as patched:
        patched.setattr("fa4build.shipping.wheel.check_artifacts", lambda artifacts, **_: None)
        return prepare_pack_wheel(artifacts, arch=ARCH, toolchain=TOOLCHAIN, out_dir=directory).write().path


@foreign
def test_a_wheel_of_it_is_refused_by_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blobs: tuple[bytes, bytes], message: str
) -> None:
    """`inspect`, a bundle, a bundle that includes it among the wheels of others, a pack directory."""
    bad = dataclasses.replace(GOOD, cubin=blobs[0] or b"\0", plan=blobs[1])
    path = sealed_wheel(tmp_path / "made", monkeypatch, [bad])
    own = [made_up_artifact(target="sm_100a")]
    good = prepare_pack_wheel(own, arch=arch_named("sm100"), toolchain=TOOLCHAIN, out_dir=tmp_path).write().path
    pack = build_pack([bad], pack="p", version="1", abi=ABI_HASH, toolchain=TOOLCHAIN)
    readers: list[Callable[[], object]] = [
        lambda: inspect_file(path),
        lambda: read_pack(write_pack(pack, tmp_path / "pack")),
        lambda: write_bundle(tmp_path / "out", [path]),
        lambda: write_bundle(tmp_path / "out", [good], include=[path]),
    ]
    message = message.replace("its 0 bytes", "its 1 bytes")
    for read in readers:
        with pytest.raises(WheelError, match=message):
            read()

    assert not (tmp_path / "out").exists()


def test_a_store_that_was_written_to_ends_the_build(tmp_path: Path) -> None:
    """The entry has its own key and digests; the cubin in it is 16 bytes of rubbish, or another kernel's."""
    for name, objects in (
        ("rubbish", {**objects_of(TWO.globs[0]), "cubin": b"0123456789abcdef"}),
        ("another", objects_of(TWO.globs[1])),
    ):
        cache = Cache(tmp_path / name)
        entry = next(entry for entry in fill(cache) if entry.name == TWO.globs[0])
        cache.put(name=entry.name, inputs=entry.inputs, facts=entry.facts, objects=objects)
        with pytest.raises(WheelError, match=f"kernel {TWO.globs[0]}: .*empty --cache-dir"):
            write_wheels(TWO, cache, out_dir=tmp_path / "dist", platforms=(), evidence_dirs=())

    assert not (tmp_path / "dist").exists()


def test_an_entry_under_another_name_than_its_key_ends_the_build(tmp_path: Path) -> None:
    """A whole kernel of another variant, which would be packed with the axes of this one."""
    cache = Cache(tmp_path / "cache")
    entries = {entry.name: entry for entry in fill(cache)}
    first, second = (entries[name] for name in TWO.globs)
    cache.put(name=second.name, inputs=first.inputs, facts=second.facts, objects=objects_of(second.name))
    with pytest.raises(WheelError, match="its key is made of fwd_sm90a_bf16_hd128_causal"):
        write_wheels(TWO, cache, out_dir=tmp_path / "dist", platforms=(), evidence_dirs=())


@pytest.mark.dsl
def test_both_readers_of_cubins_agree(tmp_path: Path) -> None:
    """Of a real cubin: what the compiler's own reader says, and its table of parameters; it passes as what it is."""
    with LocalExecutor(current_toolchain(), jobs=1, timeout_s=60) as executor:
        executor.submit(toy_request(), CompileOptions(), tmp_path / "work")
        made = executor.wait().result
    assert isinstance(made, Cubin), made
    found, slow, table = read_contents(made.elf), read_cubin(made.elf), read_parameter_tables(made.elf)["toy_0"]

    assert found.target == slow.target
    for kernel in slow.kernels:
        entry = found.entries[kernel.symbol]
        assert (entry.registers, entry.local_bytes, entry.shared_bytes) == (
            kernel.registers,
            kernel.local_bytes,
            kernel.shared_bytes,
        )
        assert (entry.params, entry.base, entry.params_bytes) == (table.params, table.bank_base, table.size)
    names = ("target", "symbols", "registers", "spill_bytes", "shared_bytes")
    facts = Claim(id="toy", **{name: getattr(made, name) for name in names})
    check_kernel(facts, made.elf, plan_to_json(made.plan).encode(), remedy=REMEDY)


def test_400_kernels_are_checked_in_seconds() -> None:
    """Cubins of 60 kB with plans of 20 kB, the sizes of the matrix: 1.5 s of an idle processor, 4 s of a busy one."""
    kernels = []
    for number in range(1, 401):
        artifact = made_up_artifact(head_dim=number)
        artifact = with_code(artifact.facts, bytes(60_000))
        document = json.loads(artifact.plan)
        document["nodes"] += [["add", "i64", 0, 0]] * 800
        kernels.append(dataclasses.replace(artifact, plan=json.dumps(document).encode()))
    started = time.process_time()
    for artifact in kernels:
        check_kernel(claim(artifact), artifact.cubin, artifact.plan, remedy=REMEDY)

    assert time.process_time() - started < 4
