"""Contract: with the modules of flash-attention provided, models of transformers run unedited on
`attn_implementation="flash_attention_2"`, `_3` and `_4`, padded batches included, and give what their eager attention
gives where a token is no padding.

Tiny models with random weights; kernels are loops (reference_kernels.py), so that "CUDA" is said to be there.
Tolerance: relative 2-norm, bf16.
"""

import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.modeling_flash_attention_utils", reason="transformers with FlashAttention-4")

import fa4_kernels  # noqa: E402
from fa4_kernels import torch_backend  # noqa: E402
from fa4_kernels.stacks import modules  # noqa: E402
from transformers import modeling_flash_attention_utils as flash  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

from tests.runtime.conftest import RUNTIME  # noqa: E402
from tests.runtime.stack_reference import reference_runtime  # noqa: E402

TOLERANCE = 0.06
STACK_OF = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
SIZES = {"vocab_size": 60, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "max_position_embeddings": 256}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 59}
LAYERS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", LAYERS | {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 20.0}),
    "gpt_oss": ("GptOssConfig", LAYERS | EXPERTS),
}
TOKENS = torch.stack([(torch.arange(24) * 7).remainder(57) + 2, (torch.arange(24) * 5).remainder(57) + 2])
LEFT = torch.ones(2, 24, dtype=torch.long)
LEFT[1, :9] = 0
RIGHT = LEFT.flip(1)


@pytest.fixture(autouse=True)
def on_loops(monkeypatch):
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for row in flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX.values():
        monkeypatch.setitem(row, "supported_devices", ((lambda: True, "cuda"),))
    with reference_runtime(monkeypatch) as made:
        yield made


@pytest.fixture
def provided():
    made = []
    yield lambda version: made.append(fa4_kernels.provide(STACK_OF[version]))
    for each in made:
        each.remove()


def model_of(name):
    torch.manual_seed(0)
    config, options = CONFIGS[name]
    config = getattr(transformers, config)(**SIZES, **options)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    for layer in made.model.layers if name == "gpt_oss" else ():
        torch.nn.init.normal_(layer.self_attn.sinks)
    return made.eval()


def both(model, version, run):
    """What `run` gives by eager attention and by the provided one."""
    results = []
    for name in ("eager", f"flash_attention_{version}"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        results.append(run(model))
    return results


def off(found, expected):
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def check_padded(model, version, mask):
    def run(model):
        with torch.no_grad():
            return model(TOKENS, attention_mask=mask).logits[mask.bool()]

    expected, found = both(model, version, run)
    assert off(found, expected) < TOLERANCE


def test_transformers_looks_again():
    """It remembers what is installed; providing and removing make it forget."""
    looked = [getattr(import_utils, f"is_flash_attn_{version}_available") for version in STACK_OF]
    for look in looked:
        look.cache_clear()
    assert [look() for look in looked] == [False, False, False]
    first = fa4_kernels.provide("flash_attn.cute")
    assert [look() for look in looked] == [False, False, True]
    others = [fa4_kernels.provide("flash_attn"), fa4_kernels.provide("flash_attn_interface")]
    assert [look() for look in looked] == [True, True, True]
    assert import_utils.is_flash_attn_greater_or_equal("2.6.3")
    for each in (first, *others):
        each.remove()
    assert [look() for look in looked] == [False, False, False]


@pytest.mark.parametrize(("name", "version"), [("llama", 2), ("gpt_oss", 4)])
def test_padding_is_not_seen(provided, on_loops, name, version):
    """On the left, as generation pads; what ran were packed sequences."""
    provided(version)
    check_padded(model_of(name), version, LEFT)

    assert "fwd/varlen" in " ".join(on_loops.launched)
    ((stack, function), number), *others = fa4_kernels.served().answered.items()
    assert (stack, function, number, others) == (STACK_OF[version], "flash_attn_varlen_func", 2, [])


def snippets():
    text = (RUNTIME.parents[1] / "docs" / "guide" / "switch-on.md").read_text(encoding="utf-8")
    return re.findall(r"(?<!-->\n)```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("text", snippets(), ids=lambda text: text.split("\n")[-2][:40])
def test_the_guides_snippets_run(monkeypatch, text):
    """docs/guide/switch-on.md, each block by itself; torch's kernel and the installed package are stand-ins."""
    monkeypatch.setattr(torch_backend, "_DISPATCH_KEY", "CPU")
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: None)
    if "fallback" in text:
        monkeypatch.setattr(modules, "is_installed", lambda stack: True)
    try:
        exec(text, {})
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        for stack in list(modules._state.fallback):
            fa4_kernels.provide(stack).remove()


@pytest.mark.slow
@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("version", STACK_OF)
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_is_not_seen_by_any_model(provided, name, version, mask):
    """gpt-oss takes FlashAttention-4 alone, for its sinks."""
    if name == "gpt_oss" and version != 4:
        pytest.skip("transformers does not offer it for this model")
    provided(version)
    check_padded(model_of(name), version, mask)


@pytest.mark.slow
@pytest.mark.parametrize("version", STACK_OF)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_generation_of_a_padded_batch_writes_the_same(provided, name, version):
    """Decoding with a cache, the shorter prompt padded on the left."""
    provided(version)
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}

    def run(model):
        result = model.generate(TOKENS, attention_mask=LEFT, **options)
        return result.sequences, result.scores[0]

    (tokens, expected), (found_tokens, found) = both(model_of(name), version, run)
    assert off(found, expected) < TOLERANCE
    assert (tokens == found_tokens).float().mean() > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("version", STACK_OF)
def test_training_of_a_padded_batch_has_its_gradients(provided, version):
    """Loss and the gradient of the embeddings. The first token is no label: what predicts it is padding."""
    provided(version)
    labels = TOKENS.masked_fill((LEFT == 0) | (LEFT.roll(1, 1) == 0), -100)

    def run(model):
        model.zero_grad()
        model(TOKENS, attention_mask=LEFT, labels=labels).loss.backward()
        return model.get_input_embeddings().weight.grad.clone()

    expected, found = both(model_of("llama").train(), version, run)
    assert off(found, expected) < 2 * TOLERANCE
