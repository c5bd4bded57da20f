"""What the hopper backward does around its main kernel, with no GPU: Triton's interpreter runs it in a process.

The main kernel is stood in for by one whose results are all NaN, as they are beside values that are not numbers.
"""

import importlib.util
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import tilewise
from tilewise import masks
from tilewise.dispatch import Saved
from tilewise.request import Request

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

CASES = {
    "causal": (masks.causal(), {"k": slice(-3, None), "v": slice(-3, None)}, float("nan")),
    "window": (masks.window(4, 0), {"q": 5, "dout": 9, "v": 11}, float("inf")),
    "lengths": (
        masks.key_lengths([13, 20]) & masks.causal("bottom_right"),
        {"k": 15, "v": slice(14, 16)},
        -float("inf"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_is_done_again(case):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, case], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def not_numbers(args):
    """In the place of the main kernel: nothing came out finite, and every tile of queries has been added to."""
    stats, sums = args[4].x, args[5].x
    turns, ticket, odd = args[8:11]
    assert not ticket.any()
    assert not turns.any()
    lse, delta = stats.view(4, 2, 128).unbind(1)
    assert (lse[:, 20:] == float("inf")).all()
    assert not delta[:, 20:].any()
    sums.fill_(float("nan"))
    turns.fill_(1)
    odd.fill_(1)


def main(case):
    from tilewise.backends.hopper import backward, launch
    from tilewise.backends.triton.repeat import Work

    class Played(Work):
        def launch(self, kernel, grid, args, *more, **options):
            if kernel is backward.backward_kernel:
                not_numbers(args)
            else:
                super().launch(kernel, grid, args, *more, **options)

    mask, spoilt, value = CASES[case]
    g = torch.Generator().manual_seed(1)
    given = {n: torch.randn(2, h, 20, 64, generator=g).half() for n, h in (("q", 2), ("k", 1), ("v", 1), ("dout", 2))}
    for n, where in spoilt.items():
        given[n][:, :, where] = value
    exact = {n: x.double().requires_grad_() for n, x in given.items() if n != "dout"}
    aux_request = tilewise.AuxRequest(lse=True)
    out, aux = tilewise.attention(*exact.values(), mask, backend="dense", return_aux=aux_request)
    dlse = torch.randn(aux.lse.shape, generator=g)
    want = torch.autograd.grad([out, aux.lse], list(exact.values()), [given["dout"].double(), dlse.double()])
    r = Request(q=given["q"], k=given["k"], v=given["v"], scale=0.125, mask=mask)
    saved = Saved(given["dout"], dlse, out.detach().half(), aux.lse.detach().float(), None)
    with mock.patch.object(launch, "processors", return_value=1):
        grads = launch._backward(r, saved, Played())
    for name, x, y in zip("qkv", grads, want, strict=False):
        finite = y.isfinite()
        assert torch.equal(x.isnan(), y.isnan()), name
        assert (x.double() - y)[finite].norm() <= 2e-3 * y[finite].norm(), name


if __name__ == "__main__":
    main(sys.argv[1])
