"""The child's side of a compile: the only module of fa4build that imports the compiler.

`setup` runs once in the server, `run` once in each forked child. A family of kernels brings a function that calls
`cute.compile` (`compile_rendered` is ours); everything after it, from reading the cubin back to the launch plan, is the
same for all.
"""

import gc
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fa4build.compiling import compile as parent
from fa4build.compiling import inputs_read
from fa4build.compiling.cubin import CubinFacts, read_cubin, spills_from_log
from fa4build.compiling.fork_server import LOG_NAME, resolve
from fa4build.errors import CompileError, Fa4BuildError, LaunchPlanError

if TYPE_CHECKING:
    from fa4build.compiling.signature import Arg
    from fa4build.plan import LaunchPlan
    from fa4build.plan.extract.device_facts import StandInDevice

_FLAVOURED_MODULE = "cutlass._mlir._mlir_libs._cutlass_ir"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFunction:
    """What a family's compile function returns: the DSL's compiled object, and facts its host code does not check.

    Attributes:
        spec: goes into the launch plan, which guards it: head dimensions, data type, ...
        names: parameter of the host function -> argument of the plan, where the two differ: how a foreign kernel takes
            the names of an operator's signature.
        bindings: scalar parameter of the host function -> leaf that it always equals, `mQ.shape[1]`; callers do not
            pass it.
        types: tensor parameter -> element type, where the host takes bytes in its place.
        on_other_device: compiles the same again on the second of `devices`, the first being the one `compiled` was
            traced on; for kernels that ask for the device while they are traced. The number that was baked in becomes
            an input of the plan. Told to leave kernels out, it compiles the host half alone, or returns None if it
            cannot show that the kernels do not depend on the device.
    """

    compiled: Any
    spec: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)
    bindings: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    on_other_device: Callable[[bool], Any] | None = None
    devices: tuple["StandInDevice", ...] = ()


def setup() -> dict[str, str]:
    """Import everything slow that a child will need; tell which compiler it is."""
    inputs_read.compiler_loads(_import_compiler)
    import cutlass

    flavour = Path(str(sys.modules[_FLAVOURED_MODULE].__file__)).name.split(".")[1]
    return {"dsl_version": cutlass.__version__, "backend": flavour}


def _import_compiler() -> None:
    import cutlass.base_dsl.dsl
    import cutlass.cute
    import cutlass.cutlass_dsl.tvm_ffi_provider
    import elftools.elf.elffile  # noqa: F401

    import fa4build.compiling.signature
    import fa4build.matrix.variants
    import fa4build.plan.extract  # noqa: F401

    # The assembler's report, of which spills are read, makes the DSL look up the source line of every operation too:
    # half of the time of a trace, for nothing that reaches a cubin or a plan.
    cutlass.base_dsl.dsl._set_enable_frame_filtering = lambda _wanted: None


def run(work_dir: Path) -> None:
    """Compile what `request.json` asks for; write cubin, PTX, plan and facts beside it.

    An error made on purpose is handed to the parent as such, anything else as a CompileError with its traceback.
    """
    request = json.loads((work_dir / parent.REQUEST_NAME).read_text(encoding="utf-8"))
    gc.disable()  # a child ends after one compile, and a trace makes little garbage
    try:
        _compile(request, work_dir)
    except Fa4BuildError as error:
        parent.write_failure(work_dir, error)
        raise
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        message = f"{request['name']}: {last}"
        parent.write_failure(work_dir, CompileError(message))
        raise


def compile_rendered(request: Mapping[str, Any], options: str) -> HostFunction:
    """Compile a rendered module of our own: its `entry`, called with fake tensors that follow the signature."""
    import cutlass.cute as cute

    from fa4build.compiling.signature import signature_for, spec_for
    from fa4build.matrix.variants import parse_variant

    variant = parse_variant(request["payload"]["variant"])
    module = _import_file("rendered", Path(request["payload"]["module"]))
    arguments = fake_arguments(signature_for(variant))
    compiled = compile_host(module.entry, *arguments, cute.runtime.make_fake_stream(), options=options)
    return HostFunction(compiled=compiled, spec=spec_for(variant))


def compile_host(host: Any, *arguments: Any, **options: Any) -> Any:
    """`cute.compile` without the engine that would run the host function here: nothing is run in a build."""
    import cutlass.cute as cute

    return cute.compile(host, *arguments, no_jit_engine=True, **options)


def _compile(request: Mapping[str, Any], work_dir: Path) -> None:
    from fa4build.plan import plan_to_json
    from fa4build.plan.extract import validate_plan

    for name, directory in request["packages"]:
        _import_package(name, Path(directory))
    own_directories = (work_dir, Path(os.environ["HOME"]))  # the latter of the server, before a family sets it
    inputs_read.compile_without_stale_bytecode(work_dir)
    host = _host_of(request)
    elf, ptx = host.compiled.__cubin__, host.compiled.__ptx__
    cubin = read_cubin(elf, origin=request["name"])
    _check_cubin(request, cubin)
    spills = _spills(work_dir)  # before a second compile reports its own
    plan = _plan_of(host, elf, ptx)
    validate_plan(plan, ptx, elf)
    inputs_read.check_inputs(request, own_directories)
    facts = _facts(request, cubin, plan, spills)
    (work_dir / parent.CUBIN_NAME).write_bytes(elf)
    (work_dir / parent.PTX_NAME).write_text(ptx, encoding="utf-8")
    (work_dir / parent.PLAN_NAME).write_text(plan_to_json(plan), encoding="utf-8")
    (work_dir / parent.FACTS_NAME).write_text(json.dumps(facts), encoding="utf-8")


