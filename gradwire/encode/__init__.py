"""Sparse <-> one uint8 buffer, and how many bytes that takes."""

from gradwire.encode.message import HEADER, Encoding, Message, encode, nbytes
from gradwire.encode.read import decode

__all__ = ["HEADER", "Encoding", "Message", "decode", "encode", "nbytes"]
