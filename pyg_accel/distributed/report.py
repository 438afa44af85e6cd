"""What ranks sent each other, and how long it took."""

import sys
from typing import TextIO

from pyg_accel.distributed.model import Distributed
from pyg_accel.distributed.wire import Traffic

__all__ = ["report"]


def report(model: Distributed, file: TextIO | None = None) -> dict[str, Traffic]:
    """Print what this rank moved since the model was distributed, and return it.

    Times include waiting for other ranks. On a GPU they are those of the stream.

    Args:
        model: from :func:`distribute`.
        file: where to print; by default standard output.

    Returns:
        By kind of collective: ``halo``, ``sums`` of norms and pools, ``outputs``, ``gradients``,
        ``set-up``.
    """
    out = sys.stdout if file is None else file
    wire = model.wire
    print(f"pyg_accel.distributed: rank {wire.rank} of {wire.size}", file=out)
    print(f"{'kind':10} {'calls':>7} {'sent MB':>10} {'received MB':>12} {'seconds':>9}", file=out)
    for kind, traffic in wire.traffic.items():
        traffic.settle()
        sent, received = traffic.sent / 1e6, traffic.received / 1e6
        print(f"{kind:10} {traffic.calls:7} {sent:10.2f} {received:12.2f} {traffic.seconds:9.3f}",
              file=out)  # fmt: skip
    return dict(wire.traffic)
