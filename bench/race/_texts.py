"""Texts that any machine has, as documents of a JSONL file, and a tokenizer that was trained on them."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

VOCABULARY = 16_384
DOCUMENT = 4096  # characters


def documents(size: int) -> list[str]:
    """The Python files of this installation, cut into documents, over and over until there are `size` bytes."""
    paths = sysconfig.get_paths()
    files = [file for key in ("stdlib", "purelib") for file in sorted(Path(paths[key]).rglob("*.py"))]
    found: list[str] = []
    held = 0
    while held < size:
        before = held
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            for first in range(0, len(text), DOCUMENT):
                found.append(text[first : first + DOCUMENT])
                held += len(found[-1].encode())
            if held >= size:
                return found
        if held == before:
            raise FileNotFoundError(f"there are no Python files in {paths['stdlib']} and {paths['purelib']}.")
    return found


def write_lines(path: Path, texts: list[str]) -> None:
    """Write a document a line, as ``{"text": ...}``."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def read_lines(path: Path, count: int) -> Any:
    """Yield lists of `count` documents."""
    texts: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            if len(texts) == count:
                yield texts
                texts = []
    if texts:
        yield texts


def trained(texts: list[str]) -> Any:
    """Byte-level BPE, as GPT-2's, of VOCABULARY tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
