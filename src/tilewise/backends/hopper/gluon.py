"""What Gluon calls by other names since Triton 3.8. The old ones are gone in 3.9."""

from triton.experimental.gluon.language.nvidia.hopper import tma

_RENAMED = hasattr(tma, "async_store")
tma_load = tma.async_load if _RENAMED else tma.async_copy_global_to_shared
tma_store = tma.async_store if _RENAMED else tma.async_copy_shared_to_global
