"""The errors that pyg_accel raises on purpose."""

from collections.abc import Mapping, Sequence

__all__ = [
    "BackendNotSupported", "DistributedError", "ExtensionNotBuilt", "FolderError",
    "NotDistributable", "PartitionMismatch", "PygAccelError", "RankLost", "RanksDiverged",
    "VerificationError",
]  # fmt: skip

HOW_TO_BUILD = "`make venv` or `pip install --no-build-isolation -e .`"


class PygAccelError(Exception):
    """Base class of the errors below."""


class BackendNotSupported(PygAccelError, RuntimeError):
    """No backend, or not the named one, can run an operator.

    Args:
        what: the operator and its facts.
        reasons: of each backend, why it declined.
    """

    def __init__(self, what: object, reasons: Mapping[str, Sequence[str]]) -> None:
        self.reasons = {name: tuple(why) for name, why in reasons.items()}
        lines = [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("\n".join([f"no backend can run {what}", *lines]))


class ExtensionNotBuilt(PygAccelError, ImportError):
    """A native library is missing; the message says why, and how to build it."""

    def __init__(self, library: str, why: str) -> None:
        super().__init__(f"{library} is not available: {why}")


class VerificationError(PygAccelError, AssertionError):
    """With ``PYG_ACCEL_VERIFY=1``: an accelerated call differs from PyG's own result."""


class DistributedError(PygAccelError, RuntimeError):
    """Base class of errors between ranks."""


class PartitionMismatch(DistributedError):
    """Ranks differ in data, model, options or versions."""


class RanksDiverged(DistributedError):
    """Ranks meet in different collectives; found with ``TORCH_DISTRIBUTED_DEBUG=INFO``."""


class NotDistributable(DistributedError, ValueError):
    """A model, layer or data set that cannot be spread over ranks; the message has the reasons."""


class RankLost(DistributedError):
    """A collective failed: another rank ended, or did not come within the group's timeout."""


class FolderError(PygAccelError, ValueError):
    """A folder of a stored graph is incomplete, damaged or of another origin."""
