"""Contract of fa4build.shipping.launcher_build.

The launcher is built for both host platforms from sources alone: no C compiler, no Python headers of the machine, and
the bytes depend on nothing else. Our declarations of the limited API agree with the interpreter's own. What comes out
is checked against the promise of the wheel's tag; each broken promise is one WheelError.
"""

import importlib.util
import io
import os
import platform as host
import re
import struct
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from fa4build.errors import ToolchainError, WheelError
from fa4build.shipping.launcher_build import (
    FREE_THREADED_PLATFORMS,
    PLATFORMS,
    Platform,
    build_launcher,
    check_launcher,
    launcher_sources,
    platform_named,
    sources_digest,
)
from fa4build.shipping.wheel import RUNTIME_DIR
from tests.artifacts import COMPILER_CACHE

LIMITED_API = RUNTIME_DIR.parent / "limited_api"
X86, ARM = PLATFORMS

TOY = """
#include <Python.h>
%s
static PyObject *count(PyObject *self, PyObject *const *args, Py_ssize_t size) {
    (void)self; (void)args;
    return PyLong_FromSsize_t(size%s);
}
static PyMethodDef methods[] = {
    {"count", (PyCFunction)(void (*)(void))count, METH_FASTCALL, "number of arguments"},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_toy", NULL, 0, methods, NULL, NULL, NULL, NULL};
PyMODINIT_FUNC PyInit__toy(void) { return PyModule_Create(&module); }
"""


def toy_sources(*, top: str = "", term: str = "") -> dict[str, bytes]:
    """A module `_toy` whose `count(*args)` gives the number of arguments; `top` and `term` go into its source."""
    headers = {f"limited_api/{path.name}": path.read_bytes() for path in LIMITED_API.glob("*.h")}
    return {"_toy.c": (TOY % (top, term)).encode(), **headers}


def build_toy(platform: Platform, **parts: str) -> bytes:
    """The toy for a platform."""
    return build_launcher(toy_sources(**parts), platform, unit="_toy.c", compiler_cache=COMPILER_CACHE)


def build_real(platform: Platform) -> bytes:
    """The shipped launcher for a platform."""
    return build_launcher(launcher_sources(RUNTIME_DIR), platform, compiler_cache=COMPILER_CACHE)


@pytest.mark.parametrize("platform", [*PLATFORMS, *FREE_THREADED_PLATFORMS], ids=lambda p: p.short_name)
def test_real_launcher_is_built_and_keeps_its_promise(platform: Platform) -> None:
    """The shipped source compiles without a warning for both machines and passes its own check."""
    elf = build_real(platform)
    machine = ELFFile(io.BytesIO(elf)).header["e_machine"]

    assert machine == {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[platform.machine]


@pytest.mark.skipif(host.machine() not in ("x86_64", "aarch64"), reason="no platform of ours to load a library on")
def test_module_loads_into_this_python(tmp_path: Path) -> None:
    """Our declarations are right enough to run: METH_FASTCALL and a limited-API call."""
    path = tmp_path / "_toy.abi3.so"
    path.write_bytes(build_toy(platform_named(host.machine())))
    spec = importlib.util.spec_from_file_location("_toy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.count(1, 2, 3) == 3


@pytest.fixture(scope="module")
def other_zig_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty cache of objects: a second build must not be the first one's result copied."""
    return tmp_path_factory.mktemp("zig")


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda p: p.machine)
def test_bytes_do_not_depend_on_the_machine(platform: Platform, tmp_path: Path, other_zig_cache: Path) -> None:
    """Another process, directory, time zone, umask and hash seed: equal bytes."""
    sources = tmp_path / "elsewhere" / "fa4_kernels"
    sources.mkdir(parents=True)
    for directory, target in ((RUNTIME_DIR, sources), (LIMITED_API, sources.parent / "limited_api")):
        target.mkdir(exist_ok=True)
        for path in directory.glob("*.[ch]"):
            (target / path.name).write_bytes(path.read_bytes())
    program = (
        "import os, sys; from pathlib import Path; os.umask(0o077)\n"
        "from fa4build.shipping.launcher_build import *\n"
        "sources = launcher_sources(Path(sys.argv[1]))\n"
        "elf = build_launcher(sources, platform_named(sys.argv[2]), compiler_cache=Path(sys.argv[3]))\n"
        "sys.stdout.buffer.write(elf)"
    )
    environment = {**os.environ, "TZ": "Pacific/Auckland", "PYTHONHASHSEED": "7", "TMPDIR": str(tmp_path), "LANG": "C"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", program, str(sources), platform.tag, str(other_zig_cache)]
    elsewhere = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True).stdout

    assert elsewhere == build_real(platform)


def test_no_path_of_this_machine_is_inside() -> None:
    """Neither the directory of the checkout nor the temporary one is named in the bytes."""
    elf = build_real(X86)

    assert str(RUNTIME_DIR).encode() not in elf
    assert b"fa4build-launcher-" not in elf
    assert str(Path.home()).encode() + b"/" not in elf


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param({"term": " + PyFrob_Nicate(self)"}, "PyFrob_Nicate", id="undeclared-function"),
        pytest.param({"top": "static int unused(void) { return 1; }"}, "unused", id="warning"),
    ],
)
def test_compile_errors_show_the_compilers_words(parts: dict[str, str], message: str) -> None:
    """A failed compile is a ToolchainError with the compiler's output, and says where declarations belong."""
    with pytest.raises(ToolchainError, match=message):
        build_toy(X86, **parts)


