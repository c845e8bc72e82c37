"""Good grammars pass, bad ones say why, hostile ones end their checker and nothing else. A real process each time."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from kv_transfer.errors import InvalidRequest, QueueFull
from kv_transfer.grammar import GrammarKind, GrammarSpec
from router.gateway import grammar_checker
from router.gateway.grammar_checker import CheckedGrammar, CheckerUnavailable, GrammarChecker
from router.gateway.grammar_fields import AskedGrammar, Notation
from tests.running_cluster import wait_until

T = TypeVar("T")
LIMIT_S = 0.5

NESTED: dict[str, object] = {"type": "integer"}
for _ in range(300):
    NESTED = {"type": "array", "items": NESTED}


def asked(notation: Notation, text: object, *, is_lenient: bool = False) -> AskedGrammar:
    return AskedGrammar("field", notation, text if isinstance(text, str) else json.dumps(text), is_lenient)


def with_checker(scene: Callable[[GrammarChecker], Awaitable[T]]) -> T:
    async def run() -> T:
        checker = GrammarChecker(LIMIT_S)
        try:
            return await scene(checker)
        finally:
            await checker.close()

    return asyncio.run(run())


async def reason(checker: GrammarChecker, grammar: AskedGrammar) -> str:
    with pytest.raises(InvalidRequest) as caught:
        await checker.check(grammar)
    assert caught.value.param == "field"
    return caught.value.message


def test_what_passes_is_what_workers_are_given() -> None:
    async def scene(checker: GrammarChecker) -> list[CheckedGrammar]:
        return [
            await checker.check(asked(Notation.JSON_SCHEMA, {"type": "object"})),
            await checker.check(asked(Notation.REGEX, "[a-z]+")),
            await checker.check(asked(Notation.GRAMMAR, 'start: "a" b\nb: "b"')),
            await checker.check(asked(Notation.GRAMMAR, 'root ::= "a" b\nb ::= [0-9]+')),
            await checker.check(asked(Notation.JSON_SCHEMA, {"uniqueItems": True}, is_lenient=True)),
        ]

    schema, regex, lark, gbnf, lenient = with_checker(scene)
    assert schema.spec == GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    assert regex.spec == GrammarSpec(GrammarKind.REGEX, "[a-z]+")
    assert lark.spec == GrammarSpec(GrammarKind.LARK, 'start: "a" b\nb: "b"')
    assert gbnf.spec.kind is GrammarKind.LARK
    assert "start:" in gbnf.spec.text
    assert lenient.spec.is_lenient
    assert "uniqueItems" in lenient.warnings[0]


def test_what_is_wrong_says_why() -> None:
    cases = [
        (Notation.REGEX, "(a", "unclosed group"),
        (Notation.REGEX, r"\bword", "lookarounds not supported"),
        (Notation.REGEX, "(" * 5000 + ")" * 5000, "invalid regex"),
        (Notation.GRAMMAR, "start: nowhere", "unknown name"),
        (Notation.GRAMMAR, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (Notation.GRAMMAR, "root ::= (", "Expected ')'"),
        (Notation.GRAMMAR, "start: <think>", "<think>"),
        (Notation.JSON_SCHEMA, {"type": "txt"}, "Invalid type: txt"),
        (Notation.JSON_SCHEMA, {"not": {}}, "Unimplemented keys"),
        (Notation.JSON_SCHEMA, {"$ref": "#"}, "no text matches it"),
        (Notation.JSON_SCHEMA, {"$ref": "https://example.org/a.json"}, "does not fetch"),
        (Notation.JSON_SCHEMA, {"type": "string", "minLength": 5, "maxLength": 2}, "Unsatisfiable"),
        (Notation.JSON_SCHEMA, NESTED, "recursion limit"),
    ]

    async def scene(checker: GrammarChecker) -> list[str]:
        reasons = [await reason(checker, asked(notation, text)) for notation, text, _ in cases]
        assert checker.num_lost == 0, "a refusal costs no process"
        return reasons

    for (_, text, expected), given in zip(cases, with_checker(scene), strict=True):
        assert expected in given, (str(text)[:80], given)
        assert "\n" not in given
        assert len(given) < 500


def test_a_grammar_that_takes_for_ever_ends_its_checker_alone() -> None:
    endless = asked(Notation.JSON_SCHEMA, {"type": "integer", "multipleOf": 99999989})

    async def scene(checker: GrammarChecker) -> None:
        started_s = time.monotonic()
        bad, good = await asyncio.gather(reason(checker, endless), checker.check(asked(Notation.REGEX, "a")))
        assert "takes longer than 0.5 s" in bad
        assert good.spec.text == "a"
        assert await reason(checker, endless) == bad
        assert checker.num_lost == 1, "what has ended a checker once is not tried again"
        assert time.monotonic() - started_s < 10

    with_checker(scene)


def test_an_asker_that_leaves_takes_its_answer_along() -> None:
    async def scene(checker: GrammarChecker) -> None:
        await checker.check(asked(Notation.REGEX, "a"))
        leaving = asyncio.ensure_future(checker.check(asked(Notation.REGEX, "(b")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await checker.check(asked(Notation.REGEX, "c"))).spec.text == "c"

    with_checker(scene)


def test_too_many_at_once_are_put_off() -> None:
    async def scene(checker: GrammarChecker) -> None:
        number = grammar_checker.MAX_WAITING + 5
        answers = await asyncio.gather(
            *(checker.check(asked(Notation.REGEX, f"a{index}")) for index in range(number)), return_exceptions=True
        )
        assert sum(isinstance(answer, QueueFull) for answer in answers) == 5
        assert sum(isinstance(answer, CheckedGrammar) for answer in answers) == number - 5

    with_checker(scene)


# -- a checker that is lost for reasons of its machine -------------------------------------------------------------------

STALLS = """
import time
from router.gateway import grammar_check as module
check = module.check
module.check = lambda request: (time.sleep(1.0), check(request))[1]
module.main()
"""
DIES_ONCE = """
import os, pathlib, signal, sys
from router.gateway.grammar_check import main
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
main()
"""
ENDS_SLOWLY = """
import os, signal, sys, time
sys.stdin.buffer.read(1)
os.close(1)
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGPROF)
"""
CLOSES_AND_STAYS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
os.close(1)
time.sleep(60)
"""


