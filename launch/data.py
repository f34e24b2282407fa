# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Text files as tokens: reading, the split into training and held-out text, and batches.

A token is a byte (0 to 255); `SEPARATOR` ends each document. What a batch holds is a function of the seed and the
step, so that two recipes see the same data, a resumed run sees what the stopped one would have, and the world size
changes only which rank gets which rows.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SEPARATOR = 256
VOCAB_SIZE = 320  # 256 bytes and the separator, padded to a multiple of 64
HELD_OUT_FRACTION = 0.05
DOCUMENT_BYTES = 256 * 1024  # longer files are cut here, so that one big file can be split too


@dataclass
class Corpus:
    """Token streams, each a 1-D uint16 array, and where they came from."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    binary_files: int
    digest: str

    def __str__(self) -> str:
        skipped = f", {self.binary_files} binary files skipped" if self.binary_files else ""
        return (
            f"{self.files} files, {len(self.train):,} training and {len(self.held_out):,} held-out tokens{skipped} "
            f"(digest {self.digest[:12]})"
        )


def _list_files(paths: list[str] | None) -> list[Path]:
    """Files to read: those given, those under the folders given, or the Python standard library's sources."""
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        return [p for p in library.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts)]
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            found = [
                p
                for p in path.rglob("*")
                if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
            ]
            if not found:
                raise ValueError(f"--data {path}: the folder holds no files. Give a folder or files that hold text.")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"--data {path}: no such file or folder (looked from {os.getcwd()}).")
    return files


def load_corpus(paths: list[str] | None = None) -> Corpus:
    """Reads text files and splits them by content.

    Documents (files, cut every 256 KiB) are ordered by their SHA-256, and the first 5 % of the bytes in that order are
    held out: the split depends on the text alone, not on names, folders, seeds or ranks. Equal documents count once.
    Files that hold a zero byte are binary: they are skipped and counted.

    Raises:
        ValueError: a path does not exist, a folder is empty, or the text makes fewer than two documents.
    """
    files = _list_files(paths)
    documents, binary, read = {}, 0, 0
    for file in files:
        content = file.read_bytes()
        if b"\0" in content:
            binary += 1
            continue
        read += 1
        for start in range(0, len(content), DOCUMENT_BYTES):
            piece = content[start : start + DOCUMENT_BYTES]
            documents[hashlib.sha256(piece).digest()] = piece
    where = " ".join(paths) if paths else "the Python standard library"
    if len(documents) < 2:
        raise ValueError(
            f"--data {where}: {len(files)} files hold {len(documents)} different documents of text ({binary} files "
            f"are binary), but one to train on and one to hold out are needed. Give more files, or a file of more "
            f"than {DOCUMENT_BYTES} bytes."
        )

    ordered = sorted(documents)
    total = sum(map(len, documents.values()))
    held_out, held_bytes = [], 0
    while held_bytes < HELD_OUT_FRACTION * total and len(held_out) < len(ordered) - 1:
        held_out.append(ordered[len(held_out)])
        held_bytes += len(documents[held_out[-1]])
    digest = hashlib.sha256(b"".join(ordered)).hexdigest()
    return Corpus(
        train=_tokenize([documents[key] for key in ordered[len(held_out) :]]),
        held_out=_tokenize([documents[key] for key in held_out]),
        files=read,
        binary_files=binary,
        digest=digest,
    )


def _tokenize(documents: list[bytes]) -> np.ndarray:
    tokens = np.empty(sum(map(len, documents)) + len(documents), dtype=np.uint16)
    at = 0
    for document in documents:
        tokens[at : at + len(document)] = np.frombuffer(document, dtype=np.uint8)
        tokens[at + len(document)] = SEPARATOR
        at += len(document) + 1
    return tokens


class TrainingBatches:
    """Rows of `seq_len + 1` tokens, each drawn once per epoch, in an order made from the seed and the epoch."""

    def __init__(self, tokens: np.ndarray, seq_len: int, batch_size: int, seed: int):
        self.tokens, self.seq_len, self.batch_size, self.seed = tokens, seq_len, batch_size, seed
        self.rows_per_epoch = (len(tokens) - 1) // seq_len
        if self.rows_per_epoch < batch_size:
            raise ValueError(
                f"The training text has {len(tokens):,} tokens, but one batch takes {batch_size} rows of {seq_len} "
                f"tokens ({batch_size * seq_len:,}). Give more text with --data, or lower --batch-size or --seq-len."
            )
        self._epoch, self._order = -1, None

    def rows(self, step: int, first: int, count: int) -> torch.Tensor:
        """Rows `first` to `first + count` of the global batch of `step`: int64 [count, seq_len + 1]."""
        return torch.stack([self._row(step * self.batch_size + first + i) for i in range(count)])

    def _row(self, number: int) -> torch.Tensor:
        epoch, place = divmod(number, self.rows_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.rows_per_epoch),
            )
        start = int(self._order[place]) * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))


def held_out_rows(tokens: np.ndarray, seq_len: int, eval_tokens: int) -> torch.Tensor:
    """The held-out set: int64 [eval_tokens // seq_len, seq_len + 1], spread evenly over the held-out text.

    Raises:
        ValueError: the held-out text has fewer than `eval_tokens` tokens, or they make no row.
    """
    available, wanted = (len(tokens) - 1) // seq_len, eval_tokens // seq_len
    if not 1 <= wanted <= available:
        raise ValueError(
            f"--eval-tokens {eval_tokens:,} makes {wanted} rows of {seq_len} tokens, but 1 to {available} were "
            f"expected: the held-out text has {len(tokens):,} tokens. Set --eval-tokens to "
            f"{seq_len:,}..{available * seq_len:,}, or give more text with --data."
        )
    starts = np.linspace(0, available - 1, wanted).round().astype(np.int64) * seq_len
    return torch.from_numpy(np.stack([tokens[s : s + seq_len + 1] for s in starts]).astype(np.int64))
