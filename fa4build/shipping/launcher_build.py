"""The runtime's C launcher, cross-built for Linux on x86_64 and aarch64 from any machine with Python.

The compiler is the one in the `ziglang` wheel, the Python declarations are our own (runtime/limited_api), the C library
is glibc 2.28's as zig describes it: nothing of the building machine gets in, so bytes are equal everywhere. What comes
out is read back and must be what the wheel's tag promises. Not for running anything: see runtime/fa4_kernels.
"""

import hashlib
import importlib.util
import io
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa4build.errors import ToolchainError, WheelError
from fa4build.files import scratch_directory

LAUNCHER_SOURCE = "_launcher.c"
_TIMEOUT_S = 300
_GLIBC = (2, 28)


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One host the launcher is built for.

    Attributes:
        tag: platform tag of the wheel, `manylinux_2_28_x86_64`.
        interpreters: Python and ABI tag of the wheel: `cp310-abi3` for every CPython with an interpreter lock,
            `cp314-cp314t` and its like for free-threaded ones, each release its own.
        zig_target, elf_machine, elf_number: of the machine, as the compiler and ELF headers spell it.
    """

    tag: str
    machine: str
    zig_target: str
    elf_machine: str
    elf_number: int
    interpreters: str = "cp310-abi3"

    @property
    def wheel_tag(self) -> str:
        """The complete compatibility tag, `cp310-abi3-manylinux_2_28_x86_64`."""
        return f"{self.interpreters}-{self.tag}"

    @property
    def name(self) -> str:
        """How users name it: `manylinux_2_28_x86_64`, `manylinux_2_28_x86_64-cp314t`."""
        return self.tag + self._suffix

    @property
    def short_name(self) -> str:
        """As `name`, by the machine alone: `x86_64`, `x86_64-cp314t`."""
        return self.machine + self._suffix

    @property
    def _suffix(self) -> str:
        abi = self.interpreters.partition("-")[2]
        return "" if abi == "abi3" else f"-{abi}"

    @property
    def is_free_threaded(self) -> bool:
        """Whether its interpreters have no interpreter lock."""
        return self.interpreters.endswith("t")

    @property
    def launcher_file(self) -> str:
        """The launcher's file name, by which an interpreter finds the one that is its own."""
        if not self.is_free_threaded:
            return "_launcher.abi3.so"
        release = self.interpreters.partition("-cp")[2]
        return f"_launcher.cpython-{release}-{self.machine}-linux-gnu.so"


def _platforms(*interpreters: str) -> tuple[Platform, ...]:
    return tuple(
        Platform(
            tag=f"manylinux_2_28_{machine}",
            machine=machine,
            zig_target=f"{machine}-linux-gnu.2.28",
            elf_machine=elf_machine,
            elf_number=elf_number,
            interpreters=tags,
        )
        for tags in interpreters
        for machine, elf_machine, elf_number in (("x86_64", "EM_X86_64", 62), ("aarch64", "EM_AARCH64", 183))
    )


PLATFORMS = _platforms("cp310-abi3")
"""What a bundle serves unless asked for more."""

FREE_THREADED_PLATFORMS = _platforms("cp313-cp313t", "cp314-cp314t", "cp315-cp315t")
"""Hosts whose Python has no interpreter lock. These releases share every layout and function that the launcher uses."""

_FLAGS = (
    "-std=c11",
    "-shared",
    "-fPIC",
    "-O2",
    "-g0",
    "-s",
    "-fvisibility=hidden",
    "-fno-sanitize=all",
    "-fstack-protector-strong",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wl,--build-id=none",
    "-Wl,-z,relro,-z,now",
    "-DPy_LIMITED_API=0x030A0000",  # the subset; with Py_GIL_DISABLED it is no stable ABI, see limited_api/Python.h
    "-DNDEBUG",
    "-mcpu=baseline",  # of the target architecture, not the building machine's processor
)


def platform_named(name: str) -> Platform:
    """The platform with this name, long or short.

    Raises: WheelError, listing what is allowed.
    """
    for platform in (*PLATFORMS, *FREE_THREADED_PLATFORMS):
        if name in (platform.name, platform.short_name):
            return platform
    allowed = ", ".join(f"{p.name} (or {p.short_name})" for p in (*PLATFORMS, *FREE_THREADED_PLATFORMS))
    raise WheelError(f"platform {name!r} is unknown. Allowed: {allowed}.")


def launcher_sources(package_dir: Path) -> dict[str, bytes]:
    """Everything the launcher is compiled from, by the path it has in the compile directory.

    Raises: WheelError when the package has no launcher source.
    """
    if not (package_dir / LAUNCHER_SOURCE).is_file():
        raise WheelError(f"{package_dir}: no {LAUNCHER_SOURCE}. fa4build is installed incompletely; install it again.")
    limited_api = package_dir.parent / "limited_api"
    sources = {path.name: path.read_bytes() for path in sorted(package_dir.glob("*.[ch]"))}
    return {**sources, **{f"limited_api/{p.name}": p.read_bytes() for p in sorted(limited_api.glob("*.h"))}}


def sources_digest(sources: Mapping[str, bytes]) -> str:
    """Sha256 over names and contents of sources."""
    digest = hashlib.sha256()
    for name, data in sorted(sources.items()):
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def compiler_version() -> str:
    """Version of the installed ziglang distribution.

    Raises: ToolchainError when it is missing.
    """
    from importlib.metadata import version

    _compiler()
    return version("ziglang")


