"""Contract: with the implementation of fa4_kernels.hf, models of transformers give the logits that their eager
attention gives, whichever masks and caches they use, or refuse the mask by name.

Tiny models with random weights; the kernels are loops (reference_kernels.py). Tolerance: relative 2-norm, bf16.
"""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fa4_kernels.hf  # noqa: E402
from fa4_kernels import CaptureError, InputError, answers, api, loader  # noqa: E402

from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402

NAME = "fa4_kernels"
TOLERANCE = 0.06
SIZES = {"vocab_size": 60, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "max_position_embeddings": 256}
PADS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 59}
GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.fixture
def runtime(monkeypatch):
    for module in (answers, api):
        monkeypatch.setattr(module, "CAN_ANSWER", False)
    made = ReferenceRuntime()
    loader.use_runtime(made)
    fa4_kernels.hf.register()
    yield made
    loader.use_runtime(None)


def made(config, auto="AutoModelForCausalLM"):
    torch.manual_seed(0)
    return getattr(transformers, auto).from_config(config, dtype=torch.bfloat16).eval()


def mistral():
    return made(transformers.MistralConfig(**SIZES, **HEADS, **PADS, sliding_window=8))


def gemma2():
    return made(transformers.Gemma2Config(**SIZES, **HEADS, **PADS, **GEMMA, attn_logit_softcapping=20.0))


def gemma3():
    return made(transformers.Gemma3TextConfig(**SIZES, **HEADS, **PADS, **GEMMA))


def embedding_gemma():
    config = transformers.Gemma3TextConfig(**SIZES, **HEADS, **PADS, **GEMMA, use_bidirectional_attention=True)
    return made(config, "AutoModel")


