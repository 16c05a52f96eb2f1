"""Run records on disk: small JSON files that are whole or absent, and names that hold every setting.

A run is a folder `<results root>/<run name>/` with `run.json` (what was run, with which versions, on
what), `metrics.jsonl` (one line per snapshot, flushed as it goes) and `summary.json` (what chapters
read). Nothing here is ever unpickled, and an interrupted write leaves the earlier file as it was.
"""

import argparse
import ast
import errno
import hashlib
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from urllib.parse import quote

import numpy
import torch

REPOSITORY = Path(__file__).resolve().parents[1]

# Order and abbreviation of the settings in a run name; the others follow as key=value.
SHORT_NAMES = {
    "tokenizer": "",
    "vocab_size": "v",
    "seq_len": "t",
    "out_of_vocabulary": "",
    "num_layers": "l",
    "learning_rate": "lr",
    "batch_size": "b",
    "epochs": "epochs",
    "steps": "steps",
    "seed": "seed",
}
# A setting with this very value is left out of the name; a missing setting means the same.
USUAL_VALUES = {
    "max_sequences": None,
    "holdout": 0.0,
    "micro_batch_size": "auto",
    "epochs": None,
    "steps": None,
    "init_std": 0.0,
    "device": "auto",
    "dtype": "float32",
    "theory_sequences": "all",
    "deterministic": False,
}
LONGEST_NAME = 160  # characters of a run name; file systems allow 255 with what stands before it


def results_root(root=None) -> Path:
    """Folder of the run records: `root`, else LEADING_TERMS_RESULTS, else data/results."""
    return Path(root or os.environ.get("LEADING_TERMS_RESULTS") or REPOSITORY / "data" / "results")


def cache_dir() -> Path:
    """Folder of what can be made again: LEADING_TERMS_CACHE, else data/cache."""
    return Path(os.environ.get("LEADING_TERMS_CACHE") or REPOSITORY / "data" / "cache")


@contextmanager
def _clear_disk_errors(path: Path):
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            f"The disk is full: {path.name} was not written and what stood there before is "
            f"unchanged; free some space in {path.parent} and start the same run again."
        ) from error


@contextmanager
def atomic_file(path):
    """Yield a temporary path in the folder of `path`; it becomes `path` when the block ends well.

    Whatever happens, `path` holds either its earlier content or all of the new one.
    Raises OSError (one sentence) if the disk is full.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def plain(value):
    """`value` as JSON knows it: NumPy and torch become numbers or lists, NaN and infinity None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_json(path, value) -> None:
    """Write `value` to `path` in one piece. Raises OSError (one sentence) if the disk is full."""
    text = json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path):
    """The content of a JSON file. Raises ValueError (one sentence) if it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete or repair it.") from error


def _lacking(found, needed: dict) -> list[str]:
    """What a record lacks of `needed`, {key: its type, or the very value that it must have}."""
    if not isinstance(found, dict):
        return ["an object"]
    return [
        key
        for key, kind in needed.items()
        if key not in found
        or not (
            isinstance(found[key], kind)
            if isinstance(kind, type | UnionType)
            else found[key] == kind
        )
    ]


def read_record(path, **needed) -> dict:
    """The content of a JSON file that is an object with what is `needed`: `seconds=float`, `finished=True`.

    Raises ValueError (one sentence) if it is anything else.
    """
    found = read_json(path)
    if lacking := _lacking(found, needed):
        raise ValueError(
            f"{path} is not a whole record (it lacks {', '.join(lacking)}); delete or repair it."
        )
    return found


def append_jsonl(path, value) -> None:
    """Append one line to `path` and flush it to the disk; a torn last line is removed first."""
    path = Path(path)
    line = json.dumps(plain(value), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    with _clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        end = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        try:
            with open(path, "ab") as file:
                file.truncate(end)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            # After the file is closed, since closing it writes what was still buffered.
            if path.exists():
                os.truncate(path, end)
            raise


def read_jsonl(path, **needed) -> list[dict]:
    """The lines of `path`; a last line without its line end was torn by a kill and is dropped.

    Raises ValueError (one sentence) for a line elsewhere that is not a JSON object with what is `needed`
    (see read_record).
    """
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    try:
        found = [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(
            f"{path} has a line that is not JSON ({error}); delete or repair it."
        ) from error
    for number, line in enumerate(found, start=1):
        if lacking := _lacking(line, needed):
            raise ValueError(
                f"{path} is damaged in line {number} (it lacks {', '.join(lacking)}); delete or repair it."
            )
    return found


def _same(value, usual) -> bool:
    return type(value) is type(usual) and value == usual


def _short(value, prefix: str) -> bool:
    """Whether `value` can stand in a name: after a prefix a number, else a lower-case word."""
    if not prefix:
        return isinstance(value, str) and re.fullmatch(r"[a-z]+", value) is not None
    return type(value) is int or (type(value) is float and math.isfinite(value))


def run_name(parameters: dict) -> str:
    """Folder name of a run: readable, and different for any two different settings.

    `storyworld-words-v600-t48-drop-l3-lr0.005-b256-steps40-seed0`; what is not in SHORT_NAMES follows
    as `key=value` (JSON, percent-encoded) unless it has its usual value. A corpus that is a path
    is named by its file's stem and eight hexadecimal digits of the hash of the path as given. A name
    too long for a file system ends in `~` and sixteen digits of the hash of all of it.
    """
    parameters = dict(parameters)
    corpus = parameters.pop("corpus", None)
    parts = []
    # Words have no prefix: without all three of them their place would not tell which is which.
    words = corpus is not None and {"tokenizer", "out_of_vocabulary"} <= parameters.keys()
    if _short(corpus, ""):
        parts.append(corpus)
    elif corpus is not None:
        digest = hashlib.sha256(repr(corpus).encode()).hexdigest()[:8]
        stem = re.sub(r"[^a-z0-9]+", "_", Path(str(corpus)).stem.lower()).strip("_")[:32]
        parts.append(f"{stem}~{digest}")
    for key, prefix in SHORT_NAMES.items():
        if key in parameters and (prefix or words) and _short(parameters[key], prefix):
            parts.append(f"{prefix}{parameters.pop(key)}")
    for key, value in sorted(parameters.items()):
        if not (key in USUAL_VALUES and _same(value, USUAL_VALUES[key])):
            encoded = [
                quote(part, safe="").replace("-", "%2D") for part in (key, json.dumps(value))
            ]
            parts.append("=".join(encoded))
    name = "-".join(parts)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{name[: LONGEST_NAME - 17]}~{digest}"


def _git(*arguments) -> str | None:
    try:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device) -> str:
    """A device in words: the GPU's name, or the number of CPU cores and their model."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        found = re.search(r"model name\s*: (.+)", cpuinfo.read_text())
        model = found.group(1).strip() if found else model
    return f"{os.cpu_count()} CPU cores, {model}"


