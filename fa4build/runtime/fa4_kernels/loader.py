"""The state of a process: the driver, the packs, and which kernels are loaded on which device.

One `Runtime` serves a process. It is made at the first call that needs it, loads a kernel once a device, and never
unloads.
"""

import fnmatch
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from .abi import OUTPUT_DTYPES, SIGNATURES
from .dispatch import Decision, Device, Problem, chosen, dispatch, extents_of, signature_of
from .errors import CaptureError, DriverError, InputError, LayoutError, PackError
from .packs import Entry, Pack, PackReader, RefusedPack, installed_packs, usable
from .plan import DEVICE_LEAVES, encode_plan, parse_plan
from .record import MissRecorder
from .trust import NO_TRUST, TrustPolicy, environment_policy

DRIVER_PATH = "libcuda.so.1"
CPU, CUDA = 1, 2
"""Device types as DLPack numbers them."""


def _no_capture() -> bool:
    return False


class Runtime:
    """Decides and loads.

    Args:
        driver_path: the CUDA driver library.
        device_type: where tensors must lie; CPU exists for tests with a stand-in driver.
        packs: instead of the installed ones.
        stream_of: device ordinal -> handle of the stream to launch on.
        is_capturing: whether a CUDA graph is being captured on the current stream.
        report: receives the text of each decision, or None.
        family: whose kernels are preferred; None leaves it to evidence.
        trust: which packs among the installed ones may be used.
        recorder: receives each decision, and writes down those without a kernel; or None.
    """

    def __init__(
        self,
        *,
        driver_path: str = DRIVER_PATH,
        device_type: int = CUDA,
        packs: Iterable[Pack | RefusedPack] | None = None,
        stream_of: Callable[[int], int],
        is_capturing: Callable[[], bool] = _no_capture,
        report: Callable[[str], None] | None = None,
        family: str | None = None,
        trust: TrustPolicy = NO_TRUST,
        recorder: MissRecorder | None = None,
    ) -> None:
        self._launcher = _import_launcher()
        self._driver = self._launcher.Driver(driver_path)
        self._device_type = device_type
        self._packs = None if packs is None else tuple(packs)
        self._stream_of = stream_of
        self._is_capturing = is_capturing
        self._report = report
        self._trust = trust
        self._recorder = recorder
        self._reader = PackReader()
        self._lock = threading.RLock()
        self._devices: dict[int, Device] = {}
        self._libraries: dict[str, Any] = {}
        self._launches: dict[tuple[str, str, int, bool], Any] = {}
        self.evidence: str | None = None
        self.accept_claims = False
        self.family = family

    @property
    def device_type(self) -> int:
        """CPU or CUDA."""
        return self._device_type

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self._is_capturing()

    @property
    def driver_version(self) -> tuple[int, int]:
        """CUDA version that the driver supports."""
        return self._driver.version()

    @property
    def num_devices(self) -> int:
        """Devices the driver sees."""
        return self._driver.device_count()

    @property
    def packs(self) -> tuple[Pack | RefusedPack, ...]:
        """Installed packs, looked up once."""
        with self._lock:
            if self._packs is None:
                self._packs = installed_packs(self._trust)
            return self._packs

    def device(self, ordinal: int) -> Device:
        """Facts of a device, asked for once."""
        if ordinal not in self._devices:
            self._devices[ordinal] = Device(**self._driver.device(ordinal))
        return self._devices[ordinal]

    def decide(self, problem: Problem, ordinal: int) -> Decision:
        """What `dispatch` says about the packs. Raises: InputError when no pack is of the family asked for."""
        families = {pack.manifest.family for pack in usable(self.packs)}
        if self.family is not None and families and self.family not in families:
            raise InputError(f"FA4_KERNELS_FAMILY is {self.family!r}; installed: {', '.join(sorted(families))}.")
        required = {"evidence": self.evidence, "claims": self.accept_claims}
        decision = dispatch(problem, self.device(ordinal), self.packs, **required, family=self.family)
        if self._report is not None:
            self._report(str(decision))
        if self._recorder is not None:
            self._recorder.note(decision)
        return decision

    def launch_for(self, problem: Problem, ordinal: int) -> Any:
        """The loaded kernel for a problem on a device: an object with `run(*arguments)`.

        Raises: NoKernelError, PackError, DriverError, CaptureError.
        """
        pack, entry = chosen(self.decide(replace(problem, extents=None), ordinal))
        if entry.axes.get("when"):
            return ByExtents(self, problem, ordinal, signature_of(entry))
        return self.load(pack, entry, ordinal)

    def load(self, pack: Pack, entry: Entry, ordinal: int) -> Any:
        """Load an entry on a device unless it is there already; the launch object, called as its operator's signature.

        Raises: PackError, DriverError, CaptureError.
        """
        return self._kept(pack, entry, ordinal, bound_plan)

    def load_as_planned(self, pack: Pack, entry: Entry, ordinal: int) -> Any:
        """Load an entry that is called with exactly its plan's arguments: a step of a recipe. Otherwise as `load`."""
        return self._kept(pack, entry, ordinal, plan_alone)

    def _kept(self, pack: Pack, entry: Entry, ordinal: int, binding: Callable[..., Any]) -> Any:
        key = (entry.cubin.sha256, entry.plan.sha256, ordinal, binding is bound_plan)
        with self._lock:
            launch = self._launches.get(key)
            if launch is None:
                launch = self._launches[key] = self._load(pack, entry, ordinal, binding)
            return launch

    def _load(self, pack: Pack, entry: Entry, ordinal: int, binding: Callable[..., Any]) -> Any:
        if self._is_capturing():
            raise CaptureError(
                f"{entry.id} is not loaded yet, and loading would break the CUDA graph being captured. "
                f"Call fa4_kernels.preload(devices=[{ordinal}], select='{entry.id}') before the capture."
            )
        cubin, plan_text = self._reader.read(pack, entry)
        plan = self._launcher.Plan(encode_plan(*binding(parse_plan(plan_text), entry)))
        library = self._libraries.get(entry.cubin.sha256)
        if library is None:
            library = self._libraries[entry.cubin.sha256] = self._driver.load(cubin)
        return self._launcher.Launch(self._driver, plan, library, ordinal, self._stream_of, self._device_type)

    def preload(self, devices: Iterable[int], select: str | Iterable[str] = "*") -> tuple[str, ...]:
        """Load every kernel that runs on the devices and whose id matches a glob of `select`; the ids, sorted.

        Raises: InputError when nothing matches, else as `launch_for`.
        """
        globs = (select,) if isinstance(select, str) else tuple(select)
        loaded: set[str] = set()
        targets = {ordinal: self.device(ordinal).target for ordinal in devices}
        for pack in usable(self.packs):
            wanted = [
                entry
                for entry in pack.manifest.entries
                if entry.target in targets.values() and any(fnmatch.fnmatchcase(entry.id, glob) for glob in globs)
            ]
            # Group by group, whatever the order of ids: the reader keeps one. Decompressing takes the most time, and
            # the next group's runs beside the loading of this one's kernels.
            groups = sorted({entry.cubin.group for entry in wanted})
            for group, following in zip(groups, (*groups[1:], None), strict=False):
                if following is not None:
                    self._reader.expect(pack, pack.manifest.groups[following])
                for entry in (entry for entry in wanted if entry.cubin.group == group):
                    load = self.load if signature_of(entry) in SIGNATURES else self.load_as_planned
                    for ordinal in (ordinal for ordinal, target in targets.items() if target == entry.target):
                        load(pack, entry, ordinal)
                    loaded.add(entry.id)
        if not loaded:
            known = sorted(entry.id for pack in usable(self.packs) for entry in pack.manifest.entries)
            raise InputError(f"preload: {', '.join(globs)} matches no kernel of these devices. Installed: {known}.")
        return tuple(sorted(loaded))


