"""Every configuration of the triton kernels, compiled ahead of time for NVIDIA and AMD with no GPU, and its code read.

Cases are compiled in processes of their own: a kernel that trips an assertion of the compiler ends its process.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing: run without TRITON_INTERPRET", allow_module_level=True)

from tilewise import masks
from tilewise.backends.triton import aot, config
from tilewise.request import Request

FAST = ("forward_kernel", "dkdv_kernel", "dq_kernel", "dbias_kernel", "dq_dbias_kernel")  # whose code is read
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}  # bytes that a program may have
B, H, L = 2, 8, 1024

# (target, dtype, head dim): features, and the kernel, where one alone is new; else all of forward and backward.
CASES = {}
for _target, _dims in (("sm_80", (64, 128, 256, 512)), ("sm_90", (64, 128, 256, 512)), ("gfx942", (128, 256, 512))):
    for _d in _dims:
        CASES[_target, "bfloat16", _d] = ["plain", "causal", "most", "shared_bias dbias_kernel"]
    for _d in (64, 128, 256, 512):
        _extra = ["plain forward_kernel", "most forward_kernel", "shared_bias dbias_kernel"]
        CASES[_target, "float32", _d] = ["causal", *_extra]
    CASES[_target, "float16", 64] = ["causal"]
    CASES[_target, "tf32", 64] = ["causal"]
for _d in (64, 128):
    for _target in ("sm_80", "sm_90"):
        CASES[_target, "bfloat16", _d] += ["documents", "lists", "shared_bias forward_kernel"]
        CASES[_target, "bfloat16", _d] += ["alibi", "softcap", "dropout", "own_bias"]
    CASES["sm_90", "bfloat16", _d] += ["ranges", "shared_by_2 dq_dbias_kernel", "shared_by_9 dq_dbias_kernel"]
    CASES["sm_90", "bfloat16", _d] += ["shared_by_9 dbias_careful_kernel"]
CASES["sm_90", "bfloat16", 256] += ["alibi", "softcap"]
for _d in (16, 96):  # 96 is padded inside the kernels
    CASES["sm_90", "bfloat16", _d] = ["causal"]


def make(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def request(dtype, d, features):
    """No mask; the ranges of tiles of a window and others; lists of tiles; everything at once; changes of the scores
    alone, as the tables tell them apart; a bias whose gradient is summed, of programs enough to do so beside dQ."""
    long = 33 * L // 8
    given = {
        "plain": lambda: {},
        "causal": lambda: {"mask": masks.causal() & masks.window(300, 0)},
        "ranges": lambda: {"mask": masks.causal() & masks.key_lengths(make(B, dtype=torch.int64))},
        "documents": lambda: {"mask": masks.documents(make(B, L, dtype=torch.int64))},
        "lists": lambda: {
            "mask": masks.causal() & masks.documents(make(B, L, dtype=torch.int64)),
            "alibi": make(1, H, dtype=dtype),
        },
        "most": lambda: {
            "mask": masks.dense(make(1, H, L, L, dtype=torch.bool))
            | masks.predicate(lambda b, h, i, j: (i - j) % 3 == 0),
            "bias": make(B, H, L, L, dtype=dtype),
            "softcap": 5.0,
            "sinks": make(H, dtype=dtype),
            "dropout_p": 0.1,
            "rng": make(2, dtype=torch.int64),
            "want_max_logits": True,
        },
        "alibi": lambda: {"mask": masks.causal(), "alibi": make(1, H, dtype=dtype)},
        "softcap": lambda: {"mask": masks.causal(), "softcap": 30.0},
        "dropout": lambda: {"mask": masks.causal(), "dropout_p": 0.1, "rng": make(2, dtype=torch.int64)},
        "own_bias": lambda: {"bias": make(B, H, L, L, dtype=dtype)},
        "shared_bias": lambda: {"bias": make(1, H, L, L, dtype=dtype)},
        "shared_by_2": lambda: {"bias": make(1, H, long, long, dtype=dtype)},
        "shared_by_9": lambda: {"bias": make(1, H, long, long, dtype=dtype)},  # in two turns and more
    }[features]()
    batch, length = (int(features[-1]), long) if features.startswith("shared_by") else (B, L)
    q, k, v = (make(batch, heads, length, d, dtype=dtype) for heads in (H, H // 2, H // 2))
    return Request(q, k, v, d**-0.5, **given)


def compile_case(target, dtype, d, case):
    features, _, kernel = case.partition(" ")
    r = request(torch.float32 if dtype == "tf32" else getattr(torch, dtype), d, features)
    return aot.compile_request(r, target, backward=kernel != "forward_kernel", only=kernel or None)


def test_the_cases_are_all_configurations(monkeypatch):
    """For every target, each configuration in the tables is compiled by some case."""
    launched = set()

    def launch(fn, target, *args, **kw):
        size = tuple(kw.get(x) for x in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "maxnreg"))
        size = *size, kw.get("EVEN", False)
        launched.add((target, key[1] in ("bfloat16", "float16"), fn.__name__.removesuffix("_kernel"), *size))

    monkeypatch.setattr(aot, "compile_launch", launch)
    for key, cases in CASES.items():
        for case in cases:
            compile_case(*key, case)

    for target, (_, gpu) in aot.TARGETS.items():
        for half in (True, False):
            for direction, rows in config.tables(half, gpu).items():
                for c in {c for row in rows for c in astuple(row)[1:]}:
                    block_m, block_n, *options = c
                    wanted = (target, half, direction, block_m, block_n, *options)
                    assert wanted in launched
    for rows in config.SHARED.values():
        for row in rows:
            assert ("sm_90", True, "dq_dbias", *astuple(row.config)) in launched


def test_scratch_of_a_shared_bias_is_at_most_its_gradient():
    for len_q, len_k in ((4096, 4096), (4096, 8), (10, 4096)):
        for matrices in (1, 7, 8, 9, 64, 3000):
            found = config.together(128, 128, True, 3, matrices, len_q, len_k, config.SM90)
            if found is not None:
                assert 4 * found.programs * 128 * -(-len_k // 16) * 16 <= 2 * matrices * len_q * len_k
    assert config.together(128, 128, True, 3, 8, 4096, 4096, config.SM90) is not None
    assert config.together(128, 128, True, 3, 3000, 10, 4096, config.SM90) is None


def test_documents_without_keys_compile():
    """Nothing is listed, and the kernel that would is compiled all the same."""
    q, kv = make(B, H, L, 64, dtype=torch.bfloat16), make(B, H, 0, 64, dtype=torch.bfloat16)
    mask = masks.documents(make(B, L, dtype=torch.int64), make(B, 0, dtype=torch.int64))
    compiled = aot.compile_request(Request(q, kv, kv, 0.125, mask), "sm_90", backward=True)
    assert {"extremes_kernel", "list_kernel", "forward_kernel", "dq_kernel"} <= {c.name for c in compiled}


# --- reading the code -----------------------------------------------------------------------------

LABEL = re.compile(r"(\.L\w+):")
JUMP = re.compile(r"\b(?:BRA\b.*?`\(|s_c?branch\w*\s+)(\.L\w+)")
PRODUCT = re.compile(r"\b(?:HGMMA|HMMA|FFMA|v_mfma\w+|v_fma\w+|v_pk_fma\w+)\b")
SPILL = re.compile(r"\b(?:LDL|STL|scratch_load\w*|scratch_store\w*)\b")


def count(pattern, lines):
    return sum(bool(pattern.search(x)) for x in lines)


def loops(code):
    """The innermost loops around products, each as its lines."""
    lines = code.splitlines()
    labels = {m[1]: n for n, x in enumerate(lines) if (m := LABEL.match(x))}
    jumps = {(labels.get(m[1], n), n) for n, x in enumerate(lines) if (m := JUMP.search(x))}
    found = [(a, b) for a, b in jumps if a < b and count(PRODUCT, lines[a:b]) >= 8]
    inner = [(a, b) for a, b in found if not any(o != (a, b) and a <= o[0] and o[1] <= b for o in found)]
    return [lines[a : b + 1] for a, b in inner]


def check(target, dtype, d, features, name, shared, code):
    """What is promised of a kernel's code."""
    where = f"{name} of {features}"
    assert shared <= SHARED[target], f"{where} takes {shared} bytes of shared memory"
    if name not in FAST:
        return
    fast = loops(code)
    assert fast, f"no loop of {where} was found"
    for x in fast:
        # AMD's compiler does not get by with fewer than 128 registers for each of q, k, v and dO.
        if (target, dtype, d) != ("gfx942", "float32", 512) or name not in ("dkdv_kernel", "dq_kernel"):
            assert not count(SPILL, x), f"{where} spills in a loop of {len(x)} lines"
    half = dtype in ("bfloat16", "float16")
    if half or dtype == "tf32":
        # wgmma takes 64 rows. So many do not fit at D = 512, nor so many keys at D = 256 beside changes of the scores.
        changed = features in ("most", "alibi", "softcap")
        small = d == 512 or not half or (d == 256 and name == "dkdv_kernel" and changed)
        tensor = {"sm_80": r"\bHMMA", "sm_90": r"\bH(G?)MMA" if small else r"\bHGMMA", "gfx942": r"\bv_mfma"}[target]
        pattern = re.compile(tensor + (r"\S*TF32" if dtype == "tf32" and target != "gfx942" else ""))
        for x in fast:
            assert count(pattern, x), f"{where} does not use the tensor cores"
    if name == "forward_kernel" and half and d <= 128 and target != "gfx942":
        for x in fast:
            assert count(re.compile("LDGSTS"), x), f"{where} waits for its loads"


