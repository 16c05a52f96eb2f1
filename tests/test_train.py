"""lib.train: what one update is, resuming, determinism, records, and refusals that lose nothing."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lib import train as module
from lib.corpus import load_corpus
from lib.model import AttentionOnlyTransformer, loss_and_gradients
from lib.train import TrainConfig, corpus_of, epoch_order, main, snapshot_steps, train

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = TrainConfig(
    vocab_size=40,
    seq_len=12,
    max_sequences=60,
    batch_size=16,
    num_layers=2,
    steps=7,
    learning_rate=0.1,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEADING_TERMS_CACHE", str(tmp_path_factory.mktemp("corpus")))
        return corpus_of(SMALL)


def without_time(metrics):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics]


def weights(result):
    return dict(result.model.named_parameters())


def assert_same_run(one, two):
    assert without_time(one.metrics) == without_time(two.metrics)
    for name, weight in weights(one).items():
        assert torch.equal(weight, weights(two)[name]), name


def test_one_update_is_a_step_against_the_gradient(corpus, tmp_path):
    result = train(replace(SMALL, steps=2, dtype="float64"), corpus, tmp_path / "run")
    order = epoch_order(60, 0, 0)
    model = AttentionOnlyTransformer(40, 12, 2).double()
    for batch in (order[:16], order[16:32]):
        chosen = corpus.tokens[batch]
        _, gradients = loss_and_gradients(model, chosen[:, :-1], chosen[:, 1:])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.1 * gradients[name]
    for name, parameter in model.named_parameters():
        assert torch.equal(weights(result)[name], parameter), name
    assert model.layers[1].value.any()


def test_the_last_incomplete_batch_is_dropped_and_epochs_reshuffle(corpus, tmp_path, monkeypatch):
    seen = []
    real = module.loss_and_gradients
    monkeypatch.setattr(
        module,
        "loss_and_gradients",
        lambda m, x, y, **k: (seen.append(x.clone()), real(m, x, y, **k))[1],
    )
    train(replace(SMALL, steps=None, epochs=2), corpus, tmp_path / "run")
    assert len(seen) == 2 * (60 // 16) and all(len(x) == 16 for x in seen)
    for epoch in range(2):
        expected = corpus.inputs[epoch_order(60, 0, epoch)[:48]]
        assert torch.equal(torch.cat(seen[3 * epoch : 3 * epoch + 3]), expected)
    assert not torch.equal(epoch_order(60, 0, 0), epoch_order(60, 0, 1))
    assert not torch.equal(epoch_order(60, 0, 0), epoch_order(60, 1, 0))
    assert torch.equal(epoch_order(60, 3, 5).sort().values, torch.arange(60))


@pytest.mark.parametrize("deterministic", [False, True])
def test_two_runs_are_bitwise_equal(corpus, tmp_path, deterministic):
    one, two = (
        train(replace(SMALL, init_std=0.02, deterministic=deterministic), corpus, tmp_path / name)
        for name in ("one", "two")
    )
    assert_same_run(one, two)
    other = train(replace(SMALL, init_std=0.02, seed=1), corpus, tmp_path / "other")
    assert not torch.equal(weights(one)["output"], weights(other)["output"])


@pytest.mark.parametrize("kill_at", [1, 4, 6])
def test_resumed_equals_uninterrupted(corpus, tmp_path, monkeypatch, kill_at):
    whole = train(SMALL, corpus, tmp_path / "whole")
    real, calls = module.loss_and_gradients, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == kill_at:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(module, "loss_and_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, corpus, tmp_path / "killed")
    assert not (tmp_path / "killed" / "summary.json").exists()
    assert_same_run(train(SMALL, corpus, tmp_path / "killed"), whole)
    assert (
        len(calls) <= SMALL.steps + 2
    )  # at most the one step since the last checkpoint is repeated


def test_a_line_written_after_the_last_checkpoint_is_cut(corpus, tmp_path, monkeypatch):
    whole = train(SMALL, corpus, tmp_path / "whole")
    real = module._Checkpoint.save

    def killed_before_saving(self, model, step, identity):
        if step == 6:
            raise KeyboardInterrupt  # the line of step 6 is on disk, its weights are not
        real(self, model, step, identity)

    with monkeypatch.context() as patch:
        patch.setattr(module._Checkpoint, "save", killed_before_saving)
        with pytest.raises(KeyboardInterrupt):
            train(SMALL, corpus, tmp_path / "killed")
    assert_same_run(train(SMALL, corpus, tmp_path / "killed"), whole)


def test_killed_by_the_system_and_resumed(tmp_path, monkeypatch):
    """A real SIGKILL in another process, at a moment that nobody chose."""
    config = replace(SMALL, steps=120, max_sequences=64, batch_size=64)
    command = [sys.executable, "-m", "lib.train", "--results-root", str(tmp_path / "results")]
    for name in (
        "vocab_size",
        "seq_len",
        "max_sequences",
        "batch_size",
        "num_layers",
        "steps",
        "learning_rate",
    ):
        command += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"})
    folder = tmp_path / "results" / module.run_name(module.asdict(config))
    deadline = time.monotonic() + 60
    while (
        not (folder / "metrics.jsonl").exists()
        or len((folder / "metrics.jsonl").read_text().splitlines()) < 9
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "summary.json").exists()
    torch.set_num_threads(1)
    data = corpus_of(config)
    assert_same_run(train(config, data, folder), train(config, data, tmp_path / "whole"))


def test_a_finished_run_is_read_back_not_run_again(corpus, tmp_path, monkeypatch):
    first = train(SMALL, corpus, tmp_path / "run")
    monkeypatch.setattr(module, "loss_and_gradients", None)  # any step would fail
    second = train(SMALL, corpus, tmp_path / "run")
    assert_same_run(first, second)
    assert second.summary == first.summary and second.summary["finished"] is True
    for path in (tmp_path / "cache" / "checkpoints").iterdir():
        path.unlink()
    assert train(SMALL, corpus, tmp_path / "run").model is None


def test_the_record(corpus, tmp_path):
    result = train(replace(SMALL, steps=None, epochs=3), corpus, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["parameters"]["learning_rate"] == 0.1 and record["tf32"] is False
    assert record["corpus"]["fingerprint"] == corpus.fingerprint and record["seconds"] > 0
    assert record["peak_memory_mib"] > 0 and record["versions"]["torch"] == torch.__version__
    assert {1, 2, 3, 6, 9} <= {
        line["step"] for line in result.metrics
    }  # early steps and epoch ends
    final = result.metrics[-1]
    assert final["sum_learning_rate"] == pytest.approx(0.9) and final["epoch"] == 3
    assert result.metrics[0]["loss"] == pytest.approx(math.log(40), abs=1e-5)
    for name, smallest in result.summary["minimum_cosine"].items():
        cosines = [
            r["cosine"]
            for line in result.metrics
            for r in line["comparisons"]
            if r["parameter"] == name
        ]
        assert smallest == min(c for c in cosines if c is not None)
    assert (
        cosines[0] is None
    )  # before the third update attention has not moved: undefined, not zero


def test_full_precision_and_determinism_hold_inside_a_run(corpus, tmp_path, monkeypatch):
    seen, real = [], module.loss_and_gradients

    def look(*arguments, **options):
        flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        seen.append((*flags, torch.are_deterministic_algorithms_enabled()))
        return real(*arguments, **options)

    monkeypatch.setattr(module, "loss_and_gradients", look)
    for deterministic in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        config = replace(SMALL, steps=1, deterministic=deterministic)
        train(config, corpus, tmp_path / str(deterministic))
        record = json.loads((tmp_path / str(deterministic) / "run.json").read_text())
        assert record["tf32"] is False and record["processes"] == 1
        assert record["parameters"]["deterministic"] is deterministic
    assert seen == [(False, False, False), (False, False, True)]
    assert not torch.are_deterministic_algorithms_enabled()


def test_tf32_that_stays_on_is_refused(corpus, tmp_path, monkeypatch):
    class Stubborn:
        allow_tf32 = property(lambda self: True, lambda self, value: None)

    monkeypatch.setattr(torch.backends.cuda, "matmul", Stubborn())
    with pytest.raises(ValueError, match="TF32 cannot be switched off"):
        train(SMALL, corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_determinism_is_refused_where_it_is_not_possible(corpus, tmp_path, monkeypatch):
    config = replace(SMALL, deterministic=True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with pytest.raises(ValueError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8") as caught:
        with module._repeatable(config, torch.device("cuda")):
            pass
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with module._repeatable(config, torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()

    def not_repeatable(*arguments, **options):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))

    monkeypatch.setattr(module, "loss_and_gradients", not_repeatable)
    with pytest.raises(ValueError, match="since put_ does not repeat to the same bits; leave"):
        train(config, corpus, tmp_path / "run")
    assert not torch.are_deterministic_algorithms_enabled()


class HostReads(TorchDispatchMode):
    """Counts operations that hand a value of a tensor to Python: on a GPU each is a wait."""

    def __init__(self):
        super().__init__()
        self.count, self.is_on = 0, False

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        names = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
        self.count += self.is_on and function.name() in names
        return function(*arguments, **(options or {}))


def test_nothing_is_read_on_the_host_between_snapshots(corpus, tmp_path, monkeypatch):
    """Steps 11 and 12 are no snapshots. The model's own part is tested without data, on `meta`."""
    reads, steps, real = HostReads(), [], module.loss_and_gradients

    def look(*arguments, **options):
        reads.is_on = False
        steps.append(len(steps) + 1)
        found = real(*arguments, **options)
        reads.is_on = steps[-1] in (11, 12)
        return found

    monkeypatch.setattr(module, "loss_and_gradients", look)
    with reads:
        train(replace(SMALL, steps=14, batch_size=4), corpus, tmp_path / "run")
    assert reads.count == 0 and len(steps) == 14
    with reads:
        reads.is_on = True
        torch.ones(1).item()
    assert reads.count == 1  # the counter counts

    model, tokens = AttentionOnlyTransformer(40, 12, 2), torch.zeros(5, 12, dtype=torch.int64)
    loss, _ = real(model.to("meta"), tokens.to("meta"), tokens.to("meta"), micro_batch=2)
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_on_cuda_a_step_waits_for_nothing_and_agrees_with_the_cpu(
    corpus, tmp_path, monkeypatch, dtype
):
    """Steps 11 and 12 are no snapshots; from a new epoch's order on to its first step nothing waits either."""
    config = replace(SMALL, steps=16, batch_size=4, dtype=dtype)
    on_cpu = train(replace(config, device="cpu"), corpus, tmp_path / "cpu")
    steps, orders, real, real_order = [], [], module.loss_and_gradients, module.epoch_order

    def order(*arguments):
        orders.append(arguments)
        torch.cuda.set_sync_debug_mode("error")
        return real_order(*arguments)

    def look(*arguments, **options):
        steps.append(len(steps) + 1)
        torch.cuda.set_sync_debug_mode("error" if steps[-1] in (11, 12) else "default")
        return real(*arguments, **options)

    monkeypatch.setattr(module, "loss_and_gradients", look)
    monkeypatch.setattr(module, "epoch_order", order)
    on_cuda = train(replace(config, device="cuda"), corpus, tmp_path / "cuda")
    assert len(steps) == 16 and len(orders) == 2
    for name, weight in weights(on_cpu).items():
        error = (weights(on_cuda)[name].cpu() - weight).norm() / weight.norm()
        assert error < (1e-5 if dtype == "float32" else 1e-12), name


