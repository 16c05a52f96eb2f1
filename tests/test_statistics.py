"""lib.statistics against the one-hot definition, by hand, and under splitting, merging and saving."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lib import statistics
from lib.checks import largest_error
from lib.statistics import (
    PairCounts,
    QueryKeyCounts,
    corpus_statistics,
    statistics_memory,
    unigram_statistics,
    usefulness,
)
from tests import dense

V, T = 7, 5
NAMES = ("bigram", "context", "query_key_term", "position_term")


@pytest.fixture(scope="module")
def tokens():
    return dense.split(dense.irregular_tokens(vocab_size=V, seq_len=T))


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_one_hot_definition(tokens, name):
    actual, expected = (
        getattr(corpus_statistics(*tokens, V), name),
        dense.statistics(*tokens, V)[name],
    )
    assert actual.dtype == torch.float64
    assert expected.count_nonzero() > 0
    assert largest_error(actual, expected) < 1e-13


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_transpose_is_not_equal(tokens, name):
    expected = dense.statistics(*tokens, V)[name]
    assert largest_error(getattr(corpus_statistics(*tokens, V), name).T, expected) > 0.1


def test_two_tokens_by_hand():
    # One sequence "a a b": pairs (a, a) and (a, b). At t = 1 the prefix is a, at t = 2 it is a a.
    stats = corpus_statistics(torch.tensor([[0, 0]]), torch.tensor([[0, 1]]), 2)
    assert stats.unigram.tolist() == [1.0, 0.0]
    assert stats.bigram.tolist() == [[0.0, 0.0], [0.0, 0.0]]  # 1/2 - 1/2: as likely as chance
    assert stats.context.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    # "a b b": pairs (a, b), (b, b). The prefixes are a (weight 1), then a and b (weight 1/2 each).
    stats = corpus_statistics(torch.tensor([[0, 1]]), torch.tensor([[1, 1]]), 2)
    assert stats.bigram.tolist() == [[-0.25, 0.25], [-0.25, 0.25]]
    assert stats.context.tolist() == [[-0.375, -0.125], [0.375, 0.125]]


def test_centring(tokens):
    stats = corpus_statistics(*tokens, V)
    assert stats.unigram.sum().item() == pytest.approx(1)
    assert stats.bigram.sum(dim=1).abs().max() < 1e-15  # over next
    assert stats.context.sum(dim=0).abs().max() < 1e-15  # over next
    assert stats.query_key_term.sum().abs() < 1e-15  # a row of attention can only be redistributed
    assert stats.position_term.sum().abs() < 1e-15


def test_derived_statistics(tokens):
    stats = corpus_statistics(*tokens, V)
    assert torch.equal(stats.interchangeability, stats.interchangeability.T)
    assert largest_error(stats.value_term, stats.context.T @ stats.bigram.T) == 0
    assert largest_error(stats.value_term.T, stats.context.T @ stats.bigram.T) > 0.1


def test_chunks_and_order_do_not_matter(tokens, monkeypatch):
    whole = corpus_statistics(*tokens, V)
    monkeypatch.setattr(statistics, "CHUNK_ELEMENTS", 1)  # one sequence at a time
    small = corpus_statistics(*(t.flip(0) for t in tokens), V)
    for name in NAMES:
        assert largest_error(getattr(small, name), getattr(whole, name)) < 1e-13


def test_merged_halves_equal_the_whole(tokens, tmp_path):
    whole = PairCounts(V, T).add(*tokens)
    first, second = (
        PairCounts(V, T).add(*(t[part] for t in tokens)) for part in (slice(4), slice(4, None))
    )
    first.save(tmp_path / "first.safetensors")
    merged = PairCounts(V, T).load(tmp_path / "first.safetensors").merge(second)
    assert torch.equal(merged.following, whole.following) and merged.positions == whole.positions
    assert largest_error(merged.context, whole.context) < 1e-14

    useful = whole.bigram.T @ whole.bigram @ whole.context
    halves = [
        QueryKeyCounts(useful, T).add(*(t[part] for t in tokens))
        for part in (slice(4), slice(4, None))
    ]
    merged, whole = halves[0].merge(halves[1]), QueryKeyCounts(useful, T).add(*tokens)
    assert largest_error(merged.query_key, whole.query_key) < 1e-13
    assert largest_error(merged.position, whole.position) < 1e-13


def test_bad_input_is_refused(tokens, tmp_path):
    inputs, targets = tokens
    with pytest.raises(ValueError, match="is vocab_size right"):
        corpus_statistics(inputs, targets, V - 1)
    with pytest.raises(ValueError, match="at least one sequence"):
        corpus_statistics(inputs[:0], targets[:0], V)
    with pytest.raises(ValueError, match="must both be"):
        corpus_statistics(inputs, targets[:, 1:], V)
    with pytest.raises(ValueError, match="can be merged"):
        PairCounts(V, T).merge(PairCounts(V, T + 1))
    with pytest.raises(ValueError, match="No sequence has been counted"):
        _ = PairCounts(V, T).bigram
    PairCounts(V, T).add(*tokens).save(tmp_path / "counts.safetensors")
    with pytest.raises(ValueError, match="other counts"):
        PairCounts(V + 1, T).load(tmp_path / "counts.safetensors")
    with pytest.raises(ValueError, match="sum to 1"):
        unigram_statistics(torch.ones(V), T)


def test_independent_tokens_by_enumeration():
    """The unigram null against a sum over all 3^4 sequences, each weighted by its probability."""
    p, length = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 3
    sequences = torch.tensor(list(itertools.product(range(3), repeat=length + 1)))
    null = unigram_statistics(p, length)
    expected = {name: torch.zeros_like(getattr(null, name)) for name in NAMES}
    useful = null.bigram.T @ null.bigram @ null.context
    for sequence, weight in zip(sequences, p[sequences].prod(dim=1), strict=True):
        for t in range(1, length + 1):
            following, query, share = sequence[t], sequence[t - 1], weight / length
            expected["bigram"][query] += share * ((torch.arange(3) == following).double() - 1 / 3)
            scores = [useful[following, sequence[m]] for m in range(t)]
            for k in range(t):
                expected["context"][:, sequence[k]] += (
                    share / t * ((torch.arange(3) == following).double() - 1 / 3)
                )
                gain = share / t * (scores[k] - sum(scores) / t)
                expected["query_key_term"][query, sequence[k]] += gain
                expected["position_term"][t - 1 - k] += gain
    for name in NAMES[:3]:
        assert largest_error(getattr(null, name), expected[name]) < 1e-13
    assert expected["position_term"].abs().max() < 1e-18 and not null.position_term.any()


@pytest.mark.parametrize("share", [0.0, 1.0])  # of nonzero pairs, above which products are dense
def test_usefulness_is_its_definition(tokens, monkeypatch, share):
    monkeypatch.setattr(statistics, "SPARSE_SHARE", share)
    stats = corpus_statistics(*tokens, V)
    expected = stats.bigram.T @ stats.bigram @ stats.context
    assert largest_error(usefulness(stats.unigram, stats.bigram, stats.context), expected) < 1e-13
    assert (
        largest_error(stats.query_key_term, dense.statistics(*tokens, V)["query_key_term"]) < 1e-13
    )


def test_uneven_sequences_and_several_threads():
    """From one distinct token to all of them, over more chunks than threads; the threads stay as set."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(40, (2, 60, 30), generator=generator) // torch.arange(
        1, 61
    ).view(-1, 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics, "CHUNK_ELEMENTS", 4000)
            actual, again = (corpus_statistics(inputs, targets, 41) for _ in range(2))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    for name, expected in dense.statistics(inputs, targets, 41).items():
        assert largest_error(getattr(actual, name), expected) < 1e-12
        assert torch.equal(getattr(actual, name), getattr(again, name))


