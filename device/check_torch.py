"""Check fa4_kernels inside torch on a GPU, from the wheels alone: compile, graphs, streams, layouts, models, training.

    python device/check_torch.py WHEEL_DIR --out record.json

* torch.compile(fullgraph=True) with inductor, of flash_attn_func and flash_attn_varlen_func: gradients as eagerly.
* Forward and backward captured in a CUDA graph after preload(), dense and packed: replays give an eager run's bits.
* A side stream, while another is busy: the same bits.
* 1,000 deterministic backward passes give the same bits, dense and packed.
* Inputs that are transposed, at an odd offset, expanded, strided in the last mode, or slices of a packed tensor: the
  bits of contiguous copies, gradients included. Empty inputs.
* A Llama of transformers with random weights: logits, a cache, packed sequences and gradients no farther from float32
  than twice what eager attention in bf16 is.
* A small GPT, 200 steps with our attention, with torch's and with torch's again from the same start: the losses of ours
  differ from torch's by at most what bf16 makes of it (the mean of the last 20 steps within 0.02), and it has learnt:
  the loss is below that of guessing, ln 64, by 0.5.
* Host time of forward and backward together, beside torch's.

Each check that fails or raises is told; the others go on. Exit status 1 if one did.
"""

import argparse
import copy
import functools
import math
import statistics
import sys
import time

from harness import run_checks, run_installed, setting

DEVICE = "cuda"
COMPILER = "inductor"
STEPS, BATCH, SEQLEN, WIDTH, HEADS, LAYERS, VOCABULARY = 200, 16, 256, 256, 4, 4, 64
LAST = 20
LOSS_TOLERANCE = 0.02
ROWS = 1000  # of a problem; packed: LENGTHS
LENGTHS = (700, 1, 300, 999)
FEW = 200  # rows where many cases are run
REPEATS = 1000
BUSY = 4096  # rows of a matrix that keeps a stream busy


# --------------------------------------------------------------------------------------------------------------------
# Problems


def normal(torch, seed, *shapes):
    """Standard normal numbers in bf16, one tensor a shape."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return [torch.randn(shape, device=DEVICE, generator=generator).to(torch.bfloat16) for shape in shapes]


def starts_of(torch, lengths):
    """cu_seqlens."""
    starts = torch.tensor([0, *lengths], device=DEVICE)
    return starts.cumsum(0, dtype=torch.int32)


class Problem:
    """A differentiable scalar of q, k, v, summed in a fixed order: dense, or packed sequences."""

    def __init__(self, torch, fa4_kernels, layout, heads=4, heads_kv=2, head_dim=64):
        self._torch, self._kernels, self.layout = torch, fa4_kernels, layout
        rows = (2, ROWS) if layout == "dense" else (sum(LENGTHS),)
        self.shapes = ((*rows, heads, head_dim), *2 * ((*rows, heads_kv, head_dim),))
        self.starts = starts_of(torch, LENGTHS)

    def inputs(self):
        """q, k, v that require gradients; the same numbers every time."""
        return [x.requires_grad_() for x in normal(self._torch, 1, *self.shapes)]

    def loss(self, q, k, v):
        """Of out and lse."""
        options = {"causal": True, "return_lse": True, "deterministic": True}
        if self.layout == "dense":
            out, lse = self._kernels.flash_attn_func(q, k, v, **options)
        else:
            longest = max(LENGTHS)
            lists = (self.starts, self.starts, longest, longest)
            out, lse = self._kernels.flash_attn_varlen_func(q, k, v, *lists, **options)
        return (out.float() ** 2).mean() + lse.mean()

    def gradients(self, function=None):
        """Of fresh inputs."""
        tensors = self.inputs()
        (function or self.loss)(*tensors).backward()
        return [x.grad for x in tensors]


def equal_bits(torch, found, expected):
    """Whether all tensors hold the same bits."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, expected, strict=True))


# --------------------------------------------------------------------------------------------------------------------
# Checks. Each returns a dict with `passed`.


def check_compile(torch, fa4_kernels, layout):
    """Largest difference of a gradient from eager mode, relative to the largest gradient."""
    problem = Problem(torch, fa4_kernels, layout)
    expected = problem.gradients()
    found = problem.gradients(torch.compile(problem.loss, fullgraph=True, backend=COMPILER))
    worst = max(((x - e).abs().max() / e.abs().max()).item() for x, e in zip(found, expected, strict=True))
    return {"passed": worst < 0.01, "worst": worst}


