import json
import struct

import pytest

from modelyard.serve.dataplane import wire

ITEMS = [
    wire.Item(1, 200, 0, b"content-type\0text/plain", b"one", 120, 0xFFFFFFFF),
    wire.Item(2, 0, wire.EXPLAIN, b"", b""),
    wire.Item(0xFFFFFFFF, 65535, wire.ALONE, b"\0\0", bytes(range(256))),
]


def encode(*items: wire.Item) -> bytes:
    frame = wire.Frame()
    for item in items:
        frame.add(item.id, item.code, item.flags, item.meta, [item.body], *item[5:])
    return b"".join(frame.buffers())


TWO_FRAMES = encode(*ITEMS) + encode(ITEMS[0])


def test_frames_survive_a_split_at_every_byte() -> None:
    for at in range(len(TWO_FRAMES) + 1):
        decoder = wire.Decoder(1000)
        frames = decoder.feed(TWO_FRAMES[:at]) + decoder.feed(TWO_FRAMES[at:])
        assert frames == [ITEMS, ITEMS[:1]], f"split at byte {at} of {len(TWO_FRAMES)}"


def test_frames_survive_arriving_byte_by_byte() -> None:
    decoder = wire.Decoder(1000)
    frames = [frame for byte in TWO_FRAMES for frame in decoder.feed(bytes([byte]))]
    assert frames == [ITEMS, ITEMS[:1]]


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_what_is_received_in_its_own_place_is_the_same(piece: int) -> None:
    sent, frames = TWO_FRAMES, []
    decoder = wire.Decoder(1000)
    while sent:
        if (room := decoder.room) is not None:
            count = min(piece, len(room), len(sent))
            room[:count] = sent[:count]
            frames += decoder.filled(count)
        else:
            count = min(piece, len(sent))
            frames += decoder.feed(sent[:count])
        sent = sent[count:]
    assert frames == [ITEMS, ITEMS[:1]]


def test_a_body_that_came_in_pieces_is_put_together_once() -> None:
    decoder = wire.Decoder(1000)
    sent = encode(wire.Item(1, 0, 0, b"meta", b"x" * 900))
    assert decoder.feed(sent[:100]) == []
    assert decoder.room is not None
    assert len(decoder.room) == len(sent) - 100
    ((item,),) = decoder.feed(sent[100:])
    assert (item.body, type(item.body)) == (b"x" * 900, bytearray)
    assert decoder.room is None


def test_a_body_in_parts_arrives_as_one() -> None:
    frame = wire.Frame()
    frame.add(7, 0, 0, b"m", [b"ab", b"", b"cd"])
    ((item,),) = wire.Decoder(10).feed(b"".join(frame.buffers()))
    assert item == wire.Item(7, 0, 0, b"m", b"abcd")


def test_payloads_are_framed_without_being_copied() -> None:
    body = b"x" * 1000
    frame = wire.Frame()
    frame.add(1, 0, 0, b"", [body])
    assert any(buffer is body for buffer in frame.buffers())


def test_the_layout_is_the_documented_one() -> None:
    expected = struct.pack("<I", 1) + struct.pack("<IHHIIIII", 5, 404, 3, 7, 9, 11, 1, 2)
    expected += b"m" + b"bd"
    assert encode(wire.Item(5, 404, 3, b"m", b"bd", 7, 9, 11)) == expected


def test_a_body_of_the_longest_length_is_taken_and_one_byte_more_is_refused() -> None:
    frames = wire.Decoder(10).feed(encode(wire.Item(1, 0, 0, b"123", b"1234567")))
    assert frames[0][0].body == b"1234567"
    with pytest.raises(wire.WireError, match="an item of 11 bytes; 10 are allowed"):
        wire.Decoder(10).feed(encode(wire.Item(1, 0, 0, b"123", b"12345678")))


def test_a_time_in_a_head_is_a_while_ago_even_where_the_clock_began_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter((2**32 / 1e6 - 1.5, 2**32 / 1e6 + 1))
    monkeypatch.setattr(wire, "monotonic", lambda: next(times))
    assert wire.since_us(wire.now_us()) == 2_500_000