def test_symbol_from_nowhere_is_refused() -> None:
    """A function that neither Python nor glibc 2.28 has links, but would fail at import."""
    with pytest.raises(WheelError, match="needs cuInit, which neither Python nor glibc has"):
        build_toy(X86, top="extern int cuInit(unsigned);", term=" + cuInit(0)")


def test_second_export_is_refused() -> None:
    """Only the init function may be visible: anything else could collide with other libraries in the process."""
    top = '__attribute__((visibility("default"))) int also_visible(void);\nint also_visible(void) { return 1; }'

    with pytest.raises(WheelError, match=r"exports .*also_visible.*allowed: PyInit__toy alone"):
        build_toy(X86, top=top)


def test_wrong_machine_is_refused() -> None:
    """An aarch64 library in an x86_64 wheel."""
    with pytest.raises(WheelError, match=r"manylinux_2_28_x86_64: is for .*EM_AARCH64"):
        check_launcher(build_toy(ARM), X86, module="_toy")


def test_bytes_that_are_no_library_are_refused() -> None:
    """Nonsense, and half a library."""
    elf = build_toy(X86)
    for data in (b"", b"hello", elf[: len(elf) // 2]):
        with pytest.raises(WheelError, match="no shared object"):
            check_launcher(data, X86, module="_toy")


def test_newer_glibc_is_refused() -> None:
    """A library that needs GLIBC_2.99: the version's name is patched in a good one."""
    elf = build_real(X86)
    assert b"GLIBC_2.2.5\0" in elf

    with pytest.raises(WheelError, match=r"needs symbol versions GLIBC_2\.99; allowed: up to GLIBC_2\.28"):
        check_launcher(elf.replace(b"GLIBC_2.2.5\0", b"GLIBC_2.99\0\0"), X86)


def test_foreign_library_is_refused() -> None:
    """A library that needs libpython or a CUDA library cannot be shipped: the needed name is patched in a good one."""
    elf = build_real(X86)
    assert b"libdl.so.2\0" in elf

    with pytest.raises(WheelError, match=r"needs libpy\.so\.3; allowed: glibc's own libraries"):
        check_launcher(elf.replace(b"libdl.so.2\0", b"libpy.so.3\0"), X86)


def symbols_needed(elf: bytes) -> set[str]:
    """Names that the process must provide."""
    symbols = ELFFile(io.BytesIO(elf)).get_section_by_name(".dynsym").iter_symbols()
    return {symbol.name for symbol in symbols if symbol["st_shndx"] == "SHN_UNDEF"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_free_threaded_launcher_locks_what_calls_share(machine: str) -> None:
    """It takes the interpreter's mutex and declares that it needs no interpreter lock. Both functions exist in
    free-threaded interpreters alone, so that no other one loads it. Releases get equal bytes: what is used of them is
    the same."""
    own = {"PyMutex_Lock", "PyMutex_Unlock", "PyUnstable_Module_SetGIL"}
    of_3_13, of_3_14 = (build_real(platform_named(f"{machine}-cp{release}t")) for release in (313, 314))

    assert own <= symbols_needed(of_3_13)
    assert not own & symbols_needed(build_real(platform_named(machine)))
    assert of_3_13 == of_3_14


def test_objects_of_free_threaded_interpreters_have_four_words(tmp_path: Path) -> None:
    """PEP 703: owning thread (8 bytes), flags (2), mutex (1), collector's bits (1), local count (4), shared count (8),
    type (8). Other members of structures are where they are in every interpreter, after the head."""
    fields = "ob_tid ob_flags ob_mutex ob_gc_bits ob_ref_local ob_ref_shared ob_type".split()
    cells = [*(f"offsetof(PyObject, {name})" for name in fields), "sizeof(PyObject)", "offsetof(PyModuleDef, m_name)"]
    source = f"#define Py_GIL_DISABLED\n#include <Python.h>\nconst long long table[] = {{{', '.join(cells)}}};\n"
    elf = ELFFile(io.BytesIO(compile_object(source, [str(LIMITED_API)], tmp_path)))
    found = struct.unpack("<9q", elf.get_section_by_name(".rodata").data())

    assert found == (0, 8, 10, 11, 12, 16, 24, 32, 32 + 24)


def test_platform_names() -> None:
    """Tag or machine; a free-threaded interpreter is named by its ABI. Anything else lists what is allowed."""
    assert platform_named("manylinux_2_28_aarch64") is platform_named("aarch64") is ARM
    assert platform_named("manylinux_2_28_x86_64-cp314t") is platform_named("x86_64-cp314t")
    assert platform_named("aarch64-cp313t").wheel_tag == "cp313-cp313t-manylinux_2_28_aarch64"
    assert platform_named("aarch64-cp313t").launcher_file == "_launcher.cpython-313t-aarch64-linux-gnu.so"
    with pytest.raises(WheelError, match=r"'win_amd64' is unknown. Allowed: manylinux_2_28_x86_64 \(or x86_64\)"):
        platform_named("win_amd64")


def test_missing_source_is_one_clear_error(tmp_path: Path) -> None:
    """An incomplete installation."""
    with pytest.raises(WheelError, match=r"no _launcher\.c"):
        launcher_sources(tmp_path)


def test_digest_covers_names_and_contents() -> None:
    """Moving a byte from one file to the next, or renaming one, changes it."""
    digests = {sources_digest(s) for s in ({"a": b"xy", "b": b""}, {"a": b"x", "b": b"y"}, {"a": b"xy", "c": b""})}

    assert len(digests) == 3


# The interpreter's own headers, where it has them, are the reference for ours.

real_headers = pytest.mark.skipif(
    not Path(sysconfig.get_paths()["include"], "Python.h").is_file(), reason="this Python came without headers"
)


def compile_object(source: str, include: list[str], directory: Path) -> bytes:
    """Compile C to an object for this machine and return its ELF bytes."""
    (directory / "unit.c").write_text(source)
    flags = ["-std=c11", "-c", "-O0", "-g0", "-fno-sanitize=all", "-DPy_LIMITED_API=0x030A0000", "-Wno-macro-redefined"]
    includes = [flag for path in include for flag in ("-I", path)]
    command = [sys.executable, "-m", "ziglang", "cc", *flags, *includes, "unit.c", "-o", "unit.o"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return (directory / "unit.o").read_bytes()


def real_include() -> list[str]:
    """Include directories of the interpreter."""
    paths = sysconfig.get_paths()
    return [paths["include"], paths["platinclude"]]


@real_headers
def test_prototypes_agree_with_the_interpreters(tmp_path: Path) -> None:
    """Our function declarations after the real ones: C refuses a second declaration of another type."""
    functions = (LIMITED_API / "limited_functions.h").read_text()
    names = re.findall(r"\b(_?Py\w+)\(", functions)
    undefine = "".join(f"#undef {name}\n" for name in names)
    compile_object(f"#define PY_SSIZE_T_CLEAN\n#include <Python.h>\n{undefine}\n{functions}", real_include(), tmp_path)

    assert len(names) > 100
    with pytest.raises(AssertionError, match="conflicting types"):
        compile_object("#include <Python.h>\nint PyLong_AsLong(PyObject *);", real_include(), tmp_path)


@real_headers
def test_constants_and_layouts_agree_with_the_interpreters(tmp_path: Path) -> None:
    """One table of numbers, compiled with our header and with the real one."""
    header = (LIMITED_API / "Python.h").read_text()
    numbers = re.findall(r"^#define (\w+) \(?[0-9]", header, flags=re.MULTILINE)
    structures = {
        "PyObject": "ob_refcnt ob_type",
        "PyMethodDef": "ml_name ml_meth ml_flags ml_doc",
        "PyGetSetDef": "name get set doc closure",
        "PyModuleDef_Base": "m_init m_index m_copy",
        "PyModuleDef_Slot": "slot value",
        "PyModuleDef": "m_base m_name m_doc m_size m_methods m_slots m_traverse m_clear m_free",
        "PyType_Slot": "slot pfunc",
        "PyType_Spec": "name basicsize itemsize flags slots",
    }
    cells = [f"(long long){name}" for name in numbers]
    for structure, fields in structures.items():
        cells.append(f"sizeof({structure})")
        cells += [f"offsetof({structure}, {field})" for field in fields.split()]
    # PyBUF_SIMPLE entered the limited API in 3.11; its value is 0 in every release.
    buffers = "#ifndef PyBUF_SIMPLE\n#define PyBUF_SIMPLE 0\n#endif\n"
    table = f"#include <Python.h>\n#include <stddef.h>\n{buffers}const long long table[] = {{{', '.join(cells)}}};\n"

    def rodata(include: list[str]) -> bytes:
        return ELFFile(io.BytesIO(compile_object(table, include, tmp_path))).get_section_by_name(".rodata").data()

    ours = rodata([str(LIMITED_API)])
    assert ours == rodata(real_include())
    assert len(ours) == 8 * len(cells)
    assert len(numbers) == 39
