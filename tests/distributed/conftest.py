"""Ranks: processes that are started once and run functions of the test files together."""

import inspect
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()


class RankFailed(Exception):
    """What a rank raised."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank} raised {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class Ranks:
    """Some processes of one group."""

    def __init__(self, folder: Path, world: int, backend: str, seconds: float = 60) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.world, self.backend, self.patience = world, backend, seconds + 60
        env = dict(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env.pop("PYTEST_CURRENT_TEST", None)
        given = [backend, str(folder / "meeting")]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), *given, str(rank), str(world), str(seconds)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
                stderr=(folder / f"rank{rank}.txt").open("w"),
            )
            for rank in range(world)
        ]  # fmt: skip

    def __call__(self, case: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a function on every rank; return what they return, or raise what the first raised."""
        answers = self.answers(case, **kwargs)
        for rank, (fine, answer) in enumerate(answers):
            if not fine:
                raise RankFailed(rank, *answer)
        return [answer for _, answer in answers]

    def errors(self, case: Callable[..., Any], **kwargs: Any) -> list[tuple[str, str]]:
        """Run a function that raises on every rank; return the class and text of each error."""
        answers = self.answers(case, **kwargs)
        assert not any(fine for fine, _ in answers), answers
        return [answer[:2] for _, answer in answers]

    def answers(self, case: Callable[..., Any], **kwargs: Any) -> list[tuple[bool, Any]]:
        message = pickle.dumps((inspect.getsourcefile(case), case.__name__, kwargs))
        for process in self.processes:
            process.stdin.write(message)
            process.stdin.flush()
        end = time.monotonic() + self.patience
        answers = []
        for rank, process in enumerate(self.processes):
            ready, _, _ = select.select([process.stdout], [], [], max(end - time.monotonic(), 0))
            if not ready:
                self.close()
                pytest.fail(f"rank {rank} gave no answer")
            try:
                answers.append(pickle.load(process.stdout))
            except EOFError:
                answers.append((False, ("died", f"exit status {process.wait()}", "")))
        return answers

    def close(self) -> None:
        for process in self.processes:
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, str], Ranks]]:
    made: dict[tuple[int, str], Ranks] = {}

    def get(world: int, backend: str) -> Ranks:
        key = (world, backend)
        if key not in made or any(p.poll() is not None for p in made[key].processes):
            made[key] = Ranks(tmp_path_factory.mktemp(f"{backend}{world}"), world, backend)
        return made[key]

    yield get
    for ranks in made.values():
        ranks.close()


NCCL = pytest.param(
    "nccl",
    marks=[pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")],
)


@pytest.fixture(params=["gloo", NCCL])
def two(request: pytest.FixtureRequest, pools: Callable[[int, str], Ranks]) -> Ranks:
    """Two ranks: of gloo on the CPU, and of NCCL where there are two GPUs."""
    return pools(2, request.param)


@pytest.fixture
def ranks(pools: Callable[[int, str], Ranks]) -> Callable[[int], Ranks]:
    """Any number of ranks of gloo."""
    return lambda world: pools(world, "gloo")


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    """Ranks of gloo for one test, which may end them."""
    made: list[Ranks] = []

    def get(world: int) -> Ranks:
        made.append(Ranks(tmp_path / f"fresh{len(made)}", world, "gloo", seconds=20))
        return made[-1]

    yield get
    for ranks in made:
        ranks.close()
