"""Records what transformers' models hand to their attention function, layer by layer:

    python -m tests.models.record_calls             writes tests/models/recorded.json
    python -m tests.models.record_calls qwen3       records these again

Each architecture is made by transformers' own config class, tiny and of distinct numbers, with random weights. A
recording function takes the place of attention, and transformers' own code makes the masks, as tensors: what a layer
sees is read off the mask, not off an argument.
"""

import dataclasses
import importlib
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

RECORDED = Path(__file__).with_name("recorded.json")
NAME = "fa4_recording"
TOKENS = 14
WINDOW = 4  # of keys behind a query, itself included, in the tiny models

# Tiny numbers by field name; a config takes those that it has.
_TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "d_model": 48,
    "n_embd": 48,
    "dim": 48,
    "embed_dim": 48,
    "hidden_dim": 48,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_ff": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 7,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "depth": 3,
    "num_attention_heads": 6,
    "n_head": 6,
    "n_heads": 6,
    "num_heads": 6,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "d_kv": 8,
    "sliding_window": WINDOW,
    "max_position_embeddings": 64,
    "max_target_positions": 64,
    "max_source_positions": 32,
    "n_positions": 64,
    "n_ctx": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_TOKENS_OF_IMAGE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "modernbert": {"local_attention": 8},
    "modernbert-decoder": {"local_attention": 8},
    "llama4_text": {"attention_chunk_size": 5},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 5},
    "qwen2_vl_text": _TOKENS_OF_IMAGE,
    "qwen2_5_vl_text": _TOKENS_OF_IMAGE,
    "glm4v_text": _TOKENS_OF_IMAGE,
    "glm4v_moe_text": {"partial_rotary_factor": 1.0} | _TOKENS_OF_IMAGE,
    "llama4": {"text_config": {"attention_chunk_size": 5}},
    "llama4_vision_model": {"intermediate_size": 192},
    "qwen2_vl": {"text_config": _TOKENS_OF_IMAGE},
    "qwen2_5_vl": {"text_config": _TOKENS_OF_IMAGE},
    "glm4v": {"text_config": _TOKENS_OF_IMAGE},
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [1]},
    "qwen3_5": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen3_5_moe": {"vision_config": {"deepstack_visual_indexes": [0]}},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe_vision": {"deepstack_visual_indexes": [0]},
}
"""model_type -> what its tiny configuration has beside the common numbers; others have those alone."""

_CLASSES = {
    "qwen2_vl_vision": "qwen2_vl.modeling_qwen2_vl:Qwen2VisionTransformerPretrainedModel",
    "qwen2_5_vl_vision": "qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
    "llama4_vision_model": "llama4.modeling_llama4:Llama4VisionModel",
}
"""Parts that AutoModel does not make."""


def overrides_of(config_class: type, extra: dict[str, Any]) -> dict[str, Any]:
    """The tiny numbers that a config class has fields for, and its parts, tiny too."""
    names = {field.name for field in dataclasses.fields(config_class)}
    aliases = set((getattr(config_class, "attribute_map", None) or {}).values())
    found = {name: value for name, value in _TINY.items() if name in names | aliases}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        part_class = _part_class(config_class, name, part)
        if part_class is not None:
            found[name] = part_class(**overrides_of(part_class, extra.get(name, {}))).to_dict()
    found |= {name: value for name, value in extra.items() if not isinstance(value, dict) or name not in found}
    return found


def _part_class(config_class: type, name: str, part: type) -> type | None:
    from transformers import CONFIG_MAPPING

    if dataclasses.is_dataclass(part) and getattr(part, "model_type", ""):
        return part
    made = getattr(config_class(), name, None)
    kind = getattr(made, "model_type", None)
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None


def tiny_config(model_type: str, extra: dict[str, Any]) -> Any:
    """A config of this type with tiny numbers, `extra` on top."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**overrides_of(config_class, extra))


# --- recording --------------------------------------------------------------------------------------------------------

_calls: list[dict[str, Any]] = []


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
    _calls.append(
        {
            "name": module._recorded_name,
            "layer": getattr(module, "layer_idx", None),
            "heads_q": query.shape[1],
            "heads_kv": key.shape[1],
            "head_dim": query.shape[3],
            "head_dim_v": value.shape[3],
            **_seen(module, query.shape[2], key.shape[2], attention_mask, options),
            "softcap": float(options.get("softcap") or 0),
            "sink": options.get("s_aux") is not None,
            "bias": options.get("position_bias") is not None,
        }
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None


def _seen(module: Any, num_q: int, num_k: int, mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    """mask and window [left, right] of a call, None for a side without a bound."""
    if mask is None:
        is_causal = options.get("is_causal")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = options.get("sliding_window")
        if window is not None:
            return {"mask": "local", "window": [window - 1, 0 if is_causal else window - 1]}
        return {"mask": "causal" if is_causal and num_q > 1 else "full", "window": None}
    visible = mask if mask.dtype == torch.bool else mask > -1e3
    if num_q == num_k:
        return _band(visible[0, 0])
    return {"mask": "full" if bool(visible.all()) else "other", "window": None}


def _band(visible: torch.Tensor) -> dict[str, Any]:
    q, k = torch.meshgrid(torch.arange(visible.shape[0]), torch.arange(visible.shape[1]), indexing="ij")
    distance = k - q
    seen = distance[visible]
    if not seen.numel():
        return {"mask": "other", "window": None}
    left, right, most = -int(seen.min()), int(seen.max()), visible.shape[0] - 1
    if not torch.equal(visible, (distance >= -left) & (distance <= right)):
        return {"mask": "other", "window": None}
    if left == most:
        return {"mask": {most: "full", 0: "causal"}.get(right, "other"), "window": None}
    return {"mask": "local", "window": [left, None if right == most else right]}


def _mask(*arguments: Any, **options: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*arguments, **options | skips)


def record(model: Any, **inputs: Any) -> list[dict[str, Any]]:
    """The attention calls of one forward pass, in order."""
    for name, module in model.named_modules():
        module._recorded_name = name
    _calls.clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.eval()(**inputs)
    return [dict(call) for call in _calls]


def register() -> None:
    """Make the recording function known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def inputs_for(model: Any, config: Any) -> dict[str, Any]:
    """Tokens or pixels, by what the model names first."""
    tokens = torch.arange(TOKENS)[None] % 20 + 5
    if "grid_thw" in inspect.signature(model.forward).parameters:
        patch = config.patch_size
        frames = getattr(config, "temporal_patch_size", 2)
        patches = torch.zeros(16, getattr(config, "in_channels", 3) * frames * patch * patch)
        return {"hidden_states": patches, "grid_thw": torch.tensor([[1, 4, 4]])}
    if model.main_input_name == "pixel_values" or "pixel_values" in inspect.signature(model.forward).parameters:
        size = getattr(config, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.zeros(1, getattr(config, "num_channels", 3), height, width)}
    if model.main_input_name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 32)
        found = {"input_features": torch.zeros(1, getattr(config, "num_mel_bins", 80), frames)}
    elif model.main_input_name == "input_values":
        found = {"input_values": torch.zeros(1, 4000)}
    else:
        found = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens[:, :9]
    return found


