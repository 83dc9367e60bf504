"""From a rendered kernel to a cubin with its launch plan: the parent's side of a compile.

One fresh process a compile (`fork_server`), with a time limit; its output is kept. Nothing is believed because it was
asked for: entry names, target, registers and launch plan are read back from what the compiler made, in the child
(`compile_worker`), and a contradiction is an error. Does not import the compiler and does not know the cache.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fa4build import errors
from fa4build.compiling.fork_server import LOG_NAME, ForkServer, JobEnd
from fa4build.compiling.toolchain import Toolchain
from fa4build.errors import CompileError, Fa4BuildError, ToolchainError
from fa4build.files import write_atomically
from fa4build.matrix.arch import arch_named

if TYPE_CHECKING:
    from fa4build.compiling.render import KernelSource
    from fa4build.plan import LaunchPlan

TIMEOUT_S = 300.0
"""Time limit of one compile. A forward kernel takes 1 to 3 s; minutes mean that the compiler is stuck."""

WORKER = "fa4build.compiling.compile_worker"
REQUEST_NAME = "request.json"
CUBIN_NAME = "kernel.cubin"
PTX_NAME = "kernel.ptx"
PLAN_NAME = "plan.json"
FACTS_NAME = "facts.json"
FAILURE_NAME = "failure.json"
_LOG_LINES_SHOWN = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """What is asked of the compiler beside source and target. Every field is part of the cache key.

    `opt_level` 0 to 3; `ptxas_options` is passed to the assembler as it is; `assertions` keeps asserts in device code.
    """

    opt_level: int = 3
    ptxas_options: str = ""
    assertions: bool = False

    def command_line(self, target: str) -> str:
        """The option string for the DSL. `remarks{ptx}` makes the assembler report spills into the log."""
        words = [
            f"--gpu-arch {target}",
            f"--opt-level {self.opt_level}",
            "--enable-tvm-ffi",
            "--keep-ptx",
            "--keep-cubin",
        ]
        words += ["--dump-dir .", "remarks{ptx}"]
        if self.ptxas_options:
            words.append(f"--ptxas-options '{self.ptxas_options}'")
        if self.assertions:
            words.append("--enable-assertions")
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """One compile, for any family of kernels.

    Attributes:
        name: the variant's id; it names the compile in messages.
        target: what the cubin must be for, `sm_90a`.
        symbol: the entries must be called `<symbol>_0`, `<symbol>_1`, ...
        function: `module:name`, run in the child as `function(request, options)`; it calls `cute.compile` and returns a
            `compile_worker.HostFunction`.
        payload: what that function needs to know, as JSON.
        files: (name, text), written into the work directory before the child starts.
        packages: (import name, directory) of packages that the files import.
        family: whose kernel it is, for messages.
        sources: (path, sha256) of every file that the key holds; reading another one is an error (`inputs_read`).
        distributions: names of the installed distributions that the key holds.
    """

    name: str
    target: str
    symbol: str
    function: str
    payload: Mapping[str, Any]
    files: tuple[tuple[str, str], ...] = ()
    packages: tuple[tuple[str, str], ...] = ()
    family: str = "fa4"
    sources: tuple[tuple[str, str], ...] = ()
    distributions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cubin:
    """One compiled kernel.

    `symbols` are the entries in the order of the plan's launches; `registers` is the largest count a thread of any
    entry, `shared_bytes` the largest a block needs, static and dynamic; `spill_bytes` (stores plus loads) and
    `local_bytes` (stack a thread) are sums over entries. `ptxas` is the assembler's version. `cpu_seconds` and
    `peak_bytes` are what the compile process used.
    """

    elf: bytes
    ptx: str
    target: str
    symbols: tuple[str, ...]
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    ptxas: str
    plan: "LaunchPlan"
    log: str
    cpu_seconds: float = field(compare=False)
    peak_bytes: int = field(compare=False)


def request_for(source: "KernelSource") -> CompileRequest:
    """The compile of a rendered kernel of our own."""
    from fa4build.compiling.render import kernels_source_dir

    module = f"{source.symbol}.py"
    kernels = kernels_source_dir().resolve()
    return CompileRequest(
        name=source.variant.id,
        target=arch_named(source.variant.arch).target,
        symbol=source.symbol,
        function=f"{WORKER}:compile_rendered",
        payload={"variant": source.variant.id, "module": module},
        files=((module, source.text),),
        packages=(("kernels_src", str(kernels)),),
        sources=_below(str(kernels.parent), source.dependencies),
    )


@lru_cache(maxsize=256)
def _below(directory: str, dependencies: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """(path, sha256) of files given by their place in a directory; many kernels have the same."""
    return tuple((f"{directory}/{path}", sha256) for path, sha256 in dependencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The process whose children compile a family's kernels: what it imports first, and what it must not import.

    Attributes:
        setup: `module:function`, called once; does the slow imports and returns the compiler's facts, as
            `compile_worker.setup` does.
        blocked_modules: modules whose import fails. torch by default: whether it is installed must change nothing, and
            importing it takes seconds.
        warm: `module:function`, called in the server once several compiles were asked for: what each child would do
            again. It must change nothing of what a compile gives.
    """

    setup: str = f"{WORKER}:setup"
    blocked_modules: tuple[str, ...] = ("torch",)
    warm: str = ""


