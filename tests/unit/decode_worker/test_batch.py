"""The columns of the decoding sequences: who still needs slots."""

from decode_worker.batch import NO_END_OF_SLOTS, DecodeBatch
from decode_worker.sequences import DecodeSequence
from kv_transfer.identity import BlockId, Incarnation, RequestId, SequenceId, TransferId, WorkerId, pack_tokens, peer_id
from kv_transfer.messages import SamplingParameters

BLOCK_SIZE = 16


def sequence_of(name: str, num_tokens: int, max_tokens: int, num_blocks: int) -> DecodeSequence:
    """A prompt of `num_tokens` of which all but the last are stored."""
    return DecodeSequence(
        sequence_id=SequenceId(name),
        age=0,
        transfer=TransferId(RequestId(name), 1, Incarnation(0), Incarnation(1)),
        router=peer_id(WorkerId("gateway"), Incarnation(2)),
        packed=bytearray(pack_tokens([1] * num_tokens)),
        num_tokens=num_tokens,
        num_given_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        first_index=0,
        salt=b"",
        sampling=SamplingParameters(max_tokens=max_tokens, seed=0),
        block_table=[BlockId(block) for block in range(num_blocks)],
        num_stored_tokens=num_tokens - 1,
    )


def test_who_ends_in_the_blocks_it_has_needs_no_more() -> None:
    goes_on, ends = sequence_of("goes on", 20, 100, 2), sequence_of("ends", 20, 12, 2)
    grows = sequence_of("grows", 20, 13, 2)
    batch = DecodeBatch(sequences=(goes_on, ends, grows))
    assert batch.free_slots(BLOCK_SIZE) == (13, NO_END_OF_SLOTS, 13)
    batch.look_ahead(BLOCK_SIZE, max_rows=6)
    assert batch.num_roomy_steps == 1, "the fewest free slots decide"