def check_graph(torch, fa4_kernels, layout):
    """A captured step, replayed ten times."""
    fa4_kernels.preload(select="*hd64*")
    problem = Problem(torch, fa4_kernels, layout)
    expected, tensors = problem.gradients(), problem.inputs()
    with torch.cuda.stream(torch.cuda.Stream()):
        problem.loss(*tensors).backward()
    torch.cuda.synchronize()
    for x in tensors:
        x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.loss(*tensors).backward()
    equal = True
    for _ in range(10):
        for x in tensors:
            x.grad.zero_()
        graph.replay()
        equal &= equal_bits(torch, [x.grad for x in tensors], expected)
    return {"passed": equal}


def check_stream(torch, fa4_kernels, layout):
    """Forward and backward on a side stream while another is busy."""
    problem = Problem(torch, fa4_kernels, layout)
    expected, tensors = problem.gradients(), problem.inputs()
    busy = torch.randn(BUSY, BUSY, device=DEVICE)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(20):
        busy = busy @ busy * 0.01
    with torch.cuda.stream(side):
        problem.loss(*tensors).backward()
    side.synchronize()
    return {"passed": equal_bits(torch, [x.grad for x in tensors], expected)}


def check_repeats(torch, fa4_kernels, layout):
    """REPEATS backward passes of one forward, head dims 64 and 128; elements that differ are counted on the device."""
    different = {}
    for head_dim in (64, 128):
        problem = Problem(torch, fa4_kernels, layout, heads=8, heads_kv=2, head_dim=head_dim)
        tensors = problem.inputs()
        loss = problem.loss(*tensors)
        first = torch.autograd.grad(loss, tensors, retain_graph=True)
        count = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(REPEATS):
            again = torch.autograd.grad(loss, tensors, retain_graph=True)
            for a, b in zip(first, again, strict=True):
                count += (a.view(torch.int16) != b.view(torch.int16)).sum()
        different[f"hd{head_dim}"] = count.item()
    return {"passed": not any(different.values()), "repeats": REPEATS, "different": different}


def spoilt_layouts(torch, x):
    """Name -> a view with the values of x and other strides or another place; (batch, rows, heads, dim)."""
    offset = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype, device=DEVICE)
    packed = torch.full((*x.shape[:2], 3, *x.shape[2:]), math.nan, dtype=x.dtype, device=DEVICE)
    views = {
        "heads before rows": torch.empty_like(x.transpose(1, 2).contiguous()).transpose(1, 2),
        "odd offset": offset,
        "every second column": wide[..., ::2],
        "columns before rows": torch.empty_like(x.transpose(1, 3).contiguous()).transpose(1, 3),
        "slice of packed q, k, v": packed[:, :, 1],
    }
    for view in views.values():
        view.copy_(x)
    return views | {"expanded batch": x[:1].expand(x.shape), "expanded heads": x[:, :, :1].expand(x.shape)}


def check_layouts(torch, fa4_kernels):
    """Each of q, k, v, dout in each layout, against contiguous copies of the same values."""
    q, k, v, dout = normal(torch, 3, *4 * ((2, FEW, 2, 64),))
    wrong, count = [], 0
    for position, name in enumerate(("q", "k", "v", "dout")):
        for layout, view in spoilt_layouts(torch, (q, k, v, dout)[position]).items():
            results = []
            for changed in (view, view.contiguous()):
                *inputs, gradient = (changed if i == position else x for i, x in enumerate((q, k, v, dout)))
                leaves = [x.detach().requires_grad_() for x in inputs]
                out = fa4_kernels.flash_attn_func(*leaves, causal=True, deterministic=True)[0]
                results.append((out, *torch.autograd.grad(out, leaves, gradient)))
                with torch.no_grad():
                    results[-1] += (fa4_kernels.flash_attn_func(*inputs)[0],)
            count += 1
            if not equal_bits(torch, *results):
                wrong.append(f"{name}: {layout}")
    return {"passed": not wrong, "cases": count, "wrong": wrong}


