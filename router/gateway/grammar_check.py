"""`python -m router.gateway.grammar_check`: compiles other people's grammars where a hostile one can do no harm.

A process of its own, since nothing else bounds every grammar: some compile for minutes whatever limits the library is given (multipleOf
of a large number). Reads requests from standard input, answers each on standard output, ends when the input does. Whoever takes longer
than the request's limit, or more memory than MAX_MEMORY_BYTES, ends the process; its owner (`grammar_checker.py`) starts another.
"""

import functools
import json
import resource
import signal
import sys
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from kv_transfer.grammar import PARSER_LIMITS, GrammarKind, GrammarSpec, library_text
from router.gateway.grammar_frames import CheckReply, CheckRequest, frame, read_frame
from router.gateway.turn_parser import CALL_TAGS

MAX_MEMORY_BYTES = 1 << 30
NO_ANSWER = "no text matches it"
CALLS = "calls"
"""The notation of grammars that the gateway has written: they alone know the tags of tool calls."""


@functools.cache
def byte_tokenizer() -> Any:
    """Single bytes, without any control token that a client's grammar could name."""
    return LLTokenizer("byte")


@functools.cache
def call_tokenizer() -> Any:
    """Printable bytes and the tags of tool calls."""
    characters = [chr(code) for code in (*range(ord("!"), ord("~") + 1), 0x120, 0x10A)]  # GPT-2 writes blank and line end so
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spellings = ["<end>", *(tag.value for tag in CALL_TAGS)]
    added = [{"id": len(characters) + place, "content": text, **plain} for place, text in enumerate(spellings)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {character: place for place, character in enumerate(characters)}, "merges": []}
    tree = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    return LLTokenizer(json.dumps(tree), eos_token=len(characters))


def check(request: CheckRequest) -> CheckReply:
    """Compile a grammar and look at its first mask, over single bytes: what leads nowhere there does so with any vocabulary."""
    limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
    try:
        tokenizer = call_tokenizer() if request.notation == CALLS else byte_tokenizer()
        spec = _read(request)
        text = library_text(spec)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, tokenizer, limits=limits)
        if is_wrong:
            return CheckReply("; ".join(messages))
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except Exception as error:  # a grammar may do whatever it likes to its parsers; nothing of it may end this process but its limits
        return CheckReply(str(error) or type(error).__name__)
    if matcher.is_error():
        error_text = matcher.get_error()
        return CheckReply(NO_ANSWER if "NoExtension" in error_text else error_text)
    return CheckReply("", spec, tuple(messages))


def _read(request: CheckRequest) -> GrammarSpec:
    if request.notation == CALLS:
        return GrammarSpec(GrammarKind.LARK, request.text)
    if request.notation == "grammar":
        return GrammarSpec(GrammarKind.LARK, any_to_lark(request.text))
    return GrammarSpec(GrammarKind(request.notation), request.text, is_lenient=request.is_lenient)


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who closes the input
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder, encoder = msgspec.msgpack.Decoder(CheckRequest), msgspec.msgpack.Encoder()
    while (body := read_frame(sys.stdin.buffer)) is not None:
        request = decoder.decode(body)
        # CPU time, so that a busy machine refuses no good grammar. The default action of SIGPROF ends the process whatever native code
        # it is in.
        signal.setitimer(signal.ITIMER_PROF, request.limit_s)
        reply = check(request)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(frame(encoder.encode(reply)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
