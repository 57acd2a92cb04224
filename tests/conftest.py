"""Settings of the whole suite: threads, time limits, examples of hypothesis that are the same in every run, NaN in
memory that nobody has written, and a SIGINT that raises."""

import atexit
import gc
import os
import signal
from collections import Counter

import pytest
import pytest_timeout
import torch
from hypothesis import HealthCheck, settings
from ranks_begin import set_in_ranks
from refusals import check_form_of_all
from seeds import seed_what_is_there
from time_limits import limit
from uninitialized_memory import NO_OTHER_KERNEL, fill

from zerofn.kernels import native as _native  # inside: how kernels are built, loaded and kept
from zerofn.kernels import print_c as _print_c  # inside: as above
from zerofn.ranks import fork_server as _fork_server  # inside: what ranks have before they begin

# Modules are imported and tests collected without it, by a quarter faster; it goes on where tests begin.
gc.disable()

# One by default, since tests run in several processes. They hold on more: sums over threads are other sums.
torch.set_num_threads(int(os.environ.get("ZEROFN_TEST_THREADS", "1")))

fill()
seed_what_is_there()
set_in_ranks()
check_form_of_all()
# Each rank of each launch imports the module of its test, and what that imports. Hypothesis takes 0.2 s, the other
# three packages 0.1 s, and what most tests share 0.02 s where no bytecode is kept. A rank that compiles something
# imports the rest: 1 s.
_fork_server.server.modules = (
    *("pytest", "hypothesis", "zerofn.testing", "torch.distributed.checkpoint.state_dict"),
    *("one_launch", "pairs", "rank_programs", "ranks_begin", "refusals", "small_parts", "stages", "time_limits"),
    "torch._dynamo.backends.debugging",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch.partitioners",
    "torch._inductor.compile_fx",
    "torch._inductor.pattern_matcher",
    "torch.export._trace",
)

# A shell that starts the tests in the background has them ignore it, and tests of interrupts would wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", f"ignore:{NO_OTHER_KERNEL}")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist keeps the order of `in_which_files_end_together`


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no examples in docstrings: to look for them takes each process a second."""
    return [found for found in (yield) if type(found) is pytest.Module]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        in_which_files_end_together(items)


def in_which_files_end_together(items):
    """Files with few tests come first. Those tests start ranks or compile, and one that is the last of all would run
    half a minute alone; files of many tests fill up what is left, but for those that are marked as long."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, tests[item.path]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.freeze()  # a collection would go through all that is imported and collected by now: a second for each
    atexit.register(gc.unfreeze)
    # Of the memory of tests hardly any is in cycles: 14 times as seldom as by default.
    gc.set_threshold(10_000, 10, 20)
    gc.enable()


def pytest_sessionfinish():
    gc.enable()  # where tests could not be collected


# No deadline: the first call of an operator builds its kernels, and machines are shared.
settings.register_profile(
    "zerofn", deadline=None, max_examples=15, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("zerofn")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    """Limits of whole tests are seconds on a quiet machine, as those inside of tests are."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=limit(settings.timeout)))


@pytest.fixture
def fresh_kernels(monkeypatch, tmp_path):
    """No kernel loaded, nothing on disk, and nothing warned about; a directory for compilers and caches."""
    caches = (_native._choose, _native._build, _native._attempt, _native.warn, _print_c.formula_kernel)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CC", "ZEROFN_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for cache in caches:
        cache.cache_clear()
