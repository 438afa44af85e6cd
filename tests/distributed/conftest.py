"""Ranks: processes that are started once and run functions of the test files together."""

import inspect
import multiprocessing
import os
import runpy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("worker.py")
GPUS = torch.cuda.device_count()
# The server imports all that ranks need, once; a process that has met a GPU cannot be forked.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["pyg_accel.distributed.entry", "pyg_accel.rewrite.optimized"])
SPAWNED = multiprocessing.get_context("spawn")


class RankFailed(Exception):
    """What a rank raised."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank} raised {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class Ranks:
    """Some processes of one group."""

    def __init__(self, folder: Path, world: int, backend: str, seconds: float = 60) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.patience = seconds + 60
        self.processes, self.connections = [], []
        context = FORKED if backend == "gloo" else SPAWNED
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        for rank in range(world):
            mine, theirs = context.Pipe()
            given = {
                "connection": theirs, "backend": backend, "folder": str(folder), "rank": rank,
                "world": world, "seconds": seconds, "environment": env,
            }  # fmt: skip
            process = context.Process(target=runpy.run_path, args=(str(WORKER), given, "rank"))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(mine)

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
        for connection in self.connections:
            connection.send((inspect.getsourcefile(case), case.__name__, kwargs))
        end = time.monotonic() + self.patience
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(end - time.monotonic(), 0)):
                self.close()
                pytest.fail(f"rank {rank} gave no answer")
            try:
                answers.append(connection.recv())
            except EOFError:
                self.processes[rank].join()
                status = self.processes[rank].exitcode
                answers.append((False, ("died", f"exit status {status}", "")))
        return answers

    def close(self) -> None:
        for connection in self.connections:  # others may hold it open: processes forked meanwhile
            with suppress(BrokenPipeError):
                connection.send(None)
            connection.close()
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int, str], Ranks]]:
    made: dict[tuple[int, str], Ranks] = {}

    def get(world: int, backend: str) -> Ranks:
        key = (world, backend)
        if key not in made or not all(p.is_alive() for p in made[key].processes):
            made[key] = Ranks(tmp_path_factory.mktemp(f"{backend}{world}"), world, backend)
        return made[key]

    yield get
    for ranks in made.values():
        ranks.close()


NCCL = pytest.param(
    "nccl", marks=[pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]
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
