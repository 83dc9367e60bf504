"""Contract of what a use of a model asks for, and of the names of GPUs.

Layers and a use give problems as the runtime's own calls ask them: serving a forward over the cache's layout and, where
the runtime would split keys, the parts and their merge; training the forward and the three launches of a backward. What
no kernel can be asked for is named with the layers it concerns. Nothing here imports torch.
"""

import subprocess
import sys

import pytest

from fa4build.runtime.fa4_kernels.abi import TARGETS
from fa4build.runtime.fa4_kernels.dispatch import variant_id
from fa4build.runtime.fa4_kernels.errors import InputError
from fa4build.runtime.fa4_kernels.models.gpus import GPUS, gpu_named
from fa4build.runtime.fa4_kernels.models.needs import Use, checked_use, heads_per_rank, needs_of, use_as_options
from fa4build.runtime.fa4_kernels.models.reading import model_of

GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 4}
H200, B200 = gpu_named("H200"), gpu_named("B200")
PAGES = Use(page_size=16)


def wanted(document: dict, use: Use = PAGES, gpu=H200) -> list[tuple[str, int]]:
    """(id, layers) of every problem."""
    parts = needs_of(model_of(document, name="m"), gpu, checked_use(use))
    return [(variant_id(need.problem, gpu.target), need.layers) for part in parts for need in part.needs]


def lacks(document: dict, use: Use = PAGES, gpu=H200) -> list[tuple[str, int]]:
    """(reason, layers) of everything that no kernel can be asked for."""
    parts = needs_of(model_of(document, name="m"), gpu, checked_use(use))
    return [(lack.reason, lack.layers) for part in parts for lack in part.lacks]


@pytest.mark.parametrize(
    ("text", "target"),
    [
        *[(text, "sm_90a") for text in ("H200", "h200", "NVIDIA H100 80GB HBM3", "GH200", "sm90", "SM_90A", "9.0")],
        *[(text, "sm_100a") for text in ("B200", "gb200", "sm100", "sm_100a", "10.0")],
        *[(text, "sm_103a") for text in ("B300", "NVIDIA GB300", "sm103", "10.3")],
    ],
)
def test_a_gpu_has_many_names(text, target):
    """Products, as drivers spell them, and targets; in any case."""
    assert target == gpu_named(text).target
    assert set(TARGETS) == {gpu.target for gpu in GPUS}


@pytest.mark.parametrize("text", ["A100", "sm80", "", "H2000", "12.0"])
def test_another_gpu_is_an_error_that_lists_the_known_ones(text):
    """Nothing is built for a GPU that nobody has kernels for."""
    with pytest.raises(InputError, match=r"Allowed: H200, .*, or a target: sm90, sm100, sm103\."):
        gpu_named(text)


def test_serving_over_pages_asks_for_one_forward_a_kind_of_layer():
    """A window of 128 is two blocks of keys, which nobody splits; a merge has the sink that the parts leave out."""
    assert [
        ("fwd-sm90a-bf16-hd64-local-paged-sink", 2),
        ("fwd-sm90a-bf16-hd64-causal-paged-sink", 2),
        ("fwd-sm90a-bf16-hd64-causal-paged-split", 2),
        ("fwd_combine-sm90a-bf16-hd64-sink", 2),
    ] == wanted(GPT_OSS)


def test_a_wide_window_is_split_as_the_runtime_splits_it():
    """1,023 keys to the left are eight blocks."""
    ids = [name for name, _ in wanted({**GPT_OSS, "sliding_window": 1024})]

    assert "fwd-sm90a-bf16-hd64-local-paged-split" in ids


def test_a_cache_without_pages_is_dense_or_packed():
    """Dense keys are split as packed ones, which is a view of them."""
    ids = [name for name, _ in wanted({"model_type": "qwen3", "num_hidden_layers": 2}, Use())]

    assert [
        "fwd-sm90a-bf16-hd128-causal",
        "fwd-sm90a-bf16-hd128-causal-varlen",
        "fwd-sm90a-bf16-hd128-causal-varlen-split",
        "fwd_combine-sm90a-bf16-hd128",
    ] == ids


def test_training_asks_for_a_forward_and_the_three_launches_of_a_backward():
    """Each for batches of one length and for packed sequences; a sink is no part of the backward's kernels."""
    ids = [name for name, _ in wanted({**GPT_OSS, "layer_types": ["full_attention"] * 4}, Use(purpose="training"))]

    assert [
        "fwd-sm90a-bf16-hd64-causal-sink",
        "bwd-sm90a-bf16-hd64-causal",
        "bwd_preprocess-sm90a-bf16-hd64",
        "bwd_postprocess-sm90a-bf16-hd64",
    ] == ids[:4]
    assert [f"{name}-varlen" for name in ids[1:4]] == ids[5:]
    ids = [name for name, _ in wanted(GPT_OSS, Use(purpose="training", deterministic=True))]
    assert all(name.endswith("deterministic") for name in ids if name.startswith("bwd-"))


