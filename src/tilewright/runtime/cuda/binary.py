"""What a cubin says of a kernel: registers and local memory, read from its ELF sections."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTION = struct.Struct(
    "<IIQQQQIIQQ"
)  # name, type, flags, address, offset, size, link, info, align, entry size
_VALUE = 4  # a record of `.nv.info` with a payload (the others carry 16 bits in place of its size)
_FRAME, _REGISTERS = (
    0x11,
    0x2F,
)  # records: (symbol, bytes of the stack frame), (symbol, registers of a thread)


def resources(cubin: bytes, entry: str) -> tuple[int | None, int | None]:
    """Registers (32 bits each) and bytes of local memory that one thread of `entry` has; None for what is not said."""
    try:
        sections = {name: (info, data) for name, info, data in _sections(cubin)}
        symbols = _symbols(sections[".symtab"][1], sections[".strtab"][1])
        found: dict[int, int] = {}
        for kind, payload in _records(sections[".nv.info"][1]):
            if len(payload) == 8:
                symbol, value = struct.unpack("<II", payload)
                if symbols[symbol] == entry:
                    found[kind] = value
    except (KeyError, IndexError, struct.error, UnicodeDecodeError):
        return None, None
    return found.get(_REGISTERS), found.get(_FRAME)


def _sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Name, info field and content of every section."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [_SECTION.unpack_from(elf, start + k * size) for k in range(count)]
    table = headers[names]
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        content = b"" if kind == 8 else elf[offset : offset + length]  # 8: a section without content
        yield _text(elf, table[4] + name), info, content


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _symbols(table: bytes, names: bytes) -> list[str]:
    return [_text(names, name) for name, *_ in struct.iter_unpack("<IBBHQQ", table)]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attribute number and payload of every record of `.nv.info`."""
    at = 0
    while at + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _VALUE:
            yield kind, info[at : at + size]
            at += size
