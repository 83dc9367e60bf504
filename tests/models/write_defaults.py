"""Writes fa4build/runtime/fa4_kernels/models/defaults.py from transformers' configuration classes:

python -m tests.models.write_defaults
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from fa4build.runtime.fa4_kernels.models.structure import STRUCTURES

TARGET = Path(__file__).parents[2] / "fa4build/runtime/fa4_kernels/models/defaults.py"
# What `reading` and `structure` ask for by name.
NAMES = frozenset(
    """num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers num_decoder_layers
    num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads
    num_key_value_heads num_kv_heads hidden_size d_model n_embd embed_dim dim hidden_dim head_dim attention_head_dim
    d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim max_position_embeddings n_positions max_sequence_length
    max_target_positions max_source_positions seq_length sliding_window use_sliding_window max_window_layers
    sliding_window_pattern
    attn_logit_softcapping multi_query new_decoder_architecture global_attn_every_n_layers local_attention
    attn_layer_period attn_layer_offset swa_num_key_value_heads full_attention_interval global_head_dim
    encoder_num_hidden_layers""".split()
)
_HEAD = '''# ruff: noqa: E501 (a table, written by a script)
"""Defaults of transformers' configuration classes, for what a `config.json` leaves out.

Written by tests/models/write_defaults.py from transformers {version}; a test compares them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({{
'''
_FOOT = """})
# fmt: on
"""


def defaults_of(model_type: str) -> dict[str, Any]:
    """Field -> default, of the fields that are read. Derived ones, which a class computes, are none."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return {}
    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    return {field.name: field.default for field in fields if field.name in NAMES and _is_plain(field.default)}


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, float, str))


def text() -> str:
    """The module."""
    import transformers

    rows = []
    for name in sorted(STRUCTURES):
        found = ", ".join(f"{json.dumps(key)}: {value!r}" for key, value in sorted(defaults_of(name).items()))
        rows.append(f"    {json.dumps(name)}: {{{found}}},\n")
    return _HEAD.format(version=transformers.__version__) + "".join(rows) + _FOOT


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
