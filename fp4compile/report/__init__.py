"""What was rewritten, why, and what it saves: ``explain`` and the report it gives."""

from .explain import explain
from .report import Report, SavedBytes
from .saved import SavedTensor

__all__ = ["Report", "SavedBytes", "SavedTensor", "explain"]
