"""From a model's `config.json` to the attention of its layers.

Numbers are read from the configuration, and where it leaves one out, from the defaults of transformers' class
(`defaults`); what no number says (`structure`) stands in a table by `model_type`. A part whose type is not in the table
is named as unknown with its layers: nothing is guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from .defaults import DEFAULTS
from .layers import Attention, Model, Part, Window
from .structure import FLAT_TEXT, STRUCTURES, UNLISTED, Structure

_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}
_NO_ATTENTION = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "convolution", "recurrent", "moe", "mlp", "linear", "gdn"}
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
_WIDTH = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim")
_HEAD_DIM = ("head_dim", "attention_head_dim", "d_kv")
_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_TOKENS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions", "seq_length")


def read_model(path: Path | str) -> Model:
    """The model that a `config.json` describes; a folder stands for the one in it.

    Raises: InputError if the file cannot be read, is no model's configuration, or has a number that cannot be.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file}: cannot be read as a model's configuration: {reason}. Give a config.json.") from error
    name = file.resolve().parent.name if file.name == "config.json" else file.name.removesuffix(".json")
    return model_of(document, name=name)


def model_of(document: Any, *, name: str) -> Model:
    """The same from the parsed JSON; `name` is for people and messages."""
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise InputError(
            f"{name}: has no model_type, so it is no model's configuration. Give a Hugging Face config.json."
        )
    try:
        parts = tuple(part for key, numbers in _parts_in(document).items() for part in _with_draft(key, numbers))
    except _Lack as lack:
        raise InputError(f"{name}: {lack}") from None
    dtype = _dtype_of(document)
    return Model(
        name=name,
        model_type=document["model_type"],
        dtype=dtype,
        cache_dtype=_cache_dtype_of(document) or dtype,
        parts=parts,
    )


class _Lack(Exception):
    """A number that is missing or cannot be; the argument says which."""


# --- parts ------------------------------------------------------------------------------------------------------------


