"""Every specialisation of the hopper kernel, compiled for sm_90 with no GPU, and its machine code read.

Compiled in processes of their own: what ptxas says goes to the standard output of the process.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.__version__.startswith("3.6."):
    pytest.skip("the kernel is for Triton 3.6", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from tilewise.backends.hopper import config  # noqa: E402
from tilewise.backends.hopper.kernel import forward_kernel  # noqa: E402

SHARED = 232_448  # bytes that a program may have
MASKS = {"full": (), "causal": ("right",), "window": ("left", "right"), "left": ("left",), "lengths": ("lengths",)}
MASKS["all"] = ("left", "right", "lengths")
CASES = [*itertools.product((64, 128), MASKS)]


def compile_case(dim: int, masked: tuple[str, ...], dtype: str, top: bool) -> "triton.compiler.CompiledKernel":
    """What ``launch.forward`` launches for a request."""
    cfg = config.choose(dim, bool(masked), "left" in masked)
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]

    def descriptor(rows: int) -> str:
        block = [1, 1, rows, dim]
        return f"tensordesc<{dtype}{block},{gl.NVMMASharedLayout.get_default_for(block, element)!r}>"

    rows = {"q_desc": config.ROWS, "k_desc": cfg.block_n, "v_desc": cfg.block_n, "o_desc": config.ROWS}
    types = {name: descriptor(n) for name, n in rows.items()} | {"lse": "*fp32", "qk_scale": "fp32"}
    types |= {f"{x}_ptr": f"*{dtype}" for x in "qkv"} | {f"{x}_{s}": "i64" for x in "qkv" for s in "bhl"}
    types |= {"top": "*fp32"} if top else {}
    types |= {"lengths": "*i64"} if "lengths" in masked else {}
    types |= {"counter": "*i32"} if masked else {}
    constants = {"D": dim, "BLOCK_N": cfg.block_n, "STAGES": cfg.stages, "WIDE": cfg.wide}
    constants |= {"LEFT": "left" in masked, "RIGHT": "right" in masked}
    constants |= {x: None for x in ("top", "lengths", "counter") if x not in types}
    names = forward_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if n in types and (n in ("lse", "top") or n.endswith("_ptr"))]
    source = GluonASTSource(
        forward_kernel, signature, {(names.index(n),): x for n, x in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


# --- reading the code -----------------------------------------------------------------------------

INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
JUMP = re.compile(r"\bBRA(?:\.\S+)? (?:\S+, )?`?\(?(0x[0-9a-f]+)")


def sass(kernel) -> list[tuple[int, str]]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-sass", f.name], capture_output=True, text=True, check=True).stdout
    found = map(INSTRUCTION.match, said.splitlines())
    return [(int(m[1], 16), m[2]) for m in found if m]


def fast_loops(code: list[tuple[int, str]]) -> list[list[str]]:
    """The innermost loops in which consumers take turns: over blocks of keys. Careful products are in other loops."""
    at = {address: n for n, (address, _) in enumerate(code)}
    jumps = ((at.get(int(m[1], 16), n), n) for n, (_, x) in enumerate(code) if (m := JUMP.search(x)))
    loops = [(a, b) for a, b in jumps if a < b and any("BAR.ARV" in x for _, x in code[a:b])]
    inner = [(a, b) for a, b in loops if not any(o != (a, b) and a <= o[0] and o[1] <= b for o in loops)]
    return [[x for _, x in code[a : b + 1]] for a, b in inner]


def count(pattern: str, lines: list[str]) -> int:
    return sum(bool(re.search(rf"\b{pattern}", x)) for x in lines)


def overlapped(loop: list[str]) -> int:
    """Exponentials after the scores are there and before P V is waited for."""
    waits = [n for n, x in enumerate(loop) if "WARPGROUP.DEPBAR" in x]
    assert [loop[n].split()[-1] for n in waits] == ["0x1", "0x0"]
    return count("MUFU.EX2", loop[waits[0] : waits[1]])


@pytest.mark.parametrize(("dim", "mask"), CASES)
def test_compiles_to_what_is_fast(dim, mask):
    """Fits an SM, keeps the loops in registers, multiplies by wgmma, and ptxas has no remark on it."""
    env = {**os.environ, "TRITON_DUMP_PTXAS_LOG": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as cache:  # an empty one, as ptxas says nothing of what is in the cache
        env["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, str(dim), mask]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    said = done.stdout + done.stderr
    assert "C75" not in said, said[said.index("C75") - 200 :][:600]
    kernels = [json.loads(x.removeprefix("KERNEL ")) for x in done.stdout.splitlines() if x.startswith("KERNEL ")]
    assert len(kernels) == 2
    for found in kernels:
        assert found["shared"] <= SHARED
        assert found["fast"] == 2, "a loop of each consumer"
        assert min(found["UTMALDG"], found["HGMMA"]) > 0
        assert found["HMMA"] == 0
        assert found["spills"] == [0, 0]
        assert found["overlapped"] == [66, 66], "64 of a block of P, and those of two rows' maxima"


def main(dim: int, mask: str) -> None:
    for dtype, top in (("bf16", False), ("fp16", True)):
        kernel = compile_case(dim, MASKS[mask], dtype, top)
        code = sass(kernel)
        fast, lines = fast_loops(code), [x for _, x in code]
        found = {name: count(name, lines) for name in ("UTMALDG", "HGMMA", "HMMA")}
        found |= {"shared": kernel.metadata.shared, "fast": len(fast)}
        found |= {"spills": [count("(LDL|STL)", x) for x in fast], "overlapped": [overlapped(x) for x in fast]}
        print("KERNEL " + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2])
