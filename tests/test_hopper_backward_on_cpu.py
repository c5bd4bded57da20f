"""The hopper backward with no GPU, against the judge: its kernel as ``gluon_on_cpu`` runs it, those around it by
Triton's interpreter, in a process.
"""

import importlib.util
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from tilewise import masks
from tilewise.testing.judge import judge
from tilewise.testing.problems import Call, Problem, plain, qkv

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

WINDOW = masks.window(40, 10, "bottom_right")
LENGTHS = masks.key_lengths([300, 5])


def scores(dim, dim_v, given):
    """Two query heads of a key head, with a sink each."""

    def make(m):
        tensors = {**qkv(m, 2, 2, 140, 300, dim, dv=dim_v, kv=1), "sinks": m.randn(2)}
        return Call(tensors, given)

    return make


def ragged(ends_q, ends_k, rows, keys, dim, given, spoilt=False):
    """spoilt: in place of sinks, keys that are not numbers at the first end of a sequence, seen by the next."""

    def make(m):
        tensors = {"q": m.randn(rows, 4, dim), "k": m.randn(keys, 2, dim), "v": m.randn(keys, 2, dim)}
        if spoilt:
            for name in "kv":
                tensors[name][ends_k[1] :][:2] = float("nan")
        else:
            tensors["sinks"] = m.randn(4)
        return Call(tensors, given, cu=tuple(torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k)))

    return make


LONG_AND_SHORT = [0, 70, 71, 200], [0, 65, 70, 190], 200, 190
SOME_EMPTY = [0, 0, 200, 240, 413], [0, 20, 300, 300, 440], 430, 500
SHORT = [0, 40, 70], [0, 30, 66], 70, 66
FEW_KEYS = {"mask": masks.key_lengths([40, 3, 65])}
CASES = {
    "full": scores(64, 64, {}),
    "softcap": scores(64, 64, {"softcap": 3.0, "mask": LENGTHS & masks.causal("bottom_right")}),
    "softcap 128": scores(128, 128, {"softcap": 20.0, "mask": WINDOW}),
    "causal 128": plain((2, 2, 140, 300, 128), {"mask": masks.causal()}),
    "causal, 4 heads": plain((1, 4, 200, 300, 128), {"mask": masks.causal("bottom_right")}, kv=1),
    "96": scores(96, 96, {"mask": WINDOW}),
    "64 and 96": scores(64, 96, {}),
    "192 and 128": scores(192, 128, {"mask": WINDOW}),
    "64 and 256": scores(64, 256, {"softcap": 3.0}),
    "256": scores(256, 256, {"mask": LENGTHS & masks.causal("bottom_right")}),
    "ragged": ragged(*LONG_AND_SHORT, 64, {}),
    "ragged 256": ragged(*LONG_AND_SHORT, 256, {}),
    "ragged spoilt 192": ragged(*SHORT, 192, {"mask": masks.causal(), "softcap": 9.0}, spoilt=True),
    "ragged softcap": ragged(*SOME_EMPTY, 96, {"mask": WINDOW & masks.causal("bottom_right"), "softcap": 3.0}),
    "ragged spoilt": ragged(*SHORT, 64, {"mask": masks.causal()}, spoilt=True),
    "ragged lengths": ragged(*LONG_AND_SHORT, 128, FEW_KEYS),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(case):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def main(case):
    from gluon_on_cpu import on_cpu

    from tilewise.backends import hopper
    from tilewise.backends.triton import gradients

    backward = gradients.backward

    def only_sinks(r, saved, needs):
        assert needs == {"sinks"}
        return backward(r, saved, needs)

    with (
        mock.patch.object(hopper.HopperBackend, "devices", None),
        mock.patch.object(gradients, "backward", only_sinks),
        on_cpu(),
    ):
        for v in judge(Problem("hopper", "H", CASES[case]), "hopper", torch.float16):
            assert v.ok, f"{v.quantity}: {v.note}"
            assert v.quantity != "refused", v.note


if __name__ == "__main__":
    main(sys.argv[1])
