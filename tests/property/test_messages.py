"""Messages survive the wire, and what is no message is refused with one kind of error."""

import types
import typing
from enum import Enum

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.errors import ProtocolMismatch
from kv_transfer.messages import Hello, Message, decode, encode

SETTINGS = settings(max_examples=60, derandomize=True, deadline=None)
MESSAGE_TYPES = typing.get_args(Message)


def values_of(annotation: object) -> st.SearchStrategy[object]:
    """Any value of a field's type."""
    supertype = getattr(annotation, "__supertype__", None)
    if supertype is not None:
        return values_of(supertype)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return st.sampled_from(list(annotation))
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return structs_of(annotation)
    simple: dict[object, st.SearchStrategy[object]] = {
        int: st.integers(-(2**62), 2**62),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=16),
        types.NoneType: st.none(),
        None: st.none(),
    }
    return simple[annotation]


def structs_of(kind: type) -> st.SearchStrategy[object]:
    if kind.__name__ == "CacheLayout":
        component = msgspec.convert(["latent", [0, 1], 64, "bf16"], typing.get_args(typing.get_type_hints(kind)["components"])[0])
        return st.just(kind(64, (component,), "model", "tokenizer"))
    return st.fixed_dictionaries({name: values_of(hint) for name, hint in typing.get_type_hints(kind).items()}).map(
        lambda values: kind(**values)
    )


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_decode_undoes_encode(kind: type) -> None:
    @SETTINGS
    @given(structs_of(kind))
    def check(message: Message) -> None:  # type: ignore[valid-type]
        assert decode(encode(message)) == message

    check()


@SETTINGS
@given(st.binary(max_size=64))
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    try:
        message = decode(frame)
    except ProtocolMismatch:
        return
    assert isinstance(message, MESSAGE_TYPES)


@SETTINGS
@given(st.data(), st.sampled_from(MESSAGE_TYPES))
def test_a_frame_that_was_cut_is_refused(data: st.DataObject, kind: type) -> None:
    frame = encode(data.draw(structs_of(kind)))  # type: ignore[arg-type]
    with pytest.raises(ProtocolMismatch):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_a_message_of_a_later_minor_version_is_understood() -> None:
    """A field added at the end with a default is a minor change: the older side ignores it."""
    longer = msgspec.msgpack.encode(["Hello", "gateway", "g", 1, b"proof", "a later field"])
    assert decode(longer) == msgspec.convert(["Hello", "gateway", "g", 1, b"proof"], Hello)


def test_a_message_of_another_kind_is_refused() -> None:
    with pytest.raises(ProtocolMismatch, match="no message of protocol"):
        decode(msgspec.msgpack.encode(["Goodbye", 1]))
