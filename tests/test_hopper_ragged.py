"""The list of tiles of a ragged batch, with no GPU: Triton's interpreter runs its kernel in a process."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

BATCHES = {
    "one": ([0, 300], [0, 77], 300),
    "slack rows": ([0, 2, 5], [0, 3, 5], 7),
    "late begin": ([130, 140, 140, 400], [0, 300, 400, 401], 500),
    "empty": ([0, 0, 0], [0, 3, 5], 3),
    "many": (list(range(0, 300 * 7, 7)), [n * (n % 5) for n in range(300)], 2200),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_every_tile_is_listed_once(batch):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, batch], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def main(batch):
    """Tiles of few keys come first; rows of no sequence get what rows without keys get, and no others."""
    from tilewise.backends.hopper import ragged

    (ends_q, ends_k, rows), heads, dv = BATCHES[batch], 2, 96
    ends_k = sorted(ends_k)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (ends_q, ends_k))
    items = torch.full((1 + 2 * (rows // 128 + len(ends_q) - 1),), -7, dtype=torch.int32)
    out, lse, top = torch.full((rows, heads, dv), 5.0).half(), torch.ones(heads, rows), torch.ones(heads, rows)
    grid = len(ends_q) - 1 - (-rows // ragged.ROWS)
    ragged.items_kernel[(grid,)](
        cu_q, cu_k, items, out, lse, top, len(ends_q) - 1, rows, heads, out.stride(), DV=dv, BLOCK_DV=128, BLOCK_M=128,
        CHUNK=128, ROWS=ragged.ROWS,
    )  # fmt: skip
    sequences = sorted((ends_k[n + 1] - ends_k[n], n) for n in range(len(ends_q) - 1))
    want = [[n, tile] for _, n in sequences for tile in range(-(-(ends_q[n + 1] - ends_q[n]) // 128))]
    assert items[0] == len(want)
    assert items[1 : 1 + 2 * len(want)].view(-1, 2).tolist() == want
    assert want or items[1:3].tolist() == [0, 0]
    outside = torch.ones(rows, dtype=torch.bool)
    outside[ends_q[0] : ends_q[-1]] = False
    assert (out[outside] == 0).all()
    assert (out[~outside] == 5).all()
    for x in (lse, top):
        assert (x[:, outside] == -float("inf")).all()
        assert (x[:, ~outside] == 1).all()


if __name__ == "__main__":
    main(sys.argv[1])
