"""What the benchmarks share: options, times, the machine's yardstick, records."""

import argparse
import re
import time

import torch

from lib import paths
from lib.results import environment, results_root, write_json

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _record(text):
    """The name of a benchmark's record; any other would write over what is not its own."""
    if not re.fullmatch(r"bench-[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name like bench-gpu")
    return text


def parser(doc, **sizes):
    """Options of a benchmark: its sizes with their usual values (several where that is a list), and --save."""
    made = argparse.ArgumentParser(description=doc.split("\n")[0])
    for name, usual in sizes.items():
        several = {"nargs": "+"} if isinstance(usual, list) else {}
        made.add_argument("--" + name.replace("_", "-"), type=_positive, default=usual, **several)
    made.add_argument("--save", type=_record, help="name of the record in data/results, bench-...")
    return made


def clock():
    """Seconds: CPU time where torch has one thread, since other processes disturb it less; else wall time."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(function, *arguments, device="cpu", **options):
    """Time of one call, and its result; a GPU is waited for."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else bool
    wait()
    start = clock()
    result = function(*arguments, **options)
    wait()
    return clock() - start, result


def best(function, *arguments, budget=0.5, **options):
    """The shortest time of one call, among calls that take `budget` seconds together, at least one."""
    times = []
    while sum(times) < budget:
        times.append(seconds(function, *arguments, **options)[0])
    return min(times)


def product_rate(device="cpu", size=2048):
    """Multiply-adds per second of a float32 product of square matrices: the machine's yardstick."""
    square = torch.randn(size, size, device=device)
    return size**3 / best(torch.matmul, square, square, device=device)


def distinct_of(inputs):
    """Mean number of distinct tokens in a sequence of `inputs` [N, T]."""
    return paths.distinct_tokens(inputs)[2][:, -1].double().mean().item()


def machine():
    """One line: processor, threads, version of torch, and the kind of time that is taken."""
    found = environment()
    kind = "CPU" if torch.get_num_threads() == 1 else "wall"
    name = found["device_name"]
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    return f"{name}, {torch.get_num_threads()} threads, {versions}, {kind} time"


def save(name, options, found):
    """Write `<results root>/<name>/`: run.json (options, machine, versions) and summary.json (`found`)."""
    given = {key: value for key, value in vars(options).items() if key != "save"}
    write_json(results_root() / name / "run.json", {"parameters": given, **environment()})
    write_json(results_root() / name / "summary.json", found)
