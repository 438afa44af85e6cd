"""One rank of the tests: runs functions of test files, which it is told by file and name."""

import importlib.util
import os
import pickle
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


def main() -> None:
    backend, meeting, rank, world, seconds = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a case prints is no answer
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(rank))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=float(seconds)),
    )
    while True:
        try:
            file, name, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            answer = (True, getattr(load(file), name)(device, **kwargs))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            answer = (False, (type(error).__name__, str(error), text))
        pickle.dump(answer, answers)
        answers.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
