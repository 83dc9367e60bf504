"""Contract of reading a model's configuration.

What is read of a `config.json` is, layer by layer, what transformers' own model of that configuration hands to its
attention function. Numbers come from the file, those it leaves out from transformers' defaults, and what is in neither
is not guessed: a part whose type is unknown, or whose layers are not listed, is named with its layers.
"""

import json
from pathlib import Path

import pytest

from fa4build.runtime.fa4_kernels.errors import InputError
from fa4build.runtime.fa4_kernels.models.layers import Part
from fa4build.runtime.fa4_kernels.models.reading import model_of, read_model
from fa4build.runtime.fa4_kernels.models.structure import FLAT_TEXT, STRUCTURES

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
PARTS = [(name, key) for name, document in RECORDED.items() for key in document["parts"]]
# Recorded calls that no kernel computes, whatever their shape: the reader names them, and says no mask of them.
NO_KIND = "other"


def part_of(name: str, key: str, config: dict | None = None) -> Part:
    """A part of a recorded model as it is read."""
    parts = model_of(config or RECORDED[name]["config"], name=name).parts
    return next(part for part in parts if part.name == key)


def calls(name: str, key: str) -> list[list]:
    """The recorded calls of a part, one by one."""
    return [values for count, *values in RECORDED[name]["parts"][key] for _ in range(count)]


def as_calls(part: Part) -> list[list]:
    """What the layers of a part were read as, in the form of the recording."""
    return [
        [
            *(a.heads_q, a.heads_kv, a.head_dim, a.head_dim_v, a.mask),
            *(list(a.window) if a.window else None, a.softcap, a.sink, bool(a.unserved)),
        ]
        for layer in part.layers
        for a in layer
    ]


def comparable(values: list) -> list:
    """A recorded call; a mask of another kind stands for a call that no kernel computes."""
    *shape, mask, window, softcap, sink, has_bias = values
    is_unserved = has_bias or mask == NO_KIND
    return [*shape, "causal" if mask == NO_KIND else mask, window, softcap, sink, is_unserved]


@pytest.mark.parametrize(("name", "key"), PARTS, ids=[f"{name}-{key}" if key else name for name, key in PARTS])
def test_every_layer_is_read_as_transformers_calls_it(name, key):
    """Heads, head dims, mask, window, cap, sink; and whether there is a bias or a mask of its own."""
    part = part_of(name, key)

    assert "" == part.unknown
    assert list(map(comparable, calls(name, key))) == as_calls(part)


def test_every_known_type_is_compared():
    """A row of the table that nobody compared would be a guess. 40 at least, and of each role."""
    seen = {part_of(name, key).model_type for name, key in PARTS}

    assert set() == set(STRUCTURES) - seen
    assert len(seen) >= 150
    assert {"decoder", "encoder", "seq2seq"} == {STRUCTURES[kind].role for kind in seen}


LISTED = [(name, key) for name, key in PARTS if "layer_types" in RECORDED[name]["config"].get(key, {})] + [
    (name, "") for name, key in PARTS if not key and "layer_types" in RECORDED[name]["config"]
]


@pytest.mark.parametrize(("name", "key"), LISTED)
def test_older_files_that_list_no_layers_follow_the_rule_of_their_class(name, key):
    """Files from before transformers wrote `layer_types`: the same layers by the class's rule, or none at all."""
    config = json.loads(json.dumps(RECORDED[name]["config"]))
    del (config[key] if key else config)["layer_types"]
    part = part_of(name, key, config)

    if part.unknown:
        assert "layer_types" in part.unknown
    else:
        assert list(map(comparable, calls(name, key))) == as_calls(part)


# --- published configurations, as their files have them ---------------------------------------------------------------


def read(**document: object) -> list[tuple[Part, dict]]:
    """Parts with the kinds of their layers."""
    return [(part, part.kinds()) for part in model_of(document, name="m").parts]


def test_what_a_file_leaves_out_is_the_default_of_its_class():
    """Gemma's files name no head_dim where it is the class's 256."""
    ((_, kinds),) = read(model_type="gemma", hidden_size=3072, num_attention_heads=16, num_hidden_layers=28)

    ((attention, count),) = kinds.items()
    assert (256, 16, 28) == (attention.head_dim, attention.heads_kv, count)


