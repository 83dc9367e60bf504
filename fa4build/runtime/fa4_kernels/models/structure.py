"""What a model's configuration does not say in numbers: how its attention is built, by `model_type`.

Every row is compared with what transformers' own modules hand to their attention function, layer by layer
(tests/models). A type that is not here is unknown, and `reading` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from .layers import Window

Value = Callable[..., Any]
"""Takes names; the first of them that the configuration, or else the class's defaults, has."""

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _all_full(i: int, count: int, value: Value) -> str:
    return FULL


def _as_one_window(i: int, count: int, value: Value) -> str:
    """Every layer has the window, if there is one."""
    return SLIDING if value("sliding_window") else FULL


def _every(n: int, *names: str, other: str = SLIDING, first: int = 1) -> Callable[[int, int, Value], str]:
    """Each n-th layer is full, `first` of them counted before the first; n from the configuration where it says."""

    def rule(i: int, count: int, value: Value) -> str:
        own = value(*names) if names else None
        own = len(own) if isinstance(own, str) else own
        return FULL if (i + first) % (own or n) == 0 else other

    return rule


def _upper_layers(i: int, count: int, value: Value) -> str:
    """Layers from `max_window_layers` on, where windows are turned on."""
    is_on = value("use_sliding_window") and value("sliding_window")
    return SLIDING if is_on and i >= (value("max_window_layers") or 0) else FULL


def _listed_or_none(i: int, count: int, value: Value) -> str:
    return UNLISTED


def _jamba(i: int, count: int, value: Value) -> str:
    return FULL if i % value("attn_layer_period") == value("attn_layer_offset") else "mamba"


def _mimo(i: int, count: int, value: Value) -> str:
    return FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING


def _at_indices(*names: str) -> Callable[[int, int, Value], str]:
    def rule(i: int, count: int, value: Value) -> str:
        indices = value(*names)
        return FULL if indices is None or i in indices else "conv"

    return rule


def _gpt_bigcode_heads(value: Value, heads: int) -> int:
    return 1 if value("multi_query") else heads


def _same_on_both_sides(width: int) -> Window:
    return width, width


def _half_on_both_sides(width: int) -> Window:
    return width // 2, width // 2


def _itself_and_before(width: int) -> Window:
    return width - 1, 0


def _half_of_it(width: int) -> Window:
    return width // 2 - 1, 0


