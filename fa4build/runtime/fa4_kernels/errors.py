"""Every error fa4_kernels raises on purpose.

A message says what went wrong, the value, what is allowed and what to do next.
"""


class FA4KernelsError(Exception):
    """Root of the tree."""


class InputError(FA4KernelsError, ValueError):
    """The tensors or numbers of a call do not make an attention problem that kernels take. Nothing was launched."""


class LayoutError(InputError):
    """A tensor must be copied before a kernel can read it. `position`: which argument of the launch, from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message, position)  # both, so that a copy in another process can be made of its arguments
        self.position = position

    def __str__(self) -> str:
        return str(self.args[0])


class NoKernelError(FA4KernelsError, NotImplementedError):
    """No installed kernel fits. The message is the trace: what was considered, and why each was refused."""


class PackError(FA4KernelsError):
    """An installed pack is damaged, or of a version this dispatcher does not read. Nothing of it was loaded."""


class TrustError(FA4KernelsError):
    """What the operator set about trust cannot be followed, so no pack is used."""


class DriverError(FA4KernelsError, RuntimeError):
    """The CUDA driver is missing, too old, or refused a call."""


class CaptureError(FA4KernelsError, RuntimeError):
    """A kernel would have to be loaded while a CUDA graph is being captured."""
