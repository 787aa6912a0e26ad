"""Texts as tokens: what the tokenizers library gives, document by document, read back; and what does not fit."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path

import oxytorch as ox
import pytest
import torch

convert = importlib.import_module("oxytorch.data.convert")  # the package has a function of that name


def lines(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def read(prefix: Path) -> list[list[int]]:
    data = ox.data.open(str(prefix) + ".idx")
    (name,) = (field.name for field in data.schema)
    return [data[i][name].to(torch.int64).tolist() for i in range(len(data))]


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


TEXTS = [f"document {i}: " + "ab \u00e9\u4e2d " * (i % 7) for i in range(50)]


@pytest.mark.parametrize("end", [None, 3])
@pytest.mark.parametrize("piece", [1, 7, 50, 1024])
def test_documents_are_what_the_function_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, end: int | None
) -> None:
    monkeypatch.setattr(convert, "_PIECE", piece)
    told: list[int] = []
    made = ox.data.tokenize(lines(tmp_path, TEXTS), tmp_path / "t", letters, end=end, progress=told.append)
    assert read(tmp_path / "t") == [[*tokens, *([] if end is None else [end])] for tokens in letters(TEXTS)]
    assert (made.format, made.samples) == ("megatron", 50) and told[-1] == 50
    assert len(told) == -(-50 // piece)


def test_it_is_what_the_tokenizers_library_gives(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = lines(tmp_path, TEXTS)
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    for number, given in enumerate((tokenizer, str(tmp_path / "tokenizer.json"))):
        ox.data.tokenize(source, tmp_path / f"t{number}", given)
        assert read(tmp_path / f"t{number}") == wanted
        assert (tmp_path / f"t{number}.bin").stat().st_size == 2 * sum(map(len, wanted)), "uint16: few tokens"


def test_texts_are_made_tokens_while_others_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "_PIECE", 10)
    began, written = threading.Event(), []

    def encode(texts: list[str]) -> list[list[int]]:
        if texts[0] == TEXTS[10]:
            began.set()
        return letters(texts)

    def progress(done: int) -> None:
        assert began.wait(60), "the second piece waits for the first"
        written.append(done)

    ox.data.tokenize(lines(tmp_path, TEXTS), tmp_path / "t", encode, progress=progress)
    assert written == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("piece", [2, 1024])
@pytest.mark.parametrize(
    ("wrong", "dtype", "said"),
    [
        ([-1], "int32", "text 3 does not fit int32: tokens must be 0 to 2147483647"),
        ([5, 65_536], "uint16", "text 3 does not fit uint16: tokens must be 0 to 65535"),
        ([1 << 31], "int32", "text 3 does not fit"),
        ([1 << 70], "int32", "text 3 does not fit"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, wrong: list[int], dtype: str, said: str
) -> None:
    monkeypatch.setattr(convert, "_PIECE", piece)

    def encode(texts: list[str]) -> list[list[int]]:
        return [wrong if text == "3" else [1, 2] if text != "2" else [] for text in texts]

    with pytest.raises(ValueError, match=said):
        ox.data.tokenize(lines(tmp_path, "01234"), tmp_path / "t", encode, dtype=dtype)
    assert not list(tmp_path.glob("t.*"))


def test_bad_tokenizers_are_refused(tmp_path: Path) -> None:
    source = lines(tmp_path, TEXTS)
    with pytest.raises(ValueError, match="49 lists of tokens for 50 texts"):
        ox.data.tokenize(source, tmp_path / "t", lambda texts: letters(texts)[1:])
    with pytest.raises(TypeError):
        ox.data.tokenize(source, tmp_path / "t", lambda texts: [[0.5] for _ in texts])
    with pytest.raises(TypeError, match="int is no tokenizer"):
        ox.data.tokenize(source, tmp_path / "t", 3)
    with pytest.raises(ZeroDivisionError):
        ox.data.tokenize(source, tmp_path / "t", lambda texts: [[1 // 0] for _ in texts])
    with pytest.raises(ValueError, match="no field 'body'"):
        ox.data.tokenize(source, tmp_path / "t", letters, text="body")
    assert not list(tmp_path.glob("t.*"))