def test_too_little_memory_is_refused(tokens, monkeypatch):
    monkeypatch.setattr(statistics, "available_memory", lambda device: 2**34)
    with pytest.raises(MemoryError, match=r"50,304 tokens need 75\.\d GiB.* 16\.0 GiB free: take"):
        corpus_statistics(*tokens, 50_304, device="cpu")
    with pytest.raises(MemoryError, match=r"vocab_size up to about"):
        PairCounts(50_304, T)
    monkeypatch.setattr(statistics, "available_memory", lambda device: None)
    corpus_statistics(*tokens, V)


def test_the_vocabulary_that_is_advised_fits(tokens, monkeypatch):
    monkeypatch.setattr(statistics, "available_memory", lambda device: 2**30)
    with pytest.raises(MemoryError) as refused:
        corpus_statistics(*tokens, 50_304, device="cpu")
    fits = int(re.search(r"up to about ([\d,]+)", str(refused.value))[1].replace(",", ""))
    assert statistics_memory(fits, T) <= 2**30 < statistics_memory(fits + 1, T)


def test_processes_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(statistics.Path, "read_text", lambda path: "MemAvailable:    4096 kB")
    assert statistics.available_memory() == 2**22
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert statistics.available_memory() == 2**20


def test_only_a_cpu_works_on_as_many_chunks_as_it_has_threads():
    before, estimates = torch.get_num_threads(), {}
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            estimates[threads] = [statistics_memory(100, T, device) for device in ("cpu", "cuda")]
    finally:
        torch.set_num_threads(before)
    assert estimates[1][1] == estimates[5][1]
    tables = 8 * statistics.TABLES * 100**2
    assert estimates[5][0] - tables == 3 * (estimates[1][0] - tables)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux's account of memory"
)
@pytest.mark.parametrize(
    ("vocab_size", "sequences", "length", "share"),
    [(5000, 64, 20, "below"), (3000, 1500, 200, "above")],
)
def test_memory_is_as_stated(vocab_size, sequences, length, share):
    """Resident memory of a fresh process against the estimate, where the tables dominate.

    With few pairs the product by their number is made, with many the dense one. At the largest
    vocabulary that fits, benchmarks/bench_statistics.py --largest measures it.
    """
    code = f"""if True:
        import re, torch
        from lib.statistics import SPARSE_SHARE, corpus_statistics, statistics_memory
        def peak():  # not ru_maxrss, which a child inherits from its parent
            return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
        torch.set_num_threads(1)
        inputs, targets = torch.randint({vocab_size}, (2, {sequences}, {length}))
        corpus_statistics(inputs[:64] % 9, targets[:64] % 9, 10, device="cpu")
        before = peak()
        bigram = corpus_statistics(inputs, targets, {vocab_size}, device="cpu").bigram
        print((peak() - before) / statistics_memory({vocab_size}, {length}))
        pairs = (bigram > 0).count_nonzero() / bigram.numel()
        print("above" if pairs >= SPARSE_SHARE else "below")"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ratio, found = run.stdout.split()
    assert float(ratio) == pytest.approx(1, rel=0.2) and found == share


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_equals_cpu(tokens):
    for name in NAMES:
        cpu, cuda = (
            getattr(corpus_statistics(*tokens, V, device=d), name) for d in ("cpu", "cuda")
        )
        assert largest_error(cuda.cpu(), cpu) < 1e-12
