"""What holds for every test: nothing is left running after it, and none finds the log quieter than it was."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Limits on the time of an example would measure the load of the machine; pytest-timeout bounds a test as a whole.
slow = [HealthCheck.too_slow]
settings.register_profile("manyhands", deadline=None, suppress_health_check=slow, print_blob=True)
settings.load_profile("manyhands")

# Before torch is imported. Its threads would only wait for each other: tensors are small, and xdist uses the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background job of a shell starts with SIGINT ignored, and so do its children; the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_GRACE_S = 10.0  # for what was already told to end


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave long tests and sweeps out, unless somebody picks tests by -m, by -k or by name."""
    if config.option.markexpr or config.option.keyword or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if _is_for_other_targets(item)]
    items[:] = [item for item in items if not _is_for_other_targets(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection() -> None:
    """Nothing that collection makes is garbage: to look for some takes a quarter of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    _freeze_libraries()
    gc.enable()


def pytest_runtest_logfinish() -> None:
    """Many libraries are imported when a test first needs them: the first optimizer imports torch._dynamo."""
    if len(sys.modules) > _num_frozen_modules + 100:
        _freeze_libraries()


_num_frozen_modules = 0


def _freeze_libraries() -> None:
    """Keep the garbage collector from walking the imported libraries, which takes it 0.1 s each time."""
    global _num_frozen_modules
    gc.collect()
    gc.freeze()
    _num_frozen_modules = len(sys.modules)


def _is_for_other_targets(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("long", "sweep"))


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves an asyncio task, a thread of ours or a child process behind, and end the processes."""
    threads_before = set(threading.enumerate())
    children_before = set(_children())
    if request.node.get_closest_marker("asyncio") is not None:
        request.getfixturevalue("no_task_left")
    yield
    left = [f"thread {thread.name}" for thread in _our_threads(threads_before)]
    left += [f"process {child.pid}: {line}" for child, line in _end_children(children_before)]
    if left:
        pytest.fail("left running after the test: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def the_log_as_before() -> Iterator[None]:
    """Many tests silence the warnings of what they do on purpose, or run commands that set up the log."""
    loggers = [logging.getLogger(), logging.getLogger("manyhands")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture(autouse=True)
def peers_as_they_are() -> Iterator[None]:
    """Tests have peers do in rounds what these would not do by themselves; the next test has the same peer ids."""
    yield
    if (phases := sys.modules.get("tests.phases")) is not None:  # to import it here would import torch for all tests
        phases.forget()


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    """Set up before the test's own fixtures, so torn down after them, while the loop still runs."""
    yield
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, tasks = await asyncio.wait(tasks, timeout=_GRACE_S)
    if tasks:
        names = "; ".join(f"{task.get_name()}: {task.get_coro()}" for task in tasks)
        pytest.fail(f"asyncio tasks left running after the test: {names}", pytrace=False)


def _our_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("manyhands") and thread not in before]
    for thread in ours:
        thread.join(_GRACE_S)
    return [thread for thread in ours if thread.is_alive()]


def _children() -> list[psutil.Process]:
    if hasattr(os, "waitid"):  # costs a microsecond, where psutil reads the whole process table
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return []
    return psutil.Process().children(recursive=True)


def _end_children(before: set[psutil.Process]) -> list[tuple[psutil.Process, str]]:
    ended = []
    for child in _children():
        try:
            line = " ".join(child.cmdline()) or child.status()
            if child in before or "multiprocessing.resource_tracker" in line:  # the latter lives as long as pytest
                continue
            child.kill()
        except psutil.NoSuchProcess:
            continue
        ended.append((child, line))
    return ended
