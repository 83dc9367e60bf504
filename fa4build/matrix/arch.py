"""The one table of GPU targets: how they are named, where their cubins run, and the capacities tuning needs.

Nothing else in fa4build spells a target or compares compute capabilities.
"""

import difflib
from dataclasses import dataclass

from fa4build.errors import VariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """One compilation target and the hardware facts that depend on it.

    Attributes:
        name: spelling in variant ids, `sm90a`.
        target: spelling for the compiler and in manifests, `sm_90a`.
        compute_capability: the only one a cubin of this target runs on (the `a` suffix promises no other).
        aliases: further names accepted from users.
        smem_bytes: shared memory one CTA can use.
        register_file: 32-bit registers of one SM.
        tmem_columns: 32-bit columns of tensor memory, 0 where there is none.
        exp2_per_clock: results of MUFU.EX2 per clock and SM.
        cta_groups: how many CTAs may share one MMA.
    """

    name: str
    target: str
    compute_capability: tuple[int, int]
    aliases: tuple[str, ...]
    smem_bytes: int
    register_file: int
    tmem_columns: int
    exp2_per_clock: int
    cta_groups: tuple[int, ...]


# Sources: CUDA C++ Programming Guide, technical specifications per compute capability (227 KiB of shared memory a
# CTA, 64 Ki registers an SM) and arithmetic throughput (exp2); that sm103a has twice the exp2 rate is what
# flash-attn-4 4.0.0b36 builds on. PTX ISA: "Target architecture" (suffix `a`), "Tensor memory" (512 columns of 128
# lanes), "tcgen05 .cta_group".
ARCHES: tuple[Arch, ...] = (
    Arch(
        name="sm90a",
        target="sm_90a",
        compute_capability=(9, 0),
        aliases=("sm90", "sm_90", "sm_90a"),
        smem_bytes=232448,
        register_file=65536,
        tmem_columns=0,
        exp2_per_clock=16,
        cta_groups=(1,),
    ),
    Arch(
        name="sm100a",
        target="sm_100a",
        compute_capability=(10, 0),
        aliases=("sm100", "sm_100", "sm_100a"),
        smem_bytes=232448,
        register_file=65536,
        tmem_columns=512,
        exp2_per_clock=16,
        cta_groups=(1, 2),
    ),
    Arch(
        name="sm103a",
        target="sm_103a",
        compute_capability=(10, 3),
        aliases=("sm103", "sm_103", "sm_103a"),
        smem_bytes=232448,
        register_file=65536,
        tmem_columns=512,
        exp2_per_clock=32,
        cta_groups=(1, 2),
    ),
)

GPUS = {
    "sm90a": ("H100", "H200", "H800", "H20", "GH200"),
    "sm100a": ("B200", "GB200"),
    "sm103a": ("B300", "GB300"),
}
"""Products that people name instead of a target; the runtime knows the same ones."""

_BY_NAME = {name: arch for arch in ARCHES for name in (arch.name, *arch.aliases)}
_OF_GPU = {gpu: _BY_NAME[name] for name, gpus in GPUS.items() for gpu in gpus}


def arch_named(name: str) -> Arch:
    """The target with this name or alias, or of the GPU with this name (`H100`, `B200`); in any case.

    Raises: VariantError, listing what is allowed.
    """
    found = _BY_NAME.get(name.lower()) or _OF_GPU.get(name.upper())
    if found is not None:
        return found
    allowed = ", ".join(f"{arch.name} (or {arch.aliases[0]})" for arch in ARCHES)
    near = difflib.get_close_matches(name.upper(), _OF_GPU, n=1, cutoff=0.6)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise VariantError(f"arch {name!r} is unknown. Allowed: {allowed}, or a GPU such as H200 or B200.{meant}")


def runs_on(arch: Arch, compute_capability: tuple[int, int]) -> bool:
    """Whether a cubin of `arch` loads on a device of this compute capability: only where the two are equal."""
    return arch.compute_capability == compute_capability
