"""Which class of `kernels_src` a kernel is, and which numbers it takes: a row for each `Kernel.wiring`.

A field is an axis or a tuning value under the kernel's own name, `has_sink=sink` where the two differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """A kernel class and where its arguments come from.

    Attributes:
        module: below `kernels_src`.
        kernel: the class in it.
        fields: (argument of the class, name of the axis or tuning value), in the order of the rendered module.
    """

    module: str
    kernel: str
    fields: tuple[tuple[str, str], ...]


def _wiring(place: str, *fields: str) -> Wiring:
    module, _, kernel = place.partition(":")
    pairs = (field.partition("=") for group in fields for field in group.split())
    return Wiring(
        module=f"kernels_src.{module}", kernel=kernel, fields=tuple((name, of or name) for name, _, of in pairs)
    )


_SHAPES = "symbol dtype head_dim head_dim_v"
_ROLES_SM90 = "consumer_registers producer_registers"

_FORWARD_SM90 = "order persistent separate_output ping_pong rescale_threshold"
_ROLES_SM100 = "softmax_registers=consumer_registers correction_registers other_registers=producer_registers"
_FORWARD_SM100 = f"tile_n kv_stages {_ROLES_SM100} exp2_frequency exp2_first_fragment=exp2_start"
_SOFTMAX_SM100 = "rescale_threshold max_offset max_with_load has_softcap=softcap has_sink=sink"
_DENSE_SM100 = (_SHAPES, "mask", _FORWARD_SM100, "order persistent separate_output", _SOFTMAX_SM100)
_PACKED_SM100 = (_SHAPES, "mask layout has_split=split", _FORWARD_SM100, _SOFTMAX_SM100)

_BACKWARD = f"{_SHAPES} mask deterministic layout"
_BACKWARD_SM90 = f"{_BACKWARD} tile_m q_stages dout_stages dscores_stages dscores_by_keys overlaps_dk"
_ROLES_BACKWARD = "compute_registers=consumer_registers reduce_registers other_registers=producer_registers"

WIRINGS: Mapping[str, Wiring] = MappingProxyType(
    {
        "fwd_sm90": _wiring(
            "forward.sm90:ForwardSm90",
            *(_SHAPES, "mask tile_m tile_n kv_stages consumer_warpgroups", _ROLES_SM90, _FORWARD_SM90),
        ),
        "fwd_sm90_varlen": _wiring(
            "forward.sm90_varlen:ForwardSm90Packed",
            *(_SHAPES, "mask layout split tile_m tile_n q_stages kv_stages consumer_warpgroups", _ROLES_SM90),
            _FORWARD_SM90,
        ),
        "fwd_sm100": _wiring("forward.sm100:ForwardSm100", *_DENSE_SM100),
        "fwd_sm100_2cta": _wiring("forward.sm100_2cta:ForwardSm100TwoCta", *_DENSE_SM100),
        "fwd_sm100_2cta_hd256": _wiring("forward.sm100_2cta_hd256:ForwardSm100Wide", *_DENSE_SM100),
        "fwd_sm100_varlen": _wiring("forward.sm100_varlen:ForwardSm100Packed", *_PACKED_SM100),
        "fwd_combine": _wiring("forward.combine:Combine", "symbol dtype head_dim_v"),
        "bwd_sm90": _wiring("backward.sm90:BackwardSm90", _BACKWARD_SM90, _ROLES_SM90),
        "bwd_sm90_hd256": _wiring(
            "backward.sm90:BackwardSm90InTwo", _BACKWARD_SM90, "dq_chunk dv_q_stages dv_dout_stages", _ROLES_SM90
        ),
        "bwd_sm100": _wiring(
            "backward.sm100:BackwardSm100", _BACKWARD, "q_stages do_stages=dout_stages", _ROLES_BACKWARD
        ),
        "bwd_sm100_2cta_hd128": _wiring("backward.sm100_2cta_hd128:BackwardSm100Pipelined", _BACKWARD, _ROLES_BACKWARD),
        "bwd_sm100_2cta_hd192": _wiring("backward.sm100_2cta_hd192:BackwardSm100Wide", _BACKWARD, _ROLES_BACKWARD),
        "bwd_sm100_2cta_hd256": _wiring(
            "backward.sm100_2cta_hd256:BackwardSm100InThree",
            *(_SHAPES, "mask layout slots dv_slots"),
            "compute_registers=consumer_registers other_registers=producer_registers",
        ),
        "bwd_preprocess": _wiring("backward.preprocess:BackwardPreprocess", _SHAPES),
        "bwd_postprocess": _wiring("backward.postprocess:BackwardPostprocess", "symbol dtype head_dim"),
    }
)
