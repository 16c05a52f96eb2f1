"""lib.scoreboard: every published number has a verdict, and only its own setting decides it."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lib import presets, scoreboard
from lib.presets import Preset
from lib.results import REPOSITORY, run_name, write_json
from lib.scoreboard import (
    COMPUTED,
    VERDICTS,
    agrees,
    as_html,
    as_text,
    cost_of,
    published,
    read,
    rows,
    runs_of,
)
from lib.train import TrainConfig

RECORDS = REPOSITORY / "data" / "results"
FULL = TrainConfig(corpus="tinystories", vocab_size=50, seq_len=10, epochs=2)
SMALL = replace(FULL, corpus="sample")
HEAD = """
[[topic]]
key = "t"
title = "T"

[work.far]
multiplications = 6e12
each = "a checkpoint"
speed = "full"
"""


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A board of one entry, changed by keyword; its records, and a dry run of 3.5 hours."""
    root = tmp_path / "records"
    monkeypatch.setattr(
        presets, "PRESETS", {"full": Preset("", (FULL,)), "small": Preset("", (SMALL,))}
    )
    found = {"refused": None, "hours": 3.5, "statistics_seconds": 90.0}
    write_json(
        root / "estimate-full" / "summary.json", found | {"multiplications_per_second": 1e10}
    )
    write_json(root / "estimate-full" / "run.json", {"parameters": asdict(FULL)})

    def one(published="0.9", text="", **entry):
        entry = {
            "id": "a",
            "topic": "t",
            "source": "paper",
            "where": "Table 1",
            "quantity": "cosine",
            "published": published,
            "setting": "full",
            "chapter": "reproduction",
            "needs": "full",
            "read": "summary.loss",
        } | entry
        lines = [f"{key} = {value!r}" for key, value in entry.items() if value is not None]
        path = tmp_path / "published.toml"
        path.write_text(HEAD + "[[entry]]\n" + "\n".join(lines) + "\n" + text, encoding="utf-8")
        return rows(path, root)[0]

    one.root, one.path = root, tmp_path / "published.toml"
    return one


def record(root, config, loss, prefix="", more=None, **summary):
    parameters = asdict(config) | (more or {})
    folder = root / (prefix + run_name(parameters))
    corpus = {"name": "x", "fingerprint": "x", "sequences": 7}
    write_json(folder / "run.json", {"parameters": parameters, "corpus": corpus})
    write_json(folder / "summary.json", {"finished": True, "loss": loss, **summary})


# The real list -----------------------------------------------------------------------------------


def test_every_published_number_has_a_verdict():
    found = rows(root=RECORDS)
    assert len(found) >= 60 and {row["verdict"] for row in found} <= set(VERDICTS)
    for row in found:
        assert row["verdict"] != "not yet run" or row["cost"], row["id"]
        assert row["verdict"] != "differs" or row["why"], row["id"]
        assert (row["verdict"] in ("agrees", "differs")) == bool(row["runs"] and row["ours"])


def test_rows_that_a_published_setting_decides_name_a_preset_that_exists():
    for entry in published()["entry"]:
        for place in [entry, *entry.get("beside", [])]:
            name = place.get("needs") or place.get("preset")
            assert name is None or name in presets.PRESETS, entry["id"]
        assert entry.get("computed") is None or entry["computed"] in COMPUTED
        for place in entry.get("beside", []):
            # What stands at smaller scale is a smaller preset.
            assert place.get("preset", "sample").startswith(("sample", "embedded")), entry["id"]


def test_computed_numbers():
    orders = [COMPUTED[f"order of {name}"]() for name in ("output", "value", "query_key")]
    assert orders == [1, 2, 4]
    removal = [COMPUTED[f"order of removing {name}"]() for name in ("output", "value", "query_key")]
    assert removal == [1, 3, 7]
    assert COMPUTED["coefficient of three steps"]() == 2
    assert COMPUTED["article's s eta"]() == pytest.approx(1.6)
    assert COMPUTED["loss at zero"]() == pytest.approx(8.0064, abs=1e-4)


# Verdicts ----------------------------------------------------------------------------------------


def test_not_yet_run_has_the_estimated_cost(board):
    row = board()
    assert (row["verdict"], row["cost"], row["ours"]) == ("not yet run", "3.5 hours", "")
    assert board(cost="statistics")["cost"] == "1.5 minutes of counting, once the corpus is fetched"
    assert board(cost="far")["cost"] == "10 minutes a checkpoint"
    write_json(board.root / "estimate-full" / "summary.json", {"refused": "It needs 9 GiB."})
    assert board()["cost"] == "It needs 9 GiB."
    assert cost_of({"cost": "far"}, published(board.path)["work"], board.root) == ""


@pytest.mark.parametrize(
    "entry", [{"needs": "small"}, {"needs": None, "read": None}, {"needs": None, "run": "none-*"}]
)
def test_an_entry_without_run_and_without_cost_is_refused(board, entry):
    with pytest.raises(ValueError, match="Entry a has no run and no estimate of its cost"):
        board(**entry)