def test_both_methods_give_one_result_and_the_record_says_which(corpus, tmp_path, monkeypatch):
    runs = {}
    for method in module.METHODS:
        monkeypatch.setattr(module.cost, "choose", lambda *sizes, method=method, **options: method)
        config = replace(SMALL, dtype="float64")
        runs[method] = train(config, corpus, tmp_path / method)
        assert json.loads((tmp_path / method / "run.json").read_text())["method"] == method
    for name, weight in weights(runs["dense"]).items():
        error = (weights(runs["paths"])[name] - weight).norm() / weight.norm()
        assert error < 1e-10, name


def test_a_resumed_run_keeps_the_method_it_began_with(corpus, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module.cost, "choose", lambda *sizes, **options: "paths")
    real = module.loss_and_gradients

    def fails_later(*arguments, method, **options):
        seen.append(method)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*arguments, method=method, **options)

    monkeypatch.setattr(module, "loss_and_gradients", fails_later)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, corpus, tmp_path / "run")
    monkeypatch.setattr(module.cost, "choose", lambda *sizes, **options: "dense")
    train(SMALL, corpus, tmp_path / "run")
    assert set(seen) == {"paths"}


def test_theory_from_chosen_sequences(corpus, tmp_path):
    every = train(SMALL, corpus, tmp_path / "all").metrics[0]["comparisons"][0]
    batch = train(
        replace(SMALL, theory_sequences="first_batch"), corpus, tmp_path / "batch"
    ).metrics[0]["comparisons"][0]
    counted = train(replace(SMALL, theory_sequences=16), corpus, tmp_path / "counted").metrics[0][
        "comparisons"
    ][0]
    assert batch == counted
    assert (
        batch["relative_error"] < 1e-5 < every["relative_error"]
    )  # the first step is that batch's statistic


