"""tilewise: exact attention for PyTorch, computed tile by tile."""

from typing import TYPE_CHECKING, Any

from . import backends as _backends  # noqa: F401  the import registers them
from . import masks
from .api import (
    AuxOutput,
    AuxRequest,
    attention,
    attention_varlen,
    explain,
    merge,
    scaled_dot_product_attention,
)
from .dispatch import use_backend
from .request import alibi

if TYPE_CHECKING:
    from .diagnosis import doctor

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "alibi",
    "attention",
    "attention_varlen",
    "doctor",
    "explain",
    "masks",
    "merge",
    "scaled_dot_product_attention",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    """``doctor`` brings the profiler and the judge with it: imported when it is first asked for."""
    if name == "doctor":
        from .diagnosis import doctor

        return doctor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
