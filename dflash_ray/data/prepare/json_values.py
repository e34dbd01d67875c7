"""The values of a JSON file one by one, in memory that holds one value.

The file is one array, or values one after the other: JSON lines under a `.json` name, or pretty-printed objects. After a broken value
reading goes on at the next line where values are lines; inside an array nothing after it can be trusted, and the rest is one refused row.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import BinaryIO

_READ_BYTES = 1 << 20
_BLANK = " \t\r\n"
_DECODER = json.JSONDecoder()


class Broken(ValueError):
    """No JSON value starts here."""


def json_values(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | Broken]]:
    """(line where a value starts, its JSON text in UTF-8 or what is wrong). A value of over `limit` characters is broken."""
    text = _Window(file, limit)
    first = text.peek()
    if first == "[":
        text.advance(1)
        yield from _array(text)
        first = text.peek()
        if not first:
            return
        yield text.line, Broken("text after the end of the array")
    elif first:
        yield from _sequence(text)


def _array(text: _Window) -> Iterator[tuple[int, bytes | Broken]]:
    if text.peek() == "]":
        text.advance(1)
        return
    while True:
        text.peek()
        line = text.line
        try:
            yield line, text.value()
            if (separator := text.peek()) not in (",", "]"):
                raise Broken(f"expected , or ] after an element, found {separator!r}")
        except Broken as error:
            yield text.line, Broken(f"broken array, nothing after this is read: {error}")
            text.discard()
            return
        text.advance(1)
        if separator == "]":
            return


def _sequence(text: _Window) -> Iterator[tuple[int, bytes | Broken]]:
    while text.peek():
        line = text.line
        try:
            yield line, text.value()
        except Broken as error:
            text.skip_line()
            yield line, error


class _Window:
    """A moving window of decoded text over the file."""

    def __init__(self, file: BinaryIO, limit: int):
        self._file = file
        self._limit = limit
        # broken bytes become surrogates and bytes again, so that the row they are in is refused and no other
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = 1
        self._grow()
        if self._text.startswith("\ufeff"):
            self._at = 1

    def peek(self) -> str:
        """The next character that is not blank, now the current one; "" at the end."""
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in _BLANK:
                    return character
                self.line += character == "\n"
                self._at += 1
            if self._ended:
                return ""
            self._grow()

    def advance(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def value(self) -> bytes:
        """The text of the JSON value that starts at the current character, which is moved behind it. `Broken` if there is none."""
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
            except RecursionError:
                raise Broken("nested too deep") from None
            except ValueError as error:
                if self._ended or not self._may_be_cut(error):
                    raise Broken(str(error)[:120]) from None
            else:
                if end < len(self._text) or self._ended:
                    value = self._text[self._at : end]
                    self.advance(end - self._at)
                    return value.encode("utf-8", "surrogateescape")
            if len(self._text) - self._at > self._limit:
                raise Broken(f"more than {self._limit >> 20} MiB")
            self._grow()

    def skip_line(self) -> None:
        while (end := self._text.find("\n", self._at)) < 0:
            self._at = len(self._text)
            if self._ended:
                return
            self._grow()
        self.advance(end + 1 - self._at)

    def discard(self) -> None:
        """Nothing more is read."""
        self._at = len(self._text)
        self._ended = True

    def _may_be_cut(self, error: ValueError) -> bool:
        """Whether more text could make the value whole."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        return error.msg.startswith("Unterminated string") or len(self._text) - error.pos < 16

    def _grow(self) -> None:
        """Reads as much again as is pending, so that a large value is scanned a few times and not once a megabyte."""
        kept = self._text[self._at :]
        data = self._file.read(max(_READ_BYTES, len(kept)))
        self._ended = not data
        self._text = kept + self._decoder.decode(data, final=self._ended)
        self._at = 0
