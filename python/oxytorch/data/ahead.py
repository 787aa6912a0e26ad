"""Loaders whose batches are ready before the step asks for them: those of the given loader, in its order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from typing import Any

import torch

__all__ = ["Ahead", "Prefetched"]

_POLL_SECONDS = 0.05  # between two looks at whether anybody still wants batches


class Prefetched:
    """A loader whose next batches are drawn by a thread while a step is taken; otherwise the loader itself.

    Parameters
    ----------
    loader : iterable
        Can be iterated anew. Random numbers that it draws when an iteration starts are drawn where they were before.
    depth : int
        Batches that may wait.
    """

    def __init__(self, loader: Any, depth: int = 2) -> None:
        self._loader = loader
        self._depth = depth

    def __iter__(self) -> Iterator[Any]:
        return Ahead(iter(self._loader), self._depth)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)


class Ahead(Iterator[Any]):
    """One iteration. What the loader throws is thrown where its batch would have come; `close` ends the thread."""

    def __init__(self, source: Iterator[Any], depth: int) -> None:
        self._source = source
        self._waiting: Queue[tuple[bool, Any]] = Queue(depth)
        self._unwanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._thread is None:
            # The first batch is drawn here: a sampler draws its seed with it.
            batch = next(self._source)
            self._thread = threading.Thread(
                target=_fill,
                args=(self._source, self._waiting, self._unwanted, torch.is_grad_enabled()),
                name="oxytorch prefetch",
                daemon=True,
            )
            self._thread.start()
            return batch
        good, found = self._waiting.get()
        if good:
            return found
        self.close()
        raise found

    def close(self) -> None:
        """Draw no more; batches that wait are dropped."""
        self._ended = True
        self._unwanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            while self._thread.is_alive():
                with suppress(Empty):  # it may wait for room
                    self._waiting.get(timeout=_POLL_SECONDS)

    def __del__(self) -> None:
        self._unwanted.set()  # the thread holds nothing of this object and ends at its next look


def _fill(
    source: Iterator[Any], waiting: Queue[tuple[bool, Any]], unwanted: threading.Event, with_gradients: bool
) -> None:
    def offer(item: tuple[bool, Any]) -> None:
        while not unwanted.is_set():
            with suppress(Full):
                return waiting.put(item, timeout=_POLL_SECONDS)

    torch.set_grad_enabled(with_gradients)  # it belongs to a thread
    try:
        while not unwanted.is_set():
            offer((True, next(source)))
    except BaseException as error:  # StopIteration too; all of it is the consumer's to see
        offer((False, error))