def check_empty(torch, fa4_kernels):
    """No keys, no queries, no batch: zeros, minus infinity, gradients of zero; packed sequences without rows."""
    wrong = []
    for batch, rows, keys in ((2, 5, 0), (2, 0, 5), (0, 5, 5)):
        leaves = [x.requires_grad_() for x in normal(torch, 4, *((batch, n, 2, 64) for n in (rows, keys, keys)))]
        out, lse = fa4_kernels.flash_attn_func(*leaves, return_lse=True)
        gradients = torch.autograd.grad(out.sum(), leaves)
        is_empty = not out.any() and bool(torch.isneginf(lse).all()) and not any(x.any() for x in gradients)
        if not is_empty or out.shape != (batch, rows, 2, 64):
            wrong.append(f"batch {batch}, {rows} queries, {keys} keys")
    q, k, v = normal(torch, 5, *3 * ((50, 2, 64),))
    starts = starts_of(torch, (0, 50, 0))
    packed = fa4_kernels.flash_attn_varlen_func(q, k, v, starts, starts, 50, 50, causal=True)[0]
    single = starts_of(torch, (50,))
    if not torch.equal(packed, fa4_kernels.flash_attn_varlen_func(q, k, v, single, single, 50, 50, causal=True)[0]):
        wrong.append("packed, sequences without rows around one")
    return {"passed": not wrong, "wrong": wrong}


def check_decoding_graph(torch, fa4_kernels):
    """A captured decoding step over pages follows the lengths of the cache at each replay."""
    (q,) = normal(torch, 6, (2, 1, 8, 128))
    k, v = normal(torch, 7, *2 * ((40, 64, 2, 128),))
    table = torch.randperm(40, device=DEVICE).int().view(2, 20)
    lengths = torch.tensor([100, 1000], dtype=torch.int32, device=DEVICE)

    def step():
        return fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, table, causal=True, num_splits=3)[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    wrong = []
    for numbers in ((100, 1000), (1280, 3), (1, 517)):
        lengths.copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        if not torch.equal(result, step()):
            wrong.append(numbers)
    return {"passed": not wrong, "wrong": wrong}


def check_sdpa(torch, fa4_kernels):
    """The SDPA-style function, forward and backward, beside torch's in float32."""
    from fa4_kernels.sdpa import scaled_dot_product_attention as ours

    theirs, worst = torch.nn.functional.scaled_dot_product_attention, 0.0
    for is_causal in (False, True):
        tensors = normal(torch, 8, (2, 4, FEW, 64), *2 * ((2, 2, FEW, 64),))
        results = []
        for attend, dtype in ((ours, torch.bfloat16), (theirs, torch.float32)):
            leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
            out = attend(*leaves, is_causal=is_causal, enable_gqa=True)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        for a, b in zip(*results, strict=True):
            worst = max(worst, ((a.float() - b).abs().max() / b.abs().max()).item())
    return {"passed": worst < 0.02, "worst": worst}


def llama(torch):
    """Four layers, random weights, four query heads on two key heads of 64."""
    import fa4_kernels.hf
    import transformers

    fa4_kernels.hf.register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.1}
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE)
    return model, transformers.__version__


def check_transformers(torch, fa4_kernels):
    """Logits and the gradient of the embedding, relative differences in the 2-norm from the model in float32: ours may
    have twice that of eager attention in bf16."""
    model, version = llama(torch)
    exact = copy.deepcopy(model).float()
    exact.set_attn_implementation("eager")
    rows, first = torch.arange(FEW, device=DEVICE), FEW // 3
    tokens, positions = rows.remainder(499)[None], torch.where(rows < first, rows, rows - first)[None]

    def plain(model):
        return model(tokens, use_cache=False).logits

    def packed(model):
        return model(tokens, position_ids=positions, use_cache=False).logits

    def cached(model):
        cache = model(tokens[:, :-1], use_cache=True).past_key_values
        return model(tokens[:, -1:], past_key_values=cache).logits

    def gradient(model):
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        return model.get_input_embeddings().weight.grad.clone()

    off = {}
    for run in (plain, packed, cached, gradient):
        with torch.set_grad_enabled(run is gradient):
            expected, off[run.__name__] = run(exact), {}
            for name in ("eager", "fa4_kernels"):
                model.set_attn_implementation(name)
                difference = (run(model).float() - expected).norm() / expected.norm()
                off[run.__name__][name] = difference.item()
    passed = all(pair["fa4_kernels"] <= 2 * pair["eager"] for pair in off.values())
    return {"passed": passed, "off": off, "transformers": version}


