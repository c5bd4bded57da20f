"""What a call launches is launched again for tensors that lie alike. Launches are played here."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
pytest.importorskip("triton")
from gpu_calls import REPEATABLE, Repeatable, repeatable

import tilewise
from tilewise import dispatch, masks
from tilewise.backends.hopper import launch
from tilewise.backends.triton import config, repeat, start

CPU = torch.device("cpu")
STREAM = 7
Call = tuple[Any, ...]


class Launches:
    """Kernels that compute nothing: what they are launched with is written down."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.known = True  # whether a launch says how it is called again

    def __call__(self, kernel: Any, grid: int, args: tuple, masks: tuple = (), **options: Any) -> start.Compiled | None:
        def call(*arguments: Any) -> None:
            self.calls.append((kernel, *arguments))

        maps = ("map",) * sum(isinstance(x, start.Tiled) for x in args)
        compiled = start.Compiled(call, "function", ("how",), maps, tuple(sorted(options.items(), key=str)))
        call(*compiled.arguments(grid, STREAM, args, masks))
        return compiled if self.known else None

    def taken(self) -> list[Call]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    played = Launches()
    monkeypatch.setattr(start, "launch", played)
    monkeypatch.setattr(start, "remembers", lambda device: True)
    monkeypatch.setattr(start, "stream", lambda device: STREAM)
    monkeypatch.setattr(repeat, "_scripts", {})
    monkeypatch.setattr(config, "generation", lambda device: config.SM90)
    monkeypatch.setattr(type(dispatch.get("triton")), "limits", lambda self, r: [])
    return played


