"""The kernels of this project as a family: the first implementation of the interface."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fa4build.compiling.compile import CompileOptions, request_for
from fa4build.compiling.render import render
from fa4build.compiling.signature import signature_for, spec_for
from fa4build.compiling.toolchain import Toolchain
from fa4build.families.interface import Family, Recipe
from fa4build.matrix.arch import arch_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import expand_matrix, use_rule
from fa4build.store.keys import canonical, key_inputs, key_of


def recipe_for(variant: Variant, toolchain: Toolchain, options: CompileOptions) -> Recipe:
    """Render a variant and form its key. Raises: RenderError, VariantError.

    Beside rendered text and kernel files, the key holds what a compile takes from tables outside `codegen`: argument
    list, guarded extents and target.
    """
    tuning = tuning_for(variant)
    source = render(variant, tuning)
    inputs = key_inputs(source, tuning, toolchain, options)
    inputs["source"]["variant"] |= use_rule(variant)
    inputs["source"]["signature"] = _canonical(signature_for(variant))
    inputs["source"]["spec"] = spec_for(variant)
    inputs["source"]["target"] = arch_named(variant.arch).target
    return Recipe(name=variant.id, key=key_of(inputs), inputs=inputs, request=request_for(source), options=options)


@lru_cache(maxsize=4096)
def _canonical(value: Any) -> Any:
    """As `canonical`, once for the many kernels that share a frozen value."""
    return canonical(value)


FAMILY = Family(
    name="fa4",
    summary="FlashAttention-4 kernels of this project, kernels_src/",
    expand=expand_matrix,
    recipe=recipe_for,
)
