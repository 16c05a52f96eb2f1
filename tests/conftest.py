"""What every test starts from: no network, one thread, nothing written into the repository."""

import os
from pathlib import Path

# Before torch is imported: one thread for each test process, as make test runs two of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path_factory):
    """Run records and caches go to a temporary folder; the TinyStories sample stays findable."""
    sample = os.environ.get("LEADING_TERMS_SAMPLE", ROOT / "data/cache/tinystories-sample.txt")
    if Path(sample).is_file():
        monkeypatch.setenv("LEADING_TERMS_SAMPLE", str(Path(sample).resolve()))
    folder = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("LEADING_TERMS_RESULTS", str(folder / "results"))
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(folder / "cache"))
    monkeypatch.delenv("LEADING_TERMS_CHECKS", raising=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """For --dist loadgroup: a file's tests share a process unless they name another group."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
