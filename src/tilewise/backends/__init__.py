"""The backends. Each is one module; none imports another."""

from ..dispatch import register
from . import dense, tiled, torch_sdpa, triton

for _module in (triton, tiled, dense, torch_sdpa):
    for _backend in _module.backends():
        register(_backend)