@pytest.mark.parametrize("key", CASES, ids=lambda key: "-".join(map(str, key)))
def test_compiles_without_spills(key):
    """Fits the GPU, keeps its loops in registers, multiplies on tensor cores, and ptxas has no remark on wgmma."""
    command = [sys.executable, __file__, json.dumps([*key, CASES[key]])]
    env = {**os.environ, "TRITON_DUMP_PTXAS_LOG": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as cache:  # an empty one, as ptxas says nothing of what is in the cache
        env["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    lines = done.stdout.splitlines()
    kernels = [json.loads(x.removeprefix("KERNEL ")) for x in lines if x.startswith("KERNEL ")]
    for case in CASES[key]:
        features, _, only = case.partition(" ")
        names = {name for of, name, *_ in kernels if of == features}
        careful = set() if "plain" in case else {"forward_careful_kernel", "backward_careful_kernel"}
        assert names >= ({only} if only else {"forward_kernel", "dkdv_kernel", "dq_kernel"} | careful), case
    for kernel in kernels:
        check(*key, *kernel)
    said = "\n".join(x for x in lines if not x.startswith("KERNEL "))
    assert "C75" not in said, said[said.index("C75") - 200 :][:600]


def main(target, dtype, d, cases):
    if dtype == "tf32":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    for case in cases:
        for c in compile_case(target, dtype, d, case):
            print(
                "KERNEL " + json.dumps([case.split()[0], c.name, c.shared, c.code() if c.name in FAST else ""]),
                flush=True,
            )


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
