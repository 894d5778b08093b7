"""Words to ids and back: the smallest tokenizer that makes a batch for an embedding layer."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

PAD = "[PAD]"


class Vocabulary:
    """A list of words, each with its id. Id 0 is ``[PAD]``, which fills short texts up to the length of the batch.

    Words are what white space separates. They are compared in Unicode's composed form (NFC), so that a Korean or an
    accented word is the same word however its letters were typed.

    Args:
        words: the words in the order of their ids, from id 1. A word that comes again keeps its first id; ``[PAD]`` may
            be among them and stays id 0, so ``Vocabulary(v.words)`` is a copy of ``v``.

    Raises:
        TypeError: if ``words`` is one string, or holds something that is not a string.
        ValueError: if a word is empty or has white space in it, and so could never be found in a text.

    Examples:
        >>> import posenc_ext
        >>> vocabulary = posenc_ext.Vocabulary(["the", "cat"])
        >>> len(vocabulary), vocabulary.words
        (3, ('[PAD]', 'the', 'cat'))
    """

    def __init__(self, words: Iterable[str]) -> None:
        _refuse_single_string("Vocabulary", "words", words)
        distinct = dict.fromkeys([PAD])
        for word in words:
            distinct[_checked_word(word)] = None
        self._words = tuple(distinct)
        self._ids = {word: i for i, word in enumerate(self._words)}

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Vocabulary:
        """The vocabulary of some texts: every word of theirs, in order of first appearance.

        Args:
            texts: the texts, each a string.

        Returns:
            A vocabulary of all their words.

        Raises:
            TypeError: if ``texts`` is one string.

        Examples:
            >>> import posenc_ext
            >>> posenc_ext.Vocabulary.from_texts(["the cat sat", "the mat"])
            Vocabulary(['the', 'cat', 'sat', 'mat'])
        """
        _refuse_single_string("Vocabulary.from_texts", "texts", texts)
        return cls(word for text in texts for word in _split(text))

    @property
    def words(self) -> tuple[str, ...]:
        """All words by id: ``words[0]`` is ``[PAD]``."""
        return self._words

    @property
    def pad_id(self) -> int:
        """The id of ``[PAD]``: 0."""
        return 0

    def __len__(self) -> int:
        """Number of ids, ``[PAD]`` included: the ``vocab_size`` of an embedding layer."""
        return len(self._words)

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and unicodedata.normalize("NFC", word) in self._ids

    def __eq__(self, other: object) -> bool:
        return self._words == other._words if isinstance(other, Vocabulary) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._words)

    def __repr__(self) -> str:
        return f"Vocabulary({list(self._words[1:])!r})"

    def encode(self, texts: Iterable[str], length: int | None = None) -> Tensor:
        """Ids of a batch of texts, each filled up with 0.

        Args:
            texts: the texts, one per row.
            length: number of columns; by default, the number of words of the longest text.

        Returns:
            int64 ``[batch, length]``.

        Raises:
            TypeError: if ``texts`` is one string.
            ValueError: if a word is not in the vocabulary, or a text has more than ``length`` words: none is cut.

        Examples:
            >>> import posenc_ext
            >>> posenc_ext.Vocabulary(["the", "cat", "sat"]).encode(["the cat sat", "sat"])
            tensor([[1, 2, 3],
                    [3, 0, 0]])
        """
        _refuse_single_string("Vocabulary.encode", "texts", texts)
        rows = [self._encode_one(row, text) for row, text in enumerate(texts)]
        longest = max(map(len, rows), default=0)
        columns = longest if length is None else length
        if columns < 0:
            raise ValueError(f"Vocabulary.encode: length must not be negative, got {length}")
        if columns < longest:
            row = next(row for row, ids in enumerate(rows) if len(ids) > columns)
            raise ValueError(
                f"Vocabulary.encode: length must be at least the number of words of every text, got {length} for the "
                f"{len(rows[row])} words of text {row}"
            )
        batch = torch.full((len(rows), columns), self.pad_id, dtype=torch.int64)
        for row, ids in enumerate(rows):
            batch[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return batch

    def decode(self, ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> list[str]:
        """Texts of a batch of ids, without the padding.

        Args:
            ids: integers ``[batch, length]``, or ``[length]`` for a batch of one.

        Returns:
            One text per row, its words separated by one space.

        Raises:
            IndexError: if an id is not in the vocabulary.
            ValueError: if ``ids`` has another number of dimensions, or a dtype that is not an integer one.

        Examples:
            >>> import posenc_ext
            >>> posenc_ext.Vocabulary(["the", "cat", "sat"]).decode([[1, 2, 3], [3, 0, 0]])
            ['the cat sat', 'sat']
        """
        # An empty list becomes a floating-point tensor, and holds no id that could be wrong.
        batch = torch.as_tensor(ids)
        if batch.numel() and (batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool):
            raise ValueError(f"Vocabulary.decode: ids must be integers, got {batch.dtype}")
        if batch.dim() not in (1, 2):
            raise ValueError(f"Vocabulary.decode: ids must be [batch, length] or [length], got {list(batch.shape)}")
        rows: list[list[int]] = (batch if batch.dim() == 2 else batch.unsqueeze(0)).tolist()
        return [" ".join(self._word(i) for i in row if i != self.pad_id) for row in rows]

    def _encode_one(self, row: int, text: str) -> list[int]:
        words = _split(text)
        unknown = next((word for word in words if word not in self._ids), None)
        if unknown is not None:
            raise ValueError(
                f"Vocabulary.encode: every word must be in the vocabulary, got {unknown!r} in text {row}, which is "
                f"none of its {len(self) - 1} words"
            )
        return [self._ids[word] for word in words]

    def _word(self, i: int) -> str:
        if not 0 <= i < len(self):
            raise IndexError(f"Vocabulary.decode: ids must be in [0, {len(self)}), got {i}")
        return self._words[i]


def _split(text: str) -> list[str]:
    return unicodedata.normalize("NFC", text).split()


def _checked_word(word: str) -> str:
    if not isinstance(word, str):
        raise TypeError(f"Vocabulary: a word must be a string, got {type(word).__name__}")
    if word.split() != [word]:
        raise ValueError(f"Vocabulary: a word must not be empty or contain white space, got {word!r}")
    return unicodedata.normalize("NFC", word)


def _refuse_single_string(op: str, argument: str, value: object) -> None:
    """A string is a sequence of strings too, its letters, which nobody means."""
    if isinstance(value, str):
        raise TypeError(f"{op}: {argument} must be a sequence of strings, got one string {value!r}")
