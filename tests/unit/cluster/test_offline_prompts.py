"""Where prompts come from: one, or many; text, or JSON."""

import io
from pathlib import Path

import pytest

from cluster.offline_prompts import read_prompts
from kv_transfer.errors import ConfigError

NO_INPUT = io.StringIO("")


def test_one_prompt() -> None:
    (given,) = read_prompts("Hello", None, is_jsonl=False, stdin=NO_INPUT)
    assert given.body == {"prompt": "Hello"}


def test_all_of_standard_input_is_one_prompt() -> None:
    (given,) = read_prompts("-", None, is_jsonl=False, stdin=io.StringIO("two\nlines\n"))
    assert given.body == {"prompt": "two\nlines\n"}


def test_a_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('first\n\n{"not": "json here"}\n')
    given = read_prompts(None, str(file), is_jsonl=False, stdin=NO_INPUT)
    assert [(prompt.place, prompt.body["prompt"]) for prompt in given] == [(f"{file}:1", "first"), (f"{file}:3", '{"not": "json here"}')]


def test_jsonl_by_its_name_and_by_the_flag(tmp_path: Path) -> None:
    text = '{"prompt": "a", "max_tokens": 3}\n{"messages": [{"role": "user", "content": "b"}]}\n'
    (tmp_path / "prompts.jsonl").write_text(text)
    named = read_prompts(None, str(tmp_path / "prompts.jsonl"), is_jsonl=False, stdin=NO_INPUT)
    flagged = read_prompts(None, "-", is_jsonl=True, stdin=io.StringIO(text))
    assert [prompt.body for prompt in named] == [prompt.body for prompt in flagged]
    assert named[0].body == {"prompt": "a", "max_tokens": 3}
    assert flagged[1].place == "standard input:2"


@pytest.mark.parametrize(
    ("prompt", "file", "content", "place", "says"),
    [
        (None, None, "", "PROMPT", "give a prompt, or a file"),
        ("x", "y", "", "PROMPT", "give a prompt, or a file"),
        (" ", None, "", "PROMPT", "is empty"),
        ("-", None, "\n", "PROMPT", "is empty"),
        (None, "-", "\n \n", "standard input", "every line is blank"),
        (None, "/nowhere/at/all", "", "/nowhere/at/all", "cannot be read (No such file"),
    ],
)
def test_no_prompt(prompt: str | None, file: str | None, content: str, place: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prompts(prompt, file, is_jsonl=False, stdin=io.StringIO(content))
    assert caught.value.path == place
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("line", "says"),
    [("{", "is not JSON"), ("[]", "either messages or prompt"), ("{}", "either"), ('{"prompt": "a", "messages": []}', "either")],
)
def test_a_bad_line_is_named(line: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_prompts(None, "-", is_jsonl=True, stdin=io.StringIO(f'{{"prompt": "good"}}\n{line}\n'))
    assert caught.value.path == "standard input:2"
    assert says in caught.value.message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(None, str(tmp_path / "prompts"), is_jsonl=False, stdin=NO_INPUT)