def _compiler() -> Path:
    """The program inside the ziglang distribution."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise ToolchainError("ziglang is not installed; it brings the C compiler. Run: pip install ziglang")
    return Path(spec.origin).parent / "zig"


def build_launcher(
    sources: Mapping[str, bytes],
    platform: Platform,
    *,
    unit: str = LAUNCHER_SOURCE,
    compiler_cache: Path | None = None,
) -> bytes:
    """Compile the launcher and prove it fit for its wheel tag.

    Args:
        sources: path -> contents, from `launcher_sources`.
        unit: the C file to compile; others are included by it.
        compiler_cache: where the compiler keeps its C library for the next build; None = made anew and thrown away,
            which takes some seconds more. The result is the same.
    Returns: the shared object.
    Raises: ToolchainError when the compiler is missing, fails or takes too long (its output is in the message);
        WheelError when the result is not what the tag promises.
    """
    compiler = _compiler()
    with scratch_directory("launcher") as directory:
        root = Path(directory)
        for name, data in sources.items():
            path = root / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        # Relative paths and a fixed working directory: no name of this machine can reach the output.
        flags = [*_FLAGS, *(["-DPy_GIL_DISABLED=1"] if platform.is_free_threaded else [])]
        arguments = ["-target", platform.zig_target, *flags, "-I", "limited_api", unit, "-ldl", "-o", "../launcher.so"]
        environment = {
            "LC_ALL": "C.UTF-8",
            "PATH": os.defpath,
            "ZIG_GLOBAL_CACHE_DIR": str((compiler_cache or root / "cache").absolute()),
            "ZIG_LOCAL_CACHE_DIR": str(root / "local-cache"),
        }
        _run([str(compiler), "cc", *arguments], cwd=root / "src", environment=environment)
        elf = (root / "launcher.so").read_bytes()
    check_launcher(elf, platform, module=unit.removesuffix(".c"))
    return elf


def check_launcher(elf: bytes, platform: Platform, *, module: str = "_launcher") -> None:
    """Prove that a shared object is what the platform tag promises.

    Machine, no run path, only glibc libraries needed, no glibc symbol newer than 2.28, no symbol from nowhere, one
    exported symbol (the module's init function), and no libpython: the interpreter provides the limited API.

    Raises: WheelError naming the first property that does not hold.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        file = ELFFile(io.BytesIO(elf))
        facts = {"machine": file.header["e_machine"], "bits": file.elfclass}
        dynamic = file.get_section_by_name(".dynamic")
        needed = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        run_paths = [tag.entry.d_tag for tag in dynamic.iter_tags() if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]
        symbols = list(file.get_section_by_name(".dynsym").iter_symbols())
        versions = _needed_versions(file)
        homeless = _unversioned_undefined(file, symbols)
    except (ELFError, AttributeError) as error:
        raise WheelError(f"launcher for {platform.tag}: no shared object ({error}).") from error
    exported = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] != "STB_LOCAL"]
    _require(facts == {"machine": platform.elf_machine, "bits": 64}, platform, f"is for {facts}")
    _require(not run_paths, platform, f"has a run path ({', '.join(run_paths)})")
    allowed = re.compile(r"lib(c|dl|m|pthread|rt)\.so\.\d+|ld-linux-[a-z0-9-]+\.so\.\d+")
    strange = [name for name in needed if not allowed.fullmatch(name)]
    _require(not strange, platform, f"needs {', '.join(strange)}; allowed: glibc's own libraries")
    newer = sorted(v for v in versions if not v.startswith("GLIBC_") or _glibc_version(v) > _GLIBC)
    _require(not newer, platform, f"needs symbol versions {', '.join(newer)}; allowed: up to GLIBC_2.28")
    _require(not homeless, platform, f"needs {', '.join(homeless)}, which neither Python nor glibc has")
    _require(exported == [f"PyInit_{module}"], platform, f"exports {exported}; allowed: PyInit_{module} alone")


def _require(holds: bool, platform: Platform, what: str) -> None:
    """Raise unless a promised property holds."""
    if not holds:
        raise WheelError(f"launcher for {platform.tag}: {what}. Change its source or flags and build it again.")


def _needed_versions(file: object) -> set[str]:
    """Symbol versions the object needs from other libraries."""
    section = file.get_section_by_name(".gnu.version_r")
    if section is None:
        return set()
    return {version.name for _, versions in section.iter_versions() for version in versions}


def _unversioned_undefined(file: object, symbols: Sequence[object]) -> list[str]:
    """Undefined names that no library is named for and that are not the interpreter's. Weak ones may stay undefined."""
    section = file.get_section_by_name(".gnu.version")
    entries = [None] * len(symbols) if section is None else [symbol.entry["ndx"] for symbol in section.iter_symbols()]
    wanted = [
        symbol.name
        for symbol, version in zip(symbols, entries, strict=True)
        # pyelftools gives a number for a version of a needed library, a name otherwise
        if not isinstance(version, int)
        and symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
    ]
    return [name for name in wanted if not name.startswith(("Py", "_Py"))]


def _glibc_version(name: str) -> tuple[int, ...]:
    """`GLIBC_2.2.5` -> (2, 2, 5); GLIBC_PRIVATE counts as newer than everything."""
    numbers = name.removeprefix("GLIBC_").split(".")
    return tuple(int(n) for n in numbers) if all(n.isdigit() for n in numbers) else (999,)


def _run(command: list[str], *, cwd: Path, environment: Mapping[str, str]) -> None:
    """Run the compiler; its output becomes the error's message."""
    try:
        result = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"the C compiler did not end within {_TIMEOUT_S} s: {' '.join(command)}") from None
    if result.returncode != 0:
        raise ToolchainError(
            f"the C compiler failed (status {result.returncode}). A Python function it does not know belongs into "
            f"runtime/limited_api/limited_functions.h. Its output:\n{result.stderr.strip()[-4000:]}"
        )
