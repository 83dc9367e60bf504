"""Contract of the layers.

Imports run one way. Importing fa4build does nothing: no file, no environment variable, no torch, no compiler. What is
shipped to users imports nothing of the builder, and only the command line prints, reads the environment or exits.
"""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fa4build"
RUNTIME = "fa4build.runtime"
WORKER = "fa4build.compiling.compile_worker"


def module_name(path: Path) -> str:
    """`fa4build.compiling.render` for its file; a package for its __init__."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


EXTENSIONS = {"fa4build.runtime.fa4_kernels._launcher"}  # compiled, so no file of the source tree
FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def imports_of(name: str) -> set[str]:
    """Every module that a file names in an import, at any depth of its text."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            members = {f"{base}.{alias.name}" for alias in node.names}
            # `from package import module` is an import of the module; of anything else, of the package.
            found.update(members & (set(FILES) | EXTENSIONS) or {base})
    return found


GRAPH = {name: imports_of(name) for name in FILES}


def imported_tops(name: str) -> set[str]:
    """Names of the distributions' top packages that a file imports."""
    return {module.split(".")[0] for module in GRAPH[name]}


def test_imports_run_one_way():
    """No module reaches itself through others, also not by imports inside functions."""
    own = {name: {module for module in modules if module in FILES} - {name} for name, modules in GRAPH.items()}
    try:
        order = tuple(TopologicalSorter(own).static_order())
    except CycleError as error:
        pytest.fail(f"imports run in a circle: {' -> '.join(error.args[1])}")

    assert len(FILES) == len(order)


# Rooms from the ground up. A module imports its own room and those before it.
FLOORS = (
    *("errors", "files", "runtime", "matrix", "plan", "cases", "store", "compiling", "simulate", "timing", "numerics"),
    *("families", "farm", "pipeline", "explain", "doctor", "verify", "shipping", "report", "cli"),
    "__main__",
)
# The same inside `simulate`, whose own modules come last.
SIMULATOR_FLOORS = (
    *("ptx", "units", "hardware", "translate", "instructions", "checks"),
    *("program", "launch", "plan_launch", "native"),
)
MAX_ROOMS, MAX_MODULES = 22, 16
# Why they may be larger is in CONTRIBUTING.md, "Where things are".
MAY_BE_LARGER = {"fa4build/cli", "fa4build/runtime/fa4_kernels"}


def climbs(floors: tuple[str, ...], depth: int, within: str) -> list[tuple[str, str]]:
    """Imports (from, to) that lead to a higher floor; the room is the part at `depth` of a module's name."""

    def floor(module: str) -> int | None:
        parts = module.split(".")
        return floors.index(parts[depth]) if module.startswith(f"{within}.") and module in FILES else None

    levels = [(name, floor(name), module, floor(module)) for name in FILES for module in GRAPH[name]]
    return [(a, b) for a, low, b, high in levels if low is not None and high is not None and high > low]


def test_no_room_reaches_up():
    """The order of the floors is the order of CONTRIBUTING's arrow; a new room takes its place in it."""
    assert [] == climbs(FLOORS, 1, "fa4build")
    assert [] == climbs(SIMULATOR_FLOORS, 2, "fa4build.simulate")


def test_every_room_has_a_floor():
    """Nothing stands beside the order. Native sources beside the simulator's are no modules."""
    rooms = {name.split(".")[1] for name in FILES if name.count(".")}
    inner = {name.split(".")[2] for name in FILES if name.startswith("fa4build.simulate.")}

    assert rooms == set(FLOORS)
    assert inner <= set(SIMULATOR_FLOORS)


def test_no_room_is_crowded():
    """A folder that nobody can read at a glance is two folders."""
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    rooms = {path.relative_to(PACKAGE).parts[0] for path in files} - {"__init__.py"}
    modules: dict[str, int] = {}
    for path in FILES.values():
        if path.name != "__init__.py":
            folder = path.parent.relative_to(ROOT).as_posix()
            modules[folder] = modules.get(folder, 0) + 1

    assert len(rooms) <= MAX_ROOMS
    assert {} == {folder: n for folder, n in modules.items() if n > MAX_MODULES and folder not in MAY_BE_LARGER}


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("errors", set()),
        ("matrix.arch", {"errors"}),
        ("matrix.axes", {"errors", "matrix.arch"}),
        ("matrix.spec", {"errors", "matrix.arch", "matrix.axes"}),
        ("matrix.selection", {"matrix.spec"}),
        (
            "matrix.problems",
            {"matrix.arch", "matrix.axes", "runtime.fa4_kernels.dispatch", "runtime.fa4_kernels.models.needs"},
        ),
        (
            "matrix.variants",
            {"errors", "matrix.arch", "matrix.axes", "matrix.problems", "matrix.selection", "matrix.spec"},
        ),
        ("matrix.tuning_backward", {"matrix.axes"}),
        ("matrix.tuning", {"errors", "matrix.arch", "matrix.axes", "matrix.tuning_backward"}),
        ("compiling.signature", {"errors", "matrix.axes", "runtime.fa4_kernels.abi"}),
        ("compiling.wiring", set()),
        ("compiling.context", {"errors", "matrix.axes", "matrix.tuning", "compiling.signature", "compiling.wiring"}),
        (
            "compiling.render",
            {"errors", "matrix.axes", "matrix.tuning", "matrix.variants", "compiling.context", "compiling.wiring"},
        ),
    ],
)
def test_the_first_values_of_the_pipeline_know_only_what_comes_before(name, allowed):
    """Selection -> Variant -> Tuning -> KernelSource: no stage reaches ahead, also within a room."""
    imported = {module.removeprefix("fa4build.") for module in GRAPH[f"fa4build.{name}"] if module in FILES}

    assert allowed >= imported