def record_config(config: Any) -> list[dict[str, Any]]:
    """The calls of a tiny random model of this config alone."""
    from transformers import AutoModel

    config._attn_implementation = NAME
    if config.model_type in _CLASSES:
        module, _, name = _CLASSES[config.model_type].partition(":")
        model = getattr(importlib.import_module(f"transformers.models.{module}"), name)(config)
    else:
        model = AutoModel.from_config(config, attn_implementation=NAME)
    return record(model, **inputs_for(model, config))


def parts_of(config: Any) -> dict[str, Any]:
    """Name -> config of each part that is a model of its own; "" is the config itself where it has none."""
    names = [name for name in (getattr(config, "sub_configs", None) or {}) if getattr(config, name, None) is not None]
    return {name: getattr(config, name) for name in names} or {"": config}


# --- the fixture ------------------------------------------------------------------------------------------------------

COMPOSED = (
    "gemma3", "gemma4", "llava", "internvl", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
    "glm4v",
    "llama4", "mistral3", "paligemma", "kimi_k25", "voxtral", "clip",
)  # fmt: skip
"""Models of several parts that are recorded as a whole, part by part."""

FIELDS = ("heads_q", "heads_kv", "head_dim", "head_dim_v", "mask", "window", "softcap", "sink", "bias")
"""Of a call in the fixture, after the number of calls in a row that are like it."""


def recorded(model_type: str) -> dict[str, Any]:
    """The configuration as transformers writes it, and the calls of each part that can be made alone."""
    config = tiny_config(model_type, ARCHITECTURES.get(model_type, {}))
    parts = {}
    for key, part in parts_of(config).items():
        try:
            parts[key] = runs(record_config(part))
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            print(f"{model_type} {key}: not recorded: {error}", file=sys.stderr)
    return {"config": _kept(json.loads(config.to_json_string(use_diff=True))), "parts": parts}


def runs(calls: list[dict[str, Any]]) -> list[list[Any]]:
    """Calls in order, those in a row that are alike as one with their number."""
    found: list[list[Any]] = []
    for call in calls:
        values = [call[name] for name in FIELDS]
        if found and found[-1][1:] == values:
            found[-1][0] += 1
        else:
            found.append([1, *values])
    return found


def _kept(document: dict[str, Any]) -> dict[str, Any]:
    """A configuration without what no reader of attention looks at: texts, fractions, ids of tokens."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key in ("model_type", "per_layer_config"):
            found[key] = value
        elif isinstance(value, dict) and key.endswith("_config"):
            found[key] = _kept(value)
        elif isinstance(value, (bool, int)) or value is None:
            found[key] = value
        elif isinstance(value, list) and all(isinstance(x, (str, int)) for x in value) and len(value) <= 64:
            found[key] = value
        elif key.endswith("softcapping"):
            found[key] = value
    return {key: value for key, value in found.items() if not key.endswith(("token_id", "token_index", "_ids"))}


def record_all(names: list[str]) -> dict[str, Any]:
    """model_type -> what `recorded` gives, for those that transformers can make."""
    found = {}
    for name in names:
        document = recorded(name)
        if any(document["parts"].values()):
            found[name] = document
    return found


def names_of_table() -> list[str]:
    """Every model_type that the reader knows and transformers makes, and the models of several parts."""
    from transformers import CONFIG_MAPPING

    from fa4build.runtime.fa4_kernels.models.structure import STRUCTURES

    return sorted({*(name for name in STRUCTURES if name in CONFIG_MAPPING), *COMPOSED})


def text_of(document: dict[str, Any]) -> str:
    """The fixture: one architecture a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(document[name], sort_keys=True)}" for name in sorted(document)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    register()
    known = json.loads(RECORDED.read_text(encoding="utf-8")) if sys.argv[1:] else {}
    found = known | record_all(sys.argv[1:] or names_of_table())
    RECORDED.write_text(text_of(found), encoding="utf-8")