def modernbert():
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    config = transformers.ModernBertConfig(
        **sizes, **PADS, num_attention_heads=2, local_attention=8, global_attn_every_n_layers=2,
        max_position_embeddings=256, initializer_range=0.2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    return made(config, "AutoModel")


def gpt_oss():
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
    config = transformers.GptOssConfig(**SIZES, **HEADS, **PADS, **more, layer_types=GEMMA["layer_types"])
    model = made(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


MODELS = [mistral, gemma2, gemma3, embedding_gemma, modernbert, gpt_oss]
DECODERS = [mistral, gemma2, gemma3, gpt_oss]
TOKENS = (torch.arange(40) * 7).remainder(57)[None] + 2


def values(output):
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state).float()


def both(model, run):
    """What `run` gives by eager attention and by ours."""
    results = []
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(run(model))
    return results


def off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("make", MODELS)
def test_windows_are_those_of_eager_attention(runtime, make):
    """40 tokens, windows of 8: to the left for decoders, to both sides for encoders."""
    expected, found = both(make(), lambda model: values(model(TOKENS)))
    assert off(found, expected) < TOLERANCE
    assert runtime.launched


@pytest.mark.parametrize("max_cache_len", [40, 64, 200])
@pytest.mark.parametrize("make", DECODERS)
def test_static_caches_are_read_as_far_as_they_are_filled(runtime, make, max_cache_len):
    """A prompt of 30, then one token, then 9 at once; sliding layers have caches of their window."""

    def run(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=max_cache_len)
        return torch.cat([values(model(part, past_key_values=cache)) for part in TOKENS.split((30, 1, 9), 1)], 1)

    expected, found = both(make(), run)
    assert off(found, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("make", "is_compiled"), [*((make, False) for make in DECODERS), (mistral, True), (gemma3, True)]
)
def test_generation_with_a_static_cache_writes_the_same(runtime, make, is_compiled):
    """Scores of the first step, and the tokens; also where decoding is compiled as one graph."""
    torch._dynamo.reset()
    compilation = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compilation._compile_all_devices = True

    def run(model):
        mask = torch.ones_like(TOKENS[:, :12])
        options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
        options |= {"compile_config": compilation} if is_compiled else {"disable_compile": True}
        result = model.generate(
            TOKENS[:, :12], attention_mask=mask, **options, output_scores=True, return_dict_in_generate=True
        )
        return result.sequences, result.scores[0].float()

    (tokens, expected), (found_tokens, found) = both(make(), run)
    assert off(found, expected) < TOLERANCE
    assert (tokens == found_tokens).float().mean() > 0.9


def test_a_static_cache_of_several_sequences(runtime):
    """A batch of 3 reads as many keys in each."""

    def run(model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        return values(model(torch.cat([TOKENS, TOKENS.flip(1), TOKENS.roll(3, 1)]), past_key_values=cache))

    expected, found = both(gemma3(), run)
    assert off(found, expected) < TOLERANCE


def test_rows_of_packed_sequences_do_not_see_each_other(runtime):
    """Two rows, packed differently."""
    tokens = torch.cat([TOKENS[:, :20], TOKENS[:, 20:]])
    positions = torch.tensor([[*range(5), *range(15)], [*range(12), *range(8)]])
    expected, found = both(mistral(), lambda model: values(model(tokens, position_ids=positions, use_cache=False)))
    assert off(found, expected) < TOLERANCE
    assert "fwd/varlen" in runtime.launched


def test_what_was_read_without_gradients_serves_a_call_with_gradients(runtime):
    """The same position_ids in inference mode, then in training."""
    model, positions = mistral(), torch.tensor([[*range(20), *range(20)]])
    model.set_attn_implementation(NAME)
    with torch.inference_mode():
        model(TOKENS, position_ids=positions, use_cache=False)
    model(TOKENS, position_ids=positions, use_cache=False, labels=TOKENS).loss.backward()
    assert model.get_input_embeddings().weight.grad.any()


def masks(config, function, **options):
    """The mask that transformers makes, for 40 tokens."""
    from transformers import masking_utils

    config._attn_implementation = NAME
    given = {"inputs_embeds": torch.zeros(1, 40, 8), "attention_mask": None, "cache": None, "position_ids": None}
    return getattr(masking_utils, function)(config, **given | options)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("create_chunked_causal_mask", {}, "chunks of tokens"),
        ("create_causal_mask", {"block_sequence_ids": torch.arange(40)[None] // 8}, "blocks of tokens"),
        ("create_causal_mask", {"or_mask_function": lambda b, h, q, k: k < 5}, "a mask of its own"),
        ("create_causal_mask", {"and_mask_function": lambda b, h, q, k: (q - k) % 2 == 0}, None),
        ("create_causal_mask", {"attention_mask": torch.tensor([[0] + 39 * [1]])}, "without padding"),
    ],
)
def test_masks_that_kernels_do_not_know_are_refused(runtime, function, options, message):
    """Chunks, blocks of an image, a prefix: dropped silently, they would be another model."""
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    config.attention_chunk_size = 16
    with pytest.raises(InputError, match=message or "a mask of its own"):
        masks(config, function, **options)


def test_a_chunk_that_holds_all_tokens_is_no_chunk(runtime):
    """Llama 4 below 8192 tokens."""
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    config.attention_chunk_size = 40
    assert masks(config, "create_chunked_causal_mask") is None


def test_a_position_bias_is_refused(runtime):
    """Models of the T5 kind add it to the scores."""
    q = torch.zeros(1, 2, 5, 64, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="no position_bias"):
        fa4_kernels.hf.attention_forward(torch.nn.Module(), q, q, q, None, position_bias=torch.zeros(1, 2, 5, 5))


def test_positions_are_not_read_nor_kept_during_a_capture(runtime, monkeypatch):
    """A graph would hold the address of what the next call lets go of."""
    hf = fa4_kernels.hf
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    class Positions(torch.Tensor):
        is_cuda = True

    with pytest.raises(CaptureError, match="cu_seq_lens_q"):
        hf._starts_of(torch.tensor([[0, 1, 0]]).as_subclass(Positions), 1, 3)
