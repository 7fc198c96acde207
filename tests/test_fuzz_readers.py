"""What others wrote is read, or refused in the reader's own words: kept inputs, and a few new ones.

`python -m tests.fuzz.guided` finds more, ten minutes a reader, at night.
"""

import random
from collections.abc import Iterator

import pytest

from tests.fuzz.readers import Reader, all_readers

READERS = all_readers()
DRAWS = 60
PIECES = (b"", b"\0", b"\xff", b'"', b"{", b"]", b"-1", b"1e999", b"null", b"../", b"\r\n", b"\xed")


@pytest.mark.parametrize("name", READERS)
def test_it_is_read_or_refused(name: str) -> None:
    reader = READERS[name]
    for data in reader.known():
        _read(reader, data)
    for data in _changed(reader):
        _read(reader, data)


@pytest.mark.parametrize("name", READERS)
def test_whole_inputs_are_read(name: str) -> None:
    """Else the inputs made from them never come past the door."""
    for data in READERS[name].seeds():
        READERS[name].read(data)


def test_nothing_is_kept_for_a_reader_that_is_gone() -> None:
    places = {reader.corpora for reader in READERS.values()}
    kept = {folder for place in places if place.is_dir() for folder in place.iterdir()}
    assert kept <= {reader.corpus for reader in READERS.values()}


def _read(reader: Reader, data: bytes) -> None:
    try:
        reader.read(data)
    except reader.refusals as error:
        assert str(error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}; of {data!r}") from error


def _changed(reader: Reader) -> Iterator[bytes]:
    """Draw inputs: some bytes are others, are left out, or come twice."""
    draw = random.Random(reader.name)
    whole = reader.known()
    for _ in range(DRAWS):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 4)):
            at, length = draw.randint(0, len(data)), draw.choice((0, 1, 2, 8, 64))
            how = draw.randrange(3)
            if how == 0:
                data[at : at + length] = draw.choice(PIECES)
            elif how == 1:
                data[at : at + length] = draw.randbytes(length)
            else:
                data[at:at] = data[at : at + length]
        yield bytes(data)
