"""Tokenizers and the chat template, on characters and on Qwen3's own files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.chat import ChatTemplate
from train.tokenizer import CharTokenizer, HfTokenizer, decode_completion

SUMS = CharTokenizer("0123456789+=")


@pytest.fixture(scope="module")
def folder(shared_data):
    return shared_data / "tokenizer"


@pytest.fixture(scope="module")
def qwen3(folder):
    return HfTokenizer(folder)


# ---- characters --------------------------------------------------------------------------------


@given(st.text(alphabet=SUMS.alphabet))
def test_characters_round_trip_without_padding_or_stop(text):
    ids = SUMS.encode(text)
    assert SUMS.decode(ids) == text
    assert len(ids) == len(text)
    assert not {SUMS.pad_id, *SUMS.stop_ids} & set(ids)
    assert all(0 <= i < SUMS.vocab_size for i in ids)


def test_character_ids_are_fixed():
    assert (SUMS.pad_id, SUMS.stop_ids, SUMS.vocab_size) == (0, (1,), 14)
    assert SUMS.encode_prompt("12+7=") == [3, 4, 12, 9, 13]


def test_padding_stop_and_unknown_ids_show_in_text():
    one, nine = SUMS.encode("19")
    assert SUMS.decode([one, 0, nine]) == "1\u24009"
    assert SUMS.decode([one, 1, nine]) == "1\u24039"
    assert SUMS.decode([one, 14, nine, -1]) == "1\ufffd9\ufffd"


def test_only_the_stop_token_that_ends_a_completion_is_taken_off():
    one, nine = SUMS.encode("19")
    assert decode_completion(SUMS, [one, nine, 1]) == "19"
    assert decode_completion(SUMS, [one, nine]) == "19"
    assert decode_completion(SUMS, [one, 0, nine, 1]) == "1\u24009"
    assert decode_completion(SUMS, [one, nine, 0]) == "19\u2400"
    assert decode_completion(SUMS, [one, 1, 1]) == "1\u2403"
    assert decode_completion(SUMS, [1]) == ""
    assert decode_completion(SUMS, []) == ""


@pytest.mark.parametrize(
    ("alphabet", "message"),
    [("", "empty"), ("011", "twice"), ("01\u2400", "marks"), ("01\ufffd", "marks")],
)
def test_alphabets_that_would_be_ambiguous_are_refused(alphabet, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer(alphabet)


def test_what_characters_cannot_say_is_refused():
    with pytest.raises(ValueError, match=r"character '\*' of '1\*2' is not in the alphabet"):
        SUMS.encode("1*2")
    with pytest.raises(ValueError, match="no chat template"):
        SUMS.encode_prompt([{"role": "user", "content": "1"}])


# ---- Qwen3 -------------------------------------------------------------------------------------


def test_qwen3_special_ids(qwen3):
    assert qwen3.stop_ids == (151645, 151643)
    assert qwen3.pad_id == 151643
    assert qwen3.vocab_size == 151669


def test_qwen3_known_encodings(qwen3):
    # Ids that Qwen publishes for its vocabulary: digits are single tokens, words keep their space.
    assert qwen3.encode("hello") == [14990]
    assert qwen3.encode("<|im_start|>user\nhi<|im_end|>\n") == [151644, 872, 198, 6023, 151645, 198]
    assert len(qwen3.encode("1234567")) == 7
    assert qwen3.encode("") == []


@pytest.mark.parametrize(
    "text",
    ["naïve \u4f60\u597d \U0001f600", " \n\n  x\t", "<think>\n\n</think>", "\\frac12", "\ufffd"],
)
def test_qwen3_text_round_trips(qwen3, text):
    assert qwen3.decode(qwen3.encode(text)) == text


def test_a_completion_holding_the_padding_token_keeps_it(qwen3):
    # The padding token is a stop token too: only a last one ended the completion.
    (one,), (nine,) = qwen3.encode("1"), qwen3.encode("9")
    assert decode_completion(qwen3, [one, nine, 151645]) == "19"
    assert decode_completion(qwen3, [one, nine, 151643]) == "19"
    assert decode_completion(qwen3, [one, 151643, nine, 151645]) == "1<|endoftext|>9"


def test_ids_past_the_tokenizer_do_not_vanish(qwen3):
    (one,), (nine,) = qwen3.encode("1"), qwen3.encode("9")
    assert qwen3.decode([one, 151669, nine, 151935]) == "1\ufffd9\ufffd"


def test_text_that_is_not_unicode_is_refused(qwen3):
    with pytest.raises(ValueError, match="not valid Unicode"):
        qwen3.encode("\ud800")


def test_prompts_go_through_the_template(qwen3, folder):
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3.encode_prompt("hi") == qwen3.encode(rendered)
    assert qwen3.encode_prompt([{"role": "user", "content": "hi"}]) == qwen3.encode(rendered)
    quick = HfTokenizer(folder, enable_thinking=False)
    assert quick.encode_prompt("hi") == quick.encode(rendered + "<think>\n\n</think>\n\n")


def test_tokenizer_files_that_cannot_be_used_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json"):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="'chat_template' has to be text, got None"):
        HfTokenizer(tmp_path)


def test_tokens_that_are_not_there_are_refused(folder):
    with pytest.raises(ValueError, match="stop_tokens: '<eos>' is not a token"):
        HfTokenizer(folder, stop_tokens=["<eos>"])
    with pytest.raises(ValueError, match="pad_token: '<pad>' is not a token"):
        HfTokenizer(folder, pad_token="<pad>")
    with pytest.raises(ValueError, match="stop_tokens is empty"):
        HfTokenizer(folder, stop_tokens=[])


# ---- chat template -----------------------------------------------------------------------------

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2? <b> & \u4f60"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4"},
    {"role": "user", "content": "And 3+3?"},
]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<|im_start|>assistant\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_qwen3_conversation_exactly(folder, options, end):
    # The thoughts of earlier turns are left out, as Qwen3 was trained.
    assert ChatTemplate.from_folder(folder).render(TURNS, **options) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n2+2? <b> & \u4f60<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nAnd 3+3?<|im_end|>\n" + end
    )


def test_qwen3_last_answer_keeps_its_thought(folder):
    assert ChatTemplate.from_folder(folder).render(TURNS[1:3], add_generation_prompt=False) == (
        "<|im_start|>user\n2+2? <b> & \u4f60<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nEasy.\n</think>\n\n4<|im_end|>\n"
    )


def test_a_template_file_of_its_own_comes_first(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content | tojson }}\n"
        "  {% continue %}\n  {% endif %}\n{% endfor %}\n"
    )
    # Blocks trimmed, loop controls there, no HTML escapes.
    assert ChatTemplate.from_folder(tmp_path).render(TURNS[1:2]) == '"2+2? <b> & \u4f60"\n'


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no turns"),
        ([{"role": "user"}], "turn 0 has no text in 'content'"),
        ([{"content": "x", "role": None}], "turn 0 has no text in 'role'"),
    ],
)
def test_conversations_without_text_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate("").render(messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses .* roles must alternate"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ undefined.attribute }}", "refuses"),
    ],
)
def test_what_a_template_does_wrong_is_an_error(source, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(TURNS)


def test_a_template_that_is_no_template_is_refused():
    with pytest.raises(ValueError, match="not a Jinja template"):
        ChatTemplate("{% if %}")