def test_nothing_imports_the_command_line_but_itself():
    """It is the top of the order."""
    users = {name for name, modules in GRAPH.items() if any(m.startswith("fa4build.cli") for m in modules)}

    assert all(name.startswith(("fa4build.cli", "fa4build.__main__")) for name in users)


def test_the_runtime_imports_nothing_of_the_builder_and_no_compiler():
    """It is shipped alone, to machines that have neither."""
    for name in FILES:
        if not name.startswith(f"{RUNTIME}."):
            continue
        outside = {m for m in GRAPH[name] if m.startswith("fa4build") and not m.startswith(RUNTIME)}
        assert set() == outside, name
        assert not {"cutlass", "jinja2", "click"} & imported_tops(name), name


def test_the_compiler_is_imported_by_code_generation_alone():
    """Everything else works, and starts fast, without it. What a family runs in the compile process may, inside."""
    users = {name for name in FILES if "cutlass" in imported_tops(name)}

    assert all(name == WORKER or name.startswith("fa4build.families.") for name in users)


# What is attention, and what is one family's: variants, tuning, rendered text, acceptance cases, the adapters.
OF_A_FAMILY = {
    *(f"fa4build.matrix.{name}" for name in ("axes", "variants", "tuning")),
    *(f"fa4build.cases.{name}" for name in ("forward", "backward", "varlen", "varlen_backward", "of_variant")),
    *(f"fa4build.compiling.{name}" for name in ("render", "context", "signature", "wiring")),
    *(f"fa4build.families.{name}" for name in ("fa4", "quack", "flash_attn_4")),
}
CORE = (
    *(
        "files",
        "pipeline",
        "matrix.arch",
        "matrix.selection",
        "store.cache",
        "store.entries",
        "store.evidence",
        "store.keys",
    ),
    *(f"compiling.{name}" for name in ("cubin", "executors", "fork_server", "toolchain")),
    *(f"shipping.{name}" for name in ("launcher_build", "manifest", "pack", "release", "sbom", "wheel", "wheel_file")),
    *(f"families.{name}" for name in ("interface", "registry", "kernels", "tracing")),
    *(name.removeprefix("fa4build.") for name in FILES if f"{name}.".startswith("fa4build.plan.")),
)


@pytest.mark.parametrize("name", CORE)
def test_the_core_knows_no_family(name):
    """Kernels, tensors and launch plans are all it knows; families are found by name, as text."""
    imported = GRAPH[f"fa4build.{name}"]

    assert not {module for module in imported for own in OF_A_FAMILY if f"{module}.".startswith(f"{own}.")}


def test_only_the_command_line_prints_or_exits():
    """Library code returns values and raises errors. The runtime has its own rules."""
    for name, tree in TREES.items():
        if name.startswith(("fa4build.cli", RUNTIME)) or _is_worker(name):
            continue
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert not {"print", "exit", "quit", "sys.exit"} & called, name


def _is_worker(name: str) -> bool:
    """Modules that are the main program of a process of their own."""
    return name in (WORKER, "fa4build.compiling.fork_server")


WATCH = """
import os, sys

seen = []
package = sys.argv[1]

def caller():
    # The innermost frame of the package, unless the import system came between it and the event.
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "importlib" in name:
            return None
        if name.startswith(package):
            return name
        frame = frame.f_back
    return None

def audit(event, args):
    if event in ("open", "os.listdir", "os.mkdir", "subprocess.Popen", "socket.connect") and caller():
        seen.append((event, str(args[0]), caller()))

real = type(os.environ).__getitem__

def reading(self, key):
    if caller():
        seen.append(("environ", key, caller()))
    return real(self, key)

type(os.environ).__getitem__ = reading
sys.addaudithook(audit)
for module in sys.argv[2:]:
    __import__(module)
heavy = sorted({"torch", "cutlass", "numpy", "jsonschema", "click"} & set(sys.modules))
print(repr((seen, heavy)))
"""


def watched_import(*modules: str) -> tuple[list, list]:
    """Files, environment variables and processes that importing touches, and heavy packages it loads."""
    command = [sys.executable, "-c", WATCH, str(PACKAGE), *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        pytest.fail(f"a module cannot be imported:\n{done.stderr}")
    return ast.literal_eval(done.stdout)


def test_importing_the_matrix_touches_nothing_and_loads_nothing_heavy():
    """No file, environment variable, torch or compiler, from fa4build to rendering."""
    modules = (
        "fa4build",
        "fa4build.matrix.variants",
        "fa4build.matrix.tuning",
        "fa4build.explain",
        "fa4build.compiling.signature",
    )

    assert ([], []) == watched_import(*modules)


def test_importing_any_module_of_the_builder_touches_no_file_and_no_environment():
    """Except the command line and the compiler's processes, which are programs."""
    modules = [
        name
        for name in FILES
        if not name.startswith(("fa4build.cli", RUNTIME))
        and not _is_worker(name)
        and "cutlass" not in imported_tops(name)
    ]
    seen, heavy = watched_import(*modules)

    assert [] == seen
    assert not {"torch", "cutlass"} & set(heavy)


def test_the_watch_notices_what_it_is_there_for(tmp_path):
    """A module that reads the environment and a file at import is caught: the tests above can fail."""
    (tmp_path / "noisy.py").write_text("import os\nos.environ.get('HOME')\nopen(__file__).close()\n")
    command = [sys.executable, "-c", WATCH, str(tmp_path), "noisy"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60, env={"PYTHONPATH": str(tmp_path)}
    )
    seen, _ = ast.literal_eval(done.stdout)

    assert ["environ", "open"] == [event for event, *_ in seen]
