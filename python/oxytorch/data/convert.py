"""Datasets written anew, and `oxytorch convert`: into MDS shards, or into tokens in Megatron's format."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._C import data as _native
from ..base import format_size, parse_size
from . import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..cli import Commands

__all__ = ["add_command", "convert", "tokenize"]

_PIECE = 1024  # texts that are made tokens at once

Progress = Callable[[int], object]


def convert(
    source: Any,
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    shard_size: int | str = "64MB",
    compress: bool = False,
    resize: int = 0,
    quality: int = 90,
    threads: int | str = "auto",
    progress: Progress | None = None,
) -> _native.Converted:
    """Write a dataset into a folder, in a format that is read fast and that others read too.

    Shards appear whole, with their hashes in the index, which comes last. An interrupted conversion to MDS goes on
    behind the last shard when it is called again.

    Parameters
    ----------
    source : Dataset, str, path or object
        A dataset or what `open` takes.
    target : str or path
        A folder that is new, empty or holds the begun conversion; for MDS an http, https or s3 URL of one too, whose
        server takes PUT requests: shards go there while the next ones are made.
    format : {"mds", "megatron"}, optional
        megatron where samples are tokens alone, else mds, unless given.
    shard_size : int or str
        Bytes of an MDS shard.
    compress : bool
        MDS shards by zstd: for slow storage. It makes reading slower from a fast disk.
    resize : int
        Shorter side to which larger images are shrunk; they become JPEGs. 0 keeps the images as they are.
    quality : int
        Of those JPEGs.
    threads : int or "auto"
    progress : callable, optional
        Called with the number of samples that are written.

    Raises
    ------
    ValueError
        For fields that the format cannot hold, and a folder that holds something else.
    RuntimeError
        Where the folder holds a conversion of another dataset or with other options.
    OSError
    """
    dataset = source if isinstance(source, _native.Dataset) else sources.open(source)
    shard_bytes = parse_size(shard_size) if isinstance(shard_size, str) else shard_size
    count = 0 if threads == "auto" else int(threads)
    return _native.convert(
        dataset, os.fspath(target), format or "", shard_bytes, compress, resize, quality, count, progress
    )


def tokenize(
    source: Any,
    prefix: str | os.PathLike[str],
    tokenizer: Any,
    *,
    text: str = "text",
    end: int | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> _native.Converted:
    """Make the texts of a dataset tokens: a document each, in Megatron's ``prefix.bin`` and ``prefix.idx``.

    Parameters
    ----------
    source : Dataset, str, path or object
        A dataset or what `open` takes.
    prefix : str or path
    tokenizer : object, str or callable
        Of the ``tokenizers`` library, the path of its ``tokenizer.json``, a tokenizer of ``transformers``, or a
        function of a list of texts that returns a list of lists of token numbers. It is called in a thread of its own,
        while the texts before are written. Special tokens are not added: `end` is.
    text : str
        The field with the text.
    end : int, optional
        Token that follows each document.
    dtype : {"uint16", "int32"}, optional
        uint16 where the tokenizer is known to have no more than 65,536 tokens, else int32.

    Raises
    ------
    ValueError
        Where there is no such field, files of that name exist, a token does not fit the dtype, or there are not as
        many lists as texts.
    """
    dataset = source if isinstance(source, _native.Dataset) else sources.open(source)
    fields = {field.name: field.kind for field in dataset.schema}
    if fields.get(text) != "text":
        raise ValueError(f"there is no field {text!r} of text; the fields are {fields}.")
    encode, numbers, vocabulary = _encoder(tokenizer)
    dtype = dtype or ("uint16" if vocabulary is not None and vocabulary <= 1 << 16 else "int32")
    if dtype not in ("uint16", "int32"):
        raise ValueError(f"dtype is {dtype!r}, expected uint16 or int32.")
    path = Path(prefix)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = _native.MegatronWriter(str(path), dtype)
    count = len(dataset)

    def encoded(first: int) -> Sequence[Any]:
        texts = [dataset[i][text] for i in range(first, min(first + _PIECE, count))]
        found = encode(texts)
        if len(found) != len(texts):
            raise ValueError(f"the tokenizer gave {len(found)} lists of tokens for {len(texts)} texts.")
        return found

    # Tokenizers release the interpreter: the next texts are made tokens while these are written.
    try:
        with ThreadPoolExecutor(1, "oxytorch-tokenize") as ahead:
            coming = ahead.submit(encoded, 0)
            for first in range(0, count, _PIECE):
                found = coming.result()
                if first + _PIECE < count:
                    coming = ahead.submit(encoded, first + _PIECE)
                writer.add(map(numbers, found), first, end)
                if progress is not None:
                    progress(min(first + _PIECE, count))
    except BaseException:
        del writer  # with its files, which the traceback would keep
        raise
    return _native.Converted("megatron", count, writer.finish())


def _encoder(
    tokenizer: Any,
) -> tuple[Callable[[list[str]], Sequence[Any]], Callable[[Any], Sequence[int]], int | None]:
    """A function of many texts, what makes numbers of one of its results, and how many there are, where it is known."""
    if isinstance(tokenizer, (str, os.PathLike)):
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415  (only where such a file is given)
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"{tokenizer} takes the tokenizers library: pip install tokenizers.") from None
        tokenizer = Tokenizer.from_file(os.fspath(tokenizer))
    if hasattr(tokenizer, "encode_batch"):
        many = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)  # it leaves out where tokens came from
        return lambda texts: many(texts, add_special_tokens=False), attrgetter("ids"), tokenizer.get_vocab_size()
    if hasattr(tokenizer, "vocab_size") and callable(tokenizer):
        return lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"], _as_given, len(tokenizer)
    if callable(tokenizer):
        return tokenizer, _as_given, None
    raise TypeError(
        f"a {type(tokenizer).__qualname__} is no tokenizer: give a tokenizer.json or a function of a list of texts."
    )


def _as_given(numbers: Sequence[int]) -> Sequence[int]:
    return numbers


def add_command(commands: Commands) -> None:
    """Add `convert` to the command."""
    parser = commands.add_parser(
        "convert",
        help="write a dataset anew, in a format that is read fast",
        description="Writes images and records as MDS shards, tokens in Megatron's format; with --tokenizer texts "
        "become tokens. An interrupted conversion to MDS goes on when the command is given again. Exit status: 0 "
        "written, 2 bad usage.",
    )
    parser.add_argument("source", help="what oxytorch.data.open takes: a file, a folder or a URL")
    parser.add_argument(
        "target",
        help="a folder, or a URL whose server takes PUT requests; with --tokenizer a path without .bin and .idx",
    )
    parser.add_argument("--format", choices=("mds", "megatron"), help="megatron for tokens alone, else mds")
    parser.add_argument("--shard-size", default="64MB", metavar="SIZE", help="bytes of an MDS shard (64MB)")
    parser.add_argument("--compress", action="store_true", help="MDS shards by zstd")
    parser.add_argument("--resize", type=int, default=0, metavar="N", help="shrink images to this shorter side")
    parser.add_argument("--quality", type=int, default=90, metavar="N", help="of images that were shrunk (90)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads (one a core)")
    parser.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json of the tokenizers library")
    parser.add_argument("--text", default="text", metavar="FIELD", help="the field with the text (text)")
    parser.add_argument("--end", type=int, metavar="TOKEN", help="token that follows each document")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    try:
        dataset = sources.open(arguments.source)
        with _shown(len(dataset)) as progress:
            if arguments.tokenizer is not None:
                made = tokenize(
                    dataset,
                    arguments.target,
                    arguments.tokenizer,
                    text=arguments.text,
                    end=arguments.end,
                    progress=progress,
                )
            else:
                made = convert(
                    dataset,
                    arguments.target,
                    format=arguments.format,
                    shard_size=arguments.shard_size,
                    compress=arguments.compress,
                    resize=arguments.resize,
                    quality=arguments.quality,
                    threads=arguments.threads or "auto",
                    progress=progress,
                )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        print(f"oxytorch convert: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - began
    told = {
        "source": dataset.format, "target": made.format, "samples": made.samples, "bytes": made.bytes,
        "resumed": made.resumed, "seconds": round(seconds, 3),
    }  # fmt: skip
    if arguments.json:
        print(json.dumps(told, indent=1))
        return 0
    before = f", {made.resumed} of them before" if made.resumed else ""
    print(
        f"{made.samples} samples of {dataset.format}{before} are {format_size(made.bytes)} of {made.format} in "
        f"{arguments.target}, after {seconds:.1f} s."
    )
    return 0


@contextmanager
def _shown(total: int) -> Iterator[Progress | None]:
    """A progress bar where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415  (slow to import, and only for the bar)
    from rich.progress import Progress as Bar  # noqa: PLC0415

    with Bar(console=Console(stderr=True)) as bar:
        task = bar.add_task("converting", total=total)
        yield lambda done: bar.update(task, completed=done)