def test_a_null_is_no_number_and_no_default():
    """`"head_dim": null` is hidden_size / heads; `"sliding_window": null` is no window, whatever the class has."""
    document = {"head_dim": None, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    ((_, kinds),) = read(model_type="mistral", sliding_window=None, num_hidden_layers=2, **document)

    (attention,) = kinds
    assert (128, "causal", None) == (attention.head_dim, attention.mask, attention.window)


def test_gemma_3_alternates_five_windows_and_one_full_layer():
    """google/gemma-3-27b-it: a file of several parts that names neither layer_types nor the pattern."""
    text = {"model_type": "gemma3_text", "num_attention_heads": 32, "num_key_value_heads": 16, "num_hidden_layers": 62}
    text |= {"head_dim": 128, "hidden_size": 5376, "sliding_window": 1024, "query_pre_attn_scalar": 168}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    vision |= {"num_hidden_layers": 27}
    parts = read(model_type="gemma3", text_config=text, vision_config=vision)

    kinds = {part.name: sorted((a.mask, a.head_dim, n) for a, n in kinds.items()) for part, kinds in parts}
    assert [("causal", 128, 10), ("local", 128, 52)] == kinds["text_config"]
    assert [("full", 72, 27)] == kinds["vision_config"]


def test_the_layers_of_deepseek_v3_have_two_head_dims_and_one_more_drafts():
    """128 + 64 for q and k, 128 for v, a query head each; num_nextn_predict_layers is a part of its own."""
    document = {"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61, "hidden_size": 7168}
    document |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1}
    parts = read(model_type="deepseek_v3", **document)

    assert [("", 61), ("draft", 1)] == [(part.name, sum(kinds.values())) for part, kinds in parts]
    assert {(192, 128, 128)} == {(a.head_dim, a.head_dim_v, a.heads_kv) for _, kinds in parts for a in kinds}
    assert "latents" in parts[0][0].notes[0]


def test_a_part_of_unknown_type_is_named_with_its_layers():
    """The known parts are read all the same."""
    text = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    parts = read(model_type="x", text_config=text, vision_config={"model_type": "novel_vit", "num_hidden_layers": 40})

    assert ["", "model_type 'novel_vit' is not in the table of known models"] == [part.unknown for part, _ in parts]
    assert 40 == parts[1][0].num_layers


def test_an_encoder_that_is_made_a_decoder_is_not_read_as_either():
    """`is_decoder` turns BERT's mask: its calls were not compared."""
    ((part, kinds),) = read(model_type="bert", is_decoder=True)

    assert "is_decoder" in part.unknown
    assert {} == kinds


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"kv_cache_quant_algo": "FP8"}, "e4m3"),
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "mxfp4"}, "fp16"),
        (None, "fp16"),
    ],
)
def test_a_quantised_checkpoint_says_what_it_caches(quantization, dtype):
    """Weights of few bits leave the cache as it is; a scheme for keys and values does not."""
    model = model_of({"model_type": "llama", "torch_dtype": "float16", "quantization_config": quantization}, name="m")

    assert ("fp16", dtype) == (model.dtype, model.cache_dtype)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "has no model_type"),
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "llama", "num_attention_heads": "8"}, "num_attention_heads is '8'"),
        ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 36 layers"),
        ({"model_type": "gpt_oss", "layer_types": "full"}, "a list of names is expected"),
        ({"model_type": "gpt_oss", "num_attention_heads": 65}, "65 query heads on 8 KV heads"),
    ],
)
def test_a_number_that_cannot_be_is_one_error_that_names_it(document, message):
    """With the model's name in front."""
    with pytest.raises(InputError, match=r"^m: ") as caught:
        model_of(document, name="m")

    assert message in str(caught.value)


def test_a_file_or_its_folder_is_read_and_named_after_the_folder(tmp_path):
    """Hugging Face keeps a model's config.json in a folder of its name."""
    folder = tmp_path / "Qwen3-32B"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")

    assert ["Qwen3-32B"] * 2 == [read_model(path).name for path in (folder, folder / "config.json")]
    with pytest.raises(InputError, match="cannot be read as a model's configuration"):
        read_model(tmp_path)
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"broken\.json: cannot be read"):
        read_model(tmp_path / "broken.json")


def test_a_flat_file_of_several_parts_has_its_text_at_the_top():
    """Qwen2-VL's first files: text numbers beside vision_config."""
    vision = {"model_type": "qwen2_vl_vision", "depth": 32, "embed_dim": 1280, "num_heads": 16}
    parts = read(model_type="qwen2_vl", num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
                 hidden_size=1536, vision_config=vision)  # fmt: skip

    assert {"text_config": (28, 128), "vision_config": (32, 80)} == {
        part.name: (sum(kinds.values()), next(iter(kinds)).head_dim) for part, kinds in parts
    }
    assert set(FLAT_TEXT.values()) <= set(STRUCTURES)


# --- transformers itself ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_recording_is_what_transformers_does_today():
    """Records every architecture again."""
    pytest.importorskip("transformers")
    from tests.models import record_calls, write_defaults

    record_calls.register()

    assert record_calls.names_of_table() == sorted(RECORDED)
    assert RECORDED == json.loads(record_calls.text_of(record_calls.record_all(sorted(RECORDED))))
    assert write_defaults.TARGET.read_text(encoding="utf-8") == write_defaults.text()
