"""Turn the chosen entries into one uint8 buffer and back, and count the bytes of that buffer."""

from gradwire.encode.format import HEADER, Encoding, nbytes
from gradwire.encode.message import Message, encode
from gradwire.encode.read import decode

__all__ = ["HEADER", "Encoding", "Message", "decode", "encode", "nbytes"]
