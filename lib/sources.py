"""Where texts come from: the embedded corpus, files, and data sets of the Hugging Face hub.

`check_source` turns what the user names into a source that exists, `identify` says what it is made
of, and `read_texts` yields its texts in order. What is done with them is lib.corpus's.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
SEPARATOR = "<|endoftext|>"


class HubSet(NamedTuple):
    """A data set of the hub; a large one is streamed, so that only its first texts are fetched."""

    repository: str
    config: str | None
    split: str
    revision: str
    large: bool


HUB = {
    "tinystories": HubSet(  # the commit of 12 August 2024
        "roneneldan/TinyStories", None, "train", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64", False
    ),
    "openwebtext": HubSet(  # a commit that has parquet files in place of a loading script
        "Skylion007/openwebtext", None, "train", "79d93d786212f7344586290adb811d4ae6a1762c", True
    ),
    "fineweb": HubSet(  # the commit tagged v1.4.0; a random sample of 10 billion tokens
        "HuggingFaceFW/fineweb",
        "sample-10BT",
        "train",
        "9bb295ddab0e05d785b879661af7260fed5140fc",
        True,
    ),
}
SAMPLE_SHA256 = "508023961c5195ab235e7377ad73e14a35f1a8d565df99228ea663773fc3e623"
SAMPLE_NAME = "TinyStories sample (5,511 stories)"
AVAILABLE = (
    f"available are 'storyworld', 'sample', {', '.join(map(repr, HUB))}, or the path of a .txt, "
    ".jsonl or .parquet file"
)


def sample_path() -> Path | None:
    """The TinyStories sample: LEADING_TERMS_SAMPLE, else data/cache/tinystories-sample.txt.

    None if that file does not exist. data/README.md says how to make it.
    """
    default = REPOSITORY / "data" / "cache" / "tinystories-sample.txt"
    path = Path(os.environ.get("LEADING_TERMS_SAMPLE") or default)
    return path if path.is_file() else None


def grows(source: str | Path) -> bool:
    """Whether texts are taken from the front of `source` until there are enough of them."""
    return source == "storyworld" or (source in HUB and HUB[source].large)


def check_source(source: str | Path, settings: dict) -> str | Path:
    """The name of a source, or the path of a file that exists, is not empty and can be read.

    Puts the pinned `revision` into `settings`. Raises ValueError or FileNotFoundError, one sentence.
    """
    revision = settings["revision"]
    if not isinstance(source, str | Path) or not str(source):
        raise ValueError(f"source={source!r}: {AVAILABLE}")
    if source in HUB:
        if revision is not None and (not isinstance(revision, str) or not revision):
            raise ValueError(f"revision={revision!r}: must be a commit of the data set, or None")
        if HUB[source].large and settings["max_sequences"] is None:
            raise ValueError(
                f"source={source!r} is too large to be read whole; give max_sequences, the number "
                "of sequences to take from its first texts"
            )
        settings["revision"] = revision or HUB[source].revision
        return source
    if revision is not None:
        raise ValueError(f"revision={revision!r}: only sources from the hub have a revision")
    if source == "storyworld":
        return source
    if source == "sample":
        if (source := sample_path()) is None:
            raise FileNotFoundError(
                "the TinyStories sample is not on this machine: set LEADING_TERMS_SAMPLE to the "
                "file, or make data/cache/tinystories-sample.txt as data/README.md says"
            )
    path = Path(source)
    if not path.exists():
        if isinstance(source, str) and not path.suffix and path.name == source:
            raise ValueError(f"source={source!r} is not available; {AVAILABLE}")
        raise FileNotFoundError(f"{path} does not exist; {AVAILABLE}")
    if path.suffix.lower() not in READ or not path.is_file():
        raise ValueError(f"{path} cannot be read as a corpus; {AVAILABLE}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; choose a file with texts in it")
    return path


def identify(source: str | Path, revision: str | None) -> tuple[list[str | None], str]:
    """What the texts depend on besides the settings, and the name to show."""
    if source == "storyworld":
        from lib import storyworld

        files = [REPOSITORY / "data" / "storyworld.toml", Path(storyworld.__file__)]
        return [
            "storyworld",
            *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files),
        ], "storyworld"
    if source in HUB:
        repository, config, split, *_ = HUB[source]
        name = ", ".join(filter(None, (repository, config, split, f"revision {revision[:7]}")))
        return ["hub", repository, config, split], name
    with open(source, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    name = SAMPLE_NAME if sha256 == SAMPLE_SHA256 else source.name
    return [source.suffix.lower(), sha256], name


def read_texts(source: str | Path, revision: str | None, dirt: dict) -> Iterator[str]:
    """The texts of a file or of a hub set at `revision`, in order; counts what is odd in `dirt`.

    Raises ValueError for a file that is not what its name says, ConnectionError where the hub
    cannot be reached.
    """
    if source in HUB:
        return _read_hub(source, revision)
    return READ[source.suffix.lower()](source, dirt)


def _decode(line: bytes, offset: int, name: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: the byte at offset {offset + error.start} cannot be decoded; "
            "convert the file to UTF-8"
        ) from None


def _read_lines(path: Path, dirt: dict) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of a file, without the byte-order mark."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if offset == 0 and line.startswith(b"\xef\xbb\xbf"):
                dirt["byte_order_mark"] = 1
                offset, line = 3, line[3:]
            yield offset, line
            offset += len(line)


def _read_txt(path: Path, dirt: dict) -> Iterator[str]:
    """Texts between separators; blank space after the last separator is no text."""
    separators = 0
    parts: list[str] = []
    for offset, line in _read_lines(path, dirt):
        *ended, rest = _decode(line, offset, path.name).split(SEPARATOR)
        for part in ended:
            yield "".join([*parts, part])
            parts = []
            separators += 1
        parts.append(rest)
    last = "".join(parts)
    if separators == 0:
        dirt["no_separators"] = 1
    if separators == 0 or last.strip():
        yield last


def _read_jsonl(path: Path, dirt: dict) -> Iterator[str]:
    for number, (offset, line) in enumerate(_read_lines(path, dirt), start=1):
        line = _decode(line, offset, path.name)
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            broken = not isinstance(text, str | None)
        except (ValueError, KeyError, TypeError):
            broken = True
        if broken:
            raise ValueError(
                f'line {number} of {path.name} is not a JSON object with a string "text"; '
                "mend or remove that line"
            )
        yield text or ""


def _read_parquet(path: Path, dirt: dict) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path.name} is not a parquet file: {error}") from None
    with file:
        columns = file.schema_arrow
        kind = columns.field("text").type if "text" in columns.names else None
        if kind is None or not (
            pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        ):
            raise ValueError(
                f'{path.name} has no column "text" of strings (its columns: '
                f"{', '.join(columns.names)}); rename the column that holds the texts"
            )
        for batch in file.iter_batches(columns=["text"], batch_size=4096):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _read_hub(name: str, revision: str) -> Iterator[str]:
    import datasets

    repository, config, split, _, large = HUB[name]
    try:
        dataset = datasets.load_dataset(
            repository, config, split=split, revision=revision, streaming=large
        )
        for batch in dataset.iter(batch_size=1024):
            yield from (text or "" for text in batch["text"])
    except Exception as error:  # the client of the hub raises errors of many kinds
        reason = str(error).split("\n")[0]
        raise ConnectionError(
            f"{repository} at revision {revision} cannot be fetched from the Hugging Face hub "
            f"({reason}); check the network and the revision, or use the TinyStories sample "
            "(data/README.md says how to get it) or source='storyworld' instead"
        ) from error


READ = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
