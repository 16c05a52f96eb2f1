"""lib.distributed: one process does nothing, two processes do the work of one, errors end all."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lib import distributed
from lib.distributed import World
from lib.results import run_name
from lib.statistics import corpus_statistics, statistics_memory
from lib.train import asdict, corpus_of, main, train
from tests.ranks import CONFIG, LARGE

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")


def two_processes(*arguments):
    """torchrun on this machine, two gloo processes; returns the finished process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=180
    )


def options(config):
    names = "vocab_size seq_len max_sequences batch_size num_layers steps learning_rate device dtype".split()
    return [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


def assert_metrics_agree(lines, expected, tolerance, names=None):
    """Loss and comparisons, all of them or those that are named; they are of order one."""
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=tolerance)
        for row, wanted in zip(line["comparisons"], other["comparisons"], strict=True):
            for name in names or wanted:
                if isinstance(wanted[name], float):
                    assert row[name] == pytest.approx(wanted[name], abs=tolerance), name
                else:
                    assert row[name] == wanted[name]


def test_without_torchrun_there_is_one_process_and_nothing_to_do():
    rows, total = torch.arange(5), torch.tensor([2.0])
    with distributed.processes(torch.device("cuda")):
        assert distributed.world() == World(0, 1) and distributed.world().is_first
        assert torch.equal(distributed.shard(rows), rows)
        distributed.sum_over_ranks([total], weight=0.5)
        distributed.copy_from_first([total])
        assert total.item() == 2 and distributed.from_first("here") == "here"
        with pytest.raises(KeyError), distributed.together():
            raise KeyError("own")
        assert distributed.first_then_others(lambda: 7) == 7


@pytest.mark.parametrize("count", [1, 2, 7, 9])
def test_shares_are_contiguous_and_differ_by_one_at_most(monkeypatch, count):
    rows, shares = torch.arange(count), []
    for rank in range(3):
        monkeypatch.setattr(distributed, "world", lambda rank=rank: World(rank, 3))
        shares.append(distributed.shard(rows))
    assert torch.equal(torch.cat(shares), rows)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 processes on a machine with 1 GPUs; lower"):
        with distributed.processes(torch.device("cuda")):
            pass


def test_fewer_sequences_in_a_batch_than_processes_are_refused(monkeypatch, tmp_path):
    corpus = corpus_of(CONFIG)
    monkeypatch.setattr(distributed, "world", lambda: World(0, 3))
    monkeypatch.setattr(distributed, "gather", lambda value: [value])
    with pytest.raises(ValueError, match="batch_size is 2 but 3 processes share each batch"):
        train(replace(CONFIG, batch_size=2), corpus, tmp_path / "run")


@pytest.mark.slow
def test_two_processes_count_and_train_as_one(tmp_path):
    done = two_processes("-m", "tests.ranks", "share", str(tmp_path))
    assert done.returncode == 0, done.stderr
    corpus = corpus_of(CONFIG)
    config = replace(CONFIG, dtype="float32")
    one = train(config, corpus, tmp_path / "one")
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    for name, rows in {"all": 61, "one": 1}.items():
        expected = corpus_statistics(corpus.inputs[:rows], corpus.targets[:rows], 40)
        for key, value in vars(expected).items():
            assert distance(ranks[1][f"{name}.{key}"], value) < 1e-12, (name, key)
    # One process in float32 is itself 1e-6 from float64: what rounding does is seen here, and only here.
    for name, parameter in one.model.named_parameters():
        assert distance(ranks[0][name], parameter) < 5e-6, name
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    two = train(config, corpus, tmp_path / "run")  # read back
    assert_metrics_agree(two.metrics, one.metrics, 1e-6, ["cosine", "row_normalised"])
    assert reports[0]["summary"] == reports[1]["summary"]
    assert [report["metrics"] for report in reports] == [len(one.metrics)] * 2
    other = "OtherRankError: Process {} failed and says why."
    for report in reports:
        assert report["memory"] == pytest.approx(statistics_memory(LARGE, 12), rel=0.2)
    sentence, silence = (report["refused"] for report in reports)
    assert (
        sentence.startswith("Statistics of 40 tokens need")
        and silence == "Process 0 failed and says why."
    )
    own = "ValueError: rank {} says why"
    assert reports[0]["together"] == [own.format(0), other.format(1), own.format(0), "went on"]
    sentence, silence = (report["not a number"] for report in reports)
    assert sentence[0] == silence[0] == 2 and silence[1] == ""
    assert sentence[1].startswith("The loss is no longer a number") and sentence[1].count("\n") == 1
    assert reports[1]["together"] == [other.format(0), own.format(1), other.format(0), "went on"]


