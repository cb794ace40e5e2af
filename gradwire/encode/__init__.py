"""Sparse <-> one uint8 buffer, and how many bytes that takes."""

from gradwire.encode.format import HEADER, Encoding, nbytes
from gradwire.encode.message import Message, encode
from gradwire.encode.read import decode

__all__ = ["HEADER", "Encoding", "Message", "decode", "encode", "nbytes"]
