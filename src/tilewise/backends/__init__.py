"""The backends. Each is one module; none imports another, but for ``hopper``, which leaves some cases to ``triton``."""

from ..dispatch import register
from . import dense, hopper, tiled, torch_sdpa, triton

for _module in (hopper, triton, tiled, dense, torch_sdpa):
    for _backend in _module.backends():
        register(_backend)
