"""lib.presets: what the presets are, and the driver: skip, resume, go on after a failure, table, dry run."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lib import presets, results
from lib import train as training
from lib.presets import PRESETS, Preset, expected, main, measure, preset, state
from lib.train import TrainConfig, train

ROOT = Path(__file__).parents[1]
SMALL = TrainConfig(
    vocab_size=40, seq_len=12, max_sequences=60, batch_size=16, num_layers=2, steps=4
)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LEADING_TERMS_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("TQDM_DISABLE", "1")


def use(monkeypatch, **settings):
    """Presets of these names; each is one setting or a tuple of them."""
    made = {
        name: Preset("", one if isinstance(one, tuple) else (one,))
        for name, one in settings.items()
    }
    monkeypatch.setattr(presets, "PRESETS", made)


def without_notebook(monkeypatch):
    """Train here instead of in a kernel; returns the list of settings that were run."""
    ran = []

    def execute(config, root=None, kind="train"):
        ran.append(config)
        folder = results.results_root(root) / results.run_name(asdict(config))
        train(config, training.corpus_of(config), folder, progress=False)

    monkeypatch.setattr(presets, "execute", execute)
    return ran


# What the presets are ---------------------------------------------------------------------------


def test_the_first_embedded_setting_is_the_notebooks_default():
    notebook = json.loads((presets.NOTEBOOKS / "train.ipynb").read_text(encoding="utf-8"))
    (source,) = [
        "".join(cell["source"])
        for cell in notebook["cells"]
        if "parameters" in cell["metadata"].get("tags", [])
    ]
    values = {}
    exec(source, values)
    first, *others = PRESETS["embedded"].settings
    assert {name: values[name] for name in asdict(first)} == asdict(first)
    assert [one.seed for one in others] == [1, 2, 3, 4]
    assert all(replace(one, seed=0) == first for one in others)


def test_published_settings():
    (article,) = PRESETS["article"].settings
    sizes = (article.vocab_size, article.max_sequences, article.seq_len, article.num_layers)
    assert sizes == (3000, 65_536, 200, 3)
    assert (article.batch_size, article.micro_batch_size, article.epochs) == (2048, 256, 10)
    assert (article.learning_rate, article.init_std) == (0.005, 0.0)
    assert (article.theory_sequences, article.out_of_vocabulary) == (2048, "drop")
    (small,), (large,) = (PRESETS[f"paper-{rate}-lr"].settings for rate in ("small", "large"))
    paper = {"epochs": 100, "theory_sequences": "first_batch", "micro_batch_size": "auto"}
    assert small == replace(article, **paper)
    assert large == replace(small, learning_rate=0.05)
    (bpe,) = PRESETS["paper-bpe"].settings
    assert bpe == replace(small, tokenizer="bpe", vocab_size=10_000, epochs=10)


def test_every_published_preset_has_a_twin_with_theory_from_all():
    for name in [name for name in PRESETS if f"{name}-all" in PRESETS]:
        (one,), (twin,) = PRESETS[name].settings, PRESETS[f"{name}-all"].settings
        assert one.theory_sequences != "all"
        assert twin == replace(one, theory_sequences="all")
    assert sum(name.endswith("-all") for name in PRESETS) == 4


def test_the_sample_at_the_large_rate_passes_forty():
    (small,), (large,) = PRESETS["sample"].settings, PRESETS["sample-large-lr"].settings
    assert large == replace(small, learning_rate=0.05)
    updates = large.epochs * (int(4998 * (1 - large.holdout)) // large.batch_size)
    assert updates * large.learning_rate > 40


def test_first_batch_presets_differ_in_the_theory_alone():
    for name, change in (("embedded", {}), ("sample", {"epochs": 10})):
        first = [
            replace(one, theory_sequences="all") for one in PRESETS[f"{name}-first-batch"].settings
        ]
        assert first == [replace(one, **change) for one in PRESETS[name].settings]


def test_no_two_settings_share_a_run_name():
    names = [results.run_name(asdict(one)) for found in PRESETS.values() for one in found.settings]
    assert len(set(names)) == len(names)


# The driver --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_through_the_notebook_resume_go_on_after_a_failure_and_are_skipped(
    monkeypatch, capfd, tmp_path
):
    bad = replace(SMALL, batch_size=61)
    use(monkeypatch, one=(bad, SMALL), later=replace(SMALL, seed=1))
    monkeypatch.setattr(presets, "REPOSITORY", tmp_path)  # where the executed copies go
    real, calls = training.loss_and_gradients, []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(training, "loss_and_gradients", interrupted)
    name = results.run_name(asdict(SMALL))
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, training.corpus_of(SMALL), results.results_root() / name, progress=False)
    monkeypatch.undo()
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LEADING_TERMS_RESULTS", str(tmp_path / "results"))
    use(monkeypatch, one=(bad, SMALL), later=replace(SMALL, seed=1))
    monkeypatch.setattr(presets, "REPOSITORY", tmp_path)
    assert state(SMALL)["state"] == "broken" and state(SMALL)["updates"] == 2

    assert main(["one", "later"]) == 1
    out, err = capfd.readouterr()
    assert "failed: batch_size is 61 but the corpus has only 60 sequences." in err
    table = [line.split() for line in out.splitlines() if line.startswith(("one ", "later "))]
    assert [line[1] for line in table] == ["not", "finished", "finished"]
    assert len(results.load_run(name)["metrics"]) == 4
    assert len(list((tmp_path / "_build" / "runs").glob("*.ipynb"))) == 3
    recorded = results.load_run(name)["run"]["parameters"]
    assert recorded == asdict(SMALL)

    ran = without_notebook(monkeypatch)
    assert main(["later"]) == 0 and not ran
    assert main(["one"]) == 1 and ran == [bad]


def test_a_failing_run_stops_only_itself_and_finished_ones_are_skipped(monkeypatch, capsys):
    bad = replace(SMALL, batch_size=61)
    use(monkeypatch, one=(bad, SMALL), later=replace(SMALL, seed=1))
    ran = without_notebook(monkeypatch)
    assert main(["one", "later"]) == 1
    assert ran == [bad, SMALL, replace(SMALL, seed=1)]
    assert "failed: batch_size is 61 but the corpus has only 60" in capsys.readouterr().err
    assert main(["later"]) == 0 and len(ran) == 3
    assert main(["one"]) == 1 and ran[3:] == [bad]


def test_a_damaged_record_stops_only_its_own_run(monkeypatch, capsys):
    use(monkeypatch, one=SMALL, later=replace(SMALL, seed=1))
    ran = without_notebook(monkeypatch)
    assert main(["one"]) == 0
    (results.results_root() / results.run_name(asdict(SMALL)) / "summary.json").write_text("null")
    capsys.readouterr()
    assert main(["one", "later"]) == 1
    out, err = capsys.readouterr()
    assert "failed: " in err and "is not a whole record" in err and err.count("\n") == 1
    table = [line.split() for line in out.splitlines() if line.startswith(("one ", "later "))]
    assert [line[1] for line in table] == ["damaged", "finished"] and len(ran) == 3


def test_an_interrupt_is_one_sentence(monkeypatch, capsys):
    use(monkeypatch, one=SMALL)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(presets, "execute", interrupted)
    assert main(["one"]) == 130
    assert capsys.readouterr().err == "Interrupted; the same command goes on from here.\n"


def test_table_shows_measured_cost_and_the_estimate_for_the_rest(monkeypatch, capsys):
    use(monkeypatch, done=SMALL, open=replace(SMALL, seed=1), unknown=replace(SMALL, seed=2))
    without_notebook(monkeypatch)
    assert main(["done"]) == 0
    assert main(["open", "--dry-run", "1"]) == 0
    capsys.readouterr()
    chosen = [(name, found.settings[0], "train") for name, found in presets.PRESETS.items()]
    head, *lines = presets.table(chosen).splitlines()
    assert head.split() == ["preset", "state", "updates", "seconds", "MiB", "estimate", "run"]
    assert lines[0].split()[1:3] == ["finished", "4"] and "seconds" not in lines[0]
    assert "not yet run" in lines[1]
    assert presets.cost_in_words(presets.estimate("open")) in lines[1]
    assert "no dry run yet" in lines[2]
    for line, (_, config, _) in zip(lines, chosen, strict=True):
        assert line.endswith(results.run_name(asdict(config)))


def test_what_a_machine_decides_can_be_changed(monkeypatch):
    use(monkeypatch, one=SMALL)
    ran = without_notebook(monkeypatch)
    assert main(["one", "--micro-batch-size", "4", "--device", "cpu"]) == 0
    assert ran == [replace(SMALL, micro_batch_size=4, device="cpu")]


@pytest.mark.slow
def test_interventions_follow_the_training_and_are_skipped_once_made(monkeypatch, capfd, tmp_path):
    config = replace(SMALL, holdout=0.2)
    use(monkeypatch, one=config)
    monkeypatch.setattr(presets, "REPOSITORY", tmp_path)  # where the executed copies go
    assert main(["one", "--intervene"]) == 0
    train_line, line = capfd.readouterr().out.splitlines()[-2:]
    name = presets.run_of(config, "intervene")
    assert train_line.split()[:3] == ["one", "finished", "4"]
    assert line.split()[:3] == ["one", "finished", "4"] and line.endswith(name)
    found = results.load_run(name)
    assert found["run"]["parameters"] == asdict(config) | {"samples": 64}
    assert {row["text"] for row in found["summary"]["interventions"]} == {"train", "held_out"}

    made = []
    monkeypatch.setattr(presets, "execute", lambda *one: made.append(one))
    assert main(["one", "--intervene"]) == 0 and not made


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nonesuch"], "Unknown preset nonesuch; the presets are embedded, "),
        (["embedded", "nonesuch"], "Unknown preset nonesuch"),
        (["nonesuch", "--dry-run", "1"], "Unknown preset nonesuch"),
        (["embedded", "--learning-rate", "1"], "Unrecognized arguments: --learning-rate"),
        (["embedded", "--dry-run", "0"], "--dry-run takes at least 1 step, got 0."),
        (["embedded", "--dry-run", "few"], "Argument --dry-run: invalid int value: 'few'"),
        (["embedded", "--micro-batch-size", "0"], "micro_batch_size must be a whole number"),
        ([], "Name a preset: embedded, "),
    ],
)
def test_bad_input_is_one_sentence(monkeypatch, capsys, arguments, sentence):
    ran = without_notebook(monkeypatch)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith(sentence) and err.count("\n") == 1
    assert out == "" and not ran and not results.results_root().exists()


def test_list_names_all(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert "5 runs" in lines[0]


# The dry run -------------------------------------------------------------------------------------


def test_dry_run_extrapolates_along_the_line(monkeypatch, capsys):
    config = TrainConfig(
        corpus="tinystories",
        vocab_size=60,
        seq_len=16,
        max_sequences=4000,
        num_layers=2,
        batch_size=1000,
        epochs=3,
        theory_sequences="first_batch",
    )
    use(monkeypatch, one=config)
    monkeypatch.setattr(presets.torch.backends.cudnn, "allow_tf32", True)
    assert main(["one", "--dry-run", "2"]) == 0
    run, found = (
        results.read_json(results.results_root() / "estimate-one" / f"{name}.json")
        for name in ("run", "summary")
    )
    assert run["parameters"] == asdict(config) and run["versions"]
    assert run["tf32"] is False
    assert found["updates"] == 12 and found["refused"] is None
    assert list(found["seconds"]) == [str(n) for n in presets.SEQUENCES[found["method"]]]
    assert found["seconds_per_step"] >= max(found["seconds"].values()) > 0
    assert found["hours"] == pytest.approx(found["seconds_per_step"] * 12 / 3600)
    assert min(found[key] for key in ("statistics_seconds", "step_memory_gib")) > 0
    assert capsys.readouterr().out.startswith("one: ")
    assert presets._line({64: 2.0, 256: 5.0}, 448) == 8.0
    assert presets._line({16: 2.0}, 16) == 2.0


def test_presets_of_the_same_sizes_are_measured_once(monkeypatch, capsys):
    use(
        monkeypatch,
        one=SMALL,
        longer=replace(SMALL, steps=40, learning_rate=0.1, theory_sequences=20),
        larger=replace(SMALL, vocab_size=41),
    )
    real, calls = presets.measure, []
    monkeypatch.setattr(presets, "measure", lambda *a: (calls.append(a[0]), real(*a))[1])
    assert main(["one", "longer", "larger", "--dry-run", "1"]) == 0
    assert [config.vocab_size for config in calls] == [40, 41]
    one, longer = presets.estimate("one"), presets.estimate("longer")
    assert longer["hours"] == pytest.approx(10 * one["hours"])
    assert (
        results.read_json(results.results_root() / "estimate-longer" / "run.json")["parameters"][
            "steps"
        ]
        == 40
    )


def test_dry_run_says_what_does_not_fit(monkeypatch, capsys):
    use(monkeypatch, one=SMALL)
    monkeypatch.setattr(training, "available_memory", lambda device: 1000)
    assert main(["one", "--dry-run", "1"]) == 0
    assert "One training step needs about" in capsys.readouterr().out
    assert presets.estimate("one")["refused"].startswith("One training step needs about")
    assert presets.cost_in_words(presets.estimate("one")).startswith("One training step needs")


def test_small_batches_are_timed_whole():
    found = expected(SMALL, measure(SMALL))
    assert max(found["seconds"]) <= 16 and found["updates"] == 4


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.123, "0.12 seconds"),
        (59.9, "60 seconds"),
        (60, "1 minute"),
        (3599, "60 minutes"),
        (4e3, "1.1 hours"),
        (383456, "110 hours"),
        (1e7, "2,800 hours"),
    ],
)
def test_durations_in_words(seconds, words):
    assert presets.duration(seconds) == words


def test_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="Unknown preset x; the presets are embedded"):
        preset("x")