@pytest.mark.slow
def test_torchrun_fails_as_one_and_resumes_to_the_result_of_one_process(tmp_path):
    arguments = [*options(CONFIG), f"--results-root={tmp_path / 'two'}"]
    run_dir = tmp_path / "two" / run_name(asdict(CONFIG))

    failed = two_processes("-m", "tests.ranks", "break", *arguments)
    assert failed.returncode != 0 and not (run_dir / "summary.json").exists()
    ours = [line for line in failed.stderr.splitlines() if line.startswith(("Rank", "Another"))]
    assert ours == ["Rank 1 has no memory left."]
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 4

    resumed = two_processes("-m", "lib.train", *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.count(str(run_dir)) == 1  # rank 0 alone prints
    assert json.loads((run_dir / "run.json").read_text())["processes"] == 2

    corpus = corpus_of(CONFIG)
    one, two = train(CONFIG, corpus, tmp_path / "one"), train(CONFIG, corpus, run_dir)
    assert_metrics_agree(two.metrics, one.metrics, 1e-9)
    for name, parameter in one.model.named_parameters():
        assert distance(dict(two.model.named_parameters())[name], parameter) < 1e-9, name


@pytest.mark.parametrize("said_elsewhere", [True, False])
def test_the_command_line_speaks_once(monkeypatch, capsys, said_elsewhere):
    waited = []
    monkeypatch.setattr(distributed, "wait_for_the_end", lambda: waited.append(1))
    for local_rank, sentence in {"0": "vocab_size must be", "1": ""}.items():
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert main(["--vocab-size", "1", "--steps", "1"]) == 2
        assert capsys.readouterr().err.startswith(sentence) and len(waited) == int(local_rank)

    def ended(config):
        raise distributed.OtherRankError("Another process ended.", reported=said_elsewhere)

    monkeypatch.setattr("lib.train.corpus_of", ended)
    assert main(["--steps", "1"]) == 2 and len(waited) == 2
    assert capsys.readouterr().err == ("" if said_elsewhere else "Another process ended.\n")


def test_a_lost_process_is_an_error_of_its_own(monkeypatch):
    monkeypatch.setattr(distributed, "world", lambda: World(0, 2))

    def lost(*arguments, **options):
        raise RuntimeError("Connection closed by peer")

    for name in ("all_reduce", "all_gather_object", "broadcast"):
        monkeypatch.setattr(distributed.dist, name, lost)
    for call in (
        lambda: distributed.gather(1),
        lambda: distributed.sum_over_ranks([torch.zeros(2)]),
        lambda: distributed.copy_from_first([torch.zeros(2)]),
    ):
        with pytest.raises(distributed.OtherRankError, match="ended early; start") as caught:
            call()
        assert not caught.value.reported


def test_processes_that_do_not_find_each_other(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def alone(*arguments, **options):
        raise RuntimeError("timed out\nwith many details")

    monkeypatch.setattr(distributed.dist, "init_process_group", alone)
    with pytest.raises(OSError, match=r"did not find each other \(timed out\); check torchrun"):
        with distributed.processes(torch.device("cpu")):
            pass
