"""Signals while a body runs that is to be run to its end."""

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


@pytest.fixture
def several():
    """Handlers of three signals: two raise, and the one between them notes."""
    calls: list[int] = []

    def leave(*_: object) -> None:
        raise SystemExit(3)

    def late(*_: object) -> None:
        raise TimeoutError

    new = {signal.SIGTERM: leave, signal.SIGUSR1: lambda number, _: calls.append(number), signal.SIGALRM: late}
    before = {number: signal.signal(number, handler) for number, handler in new.items()}
    yield calls
    for number, handler in new.items():
        assert signal.getsignal(number) is handler
        signal.signal(number, before[number])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_every_signal_with_a_handler_is_held(several, number):
    done = []
    with pytest.raises((SystemExit, TimeoutError)), interrupts_held():
        with interrupts_held():
            signal.raise_signal(number)
        signal.raise_signal(number)
        done.append("body")
    assert done == ["body"]


def test_of_several_signals_all_handlers_are_called_in_the_order_in_which_they_came(several):
    with pytest.raises(TimeoutError) as error, interrupts_held():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
        assert several == []
    assert isinstance(error.value.__context__, SystemExit) and several == [signal.SIGUSR1]


def test_a_handler_gets_the_frame_in_which_its_signal_came(several):
    """As one that prints where a program is."""
    frames = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: frames.append(frame and frame.f_code.co_name))
    with interrupts_held():
        signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)
    assert frames == ["test_a_handler_gets_the_frame_in_which_its_signal_came"]


def test_a_second_alarm_of_a_timer_is_held_as_the_first(several, monkeypatch):
    """Nobody presses a key again for it: only a second Ctrl-C says that the body hangs."""
    monkeypatch.setattr(_interrupts, "PATIENCE", 0.0)
    done = []
    with pytest.raises(TimeoutError), interrupts_held():
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        done.append("body")
    assert done == ["body"]


def test_a_signal_between_the_handlers_leaves_none_behind(several, monkeypatch):
    """It comes while some signals are held already, or not any more."""
    for moment in range(1, 12):
        seen = 0

        def set_and_come(number, handler, moment=moment):
            nonlocal seen
            done, seen = signal.signal(number, handler), seen + 1
            if seen == moment:
                signal.raise_signal(signal.SIGTERM)
            return done

        handlers = [signal.getsignal(n) for n in signal.valid_signals()]
        monkeypatch.setattr(_interrupts, "_set", set_and_come)
        try:
            with interrupts_held():
                pass
        except SystemExit:
            assert seen >= moment
        else:
            assert seen < moment
        assert [signal.getsignal(n) for n in signal.valid_signals()] == handlers