def test_a_stall_of_the_machine_refuses_no_grammar() -> None:
    async def scene() -> None:
        checker = GrammarChecker(LIMIT_S, command=(sys.executable, "-c", STALLS))
        assert (await checker.check(asked(Notation.REGEX, "a"))).spec.text == "a"
        assert checker.num_lost == 0
        await checker.close()

    asyncio.run(scene())


def test_a_checker_that_was_killed_is_replaced_and_asked_again(tmp_path: Path) -> None:
    async def scene() -> None:
        checker = GrammarChecker(LIMIT_S, command=(sys.executable, "-c", DIES_ONCE, str(tmp_path / "mark")))
        assert (await checker.check(asked(Notation.REGEX, "a"))).spec.text == "a"
        assert checker.num_lost == 1
        await checker.close()

    asyncio.run(scene())


def test_a_checker_whose_output_has_ended_may_end_by_itself() -> None:
    """Killing it at that moment would hide, or lose, that it has used up its CPU time."""

    async def scene() -> None:
        checker = GrammarChecker(LIMIT_S, command=(sys.executable, "-c", ENDS_SLOWLY))
        assert "takes longer than 0.5 s" in await reason(checker, asked(Notation.REGEX, "a"))
        assert checker.num_lost == 1
        await checker.close()

    asyncio.run(scene())


def test_an_asker_that_leaves_meanwhile_ends_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def scene() -> None:
        checker = GrammarChecker(LIMIT_S, end_s=30, command=(sys.executable, "-c", CLOSES_AND_STAYS, str(mark)))
        leaving = asyncio.ensure_future(checker.check(asked(Notation.REGEX, "a")))
        await asyncio.to_thread(wait_until, lambda: checker.num_lost == 1, 10, lambda: "the checker is not lost")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving

    started_s = time.monotonic()
    asyncio.run(scene())
    assert time.monotonic() - started_s < 15
    wait_until(lambda: not psutil.pid_exists(int(mark.read_text())), 10, lambda: "the checker is still there")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("/nonexistent/python",), id="cannot be started"),
        pytest.param((sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), id="killed"),
        pytest.param((sys.executable, "-c", "import time; time.sleep(60)"), id="says nothing"),
        pytest.param((sys.executable, "-c", "import os, time; os.close(1); time.sleep(60)"), id="closes its output and stays"),
        pytest.param((sys.executable, "-c", "import os; os.write(1, bytes([1, 0, 0, 0, 193])); input()"), id="says nonsense"),
    ],
)
def test_no_checker_is_no_fault_of_the_grammar(command: tuple[str, ...]) -> None:
    async def scene() -> None:
        checker = GrammarChecker(LIMIT_S, wall_s=0.5, end_s=0.2, command=command)
        for number in (2, 4):  # asked again, nothing is remembered
            with pytest.raises(CheckerUnavailable) as caught:
                await checker.check(asked(Notation.REGEX, "a"))
            assert caught.value.http_status == 503
            assert checker.num_lost == number
        await checker.close()

    asyncio.run(scene())
