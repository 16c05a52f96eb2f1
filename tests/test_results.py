"""lib.results: files that are whole or absent, one name per setting, records, notebook parameters."""

import errno
import itertools
import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from lib import results
from lib.results import (
    append_jsonl,
    cache_dir,
    load_run,
    notebook_parameters,
    read_json,
    read_jsonl,
    read_record,
    results_root,
    run_name,
    run_record,
    write_json,
)

SETTINGS = {
    "corpus": "storyworld",
    "tokenizer": "words",
    "vocab_size": 600,
    "seq_len": 48,
    "out_of_vocabulary": "unk",
    "max_sequences": None,
    "holdout": 0.0,
    "num_layers": 3,
    "learning_rate": 0.005,
    "batch_size": 256,
    "micro_batch_size": "auto",
    "epochs": None,
    "steps": 40,
    "seed": 0,
    "init_std": 0.0,
    "device": "auto",
    "dtype": "float32",
    "theory_sequences": "all",
    "deterministic": False,
}
NAME = "storyworld-words-v600-t48-unk-l3-lr0.005-b256-steps40-seed0"


def fails_with(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def one_sentence(error) -> bool:
    text = str(error.value)
    return text.endswith(".") and "\n" not in text and ". " not in text


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch, call, code):
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})
    old = path.read_bytes()
    monkeypatch.setattr(os, call, fails_with(code))
    with pytest.raises(OSError) as error:
        write_json(path, {"new": 2})
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["summary.json"]
    if code != errno.EACCES:
        assert one_sentence(error) and "disk is full" in str(error.value)


def test_value_that_json_lacks_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, [1])
    with pytest.raises(TypeError):
        write_json(path, {"no": object()})
    assert read_json(path) == [1] and os.listdir(tmp_path) == ["summary.json"]


def test_values_become_plain_json(tmp_path):
    path = tmp_path / "new folder" / "a.json"
    write_json(
        path,
        {
            "undefined": [float("nan"), float("inf"), -float("inf")],
            "torch": [torch.tensor(2), torch.tensor(0.5), torch.tensor([1.0, float("nan")])],
            "numpy": (numpy.float32(0.25), numpy.int64(3), numpy.bool_(True), numpy.float64("nan")),
            "path": Path("a/b"),
            7: "sätze",
        },
    )
    assert read_json(path) == {
        "undefined": [None, None, None],
        "torch": [2, 0.5, [1.0, None]],
        "numpy": [0.25, 3, True, None],
        "path": "a/b",
        "7": "sätze",
    }


def test_json_that_is_broken_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": ')
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON .*; delete or repair it\.$"):
        read_json(path)


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("null", "an object"),
        ("[]", "an object"),
        ('{"b": true}', "a, c"),
        ('{"a": "1", "b": true, "c": null}', "a"),
        ('{"a": 1, "b": false, "c": []}', "b, c"),
    ],
)
def test_a_record_of_another_shape_is_named(tmp_path, text, lacks):
    path = tmp_path / "a.json"
    path.write_text(text)
    sentence = rf"a\.json is not a whole record \(it lacks {lacks}\); delete or repair it\.$"
    with pytest.raises(ValueError, match=sentence):
        read_record(path, a=int, b=True, c=int | None)
    path.write_text('{"a": 1, "b": true, "c": null}')
    assert read_record(path, a=int, b=True, c=int | None) == {"a": 1, "b": True, "c": None}


def test_torn_last_line_is_dropped_and_repaired(tmp_path):
    path = tmp_path / "runs" / "metrics.jsonl"
    append_jsonl(path, {"step": 1, "loss": float("nan")})
    append_jsonl(path, {"step": 2})
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    assert read_jsonl(path) == [{"step": 1, "loss": None}, {"step": 2}]
    append_jsonl(path, {"step": torch.tensor(3)})
    assert read_jsonl(path) == [{"step": 1, "loss": None}, {"step": 2}, {"step": 3}]
    assert path.read_bytes().endswith(b'{"step": 2}\n{"step": 3}\n')


