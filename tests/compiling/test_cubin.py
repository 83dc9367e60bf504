"""Contract of the cubin reader.

Target, assembler and numbers are read from the file. Bytes that are no complete cubin, or that contradict themselves,
are an error and never a guess. Spills come from the assembler's report.
"""

import struct
from pathlib import Path

import pytest

from fa4build.compiling.compile import CompileOptions, Cubin
from fa4build.compiling.cubin import CubinFacts, KernelFacts, read_cubin, spills_from_log
from fa4build.compiling.executors import LocalExecutor
from fa4build.compiling.toolchain import current_toolchain
from fa4build.errors import CompileError
from tests.toy import TEXT, toy_request

FLAGS_OFFSET = 48  # e_flags of a 64-bit ELF header
MACHINE_OFFSET = 18  # e_machine


def with_memory(space: str, size: int) -> str:
    """The toy with an array in `.local` or `.shared` memory, which every thread writes and reads."""
    code = (
        f"{{ .{space} .align 16 .b8 array[{size}]; .reg .b32 base, there, here; mov.u32 base, array; "
        "and.b32 there, {$r0}, 124; add.u32 there, there, base; shl.b32 here, {$r0}, 3; and.b32 here, here, 124; "
        f"add.u32 here, here, base; st.{space}.b32 [there], {{$r0}}; bar.sync 0; ld.{space}.b32 {{$w0}}, [here]; }}"
    )
    statement = f"""
        value = cute.arch.inline_ptx({code!r}, write_only_types=[Int32], read_only_args=[thread])
        lse[batch, head, 0] = value.to(Float32)
"""
    return TEXT.replace("        if row < q.shape[1]:", f"{statement}        if row < q.shape[1]:")


# Shared memory that the launch brings.
ALLOCATED = """
        shared = cutlass.memory.SmemAllocator().allocate_array(Float32, 512)
        cute.arch.store(shared + thread, softmax_scale)
        cute.arch.sync_threads()
        lse[batch, head, 1] = cute.arch.load(shared + (thread ^ 1), Float32)
"""


def with_allocation(text: str) -> str:
    """The toy with 512 floats of shared memory from the DSL's allocator."""
    text = text.replace(
        "import cutlass.cute as cute", "import cutlass\nimport cutlass.cute as cute\nimport cutlass.memory"
    )
    return text.replace("        row = block", f"{ALLOCATED}        row = block")


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cubin]:
    """A toy for two targets, one with a stack, and with shared memory of two kinds."""
    directory = tmp_path_factory.mktemp("work")
    requests = {
        "sm_90a": toy_request(),
        "sm_103a": toy_request(target="sm_103a"),
        "stack": toy_request(text=with_memory("local", 128)),
        "static": toy_request(text=with_memory("shared", 512)),
        "dynamic": toy_request(text=with_allocation(TEXT)),
        "both": toy_request(text=with_allocation(with_memory("shared", 1024))),
    }
    with LocalExecutor(current_toolchain(), jobs=1, timeout_s=60) as executor:
        found: dict[str, Cubin] = {}
        for name, request in requests.items():
            executor.submit(request, CompileOptions(), directory / name)
            result = executor.wait().result
            assert isinstance(result, Cubin), result
            found[name] = result
    return found


@pytest.mark.dsl
@pytest.mark.parametrize("target", ["sm_90a", "sm_103a"])
def test_target_and_entries_are_read_from_the_file(cubins, target):
    """Also the suffix, which is not in the ELF header."""
    facts = read_cubin(cubins[target].elf)

    assert facts.target == target
    assert [kernel.symbol for kernel in facts.kernels] == ["toy_0"]
    assert facts.kernels[0].registers == cubins[target].registers


@pytest.mark.dsl
def test_stack_is_counted(cubins):
    """An array of 128 bytes a thread in local memory; it is no spill."""
    assert (cubins["sm_90a"].local_bytes, cubins["stack"].local_bytes) == (0, 128)
    assert cubins["stack"].spill_bytes == 0


@pytest.mark.dsl
def test_static_and_dynamic_shared_memory_are_counted(cubins):
    """None; 512 bytes declared in the kernel; 512 floats brought by the launch; 1024 bytes and 512 floats.

    What the system keeps of every block's shared memory is not the kernel's.
    """
    found = [cubins[name].shared_bytes for name in ("sm_90a", "static", "dynamic", "both")]

    assert found == [0, 512, 2048, 3072]


@pytest.mark.dsl
def test_a_cubin_that_contradicts_itself_is_refused(cubins):
    """Header of another architecture than the assembler's note."""
    elf = bytearray(cubins["sm_90a"].elf)
    (flags,) = struct.unpack_from("<I", elf, FLAGS_OFFSET)
    struct.pack_into("<I", elf, FLAGS_OFFSET, flags & ~0xFF00 | 100 << 8)

    with pytest.raises(CompileError, match="ELF header says architecture 100, the assembler's note 'sm_90a'"):
        read_cubin(bytes(elf))


@pytest.mark.dsl
def test_a_host_library_is_no_cubin(cubins):
    """The right container with the wrong machine (62 is x86-64)."""
    elf = bytearray(cubins["sm_90a"].elf)
    struct.pack_into("<H", elf, MACHINE_OFFSET, 62)

    with pytest.raises(CompileError, match="not a cubin"):
        read_cubin(bytes(elf))


@pytest.mark.dsl
@pytest.mark.parametrize("kept", [0, 1, 63, 64, 1000, 0.5, 0.9, 0.99])
def test_a_cut_cubin_is_refused(cubins, kept):
    """However little is left, or missing; a number below 1 is a fraction."""
    elf = cubins["sm_90a"].elf
    size = kept if kept >= 1 or kept == 0 else int(len(elf) * kept)

    with pytest.raises(CompileError, match=r"x\.cubin: \d+ bytes that are no complete cubin"):
        read_cubin(elf[:size], origin="x.cubin")


LOG = """\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fwd_0' for 'sm_90a'
ptxas info    : Function properties for fwd_0
ptxas         .     48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 48 bytes cumulative stack size
ptxas info    : Compiling entry function 'combine_1' for 'sm_90a'
ptxas info    : Function properties for combine_1
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


@pytest.mark.parametrize(
    ("log", "spills"),
    [
        pytest.param(LOG, {"fwd_0": 84, "combine_1": 0}, id="stores plus loads, for each entry"),
        pytest.param(
            LOG.replace(" '", "\n          '").replace("stores, ", "stores,\n  "),
            {"fwd_0": 84, "combine_1": 0},
            id="wrapped",
        ),
        pytest.param("", {}, id="no report"),
        pytest.param("1 bytes spill stores, 1 bytes spill loads", {}, id="report on nothing known"),
    ],
)
def test_spills_are_read_from_the_report(log, spills):
    """40 + 44 = 84 bytes; colours do not matter."""
    assert spills_from_log(log) == spills


def test_facts_are_values(tmp_path: Path):
    """They compare by content, so that two builds can be compared."""
    kernel = KernelFacts(symbol="k_0", registers=1, local_bytes=0, shared_bytes=0)

    assert CubinFacts(target="sm_90a", ptxas="V1", kernels=(kernel,)) == CubinFacts(
        target="sm_90a", ptxas="V1", kernels=(kernel,)
    )
