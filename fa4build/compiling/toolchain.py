"""Which compiler a kernel would be built by, known without importing it.

The identity goes into every cache key: equal toolchains give equal cubins. It is read from installed metadata: each
`nvidia-cutlass-dsl*` distribution with its version and the digest of its RECORD (which lists the sha256 of every
installed file), so a rebuilt wheel of the same version is another toolchain. Not for choosing a compiler: there is one,
pinned exactly.
"""

import csv
import hashlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path

from fa4build.errors import ToolchainError

DSL_VERSION = "4.8.1"
"""The one DSL version this fa4build is tested with; pyproject.toml pins the same."""

BACKEND = "cu13"
"""The flavour of the DSL's compiler. The DSL picks one by the machine's driver; the compile process checks it."""

ENVIRONMENT = (
    ("CUTE_DSL_COMPILER_BACKEND", "legacy"),  # its `ir_module` is the lowered host code that launch plans are read from
    ("CUTE_DSL_DISABLE_FILE_CACHING", "1"),  # one compile must not find what another left
    ("LC_ALL", "C.UTF-8"),
    ("NO_COLOR", "1"),
    ("OMP_NUM_THREADS", "1"),  # no thread pools: the compile process is forked
    ("OPENBLAS_NUM_THREADS", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONHASHSEED", "0"),  # no set order may reach a cubin
)
"""What a compile process finds in its environment, beside PATH and its own scratch directory. Nothing is inherited."""

STEERING = re.compile(
    r"(CUTE|CUTLASS|MLIR|LLVM|NVVM|NVPTX|PTXAS|NVJITLINK|TVM_FFI|FLASH_ATTENTION|FLASH_ATTN|QUACK)_.+|FA_(CLC|DISABLE|LOG).*"
)
"""Variables that would change what a direct use of the compiler makes. Setting one is refused, not ignored."""

_DISTRIBUTIONS = re.compile(r"(nvidia_cutlass_dsl.*|apache_tvm_ffi)-[^-]+\.dist-info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """An installed distribution: normalised name, version, and the sha256 of what its RECORD says is installed."""

    name: str
    version: str
    record_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """Everything outside the sources that decides what a compile gives.

    `backend` is the compiler flavour (`cu13`), `environment` the environment of the compile process as sorted
    (name, value) pairs, `distributions` sorted by name. `builder_sha256` is over `fa4build/compiling` and
    `fa4build/plan`: how the compiler is called, and how the launch plan is read from what it made.
    """

    dsl_version: str
    backend: str
    distributions: tuple[Distribution, ...]
    builder_sha256: str
    environment: tuple[tuple[str, str], ...] = ENVIRONMENT


def current_toolchain(search_path: Sequence[str] | None = None) -> Toolchain:
    """The installed toolchain.

    Args:
        search_path: directories to look for distributions in; default: `sys.path`.
    Raises: ToolchainError when the DSL is missing, any of its distributions has another version than DSL_VERSION, or
        the cu13 flavour is not there.
    """
    found = _installed(sys.path if search_path is None else search_path)
    dsl = {name: dist for name, dist in found.items() if name.startswith("nvidia-cutlass-dsl")}
    if "nvidia-cutlass-dsl" not in dsl:
        raise ToolchainError(
            f"nvidia-cutlass-dsl is not installed, version {DSL_VERSION} is needed to compile. "
            f"Run: pip install 'nvidia-cutlass-dsl[{BACKEND}]=={DSL_VERSION}'"
        )
    wrong = sorted(f"{dist.name} {dist.version}" for dist in dsl.values() if dist.version != DSL_VERSION)
    if wrong:
        raise ToolchainError(
            f"installed: {', '.join(wrong)}; tested: {DSL_VERSION} only, for all of {', '.join(sorted(dsl))}. "
            f"Run: pip install 'nvidia-cutlass-dsl[{BACKEND}]=={DSL_VERSION}'"
        )
    if f"nvidia-cutlass-dsl-libs-{BACKEND}" not in dsl:
        raise ToolchainError(
            f"the {BACKEND} flavour of nvidia-cutlass-dsl is not installed (found: {', '.join(sorted(dsl))}). "
            f"Run: pip install 'nvidia-cutlass-dsl[{BACKEND}]=={DSL_VERSION}'"
        )
    if "apache-tvm-ffi" not in found:
        raise ToolchainError(
            "apache-tvm-ffi is not installed; launch plans are read through it. Run: pip install fa4build"
        )
    return Toolchain(
        dsl_version=DSL_VERSION,
        backend=BACKEND,
        distributions=tuple(found[name] for name in sorted(found)),
        builder_sha256=tree_sha256(Path(__file__).parents[1], "compiling", "plan"),
    )


def installed_distribution(name: str, search_path: Sequence[str] | None = None) -> Distribution | None:
    """An installed distribution by its normalised name (`flash-attn-4`), None if there is none.

    Raises: ToolchainError when its RECORD is missing or damaged.
    """
    stem = name.replace("-", "_")
    for directory in sys.path if search_path is None else search_path:
        for path in sorted(Path(directory or ".").glob(f"{stem}-*.dist-info")):
            return _distribution(name, path)
    return None


def refuse_steering(environ: Mapping[str, str]) -> None:
    """Refuse variables that people set to steer the compiler: here they would silently do nothing.

    Raises: ToolchainError naming each variable that matches STEERING, unless its value is the pinned one.
    """
    pinned = dict(ENVIRONMENT)
    found = sorted(name for name in environ if STEERING.fullmatch(name) and pinned.get(name) != environ[name])
    if found:
        values = ", ".join(f"{name}={environ[name]}" for name in found)
        raise ToolchainError(
            f"the environment steers the compiler: {values}. fa4build compiles in a fixed environment so that a key "
            f"stands for one cubin. Unset them: unset {' '.join(found)}"
        )


def record_sha256(record: str) -> str:
    """Digest of a RECORD, the same on every machine that installed the same wheel.

    Only rows with a file hash count, in sorted order: installers add unhashed rows of their own (byte code, INSTALLER),
    and rows outside the package directory (scripts) depend on the installation.
    """
    rows = sorted((path, digest) for path, digest, _ in csv.reader(record.splitlines()) if _is_from_wheel(path, digest))
    return hashlib.sha256("\n".join(f"{path},{digest}" for path, digest in rows).encode()).hexdigest()


def tree_sha256(directory: Path, *folders: str) -> str:
    """Digest of the Python files below a directory, or below some folders of it: relative paths and contents."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders or (".",) for path in (directory / folder).rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(directory).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def damaged_files(distribution_name: str, search_path: Sequence[str] | None = None) -> tuple[str, ...]:
    """Installed files that differ from what RECORD says, or are missing. Reads every file of the distribution.

    Returns: their paths as RECORD names them, sorted; empty when all is well.
    """
    metadata = _metadata_directories(sys.path if search_path is None else search_path)[distribution_name]
    damaged = []
    for path, digest, _ in csv.reader((metadata / "RECORD").read_text(encoding="utf-8").splitlines()):
        if _is_from_wheel(path, digest) and _record_hash(metadata.parent / path) != digest:
            damaged.append(path)
    return tuple(sorted(damaged))


def _record_hash(path: Path) -> str | None:
    """The hash of a file as RECORD spells it, or None when there is no such file."""
    import base64

    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return None
    return "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


def _is_from_wheel(path: str, digest: str) -> bool:
    """Whether a RECORD row names a file the wheel brought, rather than one an installer made."""
    made_by_installer = path.endswith((".dist-info/INSTALLER", ".dist-info/REQUESTED", ".dist-info/direct_url.json"))
    return bool(digest) and not made_by_installer and not path.startswith("..") and not path.endswith(".pyc")


def _metadata_directories(search_path: Iterable[str]) -> dict[str, Path]:
    """Metadata directories of the compiler's distributions by normalised name; the first on the path wins."""
    found: dict[str, Path] = {}
    for directory in search_path:
        root = Path(directory or ".")
        if not root.is_dir():
            continue
        for path in sorted(root.glob("*.dist-info")):
            if _DISTRIBUTIONS.fullmatch(path.name):
                found.setdefault(path.name.split("-")[0].replace("_", "-").lower(), path)
    return found


def _installed(search_path: Iterable[str]) -> dict[str, Distribution]:
    """The compiler's distributions on the path, by normalised name."""
    return {name: _distribution(name, path) for name, path in _metadata_directories(search_path).items()}


def _distribution(name: str, metadata: Path) -> Distribution:
    """A distribution from its metadata directory."""
    distribution = PathDistribution(metadata)
    record = distribution.read_text("RECORD")
    if record is None:
        raise ToolchainError(f"{metadata.name} has no RECORD, so its contents are unknown. Reinstall it with pip.")
    try:
        digest = record_sha256(record)
    except (ValueError, csv.Error) as error:
        raise ToolchainError(f"{metadata.name}: its RECORD is damaged ({error}). Reinstall it with pip.") from error
    return Distribution(name=name, version=distribution.version, record_sha256=digest)