@pytest.mark.parametrize("broken", [b'{"step": ', b"", b"\xff"])
def test_broken_middle_line_is_an_error(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl has a line that is not JSON"):
        read_jsonl(path)
    path.write_bytes(b'{"step": 1}\nnull\n')
    sentence = r"metrics\.jsonl is damaged in line 2 \(it lacks an object\)"
    with pytest.raises(ValueError, match=sentence):
        read_jsonl(path)
    path.write_bytes(b'{"step": 1}\n{"step": "2"}\n')
    with pytest.raises(ValueError, match=r"damaged in line 2 \(it lacks step\)"):
        read_jsonl(path, step=int)


def test_append_on_a_full_disk_keeps_the_earlier_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    old = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_with(errno.ENOSPC))
        with pytest.raises(OSError, match="disk is full") as error:
            append_jsonl(path, {"step": 2})
    assert one_sentence(error) and path.read_bytes() == old


def test_line_cut_short_by_the_system_leaves_no_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) + 7, limits[1]))
    try:
        with pytest.raises(OSError):
            append_jsonl(path, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old


def test_run_name_is_readable():
    assert run_name(SETTINGS) == NAME
    usual = {key: SETTINGS[key] for key in SETTINGS.keys() - results.USUAL_VALUES.keys()}
    assert run_name(usual | {"steps": 40}) == NAME  # a missing setting has its usual value
    assert run_name(dict(reversed(SETTINGS.items()))) == NAME
    path = run_name(SETTINGS | {"corpus": "/data/My Text.txt"})
    assert path.startswith("my_text~") and path.endswith(NAME.removeprefix("storyworld"))


def test_run_name_tells_settings_apart():
    odd = [
        0,
        1,
        "1",
        True,
        1.0,
        -1,
        0.1,
        "0.1",
        1e-05,
        "1e-05",
        None,
        "None",
        "none",
        "null",
        "auto",
    ]
    odd += [
        "",
        "a-b",
        "a=b",
        "a/b",
        "../a",
        "A",
        "a%2Db",
        "ä",
        "words",
        "unk",
        "x",
        "rx",
        "lx",
        [1],
    ]
    odd += [float("nan"), "NaN", float("inf"), {"a": 1}]
    paths = ["/a/text.txt", "/b/text.txt", "text.txt", Path("text.txt"), "text.md", "Text.txt", "~"]
    variants = [SETTINGS]
    for key, value in itertools.product([*SETTINGS, "new", "new-key", "new=1"], odd + paths):
        if not isinstance(value, Path) or key == "corpus":
            variants.append(SETTINGS | {key: value})
    variants += [
        {"corpus": "x"},
        {"tokenizer": "x"},
        {"out_of_vocabulary": "x"},
        {"tokenizer": "vx"},
        {"vocab_size": "x"},
        {"num_layers": "rx"},
        {"learning_rate": "x"},
        {"corpus": "x", "tokenizer": "y"},
        {"corpus": "x", "out_of_vocabulary": "y"},
        {"tokenizer": "x", "out_of_vocabulary": "y"},
        {"corpus": "x", "y": 1},
        {"x-y": 1},
    ]

    def meaning(parameters):
        missing = results.USUAL_VALUES | {"corpus": None}
        return repr(sorted((missing | parameters).items()))

    by_meaning = {meaning(variant): run_name(variant) for variant in variants}
    names = list(by_meaning.values())
    assert len(names) > 700 and len(set(names)) == len(names)
    assert all("/" not in name and name not in (".", "..") for name in names)


def test_folders_by_argument_then_environment_then_default(tmp_path, monkeypatch, root):
    monkeypatch.setenv("LEADING_TERMS_RESULTS", str(tmp_path / "environment"))
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / "cache"))
    assert results_root(tmp_path / "argument") == tmp_path / "argument"
    assert results_root() == tmp_path / "environment"
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("LEADING_TERMS_RESULTS")
    monkeypatch.delenv("LEADING_TERMS_CACHE")
    assert results_root() == root / "data" / "results"
    assert cache_dir() == root / "data" / "cache"


