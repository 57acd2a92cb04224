"""SIGINT while a body runs that is to be run to its end."""

from __future__ import annotations

import signal
import threading

import pytest

from zerofn import _interrupts  # inside: how interrupts are held, of which nothing is public
from zerofn._interrupts import interrupts_held  # inside: how interrupts are held, of which nothing is public


def come() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def told():
    """A handler that notes and does not raise, as that of an event loop."""
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    yield calls
    signal.signal(signal.SIGINT, before)


def test_it_comes_behind_the_body():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        come()
        done.append("body")
    assert done == ["body"]
    with pytest.raises(KeyboardInterrupt):
        come()


def test_inside_of_another_one_it_comes_behind_the_outer():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            come()
        done.append("behind the inner one")
    assert done == ["behind the inner one"]


def test_a_handler_of_the_users_is_called_once_and_stays(told):
    mine = signal.getsignal(signal.SIGINT)
    with interrupts_held():
        come()
        come()
        assert told == []
    assert told == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine


def test_a_body_that_raises_is_the_context():
    with pytest.raises(KeyboardInterrupt) as error, interrupts_held():
        come()
        raise ZeroDivisionError
    assert isinstance(error.value.__context__, ZeroDivisionError)


def test_a_second_one_reaches_a_body_that_hangs(monkeypatch):
    monkeypatch.setattr(_interrupts, "PATIENCE", 0.0)
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        come()
        done.append("held")
        come()
        done.append("not reached")
    assert done == ["held"] and signal.getsignal(signal.SIGINT) is before


def test_a_second_one_at_once_is_the_same_keystroke():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        come()
        come()
        done.append("body")
    assert done == ["body"]


def test_a_handler_that_the_body_sets_stays(told):
    def other(*_: object) -> None:
        told.append(0)

    with interrupts_held():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_the_system_does_with_it_is_left_alone(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing():
    found = []

    def run() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