@pytest.fixture
def hopper(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches on a CPU; a descriptor is told by its address and how the tensor lies."""

    def encoded(address: int, shape: tuple, strides: tuple, made: str) -> tuple:
        return (address, shape, strides, made), *shape, *strides, 1

    monkeypatch.setattr(start, "encoded", encoded)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "processors", lambda device: 132)
    counter = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(launch, "_counter", lambda device: counter)
    monkeypatch.setattr(type(dispatch.get("hopper")), "devices", None)
    monkeypatch.setattr(type(dispatch.get("hopper")), "limits", lambda self, r: [])


def named(calls: list[Call], given: tuple[Any, ...]) -> list[Call]:
    """Addresses as which input it is, or which one of the others in the order of their first use."""
    names: dict[Any, str] = {x.data_ptr(): f"input {n}" for n, x in enumerate(given) if x is not None}

    def name(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(name, x))
        is_address = isinstance(x, int) and not isinstance(x, bool) and x > 2**32
        return names.setdefault(x, f"made {len(names)}") if is_address else x

    return [name(c) for c in calls]


def forward_and_backward(
    c: Repeatable, launches: Launches, backend: str = "triton"
) -> tuple[list[Call], list[Call], list[torch.Tensor]]:
    """The launches of each, and the results."""
    out = c.call(*c.tensors, backend=backend)
    forward = named(launches.taken(), c.tensors)
    grads = torch.autograd.grad(out, c.tensors, c.dout)
    return forward, named(launches.taken(), (*c.tensors, c.dout, out)), [out, *grads]


@pytest.mark.parametrize("case", REPEATABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_launches_with_other_tensors(launches: Launches, case: str, dtype: torch.dtype) -> None:
    first, second = (repeatable(case, CPU, 70, dtype) for _ in range(2))
    *recorded, results = forward_and_backward(first, launches)
    for c in (first, second):
        *again, others = forward_and_backward(c, launches)
        assert again == recorded
        for x, y in zip(others, results, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    scripts = list(repeat._scripts.values())
    predicates = 2 if case == "predicate" else 1  # each recorded anew
    assert len(scripts) == 2 * predicates  # forward and backward
    assert None not in scripts


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", ["causal", "padding"])
def test_descriptors_are_made_of_other_tensors(launches: Launches, case: str) -> None:
    first, second = (repeatable(case, CPU, 70) for _ in range(2))
    *recorded, results = forward_and_backward(first, launches, "hopper")
    for c in (first, second):
        *again, others = forward_and_backward(c, launches, "hopper")
        assert again == recorded
        for x, y in zip(others, results, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
    scripts = list(repeat._scripts.values())
    assert len(scripts) == 2
    assert [sum(len(x.maps) for x in s.launches) for s in scripts if s is not None] == [4, 8]


def test_what_only_kernels_see_is_one_allocation(launches: Launches) -> None:
    forward_and_backward(repeatable("documents", torch.device("cpu"), 100), launches)
    forward, backward = repeat._scripts.values()
    assert forward is not None
    assert backward is not None
    for script, results in ((forward, 2), (backward, 3)):
        *own, scratch = script.rooms
        assert len(own) == results
        used = [offset for slot, offset in script.parts]
        assert scratch.dtype == torch.uint8
        assert used == sorted(set(used))  # nothing lies where something else does
        assert used[-1] < scratch.size[0]
        assert all(offset % 256 == 0 for offset in used)


def test_what_decides_is_told_apart(launches: Launches) -> None:
    def qkv(length: int = 64, dim: int = 32, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
        return [torch.randn(1, 2, length, dim).to(dtype) for _ in range(3)]

    q, k, v = qkv()
    long = torch.randn(1, 2, 64, 64).bfloat16()
    calls: list[tuple[list[torch.Tensor], dict[str, Any]]] = [
        ([q, k, v], {}), (qkv(length=65), {}), (qkv(dim=16), {}), (qkv(dtype=torch.float16), {}),
        ([q, k, long], {}), ([q, k, long[..., ::2]], {}), ([q, k, long[..., 1:33]], {}), ([q, q, v], {}),
        ([q, k, k], {}), ([q, k, v], {"scale": 1.0}), ([q, k, v], {"softcap": 3.0}), ([q, k, v], {"softcap": 4.0}),
        ([q, k, v], {"mask": masks.causal()}), ([q, k, v], {"mask": masks.causal("bottom_right")}),
        ([q, k, v], {"mask": masks.window(1, 0)}), ([q, k, v], {"mask": masks.window(2, 0)}),
        ([q, k, v], {"mask": masks.key_lengths([5])}), ([q, k, v], {"mask": masks.key_lengths([5], "left")}),
        ([q, k, v], {"bias": torch.zeros(64, 64)}), ([q, k, v], {"bias": torch.zeros(1, 1, 1, 64)}),
        ([q, k, v], {"sinks": torch.zeros(2)}), ([q, k, v], {"dropout_p": 0.1}), ([q, k, v], {"dropout_p": 0.2}),
        ([q, k, v], {"return_aux": tilewise.AuxRequest(max_logits=True)}),
    ]  # fmt: skip
    seen = []
    for _ in range(2):
        for tensors, options in calls:
            tilewise.attention(*tensors, backend="triton", **options)
            assert len(repeat._scripts) == min(len(seen) + 1, len(calls))
            seen.append(named(launches.taken(), (*tensors, *options.values()) if "bias" in options else (*tensors,)))
    assert seen[: len(calls)] == seen[len(calls) :]


def test_the_same_tensor_twice_is_not_two_tensors(launches: Launches) -> None:
    x, y, z = (torch.randn(1, 2, 64, 32) for _ in range(3))
    for q, k, v in ((x, x, x), (x, y, z), (y, y, y), (z, y, x), (x, x, y)):
        for _ in range(2):
            tilewise.attention(q, k, v, backend="triton")
            ((_, _, _, _, _, _, _, *addresses),) = launches.taken()
            assert addresses[:3] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]


def test_a_predicate_may_change_its_mind(launches: Launches) -> None:
    """Another number that it closes over, or another tensor."""
    some = torch.arange(64) // 16
    width, ids = 3, some
    mask = masks.predicate(lambda b, h, i, j: (i - j < width) & (ids[i] == ids[j]))
    q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
    for width, ids, known in ((3, some, 1), (3, some, 1), (5, some, 2), (5, some.clone(), 3), (5, some, 4)):
        for _ in range(2):
            tilewise.attention(q, k, v, mask, backend="triton")
            last = launches.taken()[-1]
            assert any(isinstance(x, tuple) and {width, ids.data_ptr()} <= set(x) for x in last), last
            assert len(repeat._scripts) == known


def test_what_triton_launches_is_not_repeated(launches: Launches) -> None:
    launches.known = False
    q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
    for _ in range(3):
        tilewise.attention(q, k, v, backend="triton")
        assert len(launches.taken()) == 1
    assert list(repeat._scripts.values()) == [None]


def test_a_mask_on_another_device_is_copied_each_time(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 2, 64, 32) for _ in range(3))
    lengths = torch.tensor([3, 4])
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **b: self.clone())
    for _ in range(2):
        tilewise.attention(q, k, v, masks.key_lengths(lengths), backend="triton")
        calls = launches.taken()
        assert len(calls) == 2
        assert not any(isinstance(x, tuple) and lengths.data_ptr() in x for call in calls for x in call)
    assert list(repeat._scripts.values()) == [None]


def test_not_more_than_so_many_are_remembered(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_MOST", 4)
    for n in range(11):
        q, k, v = (torch.randn(1, 1, 16 + n, 32) for _ in range(3))
        tilewise.attention(q, k, v, backend="triton")
        assert len(repeat._scripts) <= 4