def test_an_encoder_has_no_decoding_and_no_pages():
    """A vision tower sees every patch once."""
    document = {"model_type": "siglip_vision_model", "num_hidden_layers": 2, "hidden_size": 768}

    assert [("fwd-sm90a-bf16-hd64-full", 2), ("fwd-sm90a-bf16-hd64-full-varlen", 2)] == wanted(document)


def test_a_causal_encoder_of_text_has_no_decoding():
    """CLIP's text tower has a causal mask and no cache."""
    document = {"model_type": "clip_text_model", "num_hidden_layers": 2}

    assert [("fwd-sm90a-bf16-hd64-causal", 2), ("fwd-sm90a-bf16-hd64-causal-varlen", 2)] == wanted(document)


def test_cross_attention_reads_the_encoders_keys_without_a_mask():
    """Whisper: encoder, decoder over pages, and keys of another part."""
    ids = {name for name, _ in wanted({"model_type": "whisper", "max_target_positions": 448})}

    assert {"fwd-sm90a-bf16-hd64-full", "fwd-sm90a-bf16-hd64-causal-paged", "fwd-sm90a-bf16-hd64-full-varlen"} <= ids
    assert not any("full-paged" in name for name in ids)
    assert "fwd-sm90a-bf16-hd64-full-varlen-split" in ids  # 1,500 frames; 448 tokens of its own are not split
    assert "fwd-sm90a-bf16-hd64-causal-paged-split" not in ids


def test_a_cache_of_eight_bits_needs_queries_of_eight_bits_and_blackwell():
    """Kernels take one dtype; the merge writes bf16. On Hopper the layers are named."""
    document = {"model_type": "qwen3", "num_hidden_layers": 2}
    fp8 = Use(page_size=16, cache_dtype="FP8")

    assert [
        "fwd-sm100a-e4m3-hd128-causal-paged",
        "fwd-sm100a-e4m3-hd128-causal-paged-split",
        "fwd_combine-sm100a-bf16-hd128",
    ] == [name for name, _ in wanted(document, fp8, B200)]
    ((reason, layers),) = lacks(document, fp8)
    assert reason.startswith("the cache is e4m3, and fp8 kernels need compute capability 10.0")
    assert 2 == layers
    quantised = document | {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}
    assert [("keys and values are cached as int8, which no kernel reads", 2)] == lacks(quantised, gpu=B200)
    assert [] == lacks(quantised, Use(page_size=16, cache_dtype="bf16"))


def test_what_no_kernel_computes_is_named_with_its_layers():
    """A bias, chunks, an unknown tower."""
    assert [("a bias for each pair of positions is added to the scores", layers) for layers in (6, 6, 6)] == lacks(
        {"model_type": "t5"}
    )
    types = ["chunked_attention"] * 3 + ["full_attention"]
    assert [3] == [n for _, n in lacks({"model_type": "llama4_text", "num_hidden_layers": 4, "layer_types": types})]
    assert [9] == [n for _, n in lacks({"model_type": "novel", "num_hidden_layers": 9})]


@pytest.mark.parametrize(("ranks", "heads"), [(1, (64, 8)), (4, (16, 2)), (8, (8, 1)), (16, (4, 1)), (64, (1, 1))])
def test_heads_are_shared_and_few_kv_heads_are_copied(ranks, heads):
    """64 query heads on 8 KV heads."""
    (attention,) = model_of({"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 64,
                             "num_key_value_heads": 8}, name="m").parts[0].kinds()  # fmt: skip

    assert heads == heads_per_rank(attention, ranks)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (Use(tensor_parallel=3), "cannot be shared by 3 ranks evenly"),
        (Use(page_size=0), "page_size is 0; at least 1"),
        (Use(query_rows=0), "query_rows is 0"),
        (Use(cache_dtype="int4"), "cache dtype 'int4' is unknown. Allowed: bf16, fp16, e4m3, e5m2, fp8."),
        (Use(purpose="fun"), "use 'fun' is unknown. Allowed: serving, training."),
    ],
)
def test_a_use_that_cannot_be_is_one_error(use, message):
    """The value and what is allowed."""
    with pytest.raises(InputError) as caught:
        wanted(GPT_OSS, use)

    assert message in str(caught.value)


def test_a_use_is_spelled_as_options_of_the_builder():
    """What a person is told to run is what was asked."""
    use = Use(page_size=16, cache_dtype="e4m3", query_rows=4, tensor_parallel=8)

    assert "--page-size 16 --cache-dtype e4m3 --query-rows 4 --tp 8" == use_as_options(use)
    assert "--for training --deterministic" == use_as_options(Use(purpose="training", deterministic=True))
    assert "" == use_as_options(Use())


def test_neither_torch_nor_transformers_is_needed():
    """`serves` runs where kernels are shipped from, not only where they run."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "import fa4_kernels.__main__, fa4_kernels.models.command"
    )
    from fa4build.shipping.wheel import RUNTIME_DIR

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=RUNTIME_DIR.parent)
