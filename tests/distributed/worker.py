"""One rank of the tests: runs functions of test files, which it is told by file and name."""

import importlib.util
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def load(file: str):
    name = "case_" + Path(file).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def main(connection, backend, folder, rank, world, seconds, environment) -> None:
    os.environ.clear()
    os.environ.update(environment)
    dist.set_debug_level_from_env()
    with open(f"{folder}/rank{rank}.txt", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=world,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    while case := connection.recv():
        file, name, kwargs = case
        torch.manual_seed(0)
        try:
            answer = (True, getattr(load(file), name)(device, **kwargs))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            answer = (False, (type(error).__name__, str(error), text))
        connection.send(answer)
    dist.destroy_process_group()


if __name__ == "rank":
    names = ("connection", "backend", "folder", "rank", "world", "seconds", "environment")
    main(*(globals()[name] for name in names))
