"""lib.threads: results in order, one core a thread, and torch's threads left as they were."""

import threading

import pytest
import torch

from lib.threads import in_threads


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def where(item):
    return item, threading.current_thread() is threading.main_thread(), torch.get_num_threads()


def test_in_order_by_threads_of_one_core(three_threads):
    found = list(in_threads(where, range(20), "cpu"))
    assert found == [(item, False, 1) for item in range(20)]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_off_the_cpu_in_the_calling_thread(three_threads, device):
    assert list(in_threads(where, range(3), device)) == [(item, True, 3) for item in range(3)]


def test_an_error_arrives_and_the_threads_are_as_before(three_threads):
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda item: 1 / item, [2, 1, 0, 1], "cpu"))
    assert torch.get_num_threads() == 3
