"""`python -m router.gateway.grammar_check`: compiles other people's grammars where a hostile one can do no harm.

A process of its own, since nothing else bounds every grammar: some compile for minutes whatever limits the library is given (multipleOf
of a large number). Reads requests from standard input, answers each on standard output, ends when the input does. Whoever takes longer
than the request's limit, or more memory than MAX_MEMORY_BYTES, ends the process; its owner (`grammar_checker.py`) starts another.
"""

import resource
import signal
import sys
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from kv_transfer.grammar import PARSER_LIMITS, GrammarKind, GrammarSpec, library_text
from router.gateway.grammar_frames import CheckReply, CheckRequest, frame, read_frame

MAX_MEMORY_BYTES = 1 << 30
NO_ANSWER = "no text matches it"


def check(request: CheckRequest, tokenizer: Any) -> CheckReply:
    """Compile a grammar and look at its first mask, over single bytes: what leads nowhere there does so with any vocabulary."""
    limits = LLParserLimits(**PARSER_LIMITS)  # type: ignore[arg-type]
    try:
        spec = _read(request)
        text = library_text(spec)
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
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
    if request.notation == "grammar":
        return GrammarSpec(GrammarKind.LARK, any_to_lark(request.text))
    return GrammarSpec(GrammarKind(request.notation), request.text, is_lenient=request.is_lenient)


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who closes the input
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    decoder, encoder = msgspec.msgpack.Decoder(CheckRequest), msgspec.msgpack.Encoder()
    while (body := read_frame(sys.stdin.buffer)) is not None:
        request = decoder.decode(body)
        # The default action of SIGALRM ends the process whatever native code it is in.
        signal.setitimer(signal.ITIMER_REAL, request.limit_s)
        reply = check(request, tokenizer)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.stdout.buffer.write(frame(encoder.encode(reply)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