def test_snapshots_are_spaced_evenly_in_the_logarithm():
    steps = sorted(snapshot_steps(1000))
    assert steps[0] == 1 and steps[-1] == 1000 and len(steps) < 30
    assert all(later / earlier <= 2 for earlier, later in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"vocab_size": 1}, "vocab_size must be a whole number of at least 2, got 1"),
        ({"seq_len": 4.0}, "seq_len must be a whole number"),
        ({"num_layers": True}, "num_layers must be a whole number"),
        ({"seed": 2**63}, r"seed must be below 2\*\*63"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"learning_rate": "0.1"}, "learning_rate must be a finite number"),
        ({"init_std": math.nan}, "init_std must be a finite number"),
        ({"init_std": -0.1}, "init_std must be at least 0"),
        ({"holdout": "0.1"}, "holdout must be a finite number"),
        ({"holdout": -0.1}, "holdout must be at least 0"),
        ({"holdout": 1}, "holdout must be below 1"),
        ({"batch_size": "half"}, "batch_size must be a whole number of at least 1 or 'full'"),
        ({"theory_sequences": 0}, "theory_sequences must be"),
        ({"steps": None}, "exactly one of epochs and steps"),
        ({"epochs": 1}, "exactly one of epochs and steps"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"dtype": "float16"}, "dtype must be one of float32, float64"),
        ({"deterministic": 1}, "deterministic must be True or False"),
        ({"out_of_vocabulary": "keep"}, "out_of_vocabulary must be one of drop, unk"),
    ],
)
def test_settings_are_refused_in_one_sentence(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        replace(SMALL, **changes)
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_fit_the_corpus(corpus, tmp_path):
    with pytest.raises(ValueError, match="batch_size is 61 but the corpus has only 60"):
        train(replace(SMALL, batch_size=61), corpus, tmp_path / "run")
    with pytest.raises(ValueError, match="The corpus has T=12"):
        train(replace(SMALL, seq_len=13), corpus, tmp_path / "run")
    with pytest.raises(ValueError, match="theory_sequences is 99"):
        train(replace(SMALL, theory_sequences=99), corpus, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_asked_for_and_absent(corpus, tmp_path):
    with pytest.raises(ValueError, match="no CUDA device"):
        train(replace(SMALL, device="cuda"), corpus, tmp_path / "run")


def test_another_run_in_the_folder_is_not_overwritten(corpus, tmp_path):
    train(SMALL, corpus, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        ValueError, match="another learning_rate; choose another folder. Nothing was changed"
    ):
        train(replace(SMALL, learning_rate=0.2), corpus, tmp_path / "run")
    with pytest.raises(ValueError, match="another learning_rate"):
        train(replace(SMALL, learning_rate=0.2), corpus, tmp_path / "run", resume=False)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def unchanged(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "broken"])
def test_a_record_with_holes_is_not_gone_on_with(corpus, tmp_path, finished):
    whole = train(SMALL, corpus, tmp_path / "run")
    metrics, summary = (tmp_path / "run" / name for name in ("metrics.jsonl", "summary.json"))
    lines = metrics.read_bytes().splitlines(keepends=True)
    if not finished:
        summary.unlink()
    sentence = "lacks the line of update"
    for damaged in (lines[: len(lines) // 2], [], [*lines[:-1], lines[-1][:9]]):
        metrics.write_bytes(b"".join(damaged))
        before = unchanged(tmp_path / "run")
        with pytest.raises(ValueError, match=sentence):
            train(SMALL, corpus, tmp_path / "run")
        assert unchanged(tmp_path / "run") == before
    for damaged, sentence in (
        (lines[:2] + lines[3:], "lacks the line of update 3"),
        (lines[::-1], "has its lines out of order"),
        ([*lines, b'{"step": 99}\n'], "damaged in line .*it lacks seconds, loss, comparisons"),
    ):
        metrics.write_bytes(b"".join(damaged))
        with pytest.raises(ValueError, match=sentence):
            train(SMALL, corpus, tmp_path / "run")
    metrics.write_bytes(b"".join(lines))
    assert_same_run(train(SMALL, corpus, tmp_path / "run"), whole)
    for damaged in (b"null", b'{"finished": false}', b'{"finished": true, "step": "7"}'):
        summary.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a whole record"):
            train(SMALL, corpus, tmp_path / "run")


def test_results_that_do_not_say_whose_they_are_stay(corpus, tmp_path):
    train(SMALL, corpus, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    before = unchanged(tmp_path / "run")
    for resume in (True, False):
        with pytest.raises(ValueError, match="results but no run.json that says whose"):
            train(SMALL, corpus, tmp_path / "run", resume=resume)
    assert unchanged(tmp_path / "run") == before


def test_a_finished_run_can_be_read_without_its_damaged_weights(corpus, tmp_path):
    train(SMALL, corpus, tmp_path / "run")
    (path,) = (tmp_path / "cache" / "checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="to read this run without its weights"):
        train(SMALL, corpus, tmp_path / "run")
    path.unlink()
    assert train(SMALL, corpus, tmp_path / "run").model is None


def test_a_broken_run_without_weights_says_that_it_starts_anew(corpus, tmp_path, capsys):
    whole = train(SMALL, corpus, tmp_path / "run", progress=False)
    (tmp_path / "run" / "summary.json").unlink()
    (path,) = (tmp_path / "cache" / "checkpoints").iterdir()
    path.unlink()
    capsys.readouterr()
    assert_same_run(train(SMALL, corpus, tmp_path / "run", progress=False), whole)
    assert "it starts anew" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["parameters", "corpus"])
@pytest.mark.parametrize("value", [None, [], {}])
def test_a_run_json_of_another_shape_is_one_sentence(corpus, tmp_path, key, value):
    train(SMALL, corpus, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(record | {key: value}))
    before = unchanged(tmp_path / "run")
    with pytest.raises(ValueError, match="is not a whole record|holds a run with another"):
        train(SMALL, corpus, tmp_path / "run")
    assert unchanged(tmp_path / "run") == before


def test_a_damaged_checkpoint_is_noticed(corpus, tmp_path):
    train(SMALL, corpus, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (path,) = (tmp_path / "cache" / "checkpoints").iterdir()
    intact = path.read_bytes()
    for damaged, sentence in (
        (intact[:-1] + bytes([intact[-1] ^ 1]), "do not match their hash"),
        (intact[:100], "cannot be read"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=sentence):
            train(SMALL, corpus, tmp_path / "run")
    path.write_bytes(intact)
    assert train(SMALL, corpus, tmp_path / "run").summary["finished"] is True


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_weights(corpus, tmp_path):
    config = replace(SMALL, learning_rate=1e30, steps=6)
    with pytest.raises(
        FloatingPointError, match="no longer a number after step .*; lower learning_rate"
    ):
        train(config, corpus, tmp_path / "run")
    kept = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert kept and all(math.isfinite(json.loads(line)["loss"]) for line in kept)


def test_a_full_gpu_is_one_sentence(corpus, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate.")

    monkeypatch.setattr(module, "loss_and_gradients", full)
    with pytest.raises(MemoryError, match="The GPU's memory is full; lower micro_batch_size"):
        train(SMALL, corpus, tmp_path / "run")


def test_held_out_texts_are_put_aside_and_named():
    config = replace(SMALL, holdout=0.25, max_sequences=None)
    data, whole = corpus_of(config), corpus_of(replace(config, holdout=0))
    assert len(data.held_out) * 3 == len(data.tokens) and len(whole.held_out) == 0
    assert len(data.tokens) + len(data.held_out) == len(whole.tokens)
    names = [module.run_name(module.asdict(c)) for c in (config, replace(config, holdout=0))]
    assert names[0] == names[1] + "-holdout=0.25"


@pytest.mark.parametrize("name", ["deterministic", "holdout"])
def test_an_earlier_record_without_the_newer_settings_is_still_this_run(corpus, tmp_path, name):
    first = train(SMALL, corpus, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    del record["parameters"][name]
    path.write_text(json.dumps(record))
    earlier = {"parameters": record["parameters"], "fingerprint": corpus.fingerprint}
    module._Checkpoint(tmp_path / "run").save(first.model, SMALL.steps, earlier)
    assert_same_run(train(SMALL, corpus, tmp_path / "run"), first)
    other = replace(SMALL, **{name: {"deterministic": True, "holdout": 0.5}[name]})
    with pytest.raises(ValueError, match=f"another {name}"):
        train(other, corpus, tmp_path / "run")


def test_too_little_memory_is_said_beforehand(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "available_memory", lambda device: 1000)
    with pytest.raises(MemoryError, match="GiB are free; lower vocab_size"):
        train(SMALL, corpus, tmp_path / "run")


def test_command_line_says_one_sentence(capsys, tmp_path):
    assert main(["--vocab-size", "1", "--steps", "1"]) == 2
    assert capsys.readouterr().err == "vocab_size must be a whole number of at least 2, got 1.\n"
    assert main(["--steps", "1", "--deterministic", "maybe"]) == 2
    assert capsys.readouterr().err == "deterministic must be True or False, got 'maybe'.\n"
    assert main(["--deterministic", "--corpus", str(tmp_path / "absent.txt"), "--steps", "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["--bogus", "1"]) == 2
    err = capsys.readouterr().err
    assert err == "Unrecognized arguments: --bogus 1; --help shows what there is.\n"


def test_larger_corpus_vocabulary_must_match(tmp_path):
    data = load_corpus(
        "storyworld", vocab_size=50, seq_len=12, max_sequences=60, out_of_vocabulary="unk"
    )
    with pytest.raises(ValueError, match="The corpus has T=12 and V=50"):
        train(SMALL, data, tmp_path / "run")


def test_starting_anew_deletes_nothing_before_it_is_sure(corpus, tmp_path, monkeypatch):
    train(SMALL, corpus, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    monkeypatch.setattr(module, "available_memory", lambda device: 1000)
    with pytest.raises(MemoryError):
        train(SMALL, corpus, tmp_path / "run", resume=False)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def test_weights_without_their_lines_start_anew(corpus, tmp_path):
    whole = train(SMALL, corpus, tmp_path / "run")
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    assert_same_run(train(SMALL, corpus, tmp_path / "run"), whole)


def test_a_full_disk_is_one_sentence(corpus, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise module.SafetensorError("No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match="The checkpoint was not written .* start the same run again"):
        train(SMALL, corpus, tmp_path / "run")


@pytest.mark.parametrize(
    "parameters, sentence",
    [({"lrr": 0.1}, "Unknown parameter lrr"), ({"learning_rate": "fast"}, "learning_rate must be")],
)
def test_the_run_notebook_refuses_bad_parameters(tmp_path, parameters, sentence):
    papermill = pytest.importorskip("papermill")
    notebook = REPOSITORY / "book" / "runs" / "train.ipynb"
    with pytest.raises(papermill.PapermillExecutionError, match=sentence):
        papermill.execute_notebook(
            notebook,
            tmp_path / "out.ipynb",
            parameters | {"results_root": str(tmp_path)},
            cwd=notebook.parent,
            progress_bar=False,
        )
