"""``patch()``: accelerate PyG models as they are.

PyG's own ``propagate`` runs, but on edge tensors that are computed lazily (:mod:`.lazy`): a message
becomes a formula and its reduction one kernel call, whatever the layer. What cannot be expressed
runs as it always did, and :func:`report` says why.
"""

from pyg_accel.patching.api import PatchHandle, patch, patched, unpatch
from pyg_accel.patching.calibration import calibrate_sampling
from pyg_accel.patching.sampling import sampled
from pyg_accel.runtime.report import Report, report, reset_report

__all__ = [
    "PatchHandle",
    "Report",
    "calibrate_sampling",
    "patch",
    "patched",
    "report",
    "reset_report",
    "sampled",
    "unpatch",
]
