"""Launches cubins through the CUDA driver with nothing but torch and ctypes: for the scripts that record hardware."""

import ctypes
import time

TIME_LIMIT_S = 10.0
_MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DidNotEnd(Exception):
    """A kernel was still running after TIME_LIMIT_S; the GPU context is lost."""


class Driver:
    """The few CUDA driver calls that are needed, in the primary context that torch has made current."""

    def __init__(self):
        import torch

        torch.zeros(1, device="cuda")  # makes the primary context current in this thread
        self.torch, self.library = torch, ctypes.CDLL("libcuda.so.1")
        self.device_name = torch.cuda.get_device_name()
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count

    def call(self, function, *arguments):
        """One driver call; its error becomes a RuntimeError."""
        status = getattr(self.library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed with CUDA error {status}")

    def load(self, cubin, kernel, shared_bytes):
        """A kernel of a cubin, allowed `shared_bytes` of dynamic shared memory. Stays loaded until the process ends."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        return function

    def launch(self, function, grid, block, shared_bytes, parameters):
        """Launches on the default stream and waits. parameters: bytes of each kernel parameter.

        Raises: DidNotEnd after TIME_LIMIT_S; RuntimeError for an error of the launch or the kernel.
        """
        self.torch.cuda.synchronize()
        buffers = [ctypes.create_string_buffer(data, len(data)) for data in parameters]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        extents = [ctypes.c_uint(extent) for extent in (*grid, *block, shared_bytes)]
        self.call("cuLaunchKernel", function, *extents, ctypes.c_void_p(), pointers, ctypes.c_void_p())
        done = self.torch.cuda.Event()
        done.record(self.torch.cuda.default_stream())
        deadline = time.monotonic() + TIME_LIMIT_S
        while not done.query():
            if time.monotonic() > deadline:
                raise DidNotEnd
            time.sleep(0.001)

    def to_device(self, array):
        """A copy of a numpy array's bytes on the GPU (a uint8 tensor)."""
        return self.torch.from_numpy(array.reshape(-1).view("uint8").copy()).cuda()

    def to_host(self, tensor, like):
        """The bytes of a GPU tensor as an array of the dtype and shape of `like`."""
        return tensor.cpu().numpy().view(like.dtype).reshape(like.shape)
