"""A runtime whose device is the PTX simulator: what the launcher hands to the stand-in driver is executed on the CPU
tensors of the call, in their own memory.
"""

import ctypes

import numpy as np
from fa4_kernels import loader, packs

from fa4build.matrix.arch import arch_named
from fa4build.matrix.variants import parse_variant
from fa4build.plan.as_json import plan_to_json
from fa4build.plan.values import BytesParam, Launch, TensorMapParam
from fa4build.simulate import GlobalMemory, simulate_launch
from fa4build.simulate.hardware.global_memory import Buffer
from tests.built import cubin_of
from tests.runtime.fake import fake_cubin, param_bytes, read_map, write_pack

# Numbers of the driver's enumerations (cuda.h, CUtensorMap*) -> the words of launch plans.
_TYPES = dict(enumerate(("u8", "u16", "u32", "i32", "u64", "i64", "f16", "f32", "f64", "bf16")))
_SWIZZLES, _INTERLEAVES, _PROMOTIONS = (0, 32, 64, 128), (0, 16, 32), (0, 64, 128, 256)
_FILLS = ("zero", "nan")


def compile_variants(ids):
    """id -> Cubin of the real kernels."""
    return {name: cubin_of(name) for name in ids}


class SimulatedRuntime(loader.Runtime):
    """Kernels of `cubins` behind the launcher; every launch is executed before `run` returns, `launched` names them."""

    def __init__(self, cubins, directory, fake):
        self._cubins, self._fake, self.launched = cubins, fake, []
        opened = [packs.open_pack(name, _pack(directory / name, name, cubin)) for name, cubin in cubins.items()]
        super().__init__(driver_path=fake.path, device_type=loader.CPU, packs=opened, stream_of=lambda ordinal: 0)

    def load(self, pack, entry, ordinal):
        return _SimulatedLaunch(super().load(pack, entry, ordinal), self._cubins[entry.id], self)


class _SimulatedLaunch:
    def __init__(self, launch, cubin, runtime):
        self._launch, self._cubin, self._runtime = launch, cubin, runtime

    def run(self, *arguments):
        """Launch on the stand-in driver, then execute what it recorded."""
        self._runtime._fake.reset_launches()
        self._launch.run(*arguments)
        memory = _memory_of(arguments)
        for record, planned in zip(self._runtime._fake.launches, self._cubin.plan.launches, strict=True):
            self._runtime.launched.append(record.kernel.decode())
            simulate_launch(self._cubin.ptx, _recorded_launch(record, planned), memory)


def _memory_of(arguments):
    """The storages of all tensors among the arguments, at their own addresses."""
    memory = GlobalMemory()
    for argument in arguments:
        if not hasattr(argument, "untyped_storage"):
            continue
        storage = argument.untyped_storage()
        if storage.data_ptr() in {buffer.base for buffer in memory.buffers}:
            continue
        data = np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
        memory.buffers.append(Buffer(f"storage {len(memory.buffers)}", storage.data_ptr(), data, read_only=False))
    return memory


def _recorded_launch(record, planned):
    """What reached the driver, as a value the simulator takes; `planned` says where a parameter ends."""
    data, offset, params = param_bytes(record), 0, []
    for param in planned.params:
        size = getattr(param, "size", 128)
        chunk = data[offset : offset + size]
        params.append(BytesParam(data=chunk, mask=b"\xff" * size) if hasattr(param, "size") else _tensor_map(chunk))
        offset += size
    return Launch(
        kernel=record.kernel.decode(),
        grid=tuple(record.grid),
        block=tuple(record.block),
        cluster=tuple(record.cluster),
        smem=record.smem,
        pdl=False,
        cooperative=False,
        params=tuple(params),
    )


def _tensor_map(data):
    fields = read_map(data)
    return TensorMapParam(
        dtype=_TYPES[fields["dtype"]],
        addr=fields["address"],
        dims=fields["dims"],
        strides=fields["strides"],
        box=fields["box"],
        elem_strides=fields["elem_strides"],
        swizzle=_SWIZZLES[fields["swizzle"]],
        interleave=_INTERLEAVES[fields["interleave"]],
        l2_promotion=_PROMOTIONS[fields["promotion"]],
        oob_fill=_FILLS[fields["fill"]],
    )


def _pack(directory, name, cubin):
    import json

    document = json.loads(plan_to_json(cubin.plan))
    sizes = {
        launch["kernel"]: [128 if p["kind"] == "tmap" else p["size"] for p in launch["params"]]
        for launch in document["launches"]
    }
    target = arch_named(parse_variant(name).arch).target
    return write_pack(directory, [name], target=target, plan=document, cubin=fake_cubin(**sizes))
