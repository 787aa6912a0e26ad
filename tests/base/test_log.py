"""The library's log in Python's logging: a user's handlers and levels hold, and no thread waits for Python's lock."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from oxytorch import base
from oxytorch._C import base as native

OXYTORCH = logging.getLogger("oxytorch")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    handlers, level = OXYTORCH.handlers[:], OXYTORCH.level
    yield
    OXYTORCH.handlers[:] = handlers
    OXYTORCH.setLevel(level)


class Listens(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record)

    @property
    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.heard]


def soon(holds: Callable[[], bool]) -> bool:
    for _ in range(500):
        if holds():
            return True
        time.sleep(0.01)
    return False


def test_messages_are_records_of_a_logger_for_each_module(caplog: pytest.LogCaptureFixture) -> None:
    OXYTORCH.setLevel(1)
    for level in ("trace", "debug", "info", "warn", "error"):
        base.log(level, f"100 % {level} é", "tune")
    base.log("warn", "no module")
    assert caplog.record_tuples == [
        ("oxytorch.tune", 5, "100 % trace é"),
        ("oxytorch.tune", logging.DEBUG, "100 % debug é"),
        ("oxytorch.tune", logging.INFO, "100 % info é"),
        ("oxytorch.tune", logging.WARNING, "100 % warn é"),
        ("oxytorch.tune", logging.ERROR, "100 % error é"),
        ("oxytorch", logging.WARNING, "no module"),
    ]


def test_the_users_levels_hold(caplog: pytest.LogCaptureFixture) -> None:
    assert base.log_level() == "warn"  # that of the root logger
    base.log("info", "below")
    OXYTORCH.setLevel(logging.ERROR)
    base.log("warn", "below")
    assert base.log_level() == "error"
    logging.getLogger("oxytorch.tune").setLevel(logging.DEBUG)
    base.log("debug", "one module speaks", "tune")
    base.log("warn", "below", "optim")
    logging.getLogger("oxytorch.tune").setLevel(logging.NOTSET)
    base.set_log_level("debug")
    assert OXYTORCH.level == logging.DEBUG
    base.log("debug", "all speak")
    base.set_log_level("off")
    base.log("error", "below")
    assert base.log_level() == "off"
    assert caplog.messages == ["one module speaks", "all speak"]


def test_the_users_handlers_hold(capfd: pytest.CaptureFixture[str]) -> None:
    mine = Listens()
    OXYTORCH.addHandler(mine)
    mine.addFilter(lambda record: "not this" not in record.getMessage())
    base.log("warn", "this")
    base.log("warn", "not this")
    assert mine.texts == ["this"] and mine.heard[0].name == "oxytorch"
    assert capfd.readouterr().err == ""


def test_a_handler_that_raises_stops_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    class Raises(Listens):
        def emit(self, record: logging.LogRecord) -> None:
            if not self.heard:
                super().emit(record)
                raise RuntimeError("broken handler")
            super().emit(record)

    mine = Raises()
    OXYTORCH.addHandler(mine)
    base.log("warn", "the first")
    base.log("warn", "the second")
    assert mine.texts == ["the first", "the second"]
    err = capfd.readouterr().err
    assert "broken handler" in err and "the first" in err and "the second" not in err


def test_a_handler_that_makes_the_library_log_ends(capfd: pytest.CaptureFixture[str]) -> None:
    class Logs(Listens):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            base.log("warn", f"again {len(self.heard)}")

    mine = Logs()
    OXYTORCH.addHandler(mine)
    base.log("warn", "once")
    assert mine.texts == ["once"]
    assert "again 1" in capfd.readouterr().err


def test_a_thread_without_pythons_lock_waits_for_nobody() -> None:
    mine = Listens()
    OXYTORCH.addHandler(mine)
    native.log_elsewhere("warn", "of a thread that its starter waits for with the lock held")
    native.log_elsewhere("info", "below")
    base.log("warn", "of this one")
    assert mine.texts == ["of a thread that its starter waits for with the lock held", "of this one"]


def test_many_threads_lose_nothing() -> None:
    mine = Listens()
    OXYTORCH.addHandler(mine)

    def speak(who: int) -> None:
        for i in range(50):
            (native.log_elsewhere if i % 2 else base.log)("warn", f"{who} {i}")

    threads = [threading.Thread(target=speak, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    native.deliver_log()
    assert soon(lambda: len(mine.texts) == 200)  # a thread may be under way with some
    assert sorted(mine.texts) == sorted(f"{who} {i}" for who in range(4) for i in range(50))


def test_a_handler_with_a_lock_of_its_own_is_never_entered_twice() -> None:
    waiting: queue.Queue[logging.LogRecord] = queue.Queue()
    OXYTORCH.addHandler(logging.handlers.QueueHandler(waiting))
    speaking = threading.Thread(target=lambda: [native.log_elsewhere("warn", "theirs") for _ in range(200)])
    speaking.start()
    for _ in range(200):
        base.log("warn", "mine")
    speaking.join()
    native.deliver_log()
    assert soon(lambda: waiting.qsize() == 400)


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )


def test_what_is_native_arrives_with_its_module(tmp_path: Path) -> None:
    library = tmp_path / "liboxytorch-backend-none.so"
    library.write_bytes(b"no library")
    done = run(
        "import logging; logging.basicConfig(format='%(name)s|%(levelname)s|%(message)s', level='INFO')\n"
        "import oxytorch; oxytorch.available_backends()",
        OXYTORCH_BACKEND_PATH=str(library),
    )
    assert "oxytorch.backend|WARNING|cannot load the backend library" in done.stderr


def test_without_a_handler_it_is_stderr() -> None:
    done = run("import oxytorch.base as b; b.log('warn', 'told'); b.log('info', 'not told')")
    assert done.stderr == "oxytorch warning: told\n"


def test_the_variable_sets_the_level_of_the_logger() -> None:
    code = (
        "import logging; logging.basicConfig(format='%(name)s %(message)s')\n"  # the root logger stays at WARNING
        "import oxytorch.base as b; b.log('info', 'told', 'tune'); b.log('debug', 'not told')\n"
        "logging.getLogger('oxytorch').setLevel(logging.ERROR); b.log('warn', 'not told either')"
    )
    assert run(code, OXYTORCH_LOG="info").stderr == "oxytorch.tune told\n"
    assert run(code).stderr == ""


def test_threads_that_log_while_python_ends() -> None:
    code = (
        "import atexit; atexit.register(lambda: b.log('warn', 'after the end'))\n"  # after oxytorch's own
        "import logging, threading; logging.basicConfig(filename='/dev/null')\n"
        "import oxytorch.base as b; from oxytorch._C import base as native\n"
        "def speak():\n"
        "    while True: b.log('warn', 'x'); native.log_elsewhere('warn', 'y')\n"
        "for _ in range(3): threading.Thread(target=speak, daemon=True).start()\n"
        "b.log('warn', 'z')"
    )
    for _ in range(3):
        assert "after the end" in run(code).stderr