def test_a_difference_needs_a_reason(board):
    record(board.root, FULL, 0.5)
    with pytest.raises(ValueError, match="Entry a differs: 0.5 and not 0.9; say why"):
        board()
    row = board(why="Another corpus.")
    assert row["verdict"] == "differs" and row["ours"] == "0.5"
    assert "differs: Another corpus." in as_text([row])


def test_agreement_is_within_the_spread_of_seeds_and_the_tolerance(board):
    record(board.root, FULL, 0.89)
    assert board(why="x")["verdict"] == "differs"
    assert board(text="expect = {tolerance = 0.02}")["verdict"] == "agrees"
    # Another seed, device or micro-batch is the same experiment.
    record(board.root, replace(FULL, seed=1, micro_batch_size=4, device="cpu"), 0.91)
    row = board()
    assert row["verdict"] == "agrees" and len(row["runs"]) == 2
    assert row["ours"] == "0.9 (0.89 to 0.91, 2 seeds)"


@pytest.mark.parametrize(
    ("expect", "values", "verdict"),
    [
        ({"at_least": 0.9}, [0.95, 0.91], True),
        ({"at_least": 0.9}, [0.95, 0.89], False),
        ({"at_most": 0.9}, [0.8, 0.89], True),
        ({"at_most": 0.9}, [0.8, 0.91], False),
        ({"low": 6.19, "high": 6.53}, [6.2, 6.5], True),
        ({"low": 6.19, "high": 6.53}, [6.2, 6.6], False),
        ({"low": 6.19, "high": 6.53, "tolerance": 0.1}, [6.1, 6.6], True),
        ({"value": 2}, [2], True),
        ({"value": 2, "tolerance": 0.1}, [1.85], False),
        ({"words": ["pond", "lake"]}, [["lake", "pond", "boat"]], True),
        ({"words": ["pond", "lake"]}, [["lake", "boat"]], False),
    ],
)
def test_what_agrees(expect, values, verdict):
    assert agrees({"published": "text", "expect": expect}, values) is verdict


def test_a_smaller_run_stands_beside_and_never_decides(board):
    record(board.root, SMALL, 0.9)
    beside = "beside = [{preset = 'small'}, {run = 'sample-*', scale = 'by name'}]"
    row = board(text=beside)
    assert row["verdict"] == "not yet run" and row["ours"] == "" and row["runs"] == []
    (name,) = runs_of("small", root=board.root)
    assert row["smaller"] == [("small", "0.9", [name]), ("by name", "0.9", [name])]
    assert board(published="not in our copy", text=beside)["verdict"] == "not in our copy"


def test_only_the_published_setting_counts(board):
    record(board.root, replace(FULL, epochs=1), 0.9)
    record(board.root, replace(FULL, holdout=0.1), 0.9)
    record(board.root, replace(FULL, theory_sequences="first_batch"), 0.9)
    assert board()["verdict"] == "not yet run"  # nor does the dry run's own record
    record(board.root, FULL, 0.9)
    assert board()["verdict"] == "agrees"


def test_a_run_that_goes_on_from_the_training_is_found_by_its_kind(board):
    record(board.root, FULL, 0.1, prefix="intervene-", more={"samples": 64})
    record(board.root, FULL, 0.2, prefix="intervene-", more={"samples": 64, "predict_only": True})
    assert board()["verdict"] == "not yet run"
    row = board(kind="intervene", why="x")
    assert row["ours"] == "0.1" and len(row["runs"]) == 1


def test_a_path_that_finds_nothing_is_refused(board):
    record(board.root, FULL, 0.9)
    with pytest.raises(ValueError, match="Entry a finds nothing at summary.lost in the run "):
        board(read="summary.lost")


@pytest.mark.parametrize(
    "change",
    [
        {"quantity": None},
        {"toleranec": 1},
        {"topic": "u"},
        {"computed": "nonesuch"},
        {"take": "median"},
        {"kind": "intervne"},
        {"cost": "statistic"},
    ],
    ids=["field", "typo", "topic", "computed", "take", "kind", "cost"],
)
def test_a_faulty_entry_is_refused(board, change):
    with pytest.raises(ValueError, match="Entry a: missing, unknown or repeated"):
        board(**change)


@pytest.mark.parametrize(
    "text",
    [
        'beside = [{ preset = "small", raed = "summary.loss" }]',
        'beside = [{ scale = "nothing to read" }]',
        "expect = { tolerence = 0.1 }",
        "expect = { low = 0.1 }",
    ],
)
def test_a_faulty_part_of_an_entry_is_refused(board, text):
    with pytest.raises(ValueError, match="Entry a: missing, unknown or repeated"):
        board(text=text)


def test_the_same_seed_twice_is_no_further_seed(board):
    record(board.root, FULL, 0.9)
    record(board.root, replace(FULL, dtype="float64"), 0.8)
    assert "2 runs" in board()["ours"]
    record(board.root, replace(FULL, seed=1), 0.85)
    assert "3 runs" in board()["ours"]