# --------------------------------------------------------------------------------------------------------------------
# Training


def make_gpt(torch, attend):
    """A GPT of LAYERS blocks; `attend(q, k, v)` takes and gives (batch, seqlen, heads, head_dim)."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(2)
            x = x + self.project(attend(q, k, v).flatten(2))
            return x + self.mlp(self.norm2(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQLEN, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens):
            return self.head(self.blocks(self.token(tokens) + self.place.weight))

    return Gpt().to(DEVICE)


def train(torch, attend):
    """Losses of STEPS steps. The data repeat with a period that differs from row to row: only attention can tell."""
    torch.manual_seed(0)
    model = make_gpt(torch, attend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device=DEVICE).manual_seed(2)
    losses = []
    for _ in range(STEPS):
        pattern = torch.randint(VOCABULARY, (BATCH, SEQLEN + 1), device=DEVICE, generator=generator)
        period = torch.randint(5, 40, (BATCH, 1), device=DEVICE, generator=generator)
        tokens = pattern.gather(1, torch.arange(SEQLEN + 1, device=DEVICE)[None] % period)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def check_training(torch, fa4_kernels):
    """Curves of ours and of torch's attention, twice."""

    def ours(q, k, v):
        return fa4_kernels.flash_attn_func(q, k, v, causal=True)[0]

    def theirs(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    curves = {"fa4_kernels": train(torch, ours), "sdpa": train(torch, theirs), "sdpa_again": train(torch, theirs)}
    ends = {name: statistics.mean(curve[-LAST:]) for name, curve in curves.items()}
    difference = abs(ends["fa4_kernels"] - ends["sdpa"])
    has_learnt = ends["fa4_kernels"] < math.log(VOCABULARY) - 0.5
    first = {name: curve[0] for name, curve in curves.items()}
    return {"passed": difference < LOSS_TOLERANCE and has_learnt, "ends": ends, "first": first, "curves": curves}


# --------------------------------------------------------------------------------------------------------------------
# Host time


def host_microseconds(torch, fa4_kernels, calls=300):
    """Host time of forward and backward of a small problem, queued back to back; median of 5 rounds."""
    q = torch.randn(1, 128, 1, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    t = q.transpose(1, 2)
    g, gt = torch.randn_like(q), torch.randn_like(t)

    def per_call(call):
        rounds = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            rounds.append((time.perf_counter() - start) / calls * 1e6)
        return statistics.median(rounds)

    sdpa, ours = torch.nn.functional.scaled_dot_product_attention, fa4_kernels.flash_attn_func
    times = {
        "fa4_kernels": per_call(lambda: torch.autograd.grad(ours(q, q, q)[0], q, g)),
        "sdpa": per_call(lambda: torch.autograd.grad(sdpa(t, t, t), q, gt)),
    }
    return {"passed": True, "microseconds": times}


# --------------------------------------------------------------------------------------------------------------------


def checks_of(torch, fa4_kernels):
    """Name -> check, what takes longest last."""
    checks = {"host_time": host_microseconds, "training": check_training}
    for layout in ("dense", "packed"):
        for check in (check_graph, check_stream, check_repeats):
            name = f"{check.__name__.removeprefix('check_')}_{layout}"
            checks[name] = functools.partial(check, layout=layout)
    checks |= {"layouts": check_layouts, "empty": check_empty, "decoding_graph": check_decoding_graph}
    checks |= {"sdpa": check_sdpa, "transformers": check_transformers}
    for layout in ("dense", "packed"):
        checks[f"compile_{layout}"] = functools.partial(check_compile, layout=layout)
    return {name: functools.partial(check, torch, fa4_kernels) for name, check in checks.items()}


def child(arguments):
    import fa4_kernels
    import torch

    deadline = time.monotonic() + arguments.seconds
    return run_checks(checks_of(torch, fa4_kernels), setting(torch), arguments.out, deadline)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="torch.json")
    parser.add_argument("--seconds", type=float, default=300, help="after which no further check is begun")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return child(arguments) if arguments.child else run_installed(__file__, arguments.wheel_dir)


if __name__ == "__main__":
    sys.exit(main())
