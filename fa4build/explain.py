"""What is known about one variant before it is compiled, as a value. Printing it is the command line's work."""

from __future__ import annotations

from dataclasses import dataclass

from fa4build.compiling.render import render
from fa4build.matrix.arch import Arch, arch_named
from fa4build.matrix.axes import Variant
from fa4build.matrix.tuning import Tuning, TuningRow, exp2_mode, has_tuning, tuning_for, tuning_row_for
from fa4build.matrix.tuning_backward import BackwardTuningRow
from fa4build.matrix.variants import kernel_for, refusals, variant_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a variant is, whether it can be built, and how.

    Attributes:
        axes: (name, value) of every axis but op and arch.
        refusals: why the combination makes no sense; empty if it is valid.
        tuning: the row in force with its source; None for a refused variant, or an op without rows.
        exp2_mode: how powers of two are computed, derived from the tuning; None where there is none.
        template: file that renders the specialization; None if no kernel is written.
        dependencies: files of `kernels_src` the specialization reaches, (path, sha256); empty if no kernel is written.
    """

    variant: Variant
    arch: Arch
    axes: tuple[tuple[str, object], ...]
    refusals: tuple[str, ...]
    tuning: TuningRow | BackwardTuningRow | None
    exp2_mode: str | None
    template: str | None
    dependencies: tuple[tuple[str, str], ...]

    @property
    def is_valid(self) -> bool:
        """Whether the combination of axes makes sense."""
        return not self.refusals

    @property
    def is_written(self) -> bool:
        """Whether there is a kernel to build it from."""
        return self.template is not None


def explain(variant: Variant) -> Explanation:
    """What is known about a variant whose axis values exist (`axes.parse_axes` makes one), valid or refused.

    Raises: RenderError if its kernel is written but cannot be rendered.
    """
    reasons = refusals(variant)
    kernel = None if reasons else kernel_for(variant)
    row = tuning_row_for(variant) if not reasons and has_tuning(variant) else None
    return Explanation(
        variant=variant,
        arch=arch_named(variant.arch),
        axes=tuple(variant_axes(variant).items()),
        refusals=reasons,
        tuning=row,
        exp2_mode=exp2_mode(row.tuning) if row and isinstance(row.tuning, Tuning) else None,
        template=kernel.wiring if kernel else None,
        dependencies=render(variant, tuning_for(variant)).dependencies if kernel else (),
    )
