import unicodedata

import make
import pytest
import torch
from helpers import assert_refused
from hypothesis import given
from hypothesis import strategies as st

from posenc_ext.vocabulary import Vocabulary

TEXTS = ["나는 오늘 학교에 간다", "나는 오늘 도서관에 간다", "오늘 나는 학교에서 공부한다", "나는 집에 간다"]
WORDS = ("[PAD]", "나는", "오늘", "학교에", "간다", "도서관에", "학교에서", "공부한다", "집에")
VOCABULARY = Vocabulary.from_texts(TEXTS)
IDS = [[1, 2, 3, 4], [1, 2, 5, 4], [2, 1, 6, 7], [1, 8, 4, 0]]


def test_words_get_ids_in_order_of_first_appearance():
    assert VOCABULARY.words == WORDS
    assert (len(VOCABULARY), VOCABULARY.pad_id) == (9, 0)
    assert Vocabulary(WORDS[1:]) == VOCABULARY
    assert Vocabulary(WORDS[2:]) != VOCABULARY
    assert repr(VOCABULARY) == f"Vocabulary({list(WORDS[1:])!r})"


def test_encode_pads_to_the_longest_text_or_the_length_asked_for():
    ids = VOCABULARY.encode(TEXTS)
    assert ids.dtype == VOCABULARY.encode([]).dtype == torch.int64
    assert ids.tolist() == IDS
    assert VOCABULARY.encode(["간다", ""], length=3).tolist() == [[4, 0, 0], [0, 0, 0]]
    assert VOCABULARY.encode(TEXTS[:1], length=4).tolist() == IDS[:1]


@make.each(
    ("texts", "length", "shape"), {"none": ([], None, (0, 0)), "4": ([], 4, (0, 4)), "one": ([""], None, (1, 0))}
)
def test_encode_of_nothing(texts, length, shape):
    assert VOCABULARY.encode(texts, length=length).shape == shape


def test_decode_leaves_the_padding_out():
    for ids in (torch.tensor(IDS), torch.tensor(IDS, dtype=torch.int32), IDS):
        assert VOCABULARY.decode(ids) == TEXTS
    assert VOCABULARY.decode([1, 8, 4, 0]) == ["나는 집에 간다"]
    assert VOCABULARY.decode([[0, 0]]) == VOCABULARY.decode([[]]) == [""]
    assert VOCABULARY.decode(torch.empty(0, 4, dtype=torch.int64)) == []


def test_membership():
    assert [word in VOCABULARY for word in ("오늘", "[PAD]", "내일", 1)] == [True, True, False, False]


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
    words = "got '바다에' in text 1, which is none of its 8 words"
    assert_refused(lambda: VOCABULARY.encode(["나는 간다", "나는 바다에 간다"]), words)


def test_nothing_is_cut_off():
    for length in (3, 0):
        words = f"got {length} for the 4 words of text 1"
        assert_refused(lambda n=length: VOCABULARY.encode(["", TEXTS[0]], length=n), words)
    assert_refused(lambda: VOCABULARY.encode([], length=-1), "length must not be negative, got -1")


@pytest.mark.parametrize("bad", [-1, 9, 10**12])
def test_decode_refuses_ids_it_has_no_word_for(bad):
    assert_refused(lambda: VOCABULARY.decode([[1, bad]]), f"ids must be in [0, 9), got {bad}", error=IndexError)


def test_decode_refuses_what_is_not_a_batch_of_ids():
    for ids, words in (
        (torch.tensor(3), "ids must be [batch, length] or [length], got []"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), "got [1, 1, 1]"),
        (torch.tensor([1.0]), "ids must be integers, got torch.float32"),
        (torch.tensor([True]), "ids must be integers, got torch.bool"),
    ):
        assert_refused(lambda i=ids: VOCABULARY.decode(i), words)


@pytest.mark.parametrize("word", ["", " ", "two words", " a", "a\n"])
def test_words_that_no_text_could_hold(word):
    assert_refused(lambda: Vocabulary(["a", word]), "must not be empty or contain white space")


def test_one_string_is_not_a_list_of_texts():
    for call, words in (
        (lambda: Vocabulary.from_texts("a b"), "texts must be a sequence of strings, got one string 'a b'"),
        (lambda: Vocabulary("ab"), "words must be a sequence of strings"),
        (lambda: VOCABULARY.encode("a"), "texts must be a sequence of strings"),
        (lambda: Vocabulary(["a", 1]), "a word must be a string, got int"),
    ):
        assert_refused(call, words, error=TypeError)


@given(st.lists(st.lists(st.sampled_from(WORDS[1:]), max_size=6).map(" ".join), max_size=5), st.integers(0, 3))
def test_decode_undoes_encode(texts, more):
    vocabulary = Vocabulary.from_texts(texts)
    longest = max((len(text.split()) for text in texts), default=0)
    ids = vocabulary.encode(texts, length=longest + more)
    assert ids.shape == (len(texts), longest + more)
    assert vocabulary.decode(ids) == texts
    # Every id is used and none is left out: the table of an embedding has no idle row.
    assert sorted(set(ids.flatten().tolist()) | {0}) == list(range(len(vocabulary)))