def _parts_in(document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Key -> configuration of each part; "" -> the document itself where it is one part, or has layers of its own."""
    nested = {
        key: part
        for key, part in document.items()
        if isinstance(part, dict) and (key.endswith("_config") or key in ("encoder", "decoder"))
        if isinstance(part.get("model_type"), str)
    }
    own_type = document["model_type"]
    if own_type in STRUCTURES or not nested:
        own = {"": document}
        return own | (nested if nested and STRUCTURES.get(own_type, Structure()).has_parts else {})
    if own_type in FLAT_TEXT and "text_config" not in nested and any(name in document for name in _LAYERS):
        return {"text_config": {**document, "model_type": FLAT_TEXT[own_type]}, **nested}
    return nested


def _with_draft(key: str, document: Mapping[str, Any]) -> tuple[Part, ...]:
    """A part, and the layers of it that draft tokens to come (MTP), which are built as its last one is."""
    part = _part(key, document)
    count = _Numbers(document).optional(_DRAFT_LAYERS) if any(document.get(name) for name in _DRAFT_LAYERS) else 0
    last = next((layer for layer in reversed(part.layers) if layer), None)
    if not count or last is None:
        return (part,)
    note = f"taken for {count} more of the last layer's kind: transformers' own modules leave them out"
    draft = replace(part, name="draft", layers=(last,) * count, num_layers=count, notes=(note,))
    return part, draft


def _part(key: str, document: Mapping[str, Any]) -> Part:
    numbers = _Numbers(document)
    kind = numbers.model_type
    structure = STRUCTURES.get(kind)
    if structure is None:
        reason = f"model_type {kind!r} is not in the table of known models"
        return Part(name=key, model_type=kind, unknown=reason, num_layers=numbers.optional(_LAYERS) or 0)
    if structure.unknown:
        return Part(name=key, model_type=kind, unknown=structure.unknown, num_layers=numbers.optional(_LAYERS) or 0)
    if structure.role == "encoder" and document.get("is_decoder"):
        reason = f"is_decoder makes a decoder of {kind}, whose calls are not known here"
        return Part(name=key, model_type=kind, unknown=reason, num_layers=numbers.optional(_LAYERS) or 0)
    if structure.has_list and UNLISTED in _layer_types(numbers, structure):
        reason = f"{kind} lists its layers in layer_types, and the file does not"
        return Part(name=key, model_type=kind, unknown=reason, num_layers=numbers.optional(_LAYERS) or 0)
    layers = _LAYERS_BY_ROLE[structure.role](numbers, structure)
    return Part(
        name=key,
        model_type=kind,
        layers=layers,
        num_layers=len(layers),
        max_tokens=numbers.optional(_TOKENS) or 0,
        max_source_tokens=numbers.optional(("max_source_positions",)) or 0,
        notes=(structure.note,) if structure.note else (),
    )


# --- numbers ----------------------------------------------------------------------------------------------------------


class _Numbers:
    """Numbers of one part by the names that families have for them; the class's default where none is given."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document, self.model_type = document, str(document["model_type"])
        self._defaults: Mapping[str, Any] = DEFAULTS.get(self.model_type, {})

    def value(self, *names: str) -> Any:
        """The first that the document has, else the first default; None for a null or where there is neither."""
        for source in (self.document, self._defaults):
            for name in names:
                if name in source:
                    return source[name]
        return None

    def optional(self, names: tuple[str, ...]) -> int | None:
        """A count of at least 1, or None. Raises: _Lack for anything else."""
        value = next((value for name in names if (value := self.value(name)) is not None), None)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value <= 1 << 30:
            raise _Lack(f"{names[0]} is {value!r}; a whole number from 0 on is expected.")
        return value

    def needed(self, names: tuple[str, ...]) -> int:
        """A count. Raises: _Lack where the document has none."""
        value = self.optional(names)
        if not value:
            raise _Lack(f"{self.model_type} has no {names[0]}, and transformers' class has no default for it.")
        return value

    def per_layer(self, index: int) -> "_Numbers":
        """The numbers of one layer, which `per_layer_config` may set apart."""
        overrides = self.document.get("per_layer_config")
        own = overrides.get(str(index), overrides.get(index)) if isinstance(overrides, dict) else None
        return _Numbers({**self.document, **own}) if isinstance(own, dict) else self


def _head_dims(numbers: _Numbers, structure: Structure, heads: int) -> tuple[int, int]:
    """Of q and k, and of v."""
    if structure.is_latent:
        rotated = numbers.needed(("qk_rope_head_dim",))
        head_dim = (numbers.optional(("qk_nope_head_dim",)) or 0) + rotated
        return head_dim, numbers.needed(("v_head_dim",))
    head_dim = numbers.optional(_HEAD_DIM) or numbers.needed(structure.width_names or _WIDTH) // heads
    return head_dim, (numbers.optional(("v_head_dim",)) if structure.has_v_dim else None) or head_dim


def _heads(numbers: _Numbers, structure: Structure) -> tuple[int, int]:
    heads = numbers.needed(_HEADS)
    if structure.is_latent or (structure.role in ("encoder",) and not structure.grouped):
        return heads, heads
    if structure.multi_query is not None:
        return heads, structure.multi_query(numbers.value, heads)
    heads_kv = numbers.optional(_KV_HEADS) or heads
    if heads % heads_kv:
        raise _Lack(f"{heads} query heads on {heads_kv} KV heads: a multiple is expected.")
    return heads, heads_kv


# --- layers -----------------------------------------------------------------------------------------------------------

Layers = tuple[tuple[Attention, ...], ...]


def _decoder(numbers: _Numbers, structure: Structure) -> Layers:
    """Causal layers with a cache, each full or of a window, or without attention."""
    types = _layer_types(numbers, structure)
    return tuple(_decoder_layer(numbers.per_layer(i), structure, kind) for i, kind in enumerate(types))


def _decoder_layer(numbers: _Numbers, structure: Structure, kind: str) -> tuple[Attention, ...]:
    if kind in _NO_ATTENTION:
        return ()
    numbers = _renamed(numbers, structure, kind)
    heads_q, heads_kv = _heads(numbers, structure)
    heads_kv *= structure.kv_factor.get(kind, 1)
    head_dim, head_dim_v = _head_dims(numbers, structure, heads_q)
    is_sliding = kind in structure.sliding_types
    window = _window(numbers, structure) if is_sliding else None
    is_causal = not (structure.bidirectional and structure.bidirectional(numbers.value))
    has_sink = structure.sink == "all" or (structure.sink == "sliding" and is_sliding)
    attention = Attention(
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask="local" if window else "causal" if is_causal else "full",
        window=window,
        softcap=float(numbers.value(structure.softcap) or 0.0) if structure.softcap else 0.0,
        sink=has_sink,
        has_cache=is_causal and structure.is_cached,
        unserved=structure.unserved_types.get(kind, structure.unserved),
    )
    return (attention,) * structure.calls_a_layer


def _renamed(numbers: _Numbers, structure: Structure, kind: str) -> _Numbers:
    """The numbers of a layer's type, where a family sets those of one type apart and the file does not by layer."""
    rules = {} if "per_layer_config" in numbers.document else structure.own_numbers.get(kind, {})
    own = {name: value for name, rule in rules.items() if (value := rule(numbers.value)) is not None}
    return _Numbers({**numbers.document, **own}) if own else numbers


def _window(numbers: _Numbers, structure: Structure) -> Window | None:
    width = numbers.optional(structure.window_names)
    if structure.exclusive_window and (before := numbers.optional((structure.exclusive_window,))):
        width = before + 1
    if not width:
        return None
    if structure.bidirectional and structure.bidirectional(numbers.value):
        return structure.both_sides(width)
    return structure.causal_window(width)


def _layer_types(numbers: _Numbers, structure: Structure) -> tuple[str, ...]:
    """One type a layer, from the document's own list, or by the family's rule."""
    listed = next((x for name in structure.type_names if (x := numbers.document.get(name))), None)
    count = numbers.optional(_LAYERS) or (len(listed) if isinstance(listed, list) else numbers.needed(_LAYERS))
    if listed is None:
        listed = [structure.rule(i, count, numbers.value) for i in range(count)]
    if not isinstance(listed, list) or not all(isinstance(kind, str) for kind in listed):
        raise _Lack(f"layer_types is {listed!r}; a list of names is expected.")
    if len(listed) < count:
        raise _Lack(f"layer_types has {len(listed)} entries for {count} layers.")
    return tuple(structure.listed(i, count, kind, numbers.value) for i, kind in enumerate(listed[:count]))


def _encoder(numbers: _Numbers, structure: Structure) -> Layers:
    """Layers that see everything, or a window to both sides, without a cache."""
    types = _layer_types(numbers, structure) if structure.sliding_types and structure.has_types else None
    count = len(types) if types else numbers.needed(structure.layer_names or _LAYERS)
    return tuple(_encoder_layer(numbers.per_layer(i), structure, types[i] if types else "") for i in range(count))


def _encoder_layer(numbers: _Numbers, structure: Structure, kind: str) -> tuple[Attention, ...]:
    heads_q, heads_kv = _heads(numbers, structure)
    head_dim, head_dim_v = _head_dims(numbers, structure, heads_q)
    width = numbers.optional(structure.window_names) if kind and kind in structure.sliding_types else None
    window = structure.both_sides(width) if width else None
    attention = Attention(
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask="local" if window else "full",
        window=window,
        sink=structure.sink == "all",
        unserved=structure.unserved,
    )
    return (attention,) * structure.calls_a_layer


def _sequence_to_sequence(numbers: _Numbers, structure: Structure) -> Layers:
    """Encoder layers, then decoder layers: each its own keys, then the encoder's."""
    width = numbers.needed(("d_model", "hidden_size"))

    def attention(names: tuple[str, ...], mask: str, **more: Any) -> Attention:
        heads = numbers.needed(names)
        head_dim = numbers.optional(("d_kv",)) or width // heads
        dims = {"head_dim": head_dim, "head_dim_v": head_dim}
        return Attention(heads_q=heads, heads_kv=heads, mask=mask, unserved=structure.unserved, **dims, **more)

    encoder = ("encoder_attention_heads", "num_attention_heads", "num_heads")
    decoder = ("decoder_attention_heads", "num_attention_heads", "num_heads")
    of_encoder = attention(encoder, "full")
    of_decoder = (
        attention(decoder, "causal", has_cache=True),
        attention(decoder, "full", has_cache=True, is_cross=True),
    )
    num_encoder = numbers.needed(("encoder_layers", "num_layers", "num_hidden_layers"))
    num_decoder = numbers.needed(("decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers"))
    return ((of_encoder,),) * num_encoder + (of_decoder,) * num_decoder


def _none(numbers: _Numbers, structure: Structure) -> Layers:
    return ()


_LAYERS_BY_ROLE = {"decoder": _decoder, "encoder": _encoder, "seq2seq": _sequence_to_sequence, "none": _none}


# --- dtypes -----------------------------------------------------------------------------------------------------------


def _dtype_of(document: Mapping[str, Any]) -> str:
    text = document.get("text_config")
    sources = (document, text if isinstance(text, dict) else {})
    named = (source.get(key) for source in sources for key in ("dtype", "torch_dtype"))
    return next((_DTYPES[name] for name in named if name in _DTYPES), "bf16")


def _cache_dtype_of(document: Mapping[str, Any]) -> str | None:
    """Of keys and values, where a quantised checkpoint says so; a type that no kernel has keeps its own name."""
    quantization = document.get("quantization_config")
    if not isinstance(quantization, dict):
        return None
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        return "e4m3" if (bits, kind) == (8, "float") else f"{kind}{bits}"
    named = quantization.get("kv_cache_quant_algo")
    if named is None:
        return None
    return "e4m3" if str(named).upper() == "FP8" else str(named)
