"""GPUs by the names that people have for them."""

import difflib
import re
from typing import NamedTuple

from ..abi import TARGETS
from ..errors import InputError


class Gpu(NamedTuple):
    """One product. target: of the cubins it runs, `sm_90a`; num_sms: streaming multiprocessors, as shipped."""

    name: str
    target: str
    num_sms: int

    @property
    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""
        return TARGETS[self.target]


# The number of SMs decides only whether decoding splits its keys; boards of one product differ by a few.
GPUS = (
    Gpu("H200", "sm_90a", 132),
    Gpu("H100", "sm_90a", 132),
    Gpu("H800", "sm_90a", 132),
    Gpu("H20", "sm_90a", 78),
    Gpu("GH200", "sm_90a", 132),
    Gpu("B200", "sm_100a", 148),
    Gpu("GB200", "sm_100a", 148),
    Gpu("B300", "sm_103a", 148),
    Gpu("GB300", "sm_103a", 148),
)
"""The products that run the targets there are kernels for; the first of a target stands for it."""

_BY_NAME = {gpu.name: gpu for gpu in GPUS}


def gpu_named(text: str) -> Gpu:
    """The GPU of a name: `H200`, `NVIDIA B200`, `sm90`, `sm_100a`, `10.3`; in any case.

    Raises: InputError, listing what is allowed.
    """
    words = re.findall(r"[A-Z0-9_.]+", text.upper())
    for word in words:
        if word in _BY_NAME:
            return _BY_NAME[word]
        target = _target_of(word)
        if target is not None:
            return next(gpu for gpu in GPUS if gpu.target == target)
    products = ", ".join(gpu.name for gpu in GPUS)
    targets = ", ".join(target.replace("_", "").rstrip("a") for target in TARGETS)
    near = difflib.get_close_matches(text.upper(), _BY_NAME, n=1, cutoff=0.6)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise InputError(f"GPU {text!r} is unknown. Allowed: {products}, or a target: {targets}.{meant}")


def _target_of(word: str) -> str | None:
    number = re.fullmatch(r"(?:SM_?)?(\d{1,2})\.?(\d)A?", word)
    if number is None:
        return None
    capability = (int(number[1]), int(number[2]))
    return next((target for target, known in TARGETS.items() if known == capability), None)