@pytest.mark.parametrize(
    ("text", "sentence"), [("", "lacks entry, topic, work"), ("[[", "is not valid TOML")]
)
def test_a_damaged_list_is_named(tmp_path, text, sentence):
    (tmp_path / "published.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"published\.toml {sentence}"):
        published(tmp_path / "published.toml")


def test_a_damaged_summary_is_no_finished_run(board):
    record(board.root, FULL, 0.9)
    (folder,) = board.root.glob("tiny*")
    (folder / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a whole record"):
        board()
    (folder / "run.json").unlink()  # a folder that says nothing is nothing
    assert board()["verdict"] == "not yet run"


def test_a_repeated_id_is_refused(board):
    board()
    text = board.path.read_text()
    board.path.write_text(text + text[text.index("[[entry]]") :])
    with pytest.raises(ValueError, match="Entry a: missing, unknown or repeated"):
        published(board.path)


# Reading and showing -----------------------------------------------------------------------------


def test_paths_into_a_record():
    def line(epoch, *cosines):
        names = ("output", "value", "query_key")
        rows = [
            {"parameter": name, "cosine": cosine}
            for name, cosine in zip(names, cosines, strict=True)
        ]
        return {"epoch": epoch, "comparisons": rows}

    record = {
        "metrics": [line(0.5, 0.1, None, None), line(1.0, 0.2, 0.3, None), line(2, 0.4, 0, 1)]
    }
    assert read(record, "metrics.comparisons.cosine") == [0.1, 0.2, 0.3, 0.4, 0, 1]
    assert read(record, "metrics[epoch=whole].comparisons[parameter=output].cosine") == [0.2, 0.4]
    assert read(record, "metrics[epoch=2].comparisons[parameter=value|query_key].cosine") == [0, 1]
    assert read(record, "metrics[epoch=2].comparisons[parameter=value][cosine=0].cosine") == [0]
    assert read(record, "summary.loss") == []


def test_a_cosine_that_is_not_one_is_not_shown_as_one():
    shown = [scoreboard._in_words([value]) for value in (1.0, 1 - 2e-7, 0.9999, 1.53e-7, 2)]
    assert shown == ["1", "1 − 2.0e-07", "0.9999", "1.53e-07", "2"]


def test_html_is_escaped_and_every_row_is_there(board):
    row = board(quantity="<b>bold</b>", note="A & B")
    page = as_html([row, row])
    assert "&lt;b&gt;bold" in page and "A &amp; B" in page and page.count("<tr id='a'>") == 2
    assert "not yet run: 3.5 hours" in page


def test_main_prints_the_board_and_refuses_in_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LEADING_TERMS_RESULTS", str(RECORDS))
    assert scoreboard.main([]) == 0
    assert "[paper-minimum-output]" in capsys.readouterr().out
    monkeypatch.setenv("LEADING_TERMS_RESULTS", str(tmp_path))
    assert scoreboard.main([]) == 2
    err = capsys.readouterr().err
    assert "has no run and no estimate" in err and err.count("\n") == 1
    assert scoreboard.main(["--bogus"]) == 2
    assert capsys.readouterr().err.startswith("Unrecognized arguments: --bogus;")


def test_the_page_shows_every_topic():
    page = (Path(REPOSITORY) / "book" / "scoreboard.ipynb").read_text(encoding="utf-8")
    for topic in published()["topic"]:
        assert f'show(\\"{topic["key"]}\\")' in page


def test_what_costs_most_and_least_is_named_in_words():
    rows = [("value", 0.8), ("output", 0.7), ("query_key", 1e-4), ("value", 0.75)]
    found = scoreboard.TAKE["most and least"]([{"parameter": n, "mean": m} for n, m in rows])
    assert found == ["value most, query-key least"]


def test_counts_come_from_the_expansion_and_not_from_the_formula(monkeypatch):
    assert scoreboard.COMPUTED["counts of query_key"]() == ["0, 0, 2, 11 for s = 1 to 4"]
    assert scoreboard.COMPUTED["weights after one update"]() == ["output η B", "others 0"]
    first = scoreboard._expansion()[0]
    for name, order, found in (
        ("output", 0, ["output", "others 0"]),
        ("output", 1, ["output", "others 0"]),
        ("output", 4, ["output", "others 0"]),
        ("value", 0, ["output η B", ""]),
        ("position", 4, ["output η B", ""]),
    ):
        terms = list(first[name])
        terms[order] = terms[order] + 1
        monkeypatch.setattr(scoreboard, "_expansion", lambda broken=first | {name: terms}: [broken])
        assert scoreboard.COMPUTED["weights after one update"]() == found


@pytest.mark.parametrize(("text", "what"), [('beside = "x"', "beside"), ('expect = "x"', "expect")])
def test_a_part_of_a_wrong_kind_is_refused(board, text, what):
    with pytest.raises(ValueError, match=rf"Entry a: of a wrong kind: \['{what}'\]"):
        board(text=text)
