"""transformers: ``register()`` once, then ``attn_implementation="tilewise"`` on any model.

    from tilewise.integrations import transformers as tw
    tw.register()
    model = AutoModel.from_pretrained(path, attn_implementation="tilewise")

Two functions go under the one name. The mask function runs once per forward pass and kind of layer; it reads the
pattern transformers asks for and answers with a ``tilewise.masks.Mask`` of intervals, so no (L, L) tensor is made:

    what transformers asks for            the mask here
    causal                                causal(align=q_offset - kv_offset)
    sliding window W, causal              & window(W - 1, None)        W counts the token itself
    sliding window W, bidirectional       window(W, W)                 W does not
    chunks                                & documents(position // chunk)
    packed sequences (position_ids)       & documents(sequence number)
    blocks that see themselves whole      | documents(block number)
    padding before and after              & key_lengths(...)           elsewhere: a (B, 1, 1, L) bool mask
    any other function                    & predicate(...)             evaluated tile by tile

The attention function runs in every layer and hands all it is given to ``tilewise.attention``, or says what it
cannot honour. Nothing is patched, and transformers is imported by ``register`` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask

from .. import masks
from ..api import attention
from ..masks import Mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key) indices -> bool


def register(name: str = "tilewise") -> None:
    """Make ``attn_implementation=name`` known to transformers: attention and masks, for all models.

    The name must not contain "flash": models then prepare their inputs for flash-attn's own functions.
    """
    if "flash" in name:
        raise ValueError(
            f'the name {name!r} contains "flash": models would then send cu_seq_lens in place of masks; '
            'choose another, such as "tilewise"'
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, make_mask)


# --- attention ------------------------------------------------------------------------------------

# Keywords that models pass and that change the result, with what to do instead.
_NOT_HONOURED = {
    "output_attentions": "attention weights are never stored; attn_implementation='eager' shows them",
    "head_mask": "use attn_implementation='eager'",
    "layer_head_mask": "use attn_implementation='eager'",
    "sinks": "sinks are one number a head (s_aux), not one a query; use attn_implementation='eager'",
    "indices": "sparse attention by indices is not available; use attn_implementation='eager'",
    "block_indices": "sparse attention by block indices is not available; use attn_implementation='eager'",
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' ``AttentionInterface``.

    Args:
        module: the layer; only ``module.is_causal`` is read, where neither a mask nor ``is_causal`` is given.
        query: (B, Hq, Lq, D). key: (B, Hkv, Lk, D). value: (B, Hkv, Lk, Dv); Hkv divides Hq, nothing is expanded.
        attention_mask: what ``make_mask`` returned; or a tensor (B, Hq, Lq, Lk) with 1 where it broadcasts, bool
            (True = attend) or float (added to the scores). None: causal from the top left (query i sees keys
            j <= i, PyTorch's ``is_causal``) if Lq > 1 and the call is causal, and within ``sliding_window``.
        scaling: None is 1 / sqrt(D).
        sliding_window: W keys including the query's own. Read only without a mask: a mask has it already.
        softcap: as in ``tilewise.attention``.
        s_aux: (Hq,) attention sinks.
        is_causal: None is ``module.is_causal``, and True where there is none.
        position_ids: not read; what they mean for packed sequences is in the mask.
        position_bias: (B, Hq, Lq, Lk) with 1 where it broadcasts, added to the scores; its gradient flows.
        kwargs: keywords that change the result and cannot be honoured are refused, all others ignored.

    Returns:
        (B, Lq, Hq, Dv), contiguous, and None in place of the attention weights.
    """
    _check(attention_mask, kwargs)
    mask, bias = _mask_and_bias(attention_mask, position_bias)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _implied_mask(causal, sliding_window, query.shape[2])
    if query.shape[0] == 1:  # learned queries, shared by the batch
        query = query.expand(key.shape[0], -1, -1, -1)
    out = attention(query, key, value, mask, bias=bias, scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout)
    return out.transpose(1, 2).contiguous(), None