class ByExtents:
    """Stands for the launch of a problem whose kernel depends on a call's extents; decides once for each of them."""

    def __init__(self, runtime: Runtime, problem: Problem, ordinal: int, operator: str) -> None:
        self._runtime = runtime
        self._problem = problem
        self._ordinal = ordinal
        self._operator = operator
        self._launches: dict[tuple[Any, ...], Any] = {}

    def run(self, *arguments: Any) -> None:
        """Launch. Raises: NoKernelError when no kernel is for these extents, else as a launch of one kernel."""
        self.launch_for(*arguments).run(*arguments)

    def launch_for(self, *arguments: Any) -> Any:
        """The launch of the kernel for these tensors. Raises: as `run`."""
        key = (arguments[0].shape, arguments[1].shape)  # the extents of the operators' other tensors follow from these
        launch = self._launches.get(key)
        return self._decide(key, arguments) if launch is None else launch

    def _decide(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Any:
        sm_count = self._runtime.device(self._ordinal).sm_count
        problem = replace(self._problem, extents=extents_of(self._operator, arguments, sm_count))
        launch = self._runtime.load(*chosen(self._runtime.decide(problem, self._ordinal)), self._ordinal)
        if len(self._launches) >= _MAX_SHAPES:
            self._launches.clear()
        self._launches[key] = launch
        return launch


def plan_alone(plan: dict[str, Any], entry: Entry) -> tuple[dict[str, Any], dict[str, int]]:
    """The plan with its own arguments in its own order; its guards speak for alignment."""
    return plan, {}


def bound_plan(plan: dict[str, Any], entry: Entry) -> tuple[dict[str, Any], dict[str, int]]:
    """The plan with exactly the arguments of the operator's signature, in its order, and the alignment of each tensor.

    A plan may leave out arguments its kernel does not read; callers pass all of them.
    Raises: PackError when the plan has an argument that the signature lacks or describes differently.
    """
    if signature_of(entry) not in SIGNATURES:
        raise PackError(f"{entry.id} is called in a way this fa4-kernels does not know; upgrade fa4-kernels.")
    signature = SIGNATURES[signature_of(entry)]
    own = str(entry.axes["dtype"])
    words = {"variant": own, "output": OUTPUT_DTYPES.get(own, own)}
    args: list[dict[str, Any]] = []
    align_bytes: dict[str, int] = {}
    for name, kind, dtype, *rest in signature:
        arg: dict[str, Any] = {"name": name, "kind": kind, "dtype": words.get(dtype, dtype)}
        if kind == "tensor":
            shape, align_bytes[name] = rest
            arg["rank"] = len(shape)
        args.append(arg)
    expected = {arg["name"]: arg for arg in args}
    try:
        for arg in plan["args"]:
            if arg["kind"] == "device" and arg["name"] in DEVICE_LEAVES:
                args.append(arg)
            elif expected.get(arg["name"]) != arg | {"dtype": {"f16": "fp16"}.get(arg["dtype"], arg["dtype"])}:
                raise PackError(f"{entry.id}: its plan takes {arg}, the signature of {entry.op} has no such argument.")
    except (KeyError, TypeError) as error:
        raise PackError(f"{entry.id}: the arguments of its plan are damaged ({error!r}); install it again.") from error
    return plan | {"args": args}, align_bytes


def _import_launcher() -> Any:
    try:
        from . import _launcher
    except ImportError as error:
        raise DriverError(
            f"fa4_kernels has no compiled launcher for this machine ({error}). Install the fa4-kernels wheel for it: "
            f"{_wheel_tag()}."
        ) from error
    _launcher.use_errors(InputError, LayoutError, DriverError, PackError)
    return _launcher


def _wheel_tag() -> str:
    """Tag of the runtime wheel that this interpreter needs."""
    import os
    import sys

    release = f"cp{sys.version_info.major}{sys.version_info.minor}"
    interpreters = f"{release}-{release}t" if "t" in getattr(sys, "abiflags", "") else "cp310-abi3"
    return f"{interpreters}-manylinux_2_28_{os.uname().machine}"


_MAX_SHAPES = 4096

_remembered: dict[str, dict[tuple[Any, ...], Any]] = {}


def remembered(kind: str) -> dict[tuple[Any, ...], Any]:
    """What a module keeps about calls it has seen, a dictionary a kind: of the runtime of the process, and emptied with
    it."""
    return _remembered.setdefault(kind, {})


required_evidence: str | None = None
accepted_claims = False
"""What require_evidence asks for, before the runtime of the process is made."""

_runtime: Runtime | None = None
_runtime_lock = threading.Lock()


def runtime() -> Runtime:
    """The runtime of this process, for torch tensors; made at the first call."""
    global _runtime
    if _runtime is None:
        with _runtime_lock:
            if _runtime is None:
                made = _torch_runtime()
                made.evidence, made.accept_claims = required_evidence, accepted_claims
                _runtime = made
    return _runtime


def require_evidence(level: str | None, *, accept_claims: bool = False) -> None:
    """Kernels used from now on must have passed `level`. Needs no driver: a runtime made later asks for it too."""
    global required_evidence, accepted_claims
    required_evidence, accepted_claims = level, accept_claims
    if _runtime is not None:
        _runtime.evidence, _runtime.accept_claims = level, accept_claims
    forget_calls()


def use_runtime(replacement: Runtime | None) -> None:
    """Replace the runtime of this process; None makes a new one at the next call. For tests and tools."""
    global _runtime, required_evidence, accepted_claims
    _runtime, required_evidence, accepted_claims = replacement, None, False
    forget_calls()


_compiled_calls: dict[str, Any] = {}


def compiled_calls(kind: str) -> Any:
    """The launcher's table of calls it answers alone, `ForwardCalls` or `RecipeCalls`: one for the process."""
    if kind not in _compiled_calls:
        import torch

        from .observers import LEVELS, OBSERVERS

        made = getattr(_import_launcher(), kind)
        _compiled_calls[kind] = made(torch.Tensor, torch.is_grad_enabled, OBSERVERS, LEVELS)
    return _compiled_calls[kind]


def forget_calls() -> None:
    """Decide anew at the next call of each configuration."""
    for kept in _remembered.values():
        kept.clear()
    for calls in _compiled_calls.values():
        calls.clear()


def serves_cpu() -> bool:
    """True when this process was given a runtime for CPU tensors. Opens no driver."""
    return _runtime is not None and _runtime.device_type == CPU


def _torch_runtime() -> Runtime:
    import os
    import sys

    import torch

    def stream_of(ordinal: int) -> int:
        return torch.cuda.current_stream(ordinal).cuda_stream

    # The same number without a Stream object around it; torch's own compiler relies on it.
    stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", stream_of)

    def is_capturing() -> bool:
        # Without the first condition the question alone would start CUDA in a process that only preloads.
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def report(text: str) -> None:
        print(f"fa4_kernels: {text}", file=sys.stderr)

    trace = os.environ.get("FA4_KERNELS_TRACE", "") not in ("", "0")
    record = os.environ.get("FA4_KERNELS_RECORD", "")
    family = os.environ.get("FA4_KERNELS_FAMILY") or None
    return Runtime(
        family=family,
        stream_of=stream_of,
        is_capturing=is_capturing,
        report=report if trace else None,
        trust=environment_policy(os.environ),
        recorder=MissRecorder(record) if record else None,
    )
