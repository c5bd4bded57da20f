"""Bad input: each a clear error that names both sides and the fix."""

import pytest
import torch

import tilewise as tw
from tilewise import masks


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q = t(2, 4, 6, 8)
K = t(2, 2, 5, 8)
RAGGED = (t(6, 4, 8), t(5, 2, 8), t(5, 2, 8))


def call(**kw):
    args = {"query": Q, "key": K, "value": K} | kw
    return lambda: tw.attention(args.pop("query"), args.pop("key"), args.pop("value"), **args)


def ragged(cu_q, cu_k, *more, dtype=torch.int32):
    return lambda: tw.attention_varlen(*RAGGED, torch.tensor(cu_q, dtype=dtype), torch.tensor(cu_k, dtype=dtype), *more)


CASES = {
    "no tensor": (call(key=[[1.0]]), TypeError, r"key must be a torch.Tensor, got list; torch.as_tensor\(key\) makes one"),
    "no ragged tensor": (
        lambda: tw.attention_varlen([[1.0]], *RAGGED[1:], torch.tensor([0, 6]), torch.tensor([0, 5])), TypeError,
        "query must be a torch.Tensor, got list",
    ),
    "aux": (call(return_aux=True), TypeError, r"return_aux must be an AuxRequest, as in AuxRequest\(lse=True\), got bool"),
    "rank": (call(query=t(4, 6, 8)), ValueError, r"query must have 4 dims, \(B, H, L, D\), got 3: \(4, 6, 8\); add a batch dim with x\[None\]"),
    "heads": (call(query=t(2, 3, 6, 8)), ValueError, r"query heads must be a multiple of key/value heads, got 3 and 2 .*transpose\(1, 2\)"),
    "no heads": (call(query=t(2, 0, 6, 8)), ValueError, "multiple of key/value heads, got 0 and 2"),
    "dtypes": (call(key=K.double()), TypeError, "one dtype, got torch.float32, torch.float64 and torch.float32; cast"),
    "integers": (call(query=Q.int(), key=K.int(), value=K.int()), TypeError, "must be floating point, got torch.int32"),
    "devices": (call(key=t(2, 2, 5, 8, device="meta")), ValueError, "one device, got cpu, meta and cpu"),
    "head dims": (call(key=t(2, 2, 5, 7)), ValueError, "same head dim D, got 8 and 7"),
    "batch": (call(key=t(3, 2, 5, 8), value=t(3, 2, 5, 8)), ValueError, r"same batch size \(query \(2, 4, 6, 8\), key \(3"),
    "value length": (call(value=t(2, 2, 4, 8)), ValueError, "key and value must have the same heads and length"),
    "value heads": (call(value=t(2, 1, 5, 8)), ValueError, "key and value must have the same heads and length"),
    "no dim": (call(query=t(2, 4, 6, 0), key=t(2, 2, 5, 0)), ValueError, "head dim D must be at least 1"),
    "integer mask": (call(mask=t(6, 5, dtype=torch.int64)), TypeError, r"torch.bool with True = attend, got torch.int64.*~mask.bool\(\)"),
    "float mask": (call(mask=t(6, 5)), TypeError, r"an additive \(float\) mask goes to bias="),
    "mask shape": (
        call(mask=t(6, 4, dtype=torch.bool)),
        ValueError,
        r"mask of shape \(1, 1, 6, 4\) does not broadcast to \(B, H, Lq, Lk\) = \(2, 4, 6, 5\).*accepted are \(6, 5\) and",
    ),
    "mask rank": (call(mask=t(2, 6, 5, dtype=torch.bool)), ValueError, r"mask must have shape \(Lq, Lk\) or \(B, H, Lq, Lk\)"),
    "a name for a mask": (call(mask="causal"), TypeError, "one of tilewise.masks or a bool tensor, got 'causal'"),
    "a mask not called": (call(mask=masks.causal), TypeError, r"got <function causal.*; call it: masks.causal\(\)"),
    "mask and tensor": (lambda: masks.causal() & t(6, 5, dtype=torch.bool), TypeError, r"wrap the tensor, masks.dense\(tensor\)"),
    "half a window": (lambda: masks.window(2.5, 0), TypeError, "window: left must be an int or None .*, got 2.5"),
    "ragged rank": (
        lambda: tw.attention_varlen(Q, K, K, torch.tensor([0, 6], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)),
        ValueError,
        r"query must have 3 dims, \(T, H, D\), got 4: \(2, 4, 6, 8\)$",
    ),
    "drop-in's batch dims": (
        lambda: tw.scaled_dot_product_attention(t(2, 3, 4, 6, 8), t(3, 2, 4, 5, 8), t(3, 2, 4, 5, 8)),
        ValueError,
        r"same batch dims, which are not broadcast \(query \(2, 3, 4, 6, 8\), key \(3, 2.*expand them",
    ),
    "drop-in's heads": (
        lambda: tw.scaled_dot_product_attention(t(4, 6, 8), t(2, 5, 8), t(2, 5, 8)),
        ValueError,
        "query has 4 heads and key 2: pass enable_gqa=True",
    ),
    "drop-in's integer mask": (
        lambda: tw.scaled_dot_product_attention(Q, Q, Q, t(6, 6, dtype=torch.int64)),
        TypeError,
        "attn_mask must be bool .* or floating point .*, got torch.int64",
    ),
    "lengths": (call(mask=masks.key_lengths([1, 2, 3])), ValueError, r"lengths must have shape \(B,\) = \(2,\), got \(3,\)"),
    "documents": (call(mask=masks.documents([0, 1])), ValueError, r"ids of the queries must have shape \(6,\) or \(2, 6\), got \(1, 2\)"),
    "bias of bool": (call(bias=t(6, 5, dtype=torch.bool)), TypeError, r"a bool tensor \(True = attend\) goes to mask="),
    "bias shape": (call(bias=t(3, 1, 6, 5)), ValueError, r"bias of shape \(3, 1, 6, 5\) does not broadcast"),
    "bias device": (call(bias=t(6, 5, device="meta")), ValueError, "bias must be on the device of query, cpu, got meta"),
    "slopes": (call(bias=tw.alibi(t(3))), ValueError, r"shape \(H,\) = \(4,\) or \(B, H\) = \(2, 4\), got \(3,\)"),
    "slopes of ints": (lambda: tw.alibi(t(4, dtype=torch.int64)), TypeError, r"floating-point tensor of shape \(H,\) or \(B, H\)"),
    "sinks": (call(sinks=t(2)), ValueError, r"sinks must be floating point of shape \(Hq,\) = \(4,\), got torch.float32 \(2,\)"),
    "softcap 0": (call(softcap=0.0), ValueError, "softcap must be > 0, got 0.0; None turns it off"),
    "softcap -1": (call(softcap=-1.0), ValueError, "softcap must be > 0, got -1.0"),
    "dropout 1.5": (call(dropout_p=1.5), ValueError, r"probability in \[0, 1\], got 1.5"),
    "dropout -0.1": (call(dropout_p=-0.1), ValueError, r"probability in \[0, 1\], got -0.1"),
    "two seeds": (call(dropout_p=0.5, seed=1, generator=torch.Generator()), ValueError, "seed= or generator=, not both"),
    "unknown backend": (call(backend="cuda"), ValueError, "unknown backend 'cuda'; there are hopper, triton, tiled, dense, torch_flash"),
    "no backend": (call(backend=[]), ValueError, "empty list; name at least one of"),
    "cu decreasing": (ragged([0, 4, 3], [0, 2, 5]), ValueError, r"cu_seqlens_q must start at 0, not decrease.*6 rows.*\[0, 4, 3\]"),
    "cu overlong": (ragged([0, 4, 6], [0, 2, 9]), ValueError, r"cu_seqlens_k must start at 0.*the 5 rows there are; got \[0, 2, 9\]"),
    "cu from 1": (ragged([1, 4, 6], [0, 2, 5]), ValueError, "cu_seqlens_q must start at 0"),
    "cu of different counts": (ragged([0, 6], [0, 2, 5]), ValueError, "same number of sequences, got 1 and 2"),
    "cu int64": (ragged([0, 6], [0, 5], dtype=torch.int64), TypeError, r"int32 of shape \(N \+ 1,\), got torch.int64"),
    "cu longer than max": (ragged([0, 4, 6], [0, 2, 5], 3, 5), ValueError, "cu_seqlens_q has a sequence of 4 rows, more than its max_seqlen of 3"),
    "varlen rank": (
        lambda: tw.attention_varlen(Q, K, K, torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)),
        ValueError,
        r"query must have 3 dims, \(T, H, D\), got 4",
    ),
    "sdpa causal and mask": (
        lambda: tw.scaled_dot_product_attention(Q, Q, Q, t(6, 6, dtype=torch.bool), is_causal=True),
        ValueError,
        "exclude each other",
    ),
    "sdpa heads": (lambda: tw.scaled_dot_product_attention(Q, K, K), ValueError, "4 heads and key 2: pass enable_gqa=True"),
    "sdpa ranks": (lambda: tw.scaled_dot_product_attention(Q, K[0], K[0]), ValueError, "same rank of at least 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name):
    make, error, text = CASES[name]
    with pytest.raises(error, match=f"(?s){text}"):
        make()