def peak_memory_mib(device) -> float:
    """Largest memory so far in MiB: allocated on a GPU, else resident in this process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss would hold what a large parent had, too
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def environment(device="cpu") -> dict:
    """Versions, device in words, threads, TF32 (False: off) and the commit the code stands at.

    `commit` and `uncommitted_changes` are None outside a git checkout.
    """
    # Only a checkout of this repository counts, not one that happens to lie around it.
    ours = _git("rev-parse", "--show-toplevel") == str(REPOSITORY)
    commit = _git("rev-parse", "HEAD") if ours else None
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "device": torch.device(device).type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32,
        "commit": commit,
        "uncommitted_changes": bool(_git("status", "--porcelain")) if commit else None,
    }


def run_record(parameters: dict, corpus, *, device="cpu", seconds=None, peak_memory=None) -> dict:
    """What `run.json` holds: settings, corpus, environment, seconds and peak memory in MiB.

    `corpus` is a lib.corpus.Corpus, of which the name, fingerprint and size are recorded.
    """
    return {
        "parameters": dict(parameters),
        "corpus": {
            "name": corpus.source_name,
            "fingerprint": corpus.fingerprint,
            "sequences": len(corpus.tokens),
        },
        "dtype": parameters.get("dtype"),
        **environment(device),
        "seconds": seconds,
        "peak_memory_mib": peak_memory,
    }


def measured_once(run_dir: Path, settings: dict, corpus, device, measure) -> dict:
    """The summary of a run that only measures: `measure()`, written with its record into `run_dir`, or read back.

    `settings`, `corpus` and `device` go into the record. Raises ValueError (one sentence) if the folder holds
    a run of other settings or of another corpus, or a damaged one.
    """
    record_file, summary_file = run_dir / "run.json", run_dir / "summary.json"
    if record_file.exists() and summary_file.exists():
        found = read_record(record_file, parameters=dict, corpus=dict)
        if (found["parameters"], found["corpus"].get("fingerprint")) != (
            settings,
            corpus.fingerprint,
        ):
            raise ValueError(
                f"{run_dir.name} holds another run; move it away or choose another results_root."
            )
        return read_record(summary_file, finished=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    began = time.monotonic()
    summary = measure()
    seconds, peak = time.monotonic() - began, peak_memory_mib(device)
    record = run_record(settings, corpus, device=device, seconds=seconds, peak_memory=peak)
    write_json(record_file, record | {"dtype": "float64"})
    write_json(summary_file, summary)
    return read_record(summary_file, finished=True)


def load_run(name: str, root=None) -> dict:
    """The record of a run: keys `run`, `summary` (None while unfinished) and `metrics` (a list).

    Raises FileNotFoundError if there is no such run, ValueError if a file of it is damaged (one sentence).
    """
    folder = results_root(root) / name
    if not (folder / "run.json").exists():
        raise FileNotFoundError(
            f"There is no run '{name}' in {folder.parent}; run it first or correct the name."
        )
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    return {
        "run": read_record(folder / "run.json"),
        "summary": read_record(summary) if summary.exists() else None,
        "metrics": read_jsonl(metrics) if metrics.exists() else [],
    }


class OneSentenceParser(argparse.ArgumentParser):
    """A parser that raises ValueError with one sentence where argparse prints its usage and exits."""

    def error(self, message):
        raise ValueError(f"{message[:1].upper()}{message[1:]}; --help shows what there is.")


def notebook_parameters(namespace: dict, names) -> dict:
    """The parameters of a papermill notebook, from its `globals()`, by the `names` it declares.

    papermill runs on when a name is unknown and turns only capitalised None, True and False into
    values. Here an unknown name in the cell it injected raises ValueError, and the texts none and
    null in any case become None; types and ranges are for the caller to check.
    """
    for source in namespace.get("In", []):
        if source.startswith("# Parameters\n"):
            assigned = (
                node.targets for node in ast.parse(source).body if isinstance(node, ast.Assign)
            )
            given = {target.id for targets in assigned for target in targets}
            if unknown := sorted(given - set(names)):
                raise ValueError(
                    f"Unknown parameter {', '.join(unknown)}; the names are {', '.join(names)}."
                )
    values = {name: namespace[name] for name in names}
    empty = ("none", "null")
    return {
        name: None if isinstance(value, str) and value.strip().lower() in empty else value
        for name, value in values.items()
    }
