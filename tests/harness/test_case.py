"""Case files and their inputs: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import case as cases
from harness.case import Case
from harness.types import UsageError

TINY = Path(str(cases.bundled()["tiny"])).parent / "tiny"


def write(folder: Path, body: str) -> str:
    path = folder / "mine.toml"
    path.write_text(body)
    return str(path)


def test_every_bundled_case_loads_and_has_tokens() -> None:
    assert {"tiny", "single", "short", "window", "window_plus", "batch", "fp32"} <= set(cases.bundled())
    for name in cases.bundled():
        case = cases.load(name)
        assert case.description
        assert len(cases.sequence(case)) == (case.length or len(cases.sequence(case)))


def test_the_default_case_is_long_enough() -> None:
    """Beyond the window of 128, beyond 4 x index_topk = 128, and no multiple of a compression rate."""
    ids = cases.sequence(cases.load("tiny"))
    assert len(ids) >= 300
    assert len(ids) % 4
    assert len(set(ids)) > 30


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('checkpoint = "c"\nlenght = 3', "unknown key 'lenght'; valid keys are name, description"),
        ('checkpoint = "c"\nlength = "3"', "length should be int, got '3'"),
        ('checkpoint = "c"\nlength = true', "length should be int, got True"),
        ('checkpoint = "c"\nlength = 0', "expected a length of at least 1"),
        ('checkpoint = "c"\nbatch = 0', "expected a batch of at least 1"),
        ('checkpoint = "c"\npositions = -1', "expected positions of at least 0"),
        ('checkpoint = "c"\ndtype = "fp8"', "expected dtype native or fp32, got 'fp8'"),
        ('checkpoint = "c"\nprompt = "a"\ntokens = [1]', "expected one of prompt, tokens, text"),
        ('checkpoint = "c"\ntokens = [1, "a"]', "expected tokens as a list of integers"),
        ('checkpoint = "c"\ntext = "none.txt"', "cannot be read"),
        ('prompt = "a"', "the key 'checkpoint' is missing"),
        ("checkpoint = ", "expected a TOML case file"),
        ('checkpoint = "c"\n[[declared]]\nstage = "x"', "declared[0]: the key 'reason' is missing"),
        ('checkpoint = "c"\n[[declared]]\nstages = "x"', "declared[0]: unknown key 'stages'"),
        ('checkpoint = "c"\ndeclared = [3]', "declared[0]: expected a table"),
    ],
)
def test_a_wrong_case_file_is_named_with_the_key(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases.load(write(tmp_path, body))
    assert words in str(caught.value)
    assert "mine" in str(caught.value)


def test_paths_are_relative_to_the_case_file(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("lamp key")
    body = 'checkpoint = "sub"\ntext = "words.txt"\n[[declared]]\nstage = "a"\nreason = "b"\nfloor = 1\n'
    found = cases.load(write(tmp_path, body))
    assert found.checkpoint == tmp_path / "sub"
    assert found.prompt == "lamp key"
    assert found.declared[0].output == "*"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "lamp zebra"}, "does not know the word 'zebra'"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"tokens": ()}, "the prompt is empty"),
        ({"tokens": (1, 64)}, "token id 64 is out of range; the vocabulary has ids 0 to 63"),
        ({"tokens": (-1,)}, "token id -1 is out of range"),
    ],
)
def test_wrong_tokens(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases.sequence(Case("c", TINY).override(**changes))
    assert words in str(caught.value)


def test_a_checkpoint_without_tokenizer_wants_tokens(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no tokenizer\.json; give --tokens"):
        cases.sequence(Case("c", tmp_path, prompt="lamp"))
    assert cases.sequence(Case("c", tmp_path, tokens=(7, 5000))) == [7, 5000]
    assert cases.words(Case("c", tmp_path), [7]) == ["7"]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="is not a tokenizer file"):
        cases.sequence(Case("c", tmp_path, prompt="lamp"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is not a JSON file"):
        cases.sequence(Case("c", tmp_path, tokens=(1,)))


def test_an_unk_token_is_an_unknown_word(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="the word 'bee'"):
        cases.tokenise(tmp_path, "a bee a")
    assert cases.tokenise(tmp_path, "a a") == [0, 0]


def test_lengths_and_batches() -> None:
    case = Case("c", TINY, tokens=(5, 6, 7))
    assert cases.sequence(case.override(length=7)) == [5, 6, 7, 5, 6, 7, 5]
    assert cases.sequence(case.override(length=2)) == [5, 6]
    ids = list(range(20))
    made = cases.inputs(case.override(batch=2, positions=100), ids)
    assert made["input_ids"].tolist() == [ids, ids[7:] + ids[:7]]
    assert made["positions"].tolist() == [list(range(100, 120))] * 2
    assert made["lengths"].tolist() == [120, 120]


def test_without_text_tokens_come_from_the_seed() -> None:
    one, two = (cases.sequence(Case("c", TINY, seed=s, length=50)) for s in (1, 2))
    assert one != two
    assert one == cases.sequence(Case("c", TINY, seed=1, length=50))


def test_a_new_prompt_replaces_the_old_text_and_length() -> None:
    case = Case("c", TINY, tokens=(1, 2), length=9)
    assert len(cases.sequence(case.override(prompt="lamp key"))) == 3
    assert len(cases.sequence(case.override(prompt="lamp key", length=5))) == 5


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(sorted(cases.KEYS)), st.text("abc_", min_size=1, max_size=5)),
        st.one_of(st.integers(-3, 3), st.sampled_from(['"a"', "true", "[1, 2]", "1.5", "[[1]]", "{a = 1}", '""'])),
        max_size=5,
    )
)
def test_any_case_file_is_read_or_refused(tmp_path: Path, data: dict[str, object]) -> None:
    body = "\n".join(f"{key} = {value}" for key, value in data.items())
    try:
        cases.load(write(tmp_path, body))
    except UsageError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