UNLISTED = "unlisted"
"""The type of a layer whose configuration must list it and does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """How a family builds its attention.

    Attributes:
        role: `decoder` (causal, with a cache), `encoder`, `seq2seq` (both, and cross attention), `none`.
        rule: the type of a layer where the configuration has no list: (index, number of layers, value) -> type.
        sliding_types: types of layers that have a window.
        window_names: keys of the window's width.
        causal_window, both_sides: width -> (left, right), where a query sees back alone, and where it sees ahead, too.
        sink: which layers have one: `all`, `sliding`, or none.
        softcap: key of the cap of the scores.
        bidirectional: whether a configuration makes all layers see both ways.
        is_cached: whether a causal model is decoded from a cache of keys.
        is_latent: keys and values come out of a latent (MLA). has_v_dim: v may have its own head dim.
        multi_query: (value, heads) -> KV heads, where no key names them.
        own_numbers: type of layer -> {usual key: value -> what it is for these layers}.
        last_is_full: the last layer is full, whatever is listed.
        kv_factor: type of layer -> its KV heads are so many times those that the key says.
        exclusive_window: key of a width that leaves the query's own key out.
        width_names: keys of the columns of all heads, where the usual ones say something else.
        layer_names: keys of the number of layers, where the usual ones say something else.
        calls_a_layer: attention calls of one layer.
        unserved: why kernels do not compute what these layers do; unserved_types: of some types of layers.
        unknown: why the layers cannot be told from the configuration.
        note: what holds for some calls only.
    """

    role: str = "decoder"
    rule: Callable[[int, int, Value], str] = _all_full
    type_names: tuple[str, ...] = ("layer_types", "layers_block_type")
    has_types: bool = False
    sliding_types: tuple[str, ...] = (SLIDING,)
    window_names: tuple[str, ...] = ("sliding_window",)
    both_sides: Callable[[int], Window] = _same_on_both_sides
    causal_window: Callable[[int], Window] = _itself_and_before
    sink: str = ""
    softcap: str = ""
    bidirectional: Callable[[Value], bool] | None = None
    is_cached: bool = True
    is_latent: bool = False
    has_v_dim: bool = False
    grouped: bool = False
    multi_query: Callable[[Value, int], int] | None = None
    own_numbers: Mapping[str, Mapping[str, Callable[[Value], int | None]]] = field(default_factory=dict)
    last_is_full: bool = False
    width_names: tuple[str, ...] = ()
    layer_names: tuple[str, ...] = ()
    calls_a_layer: int = 1
    has_parts: bool = False
    kv_factor: Mapping[str, int] = field(default_factory=dict)
    exclusive_window: str = ""
    unserved: str = ""
    unserved_types: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""
    note: str = ""

    @property
    def has_list(self) -> bool:
        """Whether layers are told from a list alone."""
        return self.rule is _listed_or_none

    def listed(self, i: int, count: int, kind: str, value: Value) -> str:
        """The type of a layer that the configuration lists."""
        return FULL if self.last_is_full and i == count - 1 else kind


# --- rows -------------------------------------------------------------------------------------------------------------

_DECODER = Structure()
_ENCODER = Structure(role="encoder")
_SEQ2SEQ = Structure(role="seq2seq")
_BIAS = "a bias for each pair of positions is added to the scores"
_SEQ2SEQ_BIASED = Structure(role="seq2seq", unserved=_BIAS)
_WINDOWED = Structure(rule=_as_one_window)
_UPPER = Structure(rule=_upper_layers)
_LATENT = Structure(
    is_latent=True,
    note="keys and values as transformers caches them; engines that cache the latents (MQA over kv_lora_rank + "
    "qk_rope_head_dim columns) need a kernel that is not written",
)
_INDEXED = replace(
    _LATENT, note="more keys than index_topk are chosen among: those calls need a kernel that is not written"
)
_GEMMA2 = Structure(rule=_every(2), softcap="attn_logit_softcapping")
_IMAGES = "images among the tokens see each other both ways: prompts with images need a kernel that is not written"


def _gemma3_both_ways(value: Value) -> bool:
    return bool(value("use_bidirectional_attention"))


def _gemma4_both_ways(value: Value) -> bool:
    return value("use_bidirectional_attention") == "all"


def _gemma4_head_dim(value: Value) -> int:
    return value("global_head_dim") or 512


def _gemma4_kv_heads(value: Value) -> int | None:
    return value("num_global_key_value_heads") if value("attention_k_eq_v") else None


def _gemma3_window(width: int) -> Window:
    return width // 2, width // 2


_GEMMA3 = Structure(
    rule=_every(6, "sliding_window_pattern", "_sliding_window_pattern"),
    softcap="attn_logit_softcapping",
    bidirectional=_gemma3_both_ways,
    both_sides=_gemma3_window,
)
_GEMMA4 = Structure(
    rule=_every(6),
    last_is_full=True,
    bidirectional=_gemma4_both_ways,
    both_sides=_gemma3_window,
    own_numbers={FULL: {"head_dim": _gemma4_head_dim, "num_key_value_heads": _gemma4_kv_heads}},
)


def _rows() -> dict[str, Structure]:
    found: dict[str, Structure] = {}
    for structure, names in _FAMILIES:
        found |= dict.fromkeys(names.split(), structure)
    return found


_FAMILIES: tuple[tuple[Structure, str], ...] = (
    (
        _DECODER,
        "arcee aria_text ernie4_5 exaone gemma glm glm4 higgs_audio_v2 hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
        "hyperclovax internlm3 iquestcoder jais2 llama minimax_m2 molmo2_text nemotron seed_oss "
        "qwen3_vl_moe_text qwen3_vl_text sarvam_moe solar_open apertus apertus1p5_text bitnet cohere ernie4_5_moe "
        "falcon_h1 flex_olmo glm4_moe granite granite_docling_text granitemoe granitemoeshared nanochat olmo olmo2 "
        "olmoe phi stablelm biogpt gpt_neox opt persimmon ctrl gpt2 "
        "minimax_m3_vl_text qwen2_vl_text glm4v_text glm4v_moe_text",
    ),
    (Structure(is_cached=False), "clip_text_model"),
    (_WINDOWED, "mistral mixtral phi3 phimoe starcoder2 ministral3"),
    (_UPPER, "qwen2 qwen2_moe qwen3 qwen3_moe qwen2_5_vl_text"),
    (_LATENT, "deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 mistral4 axk1 sarvam_mla youtu"),
    (_INDEXED, "deepseek_v32 glm_moe_dsa axk2 mistral_large4_text"),
    (
        _ENCODER,
        "aimv2_vision_model albert beit bert bert-generation camembert chinese_clip_vision_model clip_vision_model "
        "data2vec-audio data2vec-text deit dinov2 dinov2_with_registers dinov3_vit dpr dpt electra ernie esm gte "
        "hubert ijepa internvl_vision jina_embeddings_v3 mlcd_vision_model moss_transcribe_diarize_audio pixio pixtral "
        "qianfan_ocr_vision radio roberta roberta-prelayernorm roc_bert sam3_vit_model sew siglip_vision_model "
        "splinter tipsv2_text_model tipsv2_vision_model unispeech unispeech-sat wav2vec2 distilbert nomic_bert "
        "qwen2_audio_encoder vit vit_mae vit_msn voxtral_encoder xlm-roberta xlm-roberta-xl "
        "qwen3_vl_vision "
        "qwen3_vl_moe_vision qwen2_5_vl_vision "
        "qwen3_5_vision qwen3_5_moe_vision glm4v_vision glm4v_moe_vision llama4_vision_model",
    ),
    (
        Structure(role="encoder", grouped=True),
        "eurobert glmasr_encoder",
    ),
    (
        _SEQ2SEQ,
        "bart blenderbot blenderbot-small m2m_100 marian mbart nllb-moe pegasus plbart whisper",
    ),
    (
        Structure(
            role="encoder",
            grouped=True,
            has_types=True,
            rule=_as_one_window,
            sink="all",
        ),
        "openai_privacy_filter",
    ),
    (
        Structure(role="encoder", grouped=True, has_types=True, rule=_every(6), last_is_full=True),
        "embedding_gemma2_text",
    ),
    (Structure(role="encoder", grouped=True, has_types=True, rule=_listed_or_none), "ultrabert"),
    (Structure(role="encoder", width_names=("embed_dim",)), "qwen2_vl_vision"),
    (
        Structure(
            rule=_every(3, "global_attn_every_n_layers", first=0),
            window_names=("local_attention",),
            causal_window=_half_of_it,
        ),
        "modernbert-decoder",
    ),
    (_SEQ2SEQ_BIASED, "t5 mt5 umt5"),
    (Structure(role="encoder", unserved=_BIAS), "wav2vec2-conformer"),
    (Structure(multi_query=_gpt_bigcode_heads), "gpt_bigcode"),
    (_GEMMA2, "gemma2 vaultgemma"),
    (_GEMMA3, "gemma3_text"),
    (_GEMMA4, "gemma4_text gemma4_unified_text"),
    (Structure(rule=_every(4, "sliding_window_pattern", "_sliding_window_pattern")), "cohere2"),
    (Structure(rule=_listed_or_none), "cohere2_moe ministral smollm3 laguna mellum"),
    (Structure(rule=_every(4, "sliding_window_pattern")), "exaone4 exaone_moe"),
    (Structure(rule=_every(4)), "olmo3"),
    (Structure(rule=_every(4, "global_attn_every_n_layers")), "afmoe"),
    (Structure(rule=_every(4, first=0)), "cwm"),
    (Structure(rule=_every(2), sink="all"), "gpt_oss"),
    (Structure(rule=_listed_or_none, sink="all"), "granite_swa granitemoe_swa flint"),
    (
        Structure(
            rule=_mimo,
            sink="sliding",
            has_v_dim=True,
            kv_factor={SLIDING: 2},
            exclusive_window="sliding_window_size",
        ),
        "mimo_v2_flash",
    ),
    (Structure(rule=_every(4, "full_attention_interval", other=LINEAR)), "qwen3_next qwen3_5_text qwen3_5_moe_text"),
    (Structure(rule=_listed_or_none), "olmo_hybrid kolibri1 lara_mini lfm3 muse_glimmer_text muse_spark_text"),
    (Structure(rule=_listed_or_none, sliding_types=(FULL,)), "minimax"),
    (Structure(rule=_listed_or_none), "nemotron_h"),
    (Structure(rule=_at_indices("full_attn_idxs")), "lfm2"),
    (replace(_LATENT, rule=_listed_or_none), "bailing_hybrid kimi_linear"),
    (Structure(rule=_jamba), "jamba"),
    (
        Structure(
            rule=_listed_or_none,
            unserved_types=MappingProxyType(
                {"chunked_attention": "tokens see their own chunk alone (chunked attention)"}
            ),
        ),
        "llama4_text",
    ),
    (
        Structure(
            role="encoder",
            has_types=True,
            rule=_every(3, "global_attn_every_n_layers", first=0),
            window_names=("local_attention", "sliding_window"),
            both_sides=_half_on_both_sides,
        ),
        "modernbert",
    ),
)

STRUCTURES: Mapping[str, Structure] = MappingProxyType(_rows())
"""model_type of a model or a part -> how its attention is built."""

FLAT_TEXT: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_vl": "qwen2",
        "qwen2_5_vl": "qwen2",
        "paligemma": "gemma",
        "llava": "llama",
    }
)
"""model_type of a model of several parts -> that of its text part, where older files have its numbers at the top."""