def _host_of(request: Mapping[str, Any]) -> HostFunction:
    """What the family's compile function returns. Raises: CompileError if it is something else."""
    host = resolve(request["function"])(request, request["options"])
    if not isinstance(host, HostFunction):
        raise CompileError(
            f"{request['name']}: {request['function']} returned {host!r:.80}; it must return a HostFunction, as "
            "`compile_host` makes one."
        )
    return host


def _plan_of(host: HostFunction, elf: bytes, ptx: str) -> "LaunchPlan":
    """The launch plan, for every device and under the names that were asked for."""
    from fa4build.plan.extract import extract_plan
    from fa4build.plan.names import with_bindings, with_names, with_types

    plan = extract_plan(host.compiled.ir_module, elf=elf, ptx=ptx, spec=host.spec)
    if host.on_other_device is not None:
        plan = _for_every_device(plan, host, elf, ptx)
    return with_names(with_types(with_bindings(plan, host.bindings), host.types), host.names)


def _for_every_device(plan: "LaunchPlan", host: HostFunction, elf: bytes, ptx: str) -> "LaunchPlan":
    """`plan` with device inputs, from a second compile: of the host half alone where that is enough."""
    from fa4build.plan.extract import extract_plan
    from fa4build.plan.extract.device_facts import with_device_inputs, with_shared_memory_of
    from fa4build.plan.extract.vectors import STORED_VECTORS

    assert host.on_other_device is not None
    host_half = host.on_other_device(False)
    if host_half is not None:
        second = extract_plan(host_half.ir_module, elf=elf, ptx=ptx, spec=host.spec, compared=STORED_VECTORS)
        try:
            return with_device_inputs(plan, with_shared_memory_of(plan, second), *host.devices)
        except LaunchPlanError:
            pass  # the whole compile says what is wrong, if anything is
    whole = host.on_other_device(True)
    second = extract_plan(whole.ir_module, elf=whole.__cubin__, ptx=whole.__ptx__, spec=host.spec)
    return with_device_inputs(plan, second, *host.devices)


def _check_cubin(request: Mapping[str, Any], cubin: CubinFacts) -> None:
    """The cubin must be for the target that was asked for, and its entries must have the names that were."""
    if cubin.target != request["target"]:
        raise CompileError(f"{request['name']}: asked for {request['target']}, the cubin is for {cubin.target}.")
    found = sorted(kernel.symbol for kernel in cubin.kernels)
    wanted = sorted(f"{request['symbol']}_{index}" for index in range(len(found)))
    if found != wanted:
        raise CompileError(
            f"{request['name']}: the cubin's entries are {', '.join(found)}; they must be {', '.join(wanted)}. "
            "Name the kernel by set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)."
        )


def _spills(work_dir: Path) -> Mapping[str, int]:
    """Spilled bytes by entry, from this process's own log so far."""
    sys.stdout.flush()
    sys.stderr.flush()
    return spills_from_log((work_dir / LOG_NAME).read_text(encoding="utf-8", errors="replace"))


def _facts(
    request: Mapping[str, Any], cubin: CubinFacts, plan: "LaunchPlan", spills: Mapping[str, int]
) -> dict[str, Any]:
    """The fields of `Cubin` that are numbers and names."""
    by_symbol = {kernel.symbol: kernel for kernel in cubin.kernels}
    unreported = sorted(set(by_symbol) - set(spills))
    if unreported:
        raise CompileError(f"{request['name']}: the assembler reported no spill count for {', '.join(unreported)}.")
    return {
        "target": cubin.target,
        "ptxas": cubin.ptxas,
        "symbols": list(dict.fromkeys(launch.kernel for launch in plan.launches)),
        "registers": max(kernel.registers for kernel in cubin.kernels),
        "spill_bytes": sum(spills[symbol] for symbol in by_symbol),
        "local_bytes": sum(kernel.local_bytes for kernel in cubin.kernels),
        "shared_bytes": max(launch.smem + by_symbol[launch.kernel].shared_bytes for launch in plan.launches),
    }


def fake_arguments(signature: Sequence["Arg"]) -> list[Any]:
    """Stand-ins for the arguments of a host function: tensors without storage, and scalars.

    Named extents and all strides but the last stay symbolic, so one cubin serves every shape; equal names are one
    symbol, so that the host entry checks them to be equal. Alignment is promised as the signature says, which tensor
    maps and vector accesses need.
    """
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_tensor

    from fa4build.compiling.signature import ScalarArg

    types = {
        "bf16": cutlass.BFloat16,
        "fp16": cutlass.Float16,
        "e4m3": cutlass.Float8E4M3FN,
        "e5m2": cutlass.Float8E5M2,
        "f32": cutlass.Float32,
        "i32": cutlass.Int32,
    }
    names = {extent for argument in signature for extent in getattr(argument, "shape", ()) if isinstance(extent, str)}
    symbols = {name: cute.sym_int32(symbol=name) for name in sorted(names)}

    def fake(argument: "Arg") -> Any:
        dtype = types[argument.dtype]
        if isinstance(argument, ScalarArg):
            return dtype(0)
        divisibility = argument.align_bytes * 8 // dtype.width
        return make_fake_tensor(
            dtype,
            tuple(symbols[extent] if isinstance(extent, str) else extent for extent in argument.shape),
            stride=(*(cute.sym_int64(divisibility=divisibility) for _ in argument.shape[1:]), 1),
            assumed_align=argument.align_bytes,
        )

    return [fake(argument) for argument in signature]


def _import_package(name: str, directory: Path) -> None:
    """Import a package from its directory, without putting that directory's neighbours on the path."""
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    _execute(name, spec)


def _import_file(name: str, path: Path) -> ModuleType:
    """Import a module from its file: the DSL reads the source text through it."""
    return _execute(name, importlib.util.spec_from_file_location(name, path.resolve()))


def _execute(name: str, spec: Any) -> ModuleType:
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
