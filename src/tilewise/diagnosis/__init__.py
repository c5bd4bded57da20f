"""The doctor: what a model's attention does while it runs, and which of the article's six symptoms it has.

    with tilewise.doctor() as report:
        model(x)
    print(report)

``records`` and ``kernels`` are plain values and pure rules, ``examine`` reads one call's tensors, ``steps`` the time,
``watch`` sees it all happen, ``symptoms`` and ``report`` say what it means. ``script`` runs a file under a watch.
"""

from .context import doctor
from .records import SYMPTOMS, ByHand, Call, Finding, Place
from .report import Report
from .script import Run, run_script

__all__ = ["SYMPTOMS", "ByHand", "Call", "Finding", "Place", "Report", "Run", "doctor", "run_script"]
