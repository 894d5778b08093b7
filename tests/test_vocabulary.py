import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc_ext.vocabulary import Vocabulary

TEXTS = ["나는 오늘 학교에 간다", "나는 오늘 도서관에 간다", "오늘 나는 학교에서 공부한다", "나는 집에 간다"]
WORDS = ("[PAD]", "나는", "오늘", "학교에", "간다", "도서관에", "학교에서", "공부한다", "집에")
IDS = [[1, 2, 3, 4], [1, 2, 5, 4], [2, 1, 6, 7], [1, 8, 4, 0]]


def test_words_get_ids_in_order_of_first_appearance():
    vocabulary = Vocabulary.from_texts(TEXTS)
    assert vocabulary.words == WORDS
    assert len(vocabulary) == 9
    assert vocabulary.pad_id == 0
    assert vocabulary == Vocabulary(WORDS[1:])
    assert vocabulary != Vocabulary(WORDS[2:])
    assert repr(vocabulary) == f"Vocabulary({list(WORDS[1:])!r})"


def test_encode_pads_to_the_longest_text():
    ids = Vocabulary.from_texts(TEXTS).encode(TEXTS)
    assert ids.dtype == torch.int64
    assert ids.tolist() == IDS


def test_encode_pads_to_the_length_asked_for():
    vocabulary = Vocabulary.from_texts(TEXTS)
    assert vocabulary.encode(["간다", ""], length=3).tolist() == [[4, 0, 0], [0, 0, 0]]
    assert vocabulary.encode(TEXTS[:1], length=4).tolist() == IDS[:1]


def test_encode_of_nothing():
    vocabulary = Vocabulary(["a"])
    assert vocabulary.encode([]).shape == (0, 0)
    assert vocabulary.encode([], length=4).shape == (0, 4)
    assert vocabulary.encode([""]).shape == (1, 0)
    assert vocabulary.encode([]).dtype == torch.int64


def test_decode_leaves_the_padding_out():
    vocabulary = Vocabulary.from_texts(TEXTS)
    assert vocabulary.decode(torch.tensor(IDS)) == TEXTS
    assert vocabulary.decode(torch.tensor(IDS, dtype=torch.int32)) == TEXTS
    assert vocabulary.decode(IDS) == TEXTS
    assert vocabulary.decode([1, 8, 4, 0]) == ["나는 집에 간다"]
    assert vocabulary.decode([[0, 0]]) == [""]
    assert vocabulary.decode([[]]) == [""]
    assert vocabulary.decode(torch.empty(0, 4, dtype=torch.int64)) == []


def test_membership():
    vocabulary = Vocabulary.from_texts(TEXTS)
    assert "오늘" in vocabulary
    assert "[PAD]" in vocabulary
    assert "내일" not in vocabulary
    assert 1 not in vocabulary


def test_the_same_word_typed_in_another_form():
    decomposed = unicodedata.normalize("NFD", "나는")
    assert decomposed != "나는"
    vocabulary = Vocabulary.from_texts([f"{decomposed} 나는"])
    assert vocabulary.words == ("[PAD]", "나는")
    assert decomposed in vocabulary
    assert vocabulary.encode([decomposed]).tolist() == [[1]]
    assert Vocabulary([decomposed]).encode(["나는"]).tolist() == [[1]]


def test_pad_keeps_id_0_wherever_it_comes():
    assert Vocabulary(["a", "[PAD]", "b"]).words == ("[PAD]", "a", "b")
    vocabulary = Vocabulary.from_texts(["a [PAD] b"])
    assert vocabulary.encode(["a [PAD] b"]).tolist() == [[1, 0, 2]]


def test_every_kind_of_white_space_separates():
    assert Vocabulary.from_texts(["  a\tb\n\u3000c  a"]).words == ("[PAD]", "a", "b", "c")


def test_unknown_word_is_named():
    vocabulary = Vocabulary.from_texts(TEXTS)
    with pytest.raises(ValueError, match="got '바다에' in text 1, which is none of its 8 words"):
        vocabulary.encode(["나는 간다", "나는 바다에 간다"])


@pytest.mark.parametrize("length", [3, 0])
def test_nothing_is_cut_off(length):
    vocabulary = Vocabulary.from_texts(TEXTS)
    with pytest.raises(ValueError, match=f"got {length} for the 4 words of text 1"):
        vocabulary.encode(["", TEXTS[0]], length=length)


def test_negative_length_of_no_words_is_refused():
    with pytest.raises(ValueError, match="length must not be negative, got -1"):
        Vocabulary(["a"]).encode([], length=-1)


@pytest.mark.parametrize("bad", [-1, 9, 10**12])
def test_decode_refuses_ids_it_has_no_word_for(bad):
    with pytest.raises(IndexError, match=rf"ids must be in \[0, 9\), got {bad}"):
        Vocabulary.from_texts(TEXTS).decode([[1, bad]])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor(3), r"ids must be \[batch, length\] or \[length\], got \[\]"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"got \[1, 1, 1\]"),
        (torch.tensor([1.0]), "ids must be integers, got torch.float32"),
        (torch.tensor([True]), "ids must be integers, got torch.bool"),
    ],
)
def test_decode_refuses_what_is_not_a_batch_of_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        Vocabulary(["a", "b"]).decode(ids)


@pytest.mark.parametrize("word", ["", " ", "two words", " a", "a\n"])
def test_words_that_no_text_could_hold(word):
    with pytest.raises(ValueError, match="must not be empty or contain white space"):
        Vocabulary(["a", word])


def test_one_string_is_not_a_list_of_texts():
    with pytest.raises(TypeError, match="texts must be a sequence of strings, got one string 'a b'"):
        Vocabulary.from_texts("a b")
    with pytest.raises(TypeError, match="words must be a sequence of strings"):
        Vocabulary("ab")
    with pytest.raises(TypeError, match="texts must be a sequence of strings"):
        Vocabulary(["a"]).encode("a")
    with pytest.raises(TypeError, match="a word must be a string, got int"):
        Vocabulary(["a", 1])


@given(st.lists(st.lists(st.sampled_from(WORDS[1:]), max_size=6).map(" ".join), max_size=5), st.integers(0, 3))
def test_decode_undoes_encode(texts, more):
    vocabulary = Vocabulary.from_texts(texts)
    longest = max((len(text.split()) for text in texts), default=0)
    ids = vocabulary.encode(texts, length=longest + more)
    assert ids.shape == (len(texts), longest + more)
    assert vocabulary.decode(ids) == texts
    # Every id is used and none is left out: the table of an embedding has no idle row.
    assert sorted(set(ids.flatten().tolist()) | {0}) == list(range(len(vocabulary)))
