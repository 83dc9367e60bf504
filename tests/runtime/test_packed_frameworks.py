"""Contract: the transformers attention implementation passes caps, sinks and packed sequences on.

The kernels are loops (reference_kernels.py); expected values are those of transformers' own eager attention, or of the
definition.
"""

import pytest

torch = pytest.importorskip("torch")

from fa4_kernels import InputError, answers, loader  # noqa: E402

from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(answers, "CAN_ANSWER", False)
    made = ReferenceRuntime()
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


def tensors(seqlen=12, heads=4, heads_kv=2):
    generator = torch.Generator().manual_seed(seqlen)
    return tuple(torch.randn(1, h, seqlen, 64, generator=generator).bfloat16() for h in (heads, heads_kv, heads_kv))


def definition(q, k, v, *, softcap=0.0, sink=None, visible):
    """(1, heads, rows, dim) -> (1, rows, heads, dim) in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (torch.softmax(scores, -1)[..., : k.shape[2]] @ v).transpose(1, 2)


def test_cap_sink_and_window_reach_the_kernels(runtime):
    """As Gemma 2 and gpt-oss call it: softcap, s_aux, sliding_window (the query itself is one of the keys)."""
    from fa4_kernels.hf import attention_forward

    q, k, v = tensors()
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0])
    row, key = torch.arange(12)[:, None], torch.arange(12)[None]
    visible = (key <= row) & (key > row - 4)
    out, weights = attention_forward(torch.nn.Module(), q, k, v, None, softcap=2.0, s_aux=sink, sliding_window=4)

    assert weights is None
    assert (out.double() - definition(q, k, v, softcap=2.0, sink=sink, visible=visible)).abs().max() < 0.02
    assert runtime.launched == ["fwd/dense/sink/softcap"]


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_do_not_see_each_other(runtime, how):
    """Three sequences of 5, 3 and 4 tokens in a row; as positions that start again, or as starts in int64."""
    from fa4_kernels.hf import attention_forward

    q, k, v = tensors()
    starts = torch.tensor([0, 5, 8, 12])
    sequence = torch.repeat_interleave(torch.arange(3), starts.diff())
    row, key = torch.arange(12)[:, None], torch.arange(12)[None]
    visible = (sequence[:, None] == sequence[None]) & (key <= row)
    packing = {"position_ids": (torch.arange(12) - starts[sequence])[None]}
    if how == "cu_seq_lens":
        packing = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    out, _ = attention_forward(torch.nn.Module(), q, k, v, None, **packing)

    assert (out.double() - definition(q, k, v, visible=visible)).abs().max() < 0.02
    assert runtime.launched == ["fwd/varlen"]


def test_packing_is_read_once_for_all_layers(runtime, monkeypatch):
    """Every layer gets the same position_ids; a changed tensor is read again."""
    from fa4_kernels import hf

    reads = []
    monkeypatch.setattr(hf, "_read_starts", lambda positions: reads.append(positions.tolist()))
    positions = torch.tensor([[0, 1, 2]])
    for _ in range(3):
        assert hf._starts_of(positions, 1, 3) is None
    positions += 1
    hf._starts_of(positions, 1, 3)
    hf._starts_of(positions.clone(), 1, 3)

    assert reads == [[[0, 1, 2]], [[1, 2, 3]], [[1, 2, 3]]]


def test_packed_sequences_are_a_batch_of_one(runtime):
    """More rows would each need starts of their own."""
    from fa4_kernels.hf import attention_forward

    q, k, v = (torch.cat([x, x]) for x in tensors())
    with pytest.raises(InputError, match="the batch is 2; packed sequences are a batch of 1"):
        attention_forward(torch.nn.Module(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 12]))
    assert runtime.launched == []


def test_a_model_gives_the_logits_of_eager_attention_for_packed_rows(runtime):
    """A Llama of two layers; transformers masks eager attention by the same position_ids."""
    transformers = pytest.importorskip("transformers")
    import fa4_kernels.hf

    fa4_kernels.hf.register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.2}
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens, positions = torch.arange(12)[None], torch.tensor([[*range(5), *range(7)]])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(tokens, position_ids=positions, use_cache=False).logits.float()
        model.set_attn_implementation("fa4_kernels")
        found = model(tokens, position_ids=positions, use_cache=False).logits.float()

    assert runtime.launched == 2 * ["fwd/varlen"]
    assert (found - expected).norm() < 0.03 * expected.norm()
