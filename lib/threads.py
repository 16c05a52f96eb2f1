"""Work in order over threads of one core each."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch


def at_once(device) -> int:
    """How many results of `in_threads` there are at one time: those in work and one that waits to be taken."""
    return torch.get_num_threads() + 1 if torch.device(device).type == "cpu" else 1


def in_threads(function, items, device) -> Iterator:
    """function(item) for each of `items`, in their order; on a CPU by as many threads as torch has set.

    Each thread works with one core: operations this small gain little from torch's own threads, and
    lose much to them on a busy machine. Off the CPU it is `map`.
    """
    if torch.device(device).type != "cpu":
        yield from map(function, items)
        return
    torch.empty(30 * 2**20, dtype=torch.uint8)  # freed at once: glibc then keeps smaller blocks
    threads, items = torch.get_num_threads(), iter(items)
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
            running = deque(pool.submit(function, item) for item in islice(items, threads + 1))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(function, item) for item in islice(items, 1))
    finally:
        torch.set_num_threads(threads)
