"""A kernel launched before is found by its arguments and called without Triton's own launch. Triton is played here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from tilewise.backends.triton import start

STREAM = 7


class Kernel:
    """A JIT function whose launches are written down, and whose specialisations write down their calls."""

    arg_names = ("x", "y", "n", "strides", "m", "KEEP", "BLOCK", "WIDE")

    def __init__(self, scratch: int = 0) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.called: list[tuple[int, tuple]] = []
        self.scratch = scratch

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            number = len(self.compiled)
            self.compiled.append({"grid": grid, "args": args, **options})
            launcher = SimpleNamespace(
                global_scratch_size=self.scratch, profile_scratch_size=0, launch_cooperative_grid=False,
                launch_pdl=False, launch=lambda *a: self.called.append((number, a)),
            )  # fmt: skip
            metadata = SimpleNamespace(tensordesc_meta=())
            return SimpleNamespace(run=launcher, function=100 + number, packed_metadata="metadata", metadata=metadata)

        return run


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "remembers", lambda device: True)
    monkeypatch.setattr(start.triton, "JITFunction", Kernel)
    monkeypatch.setattr(start, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)


def launch(
    kernel: Kernel, x: Any, y: Any = None, n: int = 5, strides: tuple = (4, 1), m: tuple = (), **more: Any
) -> None:
    constants = {"WIDE": False, "BLOCK": 64, "KEEP": None, **more}
    start.launch(kernel, 3, (x, y, n, strides), (m,), num_warps=8, **constants)


def test_the_second_launch_is_called_as_the_signature_has_it() -> None:
    kernel, x, mask = Kernel(), torch.zeros(8), torch.zeros(4)
    for grid in (3, 9):
        start.launch(kernel, grid, (x, None, 5, (4, 1)), ((mask, 2),), BLOCK=64, WIDE=False, KEEP="f", num_warps=8)
    assert len(kernel.compiled) == 1
    assert kernel.compiled[0]["num_warps"] == 8
    ((number, call),) = kernel.called
    assert number == 0
    assert call == (
        9, 1, 1, STREAM, 100, False, False, None, None, "metadata", None, None, None,
        x.data_ptr(), None, 5, (4, 1), (mask.data_ptr(), 2), "f", 64, False,
    )  # fmt: skip


def test_what_triton_compiles_for_is_told_apart() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    mask = torch.zeros(4, dtype=torch.int32)
    different: list[dict[str, Any]] = [
        {}, {"x": x[1:]}, {"x": x.double()}, {"y": x}, {"n": 1}, {"n": 2**40}, {"strides": (1, 4)},
        {"m": (mask,)}, {"m": (mask.long(),)}, {"m": (mask[1:],)}, {"KEEP": "f"}, {"BLOCK": 128}, {"WIDE": True},
    ]  # fmt: skip
    for _ in range(2):
        for arguments in different:
            launch(kernel, **{"x": x, **arguments})
    assert len(kernel.compiled) == len(different)
    assert [number for number, _ in kernel.called] == list(range(len(different)))
    launch(kernel, torch.zeros(64))  # other tensors that lie alike are another address
    assert kernel.called[-1][0] == 0


def test_a_kernel_that_needs_scratch_memory_is_left_to_triton() -> None:
    kernel = Kernel(scratch=128)
    for _ in range(3):
        launch(kernel, torch.zeros(8))
    assert len(kernel.compiled) == 3
    assert not kernel.called


def test_not_more_than_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_MOST", 4)
    kernel = Kernel()
    for n in range(11):
        launch(kernel, torch.zeros(8), n=n)
        assert len(start._known) <= 4


def test_where_the_call_is_not_known_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    kernel = Kernel()  # no JITFunction, as those of the interpreter are none
    for _ in range(2):
        launch(kernel, torch.zeros(8))
    assert len(kernel.compiled) == 2
    assert kernel.compiled[0]["args"][4] == ()
