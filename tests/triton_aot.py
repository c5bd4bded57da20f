"""Every configuration of the triton kernels, compiled ahead of time for NVIDIA and AMD with no GPU.

Each (target, dtype, head dim, features) is compiled in a process of its own, two at a time: a kernel that trips an
assertion of the compiler ends its process. TILEWISE_AOT_DIMS=64,128 shortens it (all of it takes about ten minutes).
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing: run without TRITON_INTERPRET", allow_module_level=True)

SHARED = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
DIMS = [int(d) for d in os.environ.get("TILEWISE_AOT_DIMS", "64,128,256,512").split(",")]
FEATURES = ("plain", "causal", "lists", "most", "shared_bias")
CASES = [(t, "bfloat16", d, f) for t in SHARED for d in DIMS for f in FEATURES]
CASES += [(t, "float16", 64, "causal") for t in SHARED]
CASES += [(t, "float32", d, f) for t in SHARED for d in DIMS for f in ("causal", "most")]
CASES += [("sm_90", "bfloat16", d, "causal") for d in (16, 32, 96)]

SCRIPT = """
import json, sys, torch
from tilewise import masks
from tilewise.request import Request
from tilewise.backends.triton.aot import compile_request

target, dtype, d, features = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3]), sys.argv[4]
B, H, L = 2, 8, 1024

def make(*shape, dtype=dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")

given = {
    "plain": {},
    "causal": dict(mask=masks.causal() & masks.window(300, 0)),
    "lists": dict(mask=masks.causal() & masks.documents(make(B, L, dtype=torch.int64)), alibi=make(1, H)),
    "most": dict(
        mask=masks.dense(make(1, H, L, L, dtype=torch.bool)) | masks.predicate(lambda b, h, i, j: (i - j) % 3 == 0),
        bias=make(B, H, L, L), softcap=5.0, dropout_p=0.1, rng=make(2, dtype=torch.int64), sinks=make(H),
        want_max_logits=True,
    ),
    "shared_bias": dict(bias=make(1, H, L, L)),
}[features]
r = Request(make(B, H, L, d), make(B, H // 2, L, d), make(B, H // 2, L, d), d**-0.5, **given)
for c in compile_request(r, target, backward=True):
    code = c.asm["sass"] if "cubin" in c.asm else c.asm["amdgcn"]
    print("KERNEL " + json.dumps([c.name, c.shared, c.resources(), code]), flush=True)
"""


def compiled(case):
    """(return code, kernels, everything that was said) of one case, in a fresh process and a fresh cache entry."""
    env = {**os.environ, "TRITON_DUMP_PTXAS_LOG": "1", "TRITON_ALWAYS_COMPILE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, case)], capture_output=True, text=True, env=env, timeout=900
    )
    lines = done.stdout.splitlines()
    kernels = [json.loads(x.removeprefix("KERNEL ")) for x in lines if x.startswith("KERNEL ")]
    said = "\n".join(x for x in lines if not x.startswith("KERNEL ")) + done.stderr
    return done.returncode, kernels, said


@pytest.fixture(scope="module")
def pool(request):
    wanted = {i.callspec.params["case"] for i in request.session.items if "case" in getattr(i, "callspec", _NO).params}
    with ThreadPoolExecutor(2) as executor:
        yield {case: executor.submit(compiled, case) for case in CASES if case in wanted}


class _NO:
    params: dict = {}  # noqa: RUF012


def inner_loops(sass):
    """The innermost loops of a kernel, each as its instructions."""
    lines = sass.splitlines()
    labels = {m[1]: n for n, x in enumerate(lines) if (m := re.match(r"\s*(\w+):\s*$", x))}
    jumps = [(labels.get(m[1], n), n) for n, x in enumerate(lines) if (m := re.search(r"\bBRA\b.*?(LBB\d+)", x))]
    loops = [(a, b) for a, b in jumps if a < b]
    return [lines[a : b + 1] for a, b in loops if not any(o != (a, b) and a <= o[0] and o[1] <= b for o in loops)]


def count(pattern, lines):
    return sum(bool(re.search(pattern, x)) for x in lines)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_compiles_without_spills(case, pool):
    target, dtype, d, _ = case
    code, kernels, said = pool[case].result()
    assert code == 0, said[-3000:]
    names = {k[0] for k in kernels}
    assert names >= {"forward_kernel", "delta_kernel", "dkdv_kernel", "dq_kernel"}
    for name, shared, resources, text in kernels:
        assert shared <= SHARED[target], (name, shared)
        if target == "gfx942":
            assert resources.get("vgpr_count"), resources
            continue
        products = name in ("forward_kernel", "dkdv_kernel", "dq_kernel", "dbias_kernel")
        loops = [x for x in inner_loops(text) if count("HGMMA|HMMA|FFMA", x) >= 8]
        fast = [x for x in loops if count("LDGSTS", x)]  # loops with loads in flight: those that are not careful
        for x in fast:
            assert not count(r"\b(LDL|STL)\b", x), f"{name} spills in a loop of {len(x)} instructions: {resources}"
        if products and dtype != "float32":
            tensor = "HGMMA" if target == "sm_90" and d < 512 else "HGMMA|HMMA"
            assert count(tensor, text.splitlines()), name
        if name == "forward_kernel" and dtype != "float32" and d <= 128:
            assert count("LDGSTS", text.splitlines()), f"{name} loads without cp.async"
    assert "C75" not in said, said[said.index("C75") - 200 :][:600]
