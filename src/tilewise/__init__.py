"""tilewise: exact attention for PyTorch, computed tile by tile."""

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

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "alibi",
    "attention",
    "attention_varlen",
    "explain",
    "masks",
    "merge",
    "scaled_dot_product_attention",
    "use_backend",
]