def start_server(toolchain: Toolchain, scratch_dir: Path, worker: Worker | None = None) -> ForkServer:
    """A compile server for this toolchain. `scratch_dir` must exist; the server's imports may write into it."""
    worker = worker or Worker()
    scratch = str(scratch_dir.resolve())
    environment = {
        **dict(toolchain.environment),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "CUTE_DSL_CACHE_DIR": scratch,
    }
    return ForkServer(
        setup=worker.setup,
        environment=environment,
        scratch_dir=scratch_dir,
        blocked_modules=worker.blocked_modules,
        warm=worker.warm,
    )


def check_server(server: ForkServer, toolchain: Toolchain) -> None:
    """Raise ToolchainError unless the server runs the compiler that the toolchain says."""
    found = server.facts()
    wanted = {"dsl_version": toolchain.dsl_version, "backend": toolchain.backend}
    if found != wanted:
        raise ToolchainError(
            f"the DSL loaded {found}, but the metadata says {wanted}. The DSL picks its flavour by the machine's CUDA "
            f"driver: compile where there is no driver, or one of CUDA {toolchain.backend[2:]} or later."
        )


def prepare(request: CompileRequest, options: CompileOptions, work_dir: Path) -> None:
    """Fill a work directory for the child. Whatever an earlier, killed compile left there is removed."""
    shutil.rmtree(work_dir, ignore_errors=True)
    work_dir.mkdir(parents=True)
    for name, text in request.files:
        (work_dir / name).write_text(text, encoding="utf-8")
    not_files = (field.name for field in fields(request) if field.name != "files")
    document = {name: getattr(request, name) for name in not_files}
    document["options"] = options.command_line(request.target)
    (work_dir / REQUEST_NAME).write_text(json.dumps(document, indent=1), encoding="utf-8")


def read_result(request: CompileRequest, work_dir: Path, end: JobEnd) -> Cubin:
    """What the child made.

    Raises: the error the child met (CompileError, LaunchPlanError, ...), or CompileError if it crashed or was stopped.
        The message names the log, which stays.
    """
    if end.end != "exit 0":
        raise _failure(request, work_dir, end)
    from fa4build.plan import plan_from_json

    facts = json.loads((work_dir / FACTS_NAME).read_text(encoding="utf-8"))
    facts["symbols"] = tuple(facts["symbols"])
    return Cubin(
        elf=(work_dir / CUBIN_NAME).read_bytes(),
        ptx=(work_dir / PTX_NAME).read_text(encoding="utf-8"),
        plan=plan_from_json((work_dir / PLAN_NAME).read_text(encoding="utf-8")),
        log=(work_dir / LOG_NAME).read_text(encoding="utf-8", errors="replace"),
        cpu_seconds=end.cpu_seconds,
        peak_bytes=end.peak_bytes,
        **facts,
    )


def compile_kernel(
    source: "KernelSource",
    toolchain: Toolchain,
    work_dir: Path,
    timeout_s: float = TIMEOUT_S,
    options: CompileOptions | None = None,
) -> Cubin:
    """Compile one rendered kernel in one fresh process.

    Args:
        work_dir: a directory of this compile alone; made, or emptied. Rendered module, log and results stay in it.
    Raises: CompileError (with the log, or because the directory holds anything else), LaunchPlanError, ToolchainError.
    Cost: about half a second of imports and 1 to 3 s of compiling. For many, use `pipeline.build_matrix`.
    """
    if work_dir.exists() and any(work_dir.iterdir()) and not (work_dir / REQUEST_NAME).exists():
        raise CompileError(f"{work_dir}: holds files that no compile made. Name an empty directory, or a new one.")
    request = request_for(source)
    prepare(request, options or CompileOptions(), work_dir)
    scratch = work_dir / "server"
    scratch.mkdir()
    with start_server(toolchain, scratch) as server:
        check_server(server, toolchain)
        server.submit(function=f"{WORKER}:run", work_dir=work_dir, timeout_s=timeout_s)
        return read_result(request, work_dir, server.wait())


def write_failure(work_dir: Path, error: Fa4BuildError) -> None:
    """In the child: hand an error to the parent."""
    document = {"error": type(error).__name__, "message": str(error)}
    write_atomically(work_dir / FAILURE_NAME, json.dumps(document).encode())


def _failure(request: CompileRequest, work_dir: Path, end: JobEnd) -> Fa4BuildError:
    """The error for a compile that did not end well."""
    log = work_dir / LOG_NAME
    kept = f"Kept: {log}"
    try:
        document = json.loads((work_dir / FAILURE_NAME).read_text(encoding="utf-8"))
        return getattr(errors, document["error"])(f"{document['message']}\n{kept}")
    except FileNotFoundError:
        pass
    if end.end == "timeout":
        return _accident(f"{request.name}: stopped after {end.seconds:.0f} s without an end. {kept}")
    what = f"the compile process ended with {end.end}"
    if end.end == "signal 9":
        what += " (killed; is the machine short of memory? then use fewer --jobs)"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    text = "\n".join([f"{request.name}: {what}.", *lines[-_LOG_LINES_SHOWN:], kept])
    return _accident(text) if end.end.startswith("signal") else CompileError(text)


def _accident(text: str) -> CompileError:
    """Of a compile that was ended from outside: it may go well another time."""
    error = CompileError(text)
    error.may_pass_again = True
    return error
