"""The family `upstream`: attention kernels of flash-attn-4, an optional package, pinned.

Nothing of the package is committed or shipped but what is compiled from it; its licence goes into every wheel.

- `configuration`: which tiles the library takes, and the facts of a problem's shape that reach its compile key.
- `matrix`: the declared kernels of each target.
- `recipes`: how operators are called with them.
- `cases`: what the operators must compute.
- `compiling`: in the compile process, the library's own Python code on fake tensors.
"""

from __future__ import annotations

from dataclasses import replace

from fa4build.families.flash_attn_4.matrix import kernels, on_request
from fa4build.families.flash_attn_4.recipes import op_recipes
from fa4build.families.interface import Family, OpRecipe
from fa4build.families.kernels import TORCH_WORKER, Pinned, kernel_family, licence_files
from fa4build.families.proof import ProofCase

# Every variable of the library that changes what it compiles, at the library's own default.
ENVIRONMENT = {
    "FA_CLC": "0",
    "FA_DISABLE_2CTA": "0",
    "FA_DISABLE_S_PING_PONG": "0",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    "FLASH_ATTENTION_HD256_GENERIC_BWD": "0",
}


def _notices() -> dict[str, bytes]:
    return {**licence_files("flash-attn-4"), **licence_files("quack-kernels")}


def _cases(recipe: OpRecipe) -> tuple[ProofCase, ...]:
    from fa4build.families.flash_attn_4.cases import cases  # the simulator, which a build does not need

    return cases(recipe)


FAMILY: Family = kernel_family(
    name="upstream",
    summary="FlashAttention-4 kernels of flash-attn-4",
    kernels=kernels,
    op_recipes=op_recipes,
    on_request=on_request,
    distributions=[
        Pinned(name="flash-attn-4", tested=("4.0.0b36",)),
        Pinned(name="quack-kernels", tested=("0.6.5",)),
    ],
    environment=ENVIRONMENT,
    worker=replace(TORCH_WORKER, warm="fa4build.families.flash_attn_4.compiling:warm"),
    cases=_cases,
    notices=_notices,
    license_expression="BSD-3-Clause AND Apache-2.0",
    aliases=("flash-attn-4", "flash_attn_4"),
    may_spill=True,
)
