"""Contract: the SDPA-style function and the transformers attention implementation give what torch gives.

Real kernels, launched into the simulator (see simulated.py). Tolerance: bf16 rounding of outputs of order 1.
"""

import pytest

pytestmark = pytest.mark.dsl
torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from fa4_kernels import InputError, loader  # noqa: E402
from fa4_kernels.sdpa import scaled_dot_product_attention  # noqa: E402

from tests.runtime.simulated import SimulatedRuntime, compile_variants  # noqa: E402

IDS = tuple(f"fwd-sm90a-bf16-hd128-{mask}" for mask in ("full", "causal", "local"))


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    return compile_variants(IDS)


@pytest.fixture
def runtime(launcher, fake, tmp_path, cubins):
    made = SimulatedRuntime(cubins, tmp_path, fake)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


def tensors(seqlen_q, seqlen_k, heads=2, heads_kv=2):
    shapes = ((1, heads, seqlen_q, 128), (1, heads_kv, seqlen_k, 128), (1, heads_kv, seqlen_k, 128))
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)


@pytest.mark.parametrize("lengths", [(50, 50), (50, 130), (130, 50)], ids=["square", "more-keys", "more-queries"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_is_torchs(runtime, lengths, is_causal):
    """Layout, scale and the alignment of the causal mask, which torch puts top left."""
    q, k, v = tensors(*lengths)
    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=is_causal, scale=0.1
    )

    assert out.shape == expected.shape
    assert (out.float() - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": torch.ones(1)}, "attn_mask is given"),
        ({"dropout_p": 0.5}, r"dropout_p is 0\.5"),
        ({}, "query has 4 heads, key has 2; pass enable_gqa=True"),
    ],
)
def test_sdpa_refuses_what_it_cannot_do(runtime, options, message):
    """One clear error, nothing launched."""
    with pytest.raises(InputError, match=message):
        scaled_dot_product_attention(*tensors(20, 20, heads=4), **options)
    assert runtime.launched == []


def test_sdpa_shares_keys_on_request(runtime):
    """enable_gqa: query heads 0 and 1 read key head 0."""
    q, k, v = tensors(20, 30, heads=4)
    out = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)

    assert (out.float() - expected).abs().max() < 0.03


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def model(runtime):
    """A Llama with two layers, two query heads on one key head, random weights."""
    transformers = pytest.importorskip("transformers")
    import fa4_kernels.hf

    fa4_kernels.hf.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        initializer_range=0.2,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_a_transformers_model_gives_its_logits(model, runtime):
    """As with eager attention, up to bf16; one causal launch a layer."""
    tokens = torch.arange(40).remainder(50)[None]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(tokens).logits.float()
        model.set_attn_implementation("fa4_kernels")
        found = model(tokens).logits.float()

    assert runtime.launched == 2 * ["fwd_sm90a_bf16_hd128_causal_0"]
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_decoding_with_a_cache_sees_all_earlier_keys(model, runtime):
    """One token after 39 in the cache: the last row of the logits of all 40."""
    tokens = torch.arange(40).remainder(50)[None]
    model.set_attn_implementation("fa4_kernels")
    with torch.no_grad():
        expected = model(tokens).logits[:, -1].float()
        cache = model(tokens[:, :-1], use_cache=True).past_key_values
        found = model(tokens[:, -1:], past_key_values=cache).logits[:, -1].float()

    assert (found - expected).norm() < 0.03 * expected.norm()


def test_padded_batches_are_refused(model, runtime):
    """A kernel without a mask would attend to the padding."""
    model.set_attn_implementation("fa4_kernels")
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(InputError, match="batches without padding"), torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long), attention_mask=mask)
    assert runtime.launched == []