def test_a_length_over_the_limit_is_refused_before_the_bytes_arrive() -> None:
    head = struct.pack("<I", 1) + wire.HEAD.pack(1, 200, 0, 0, 0, 0, 0, 0xFFFFFFFF)
    with pytest.raises(wire.WireError):
        wire.Decoder(1 << 30).feed(head)


@pytest.mark.parametrize("count", [0, wire.MAX_ITEMS + 1, 0xFFFFFFFF])
def test_a_frame_without_items_or_with_too_many_is_refused(count: int) -> None:
    with pytest.raises(wire.WireError, match=f"a frame of {count} items"):
        wire.Decoder(10).feed(struct.pack("<I", count))


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"HTTP/1.1 200 OK\r\n\r\n", b"\0" * 64])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.Decoder(1 << 20).feed(garbage)


@pytest.mark.parametrize("fields", [[], [b"a"], [b"a", b""], [b"", b"", b"id", b"name", b"value"]])
def test_packed_fields_are_unpacked(fields: list[bytes]) -> None:
    assert wire.unpack_meta(wire.pack_meta(fields)) == fields


def test_a_control_message_is_json_on_id_0() -> None:
    ((item,),) = wire.Decoder(1000).feed(wire.encode_control(wire.READY, {"pid": 7}))
    assert (item.id, item.code, json.loads(item.body)) == (0, wire.READY, {"pid": 7})
    assert wire.decode_control(item) == {"pid": 7}


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[1]", b"\xff", b"null"])
def test_a_control_message_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(wire.WireError, match="control message 2"):
        wire.decode_control(wire.Item(0, wire.READY, 0, b"", body))


def test_all_items_of_a_frame_together_have_a_limit_before_their_bytes_arrive() -> None:
    heads = b"".join(wire.HEAD.pack(id, 200, 0, 0, 0, 0, 0, 600) for id in (1, 2))
    frame = struct.pack("<I", 2) + heads
    assert wire.Decoder(1000, None, 1200).feed(frame) == []
    with pytest.raises(wire.WireError, match="a frame of 1200 bytes; 1199 are allowed"):
        wire.Decoder(1000, None, 1199).feed(frame)


def test_control_items_have_a_limit_of_their_own() -> None:
    text = wire.encode_control(wire.READY, {"a": "x" * 100})
    assert wire.Decoder(1000).feed(text)
    with pytest.raises(wire.WireError, match="an item of 109 bytes; 100 are allowed"):
        wire.Decoder(1000, 100).feed(text)


def test_empty_parts_do_not_shift_what_stands_behind_them() -> None:
    bodies = [[b"a" * (9 << 20)], [b""], [b"b", b""], [b"c"]]
    frame = wire.Frame()
    for at, parts in enumerate(bodies):
        frame.add(at + 1, 200, 0, b"longer", parts)
    decoder = wire.Decoder(1 << 24)
    found = [decoder.feed(b"".join(buffers)) for buffers in frame.split()]
    arrived = [bytes(item.body) for frames in found for items in frames for item in items]
    assert arrived == [b"".join(parts) for parts in bodies]


def test_a_frame_that_is_too_long_goes_out_as_several() -> None:
    sizes = [3, 4, 0, 4, 9, 1]
    items = [
        wire.Item(at + 1, 200, 0, b"m", bytes([at]) * (size << 20)) for at, size in enumerate(sizes)
    ]
    frame = wire.Frame()
    for item in items:
        half = len(item.body) // 2
        frame.add(item.id, 200, 0, b"m", [item.body[:half], item.body[half:]])
    frame.add(0, wire.METRICS, 0, b"", [b"{}"])
    sent = [b"".join(buffers) for buffers in frame.split()]
    frames = [found for data in sent for found in wire.Decoder(1 << 24).feed(data)]
    assert [[item.id for item in found] for found in frames] == [[1, 2, 3], [4], [5], [6, 0]]
    assert [found[0].flags for found in frames] == [wire.PARTIAL] * 3 + [0]
    arrived = [item._replace(flags=0) for found in frames for item in found]
    assert arrived[:-1] == items
    assert all(
        sum(len(item.meta) + len(item.body) for item in found) <= wire.FRAME_BYTES
        for found in frames
        if len(found) > 1
    )
