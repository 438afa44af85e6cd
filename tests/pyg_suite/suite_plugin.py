"""A pytest plugin for PyG's own tests: the same seeds in every run, and ``patch()`` if asked for.

``PYG_SUITE_MODE`` is ``stock`` or ``patched``; ``PYG_SUITE_REPORT`` names the file that receives
how many forward calls were accelerated.
"""

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_geometric.typing
from torch_geometric.testing import decorators

import pyg_accel


def pytest_configure() -> None:
    if os.environ["PYG_SUITE_MODE"] == "patched":
        pyg_accel.patch()
        # Tests that want pyg-lib run with ours, which is no package that is installed.
        has_package = decorators.has_package
        decorators.has_package = lambda name: name == "pyg_lib" or has_package(name)
        torch_geometric.typing.WITH_TORCH_SPARSE = False


@pytest.fixture(autouse=True)
def same_seed_in_every_run(request: pytest.FixtureRequest):
    random.seed(request.node.nodeid)  # PyG draws names of modules, which have to differ
    np.random.seed(12345)
    torch.manual_seed(12345)


def pytest_sessionfinish() -> None:
    with open(os.devnull, "w") as nowhere:
        rows = pyg_accel.report(nowhere).rows
    facts = {
        "accelerated": sum(row.calls for row in rows if row.formula),
        "calls": sum(row.calls for row in rows),
        "reasons": sorted({f"{row.layer}: {row.reason}" for row in rows if row.reason}),
    }
    Path(os.environ["PYG_SUITE_REPORT"]).write_text(json.dumps(facts, indent=1))
