"""Traces operators of the published flash-attn-4 package: what they compile and what they would launch, without a GPU.

The package runs on fake CUDA tensors. `cute.compile` is wrapped: each compiled function is replaced by one that
records its arguments; its launch plan is extracted as for our own kernels. Development only: nothing of it is
committed or shipped.
"""

import numpy as np

from fa4build.plan import LaunchPlan, evaluate
from fa4build.plan.extract.extraction import extract_plan
from fa4build.simulate import GlobalMemory, simulate_launch

NUM_SMS = 148
L2_BYTES = 50 << 20


class Call:
    """One call of a compiled function: its PTX, its plan, its arguments (tensors, numbers, None, nested)."""

    def __init__(self, ptx: str, plan: LaunchPlan, arguments: tuple):
        self.ptx, self.plan, self.arguments = ptx, plan, arguments


class _Recorder:
    """Stands in for a compiled function."""

    def __init__(self, compiled, calls: list):
        self.ptx = compiled.__ptx__
        self.plan = extract_plan(compiled.ir_module, elf=compiled.__cubin__, ptx=self.ptx, spec={})
        self.calls = calls

    def __call__(self, *arguments) -> None:
        self.calls.append(Call(self.ptx, self.plan, arguments))


class _Compile:
    """`cute.compile` with recording results, subscripting included."""

    def __init__(self, real, calls: list):
        self.real, self.calls = real, calls

    def __call__(self, *args, **kwargs):
        return _Recorder(self.real(*args, **kwargs), self.calls)

    def __getitem__(self, options):
        return lambda *args, **kwargs: _Recorder(self.real[options](*args, **kwargs), self.calls)

    def __getattr__(self, name):
        return getattr(self.real, name)


def trace(operator) -> tuple[list[Call], tuple]:
    """Runs `operator(torch, interface)` on fake tensors; returns the calls it makes and what it returns.

    The process must have been started with CUTE_DSL_ARCH, FLASH_ATTENTION_ARCH, FLASH_ATTENTION_NUM_SMS and
    CUTE_DSL_KEEP=ptx,cubin in its environment.
    """
    import cutlass.cute as cute
    import cutlass.utils
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls: list[Call] = []
    hardware = cutlass.utils.HardwareInfo
    hardware.__init__ = lambda self, *args, **kwargs: None
    hardware.get_max_active_clusters = lambda self, size, *args, **kwargs: NUM_SMS // size
    hardware.get_device_multiprocessor_count = lambda self, *args, **kwargs: NUM_SMS
    hardware.get_l2_cache_size_in_bytes = lambda self, *args, **kwargs: L2_BYTES
    torch.cuda.current_device = lambda: 0
    interface.is_fake_mode = lambda: False  # so that the compiled functions are called, with fake tensors
    cute.compile = _Compile(cute.compile, calls)
    with FakeTensorMode():
        returned = operator(torch, interface)
    return calls, returned


class Host:
    """Host memory behind fake tensors: one zeroed array per storage, registered as a buffer."""

    _DTYPES = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32, "int32": np.int32, "int64": np.int64}  # noqa: RUF012

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        self._storages: dict[int, tuple] = {}
        self.clusters: list[int] = []  # CTAs a cluster of every launch made

    def _storage(self, tensor) -> tuple[np.ndarray, int]:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            data = np.zeros(max(storage.nbytes() + 15 & ~15, 16), np.uint8)
            address = self.memory.add(f"storage{len(self._storages)}", data)
            self._storages[storage._cdata] = (data, address, storage)  # the storage stays alive: its key is its address
        return self._storages[storage._cdata][:2]

    def array(self, tensor) -> np.ndarray:
        """The tensor's elements as a writable array (16-bit floats and fp8 as bits)."""
        data, _ = self._storage(tensor)
        dtype = np.dtype(self._DTYPES.get(str(tensor.dtype).removeprefix("torch."), np.uint8))
        flat = data[tensor.storage_offset() * dtype.itemsize :]
        flat = flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
        strides = [s * dtype.itemsize for s in tensor.stride()]
        return np.lib.stride_tricks.as_strided(flat, tuple(tensor.shape), strides)

    def address(self, tensor) -> int:
        """Simulated address of the first element."""
        _, base = self._storage(tensor)
        return base + tensor.storage_offset() * tensor.element_size()

    def run(self, calls: list[Call], **options) -> int:
        """Simulates all calls in order; returns the warp instructions executed."""
        total = 0
        self.clusters = []
        for call in calls:
            for launch in evaluate(call.plan, self._inputs(call)):
                if not launch.is_empty:
                    self.clusters.append(launch.cluster[0])
                    total += simulate_launch(call.ptx, launch, self.memory, **options).warp_instructions
        return total

    def _inputs(self, call: Call) -> dict:
        inputs: dict = {"dev.sm_count": NUM_SMS, "dev.smem_optin": 232_448, "dev.l2_bytes": L2_BYTES}
        named = [arg for arg in call.plan.args if arg.kind != "device"]
        for arg, value in zip(named, _leaves(call.arguments), strict=True):
            if arg.kind != "tensor":
                inputs[arg.name] = value
                continue
            inputs[f"{arg.name}.ptr"] = self.address(value)
            for i, (extent, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
                inputs[f"{arg.name}.shape[{i}]"] = extent
                inputs[f"{arg.name}.stride[{i}]"] = stride
        return inputs


def _leaves(arguments) -> list:
    """Arguments in order without None; tuples and records are flattened."""
    out: list = []
    for value in arguments:
        if value is None:
            continue
        if isinstance(value, list | tuple):
            out += _leaves(value)
        elif hasattr(value, "shape") or isinstance(value, int | float):
            out.append(value)
        else:
            out += _leaves(getattr(value, name) for name in getattr(value, "__dataclass_fields__", ()))
    return out
