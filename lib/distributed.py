"""Several processes that work as one: shares of the sequences, sums over all, errors that end all.

`torchrun` starts the processes and numbers them; `processes` connects them (nccl on GPUs, gloo on
CPUs). A process is called a rank, and only rank 0 writes. Without torchrun there is one rank, and
every function here does nothing: the same code runs on one processor and on many.
"""

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lib import statistics

# Rank 0 may prepare a corpus or compare weights for long; a rank that has died is noticed at once.
TIMEOUT = timedelta(days=1)
GRACE_SECONDS = 20


class OtherRankError(RuntimeError):
    """This rank stops because another one did. `reported`: that one says why, itself."""

    def __init__(self, sentence: str, *, reported: bool):
        super().__init__(sentence)
        self.reported = reported


@dataclass(frozen=True)
class World:
    """`rank` of this process, 0 … size - 1, and `size`, the number of processes."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def world() -> World:
    """Who this process is among those that `processes` connected; rank 0 of 1 outside of it."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)


@contextmanager
def processes(device: torch.device):
    """Connect the processes that torchrun started, for the length of the block; else do nothing.

    On CUDA each process of a machine gets its own GPU, which `torch.device("cuda")` then means.
    Raises ValueError if there are more processes than GPUs, OSError if they do not find each other.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or world().size > 1:
        yield
        return
    backend = "gloo"
    if device.type == "cuda":
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            raise ValueError(
                f"torchrun starts {here} processes on a machine with {gpus} GPUs; lower "
                "--nproc-per-node or use device 'cpu'."
            )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except RuntimeError as error:
        raise OSError(
            f"The processes did not find each other ({str(error).splitlines()[0]}); check torchrun's options."
        ) from error
    yield
    dist.destroy_process_group()  # not after an error: others may still be in the middle of a sum


@contextmanager
def _connected():
    try:
        yield
    except RuntimeError as error:
        raise OtherRankError(
            "Another process of this run ended early; start the same run again to go on from its last checkpoint.",
            reported=False,
        ) from error


def speaks() -> bool:
    """Whether this process prints its error: before they are connected, all of a machine fail alike."""
    return world().size > 1 or os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_the_end() -> None:
    """Give the process that has something to say the time to say it.

    torchrun ends all processes as soon as one has ended with an error; a silent one must not be first.
    """
    time.sleep(GRACE_SECONDS)


def gather(value) -> list:
    """The `value` (plain Python) of every rank, in the order of ranks; all ranks must call it."""
    size = world().size
    if size == 1:
        return [value]
    values = [None] * size
    with _connected():
        dist.all_gather_object(values, value)
    return values


def from_first(value):
    """What rank 0 passed as `value`, on every rank."""
    return gather(value)[0]


@contextmanager
def together():
    """All ranks leave the block in the same way: an error on one of them is an error on all.

    The first rank that failed raises its own error, the others an OtherRankError. The block must
    hold no sums and no gathering, since a rank that failed would not take part in them.
    """
    error = None
    try:
        yield
    except Exception as own:
        if world().size == 1:
            raise
        error = own
    failed = [rank for rank, text in enumerate(gather(error and str(error))) if text is not None]
    if failed and error is not None and world().rank == failed[0]:
        raise error
    if failed:
        raise OtherRankError(f"Process {failed[0]} failed and says why.", reported=True)


def first_then_others(load):
    """`load()` on rank 0 and then on the others, who find what it left in the cache."""
    for turn in (True, False):
        with together():
            if world().is_first == turn:
                value = load()
    return value


def shard(tensor: Tensor) -> Tensor:
    """This rank's contiguous share of the rows of `tensor`; shares differ by one row at most."""
    return tensor.tensor_split(world().size)[world().rank]


def sum_over_ranks(tensors, weight: float = 1.0) -> None:
    """Replace each of `tensors`, in place and on every rank, by the sum over ranks of weight x tensor.

    The sums are the same to the last bit on all ranks. Raises OtherRankError if a rank has ended.
    """
    if world().size == 1:
        return
    for tensor in tensors:
        total = tensor.mul_(weight).contiguous()  # a copy only of what has gaps
        with _connected():
            dist.all_reduce(total)
        tensor.copy_(total)


def copy_from_first(tensors) -> None:
    """Overwrite `tensors`, in place, by those of rank 0."""
    if world().size == 1:
        return
    for tensor in tensors:
        values = tensor.contiguous()
        with _connected():
            dist.broadcast(values, src=0)
        tensor.copy_(values)


def corpus_statistics(
    inputs: Tensor, targets: Tensor, vocab_size: int, *, device="auto"
) -> statistics.CorpusStatistics:
    """statistics.corpus_statistics, counted by all ranks: each its share of the sequences.

    Every rank passes all sequences `inputs`, `targets` [N, T] and receives the whole result. Raises
    MemoryError on the first rank that has too little memory for it, OtherRankError on the others.
    """
    if world().size == 1:
        return statistics.corpus_statistics(inputs, targets, vocab_size, device=device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with together():
        statistics.require_statistics_memory(vocab_size, inputs.shape[1], device)
    return statistics.count_all(inputs, targets, vocab_size, device, _counted)


def _counted(counts, inputs: Tensor, targets: Tensor):
    """`counts` of all sequences: this rank adds its share, then the ranks' tables are summed."""
    counts.add(shard(inputs), shard(targets))
    sum_over_ranks([getattr(counts, name) for name in counts.tables])
    counts.positions = sum(gather(counts.positions))
    return counts
