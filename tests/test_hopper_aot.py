"""Every specialisation of the hopper kernels, compiled for sm_90 with no GPU, and their machine code read.

Compiled in processes of their own: what ptxas says goes to the standard output of the process. With a Triton that they
were not measured with some are compiled, and what makes them quick is not asked for.
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
MEASURED = triton.__version__.startswith("3.6.")
if triton.__version__.split(".")[:2] not in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"]):
    pytest.skip("Gluon is known from Triton 3.6 to 3.9", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from tilewise import masks  # noqa: E402
from tilewise.backends.hopper import config, launch  # noqa: E402
from tilewise.backends.hopper.backward import backward_kernel  # noqa: E402
from tilewise.backends.hopper.kernel import forward_kernel  # noqa: E402
from tilewise.backends.hopper.queries import queries_kernel  # noqa: E402
from tilewise.backends.triton import aot  # noqa: E402
from tilewise.dispatch import Saved  # noqa: E402
from tilewise.request import Ragged, Request  # noqa: E402

SHARED = 232_448  # bytes that a program may have
MASKS = {"full": (), "causal": ("right",), "window": ("left", "right"), "left": ("left",), "lengths": ("lengths",)}
MASKS["all"] = ("left", "right", "lengths")
FORWARDS = [(d, d, m) for d, m in itertools.product((64, 128, 256), MASKS)]
FORWARDS += [(96, 96, "causal"), (192, 192, "full"), (192, 128, "causal"), (64, 256, "window"), (256, 64, "all")]
EXTRAS = {"softcap": ("softcap",), "sinks": ("sinks", "right"), "both": ("softcap", "sinks", "left", "right")}
EXTRAS |= {"ragged": ("ragged",), "packed": ("packed", "right"), "ragged and packed": ("ragged", "packed", "right")}
EXTRAS |= {"all and both": ("softcap", "sinks", "left", "right", "lengths")}
FORWARDS += [(d, d, m) for d, m in itertools.product((64, 128, 256), EXTRAS)]
BACKWARDS = [(d, d, m) for d, m in itertools.product((64, 128), (*MASKS, "softcap", "ragged", "all and both"))]
BACKWARDS += [(96, 96, "causal"), (64, 96, "ragged and packed")]
WIDE = [(256, 256, m) for m in ("full", "causal", "window", "softcap", "ragged", "all and both")]
WIDE += [(192, 128, "causal"), (64, 256, "both"), (192, 192, "ragged and packed")]
if not MEASURED:
    BACKWARDS, WIDE = ([x for x in cases if x[2] in ("full", "ragged", "all and both")] for cases in (BACKWARDS, WIDE))
    FORWARDS = [x for x in FORWARDS if x[2] in ("full", "all and both")]


def descriptor(dtype: str, *block: int) -> str:
    """The type of a descriptor, as ``start.Tiled`` makes it."""
    element = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[dtype]
    flat = len(block) == 1
    layout = gl.NVMMASharedLayout(0, 32, 1) if flat else gl.NVMMASharedLayout.get_default_for(list(block), element)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compiled(kernel, types: dict[str, str], constants: dict[str, object]) -> "triton.compiler.CompiledKernel":
    """The kernel with pointers that are aligned, and what is neither a type nor a constant an int."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = [i for i, n in enumerate(names) if n in ("lse", "top", "turns", "stats") or n.endswith("_ptr")]
    source = GluonASTSource(
        kernel, signature, {(names.index(n),): x for n, x in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned if names[i] in types},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def compile_forward(
    dim: int, dim_v: int, asked: tuple[str, ...], dtype: str, top: bool
) -> "triton.compiler.CompiledKernel":
    """What ``launch.forward`` launches for a request."""
    ragged = "ragged" in asked
    masked = bool({"left", "right", "lengths", "ragged"} & set(asked))
    cfg = config.choose(dim, dim_v, masked, "left" in asked)
    m, n = config.ROWS, cfg.block_n
    d, dv = config.padded(dim), config.padded(dim_v)
    blocks = {"q_desc": (m, d), "k_desc": (n, d), "v_desc": (n, dv), "o_desc": (m, config.stored(dv))}
    heads = 8 if "packed" in asked else 1
    types = {name: descriptor(dtype, 1, 1, *block) for name, block in blocks.items()}
    types |= {name: descriptor(dtype, 1, heads, m // heads, blocks[name][1]) for name in ("q_desc", "o_desc")}
    types |= {"lse": "*fp32", "qk_scale": "fp32"}
    types |= {f"{x}_ptr": f"*{dtype}" for x in "qkv"} | {f"{x}_{s}": "i64" for x in "qkv" for s in "bhl"}
    types |= {"top": "*fp32"} if top else {}
    types |= {"cap": "fp32"} if "softcap" in asked else {}
    types |= {"sinks": "*fp32"} if "sinks" in asked else {}
    types |= {"lengths": "*i64"} if "lengths" in asked else {}
    types |= {"counter": "*i32"} if masked else {}
    packed = {"cu_q": "*i32", "cu_k": "*i32", "items": "*i32", "skew": "i32", "rows": "i32", "o_ptr": f"*{dtype}"}
    types |= {"o_h": "i64", "o_l": "i64"} | (packed if ragged else {})
    constants = {"D": dim, "DV": dim_v, "HEADS": heads, "BLOCK_N": cfg.block_n, "STAGES": cfg.stages, "WIDE": cfg.wide}
    constants |= {"TURNS": cfg.turns, "LEFT": "left" in asked, "RIGHT": "right" in asked}
    constants |= {x: None for x in ("top", "cap", "sinks", "lengths", "counter", *packed) if x not in types}
    return compiled(forward_kernel, types, constants)


def compile_backward(dim: int, dim_v: int, asked: tuple[str, ...], dtype: str) -> "triton.compiler.CompiledKernel":
    """The kernel for dK, dV and the sums of dQ that ``launch.backward`` launches for a request."""
    cfg, ragged = config.choose_backward(dim, dim_v), "ragged" in asked
    m, n, d, dv = cfg.block_m, cfg.block_n, config.columns(dim, dim_v), config.columns(dim_v, dim)
    blocks = {"q_desc": (m, d), "k_desc": (n, d), "v_desc": (n, dv), "do_desc": (m, dv)}
    blocks |= {"dk_desc": (config.ROWS, d), "dv_desc": (config.ROWS, dv)}
    types = {name: descriptor(dtype, 1, 1, *block) for name, block in blocks.items()}
    types |= {"stats_desc": descriptor("fp32", 2 * m), "ticket": "*i32", "scale": "fp32", "qk_scale": "fp32"}
    types |= {"sum_desc": descriptor("fp32", 1, m * d // 32, 32), "turns": "*i32"} if cfg.sums else {}
    types |= {"odd": "*i8"} if {"left", "right", "lengths", "ragged"} & set(asked) else {}
    types |= {"lengths": "*i64"} if "lengths" in asked else {}
    types |= {"cap": "fp32"} if "softcap" in asked else {}
    lists = {"cu_q": "*i32", "cu_k": "*i32", "items": "*i32", "skew": "i32"}
    lists |= {f"d{x}_ptr": f"*{dtype}" for x in "kv"}
    types |= {f"d{x}_{s}": "i64" for x in "kv" for s in "hl"} | (lists if ragged else {})
    constants = {"D": dim, "DV": dim_v, "BLOCK_M": m, "BLOCK_N": n, "STAGES": cfg.stages}
    constants |= {"LEFT": "left" in asked, "RIGHT": "right" in asked}
    optional = "odd", "lengths", "cap", "sum_desc", "turns", *lists
    constants |= {x: None for x in optional if x not in types}
    return compiled(backward_kernel, types, constants)


def compile_queries(dim: int, dim_v: int, asked: tuple[str, ...], dtype: str) -> "triton.compiler.CompiledKernel":
    """The kernel for dQ where it has one."""
    m, d, dv = config.ROWS, config.columns(dim, dim_v), config.columns(dim_v, dim)
    types = {f"{x}_desc": descriptor(dtype, 1, 1, m, d) for x in ("q", "k", "dq")}
    types |= {f"{x}_desc": descriptor(dtype, 1, 1, m, dv) for x in ("do", "v")}
    types |= {"stats": "*fp32", "ticket": "*i32", "scale": "fp32", "qk_scale": "fp32", "dq_h": "i64", "dq_l": "i64"}
    types |= {"odd": "*i8"} if {"left", "right", "lengths", "ragged"} & set(asked) else {}
    types |= {"lengths": "*i64"} if "lengths" in asked else {}
    types |= {"cap": "fp32"} if "softcap" in asked else {}
    lists = {"cu_q": "*i32", "cu_k": "*i32", "items": "*i32", "skew": "i32", "dq_ptr": f"*{dtype}"}
    types |= lists if "ragged" in asked else {}
    constants = {"D": dim, "DV": dim_v, "STAGES": config.choose_backward(dim, dim_v).stages}
    constants |= {"LEFT": "left" in asked, "RIGHT": "right" in asked}
    constants |= {x: None for x in ("odd", "lengths", "cap", *lists) if x not in types}
    return compiled(queries_kernel, types, constants)


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
    """The innermost loops in which consumers multiply and signal each other. Careful products are in other loops."""
    at = {address: n for n, (address, _) in enumerate(code)}
    jumps = ((at.get(int(m[1], 16), n), n) for n, (_, x) in enumerate(code) if (m := JUMP.search(x)))
    marks = "SYNCS.ARRIVE", "HGMMA"
    loops = [(a, b) for a, b in jumps if a < b and all(any(m in x for _, x in code[a:b]) for m in marks)]
    inner = [(a, b) for a, b in loops if not any(a < end < b for _, end in loops)]  # or a jump back from a wait outside
    return [[x for _, x in code[a : b + 1]] for a, b in inner]


def count(pattern: str, lines: list[str]) -> int:
    return sum(bool(re.search(rf"\b{pattern}", x)) for x in lines)


def overlapped(loop: list[str]) -> int:
    """Exponentials after the scores are there and before the product that was started beside them is waited for."""
    waits = [n for n, x in enumerate(loop) if "WARPGROUP.DEPBAR" in x]
    first = [n for n in waits if loop[n].split()[-1] == "0x1"]
    if not first:  # none was started
        return 0
    return count("MUFU.EX2", loop[first[0] : min(n for n in waits if n > first[0])])


def report(direction: str, dim: int, dim_v: int, asked: str) -> list[dict]:
    """What ``main`` finds in its own process, in bf16 and fp16. ptxas must have no remark."""
    env = {**os.environ, "TRITON_DUMP_PTXAS_LOG": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as cache:  # an empty one, as ptxas says nothing of what is in the cache
        env["TRITON_CACHE_DIR"] = cache
        command = [sys.executable, __file__, direction, str(dim), str(dim_v), asked]
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
    return kernels


@pytest.mark.parametrize(("dim", "dim_v", "asked"), FORWARDS)
def test_compiles_to_what_is_fast(dim, dim_v, asked):
    """Fits an SM, keeps the loops in registers, multiplies by wgmma, and ptxas has no remark on it.

    Beside 256 columns a few numbers are not kept in registers.
    """
    wide = max(dim, dim_v) > 128
    scores = config.choose(dim, dim_v, True, True).block_n // 2
    capped = "softcap" in EXTRAS.get(asked, ())
    for found in report("forward", dim, dim_v, asked):
        if not MEASURED:
            continue
        assert max(loads for loads, _ in found["spills"]) <= 3 * wide
        assert max(stores for _, stores in found["spills"]) <= wide
        expected = (1 + capped) * scores + 2
        assert found["overlapped"] == [expected] * 2, "those of a block of P and its tanh, and of two rows' maxima"


@pytest.mark.parametrize(("dim", "dim_v", "asked"), BACKWARDS)
def test_backward_compiles_to_what_is_fast(dim, dim_v, asked):
    """The same. Of 240 registers none is left over: a few addresses that do not change are read back in the loops."""
    scores = config.choose_backward(dim, dim_v).block_m // 2
    capped = "softcap" in EXTRAS.get(asked, ())
    for found in report("backward", dim, dim_v, asked):
        assert found["UTMAREDG"] > 0
        if not MEASURED:
            continue
        assert max(loads for loads, _ in found["spills"]) <= 8
        assert max(stores for _, stores in found["spills"]) <= 2
        assert found["exponentials"] == [(1 + capped) * scores] * 2


@pytest.mark.parametrize("kernel", ["backward", "queries"])
@pytest.mark.parametrize(("dim", "dim_v", "asked"), WIDE)
def test_wide_backward_compiles_to_what_is_fast(dim, dim_v, asked, kernel):
    """The same, and all is in registers. dK and dV: the owner of dV has all exponentials. dQ: its loops take them before
    dP is waited for."""
    scores = (1 + ("softcap" in EXTRAS.get(asked, ()))) * config.ROWS // 2
    for found in report(kernel, dim, dim_v, asked):
        if not MEASURED:
            continue
        assert found["spills"] == [[0, 0]] * 2
        assert sorted(found["exponentials"]) == [0 if kernel == "backward" else scores, scores]
        if kernel == "queries":
            assert found["overlapped"] == [0 if "softcap" in EXTRAS.get(asked, ()) else scores] * 2


@pytest.mark.skipif(not MEASURED, reason="they are plain Triton")
@pytest.mark.parametrize("dim", config.HEAD_DIMS)
def test_the_kernels_around_the_backward(dim, monkeypatch):
    """Before and after it: they read and write, and do it again where there is a mask and something is not finite."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    from tilewise.backends.triton.repeat import Work

    own_dq = not config.choose_backward(dim, dim).sums

    class Around(Work):
        """Leaves the kernels themselves out."""

        left_out = 0

        def launch(self, kernel, *args, **options):
            if kernel in (backward_kernel, queries_kernel):
                self.left_out += 1
            else:
                super().launch(kernel, *args, **options)

    def compiles_to(names, r, lse):
        work = Around()
        with aot.recorded("sm_90") as made:
            launch._backward(r, Saved(r.q, lse, r.q, lse, None), work)
        assert work.left_out == 1 + own_dq
        assert [x.name.removesuffix("_kernel") for x in made] == names
        assert all(x.resources()["STACK"] == 0 for x in made if x.name != "careful_kernel")

    monkeypatch.setattr(launch, "processors", lambda device: 132)
    finish = [] if own_dq else ["finish"]
    for mask, names in ((None, ["prepare", *finish]), (masks.causal(), ["prepare", *finish, "careful"])):
        q, k, lse = empty(2, 4, 300, dim), empty(2, 2, 400, dim), empty(2, 4, 300, dtype=torch.float32)
        compiles_to(names, Request(q=q, k=k, v=k, scale=0.1, mask=mask), lse)
    q, k, lse, cu = (
        empty(600, 4, dim),
        empty(800, 2, dim),
        empty(4, 600, dtype=torch.float32),
        empty(3, dtype=torch.int32),
    )
    ragged = Request(q=q, k=k, v=k, scale=0.1, softcap=9.0, ragged=Ragged(cu, cu, 300, 400))
    last = ["items", "careful"] if own_dq else ["finish", "careful"]
    compiles_to(["prepare", "items", "blank", *last], ragged, lse)


def main(direction: str, dim: int, dim_v: int, asked: str) -> None:
    for dtype, top in (("bf16", False), ("fp16", True)):
        if direction == "forward":
            kernel = compile_forward(dim, dim_v, (MASKS | EXTRAS)[asked], dtype, top)
        else:
            compile_it = compile_backward if direction == "backward" else compile_queries
            kernel = compile_it(dim, dim_v, (MASKS | EXTRAS)[asked], dtype)
        code = sass(kernel)
        fast, lines = fast_loops(code), [x for _, x in code]
        found = {name: count(name, lines) for name in ("UTMALDG", "UTMAREDG", "HGMMA", "HMMA")}
        found |= {"shared": kernel.metadata.shared, "fast": len(fast)}
        found |= {"spills": [(count("LDL", x), count("STL", x)) for x in fast]}
        found |= {"exponentials": [count("MUFU.EX2", x) for x in fast]}
        found |= {"overlapped": [overlapped(x) for x in fast]} if direction != "backward" else {}
        print("KERNEL " + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