def test_run_record_says_what_was_run_on_what(tmp_path):
    corpus = SimpleNamespace(source_name="text", fingerprint="abc", tokens=torch.zeros(5, 4))
    record = run_record(SETTINGS, corpus, seconds=1.5, peak_memory=2.5)
    assert record.keys() == {
        *("parameters", "corpus", "dtype", "versions", "device", "device_name", "threads"),
        *("tf32", "commit", "uncommitted_changes", "seconds", "peak_memory_mib"),
    }
    assert record["parameters"] == SETTINGS and record["dtype"] == "float32"
    assert record["corpus"] == {"name": "text", "fingerprint": "abc", "sequences": 5}
    assert record["versions"].keys() == {"python", "torch", "numpy"}
    assert record["versions"]["torch"] == torch.__version__
    assert (record["device"], record["seconds"], record["peak_memory_mib"]) == ("cpu", 1.5, 2.5)
    write_json(tmp_path / "run.json", record)
    assert read_json(tmp_path / "run.json") == json.loads(json.dumps(record))


def test_load_run(tmp_path):
    write_json(tmp_path / "a" / "run.json", {"seconds": 1})
    assert load_run("a", tmp_path) == {"run": {"seconds": 1}, "summary": None, "metrics": []}
    write_json(tmp_path / "a" / "summary.json", {"loss": 2})
    append_jsonl(tmp_path / "a" / "metrics.jsonl", {"step": 1})
    run = {"run": {"seconds": 1}, "summary": {"loss": 2}, "metrics": [{"step": 1}]}
    assert load_run("a", tmp_path) == run


def test_load_run_that_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no run 'absent'") as error:
        load_run("absent", tmp_path)
    assert one_sentence(error) and str(tmp_path) in str(error.value)


def test_notebook_parameters_turn_texts_to_none():
    namespace = {"a": "None", "b": " null", "c": "NONE", "d": "nonempty", "e": 0, "other": 1}
    assert notebook_parameters(namespace, "abcde") == {
        **{"a": None, "b": None, "c": None, "d": "nonempty", "e": 0}
    }


def test_notebook_parameters_refuse_unknown_names():
    cells = ["", "unrelated = 1", "# Parameters\nsteps = 3\n"]
    namespace = {"In": cells, "steps": 3, "seed": 0, "setps": 4}
    assert notebook_parameters(namespace, ("steps", "seed")) == {"steps": 3, "seed": 0}
    cells[-1] += "setps = 4\n"
    with pytest.raises(
        ValueError, match="Unknown parameter setps; the names are steps, seed"
    ) as error:
        notebook_parameters(namespace, ("steps", "seed"))
    assert one_sentence(error)


def test_a_long_name_is_cut_and_still_differs():
    lists = {"corpus": "sample", "vocab_size": 300, "rates": " ".join(map(str, range(100)))}
    names = [run_name(lists | {"rates": lists["rates"] + end}) for end in (" 7", " 8")]
    assert all(len(name) == 160 and name.startswith("sample-v300-rates=") for name in names)
    assert names[0] != names[1]


def test_a_measurement_is_made_once_and_never_taken_for_another(tmp_path):
    corpus, calls = SimpleNamespace(source_name="a", fingerprint="f", tokens=[1, 2]), []

    def measure():
        calls.append(1)
        return {"finished": True, "answer": len(calls)}

    def once(settings, corpus=corpus):
        return results.measured_once(tmp_path / "run", settings, corpus, "cpu", measure)

    assert once({"seed": 0}) == once({"seed": 0}) == {"finished": True, "answer": 1}
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["parameters"] == {"seed": 0} and record["tf32"] is False
    other = SimpleNamespace(source_name="a", fingerprint="g", tokens=[1, 2])
    for refused in ({"seed": 1}, corpus), ({"seed": 0}, other):
        with pytest.raises(ValueError, match="run holds another run; move it away"):
            once(*refused)
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a whole record"):
        once({"seed": 0})
    assert len(calls) == 1
