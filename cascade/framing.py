"""Frames on a stream: a 4-byte little-endian length, then one msgpack message (see `cascade.protocol`)."""

import asyncio
import struct

import msgspec

from cascade.protocol import MAX_FRAME_BYTES, ClientMessage, EngineMessage

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """The peer sent something that is not a frame of this protocol."""


def encode(message: ClientMessage | EngineMessage) -> bytes:
    """One message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame's body, or None at the end of the stream. Raises FrameError."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a frame of {length} bytes, the limit is {MAX_FRAME_BYTES}")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FrameError("the stream ended inside a frame") from error
        return None
    except ConnectionError:
        return None