def _check(attention_mask: Mask | Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse what would change the result and cannot be honoured."""
    for name, fix in _NOT_HONOURED.items():
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise NotImplementedError(f"tilewise does not take {name}: {fix}")
    cu = kwargs.get("cu_seq_lens_q")
    if cu is not None and not (isinstance(attention_mask, Mask) and (len(cu) <= 2 or _has_documents(attention_mask))):
        raise NotImplementedError(
            "tilewise does not take cu_seq_lens_q without a mask that separates the sequences: pass position_ids that "
            "restart at 0 with each sequence and no attention_mask, and leave cu_seq_lens out"
        )


def _has_documents(mask: Mask) -> bool:
    return any(isinstance(t, masks.Documents) for t in (mask.terms if isinstance(mask, masks.All) else (mask,)))


def _mask_and_bias(
    mask: Mask | Tensor | None, position_bias: Tensor | None
) -> tuple[Mask | Tensor | None, Tensor | None]:
    """What goes to ``mask`` and what to ``bias``: a float mask is added to the scores, as the position bias is."""
    if not isinstance(mask, Tensor):
        return mask, position_bias
    if mask.dim() != 4:
        raise ValueError(
            f"attention_mask must have 4 dims, (B, H, Lq, Lk) with 1 where it broadcasts, got {tuple(mask.shape)}; "
            "a 2-D padding mask goes to the model, which makes the mask of it"
        )
    if not mask.is_floating_point():
        return mask, position_bias
    return None, mask if position_bias is None else mask + position_bias


def _implied_mask(causal: bool, sliding_window: int | None, len_q: int) -> Mask | None:
    """The mask of a call that came without one."""
    decoding = len_q == 1  # the one query is the last position, and sees all keys before it
    if sliding_window is None:
        return masks.causal() if causal and not decoding else None
    right = 0 if causal or decoding else sliding_window - 1
    return masks.window(sliding_window - 1, right, align=masks.BOTTOM_RIGHT if decoding else masks.TOP_LEFT)


# --- masks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class CallMask(masks.All):
    """The mask of one forward pass: all its terms hold.

    ``shape`` and ``ndim`` are those of the (B, 1, Lq, Lk) tensor that it stands for: by them transformers tells a
    mask that is made already (``generate`` makes those of a static cache ahead) from a 2-D padding mask. So any mask
    can be given to a model: ``model(ids, attention_mask=CallMask((masks.prefix_lm(lengths),), (B, 1, L, L)))``.
    """

    shape: tuple[int, int, int, int]
    ndim: ClassVar[int] = 4

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a tilewise mask is no tensor and has no {name!r}; {_COMPUTES}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"a tilewise mask is no tensor and cannot be indexed; {_COMPUTES}")


_COMPUTES = "a model that computes with its mask needs attn_implementation='eager' or 'sdpa'"


def make_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: MaskFunction,
    q_length: int = 1,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | Mask | None = None,
    cache_position: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Mask:
    """The mask function of transformers' ``AttentionMaskInterface``.

    Args:
        batch_size, q_length, kv_length: B, Lq and Lk of the (B, 1, Lq, Lk) mask that is asked for.
        mask_function: the pattern, (batch, head, query, key) positions -> bool. Those of transformers are
            recognised and become intervals; any other becomes a ``masks.predicate``.
        q_offset, kv_offset: positions of the first query and the first key; 0-D tensors with a static cache.
        attention_mask: (B, S) padding, True = a real token; or a mask that this function made before.
        cache_position: (Lq,) positions of the queries; older versions pass it in place of q_length and q_offset.
        use_vmap: mask_function holds a function of the user, which may be written for single indices.
        kwargs: the rest of what transformers passes. That None may be returned is one of them, and not used: a
            mask says what it means, and the attention function need not guess.
    """
    if isinstance(attention_mask, Mask):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
    if isinstance(q_offset, Tensor):  # a static cache advances its tensor in place, the mask must not move with it
        q_offset = q_offset.clone() if q_length == 1 else int(q_offset)
    call = Call(batch_size, q_length, kv_length, q_offset, int(kv_offset), device, use_vmap)
    mask = _translate(call, mask_function)
    if attention_mask is not None:
        mask = _all(mask, _padding(call, attention_mask))
    terms = mask.terms if isinstance(mask, masks.All) else (mask,)
    return CallMask(terms, (batch_size, 1, q_length, kv_length))


class Call(NamedTuple):
    """What is the same for all parts of a pattern: the sizes, and the positions of queries and keys."""

    batch: int
    len_q: int
    len_k: int
    q_start: int | Tensor  # position of the first query; a tensor where it must not be read: decoding, static cache
    k_start: int  # position of the first key
    device: torch.device | str
    single_indices: bool  # unknown functions may not be written for index tensors
    packed: bool = False  # & of a mask that keeps packed sequences apart
    position_ids: Tensor | None = None  # (B, L): the pattern is one of these, which restart with each sequence

    def positions(self) -> tuple[Tensor, Tensor]:
        """Of the queries and of the keys, (B or 1, Lq) and (B or 1, Lk)."""
        q = torch.arange(self.len_q, device=self.device) + self.q_start
        k = torch.arange(self.len_k, device=self.device) + self.k_start
        return (q[None], k[None]) if self.position_ids is None else (self.position_ids[:, q], self.position_ids[:, k])

    def of_each(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The ids, (B, L) by position, of the queries and of the keys: (B, Lq) and (B, Lk)."""
        q, k = (x.expand(ids.shape[0], -1) for x in self.positions())
        return ids.gather(1, q), ids.gather(1, k)


def _translate(call: Call, fn: MaskFunction) -> Mask:
    """The mask of a function of transformers, known by its name and the variables that it closes over."""
    code = getattr(fn, "__code__", None)
    if code is not None and not code.co_freevars and fn.__module__ == "transformers.masking_utils":
        rule = _RULES.get((code.co_name,))
        if rule is not None:
            return rule(call)
    return _translate_closure(call, fn)


@torch.compiler.disable(
    reason="tilewise reads the window or the sequences that transformers' mask function closes over; to compile one "
    "graph, make the mask ahead with make_mask and pass it to the model as attention_mask"
)
def _translate_closure(call: Call, fn: MaskFunction) -> Mask:
    """A function made by another, such as ``sliding_window_overlay``; or one that is not known."""
    if getattr(fn, "__module__", None) != "transformers.masking_utils":
        return _predicate(call, fn)
    rule = _RULES.get((_maker(fn), *fn.__code__.co_freevars))
    return _predicate(call, fn) if rule is None else rule(call, *(c.cell_contents for c in fn.__closure__ or ()))


def _maker(fn: MaskFunction) -> str:
    """The name of the outermost function that a function was defined in."""
    return getattr(fn, "__qualname__", "").partition(".")[0]


def _band(call: Call, left: int | None, right: int | None) -> Mask:
    """Keys from ``left`` positions before the query to ``right`` after it; None is unbounded."""
    diagonal = call.q_start - call.k_start
    if isinstance(diagonal, Tensor):  # one query: its keys are a range
        first, end = (None if left is None else diagonal - left), (None if right is None else diagonal + right + 1)
        parts = [] if end is None else [masks.key_lengths(end.expand(call.batch))]
        if first is not None:
            parts.append(masks.key_lengths((call.len_k - first).expand(call.batch), padding="left"))
        return _all(*parts)
    if right is not None and diagonal + right >= call.len_k - 1:  # the first query reaches the last key already
        right = None
    if left is not None and diagonal + call.len_q - 1 <= left:  # the last query reaches the first key still
        left = None
    return masks.window(left, right, None if left is None and right is None else diagonal)


def _padding(call: Call, real: Tensor) -> Mask:
    """(B, S), True = a real token: as lengths if each row has its real tokens side by side, else as it is."""
    end_k = call.k_start + call.len_k
    real = nn.functional.pad(real.bool(), (0, max(0, end_k - real.shape[1])))[:, call.k_start : end_k]  # (B, Lk)
    if isinstance(call.q_start, Tensor) or torch.compiler.is_compiling():  # nothing may be read back
        return masks.dense(real[:, None, None])
    first, j = real.int().argmax(-1), torch.arange(call.len_k, device=real.device)
    end = first + real.sum(-1)
    a_range = (real == ((j >= first[:, None]) & (j < end[:, None]))).all()
    a_range, before, after = torch.stack([a_range, (first > 0).any(), (end < call.len_k).any()]).tolist()
    if not a_range:
        return masks.dense(real[:, None, None])
    left = masks.key_lengths(call.len_k - first, padding="left") if before else masks.window(None, None)
    right = masks.key_lengths(end) if after else masks.window(None, None)
    return _all(left, right)


def _chunks(call: Call, size: int, left_padding: Tensor) -> Mask:
    """Chunks of ``size`` positions, counted from each row's first real token; left_padding (B,)."""
    q, k = call.positions()
    return masks.documents((q - left_padding[:, None]) // size, (k - left_padding[:, None]) // size)


def _blocks(call: Call, ids: Tensor) -> Mask:
    """Pairs within a block; ids (B, L), -1 for what is in none."""
    q, k = call.of_each(ids)
    return masks.documents(q.where(q >= 0, -1), k.where(k >= 0, -2))


def _and(call: Call, functions: tuple[MaskFunction, ...]) -> Mask:
    packed = call.packed or any(_maker(fn) == "packed_sequence_mask_function" for fn in functions)
    return _all(*(_translate(call._replace(packed=packed), fn) for fn in functions))


def _or(call: Call, functions: tuple[MaskFunction, ...]) -> Mask:
    return functools.reduce(lambda a, b: a | b, (_translate(call, fn) for fn in functions))


def _remap(call: Call, fn: MaskFunction, position_ids: Tensor) -> Mask:
    """The pattern, of position_ids. Within one sequence they differ as the indices do, so that bands stay bands."""
    call = call._replace(position_ids=position_ids)
    return _translate(call, fn) if call.packed else _predicate(call, fn)


_RULES: dict[tuple[str, ...], Callable[..., Mask]] = {
    ("causal_mask_function",): lambda call: _band(call, None, 0),
    ("bidirectional_mask_function",): lambda call: masks.window(None, None),
    ("sliding_window_overlay", "sliding_window"): lambda call, w: _band(call, w - 1, None),
    ("sliding_window_bidirectional_overlay", "sliding_window"): lambda call, w: _band(call, w, w),
    ("chunked_overlay", "chunk_size", "left_padding"): _chunks,
    ("packed_sequence_mask_function", "packed_sequence_mask"): lambda call, ids: masks.documents(*call.of_each(ids)),
    ("blockwise_overlay", "block_sequence_ids"): _blocks,
    ("padding_mask_function", "padding_mask"): _padding,
    ("and_masks", "mask_functions"): _and,
    ("or_masks", "mask_functions"): _or,
    ("remap_positions_for_packed_sequence", "mask_function", "position_ids"): _remap,
}


def _all(*terms: Mask) -> Mask:
    """All terms hold: one band of all the bands (they share their diagonal), and the rest; nothing that keeps all."""
    flat = [x for t in terms for x in (t.terms if isinstance(t, masks.All) else (t,))]
    rest = [t for t in flat if not isinstance(t, masks.Band)]
    bands = [t for t in flat if isinstance(t, masks.Band) and (t.left, t.right) != (None, None)]
    if bands or not rest:
        align = bands[0].align if bands else None
        rest.insert(0, masks.window(_least([b.left for b in bands]), _least([b.right for b in bands]), align))
    return functools.reduce(lambda a, b: a & b, rest)


def _least(bounds: list[int | None]) -> int | None:
    given = [n for n in bounds if n is not None]
    return min(given) if given else None


def _predicate(call: Call, fn: MaskFunction) -> Mask:
    """A function that is not known, evaluated tile by tile at the positions where transformers would."""

    def at(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q, k = q + call.q_start, k + call.k_start
        if call.position_ids is not None:
            q, k = call.position_ids[b, q], call.position_ids[b, k]
        return fn(b, h, q, k)

    @functools.wraps(fn)
    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Head 0 stands for all heads, as everywhere in transformers."""
        if not call.single_indices:
            return at(b, torch.zeros_like(h[:, :1]), i, j).expand(b.shape[0], 1, i.shape[2], j.shape[3])
        b0, i0, j0 = (x.flatten()[0] for x in (b, i, j))
        shape = (b.shape[0], 1, i.shape[2], j.shape[3])
        return create_mask(lambda b, h, q, k: at(b + b0, h, q + i0, k + j0), *shape, device=i.device)

    return masks.predicate(rule)
