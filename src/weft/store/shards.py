"""Tensors in safetensors files, written and read in one pass, with a SHA-256 of each block computed on the way.

The safetensors library neither syncs nor hashes a file, and hashing it afterwards reads everything again. The format is
a length, a JSON header and the raw bytes, so writing it takes one page here; plain `safetensors` reads the result.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from weft.errors import UserError
from weft.lazy import torch
from weft.transport.tensor_bytes import raw

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_HEADER_BYTES = 2**26
BLOCK = 2**24
_THREADS, _AHEAD = 4, 4


@dataclass(frozen=True)
class Seal:
    """The exact size and the block hashes of a file."""

    bytes: int
    sha256: tuple[str, ...]
    """One hash for each block of 16 MiB, so that several processors hash at once."""

    def blocks(self) -> int:
        return max(1, -(-self.bytes // BLOCK))


class DamagedError(UserError):
    """A file that differs from what was written; the message names the file and the difference."""


def write(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write CPU tensors, sync them to disk, and return the seal of the file."""
    parts = [_header(tensors), *(raw(tensor) for tensor in _ordered(tensors).values())]
    blocks = _blocks(parts)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def put(number: int) -> str:
        seal, at = hashlib.sha256(), number * BLOCK
        for view in blocks[number]:
            seal.update(view)
            while view:
                wrote = os.pwrite(descriptor, view, at)
                view, at = view[wrote:], at + wrote
        _start_writing(descriptor, number * BLOCK)
        return seal.hexdigest()

    try:
        digests = _at_once(put, len(blocks))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Seal(sum(len(part) for part in parts), tuple(digests))


def read(path: Path, seal: Seal) -> dict[str, Tensor]:
    """The tensors of a file, as views of it. Raises DamagedError if the file does not match its seal."""
    with _opened(path, seal) as file:
        whole = _mapped(file)
        memory = raw(whole)
        _fetch(file, 0, _AHEAD)

        def get(number: int) -> str:
            _fetch(file, number + _AHEAD, 1)
            return hashlib.sha256(memory[number * BLOCK : (number + 1) * BLOCK]).hexdigest()

        _compare(path, seal, get)
    try:
        return _parsed(whole)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedError(f"{path} is not a safetensors file: {error}") from None


def names(path: Path) -> list[str]:
    """The names of the tensors in a file, read from its header only."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            return list(dict(json.loads(file.read(length))))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is not a safetensors file: {error}") from None


def check(path: Path, seal: Seal) -> None:
    """Raise DamagedError if a file does not match its seal. Only a few blocks are in memory at a time."""
    own = threading.local()
    with _opened(path, seal) as file:

        def get(number: int) -> str:
            if not hasattr(own, "memory"):
                own.memory = memoryview(bytearray(min(BLOCK, seal.bytes)))
            size, got = min(BLOCK, seal.bytes - number * BLOCK), 0
            while got < size and (more := os.preadv(file.fileno(), [own.memory[got:size]], number * BLOCK + got)):
                got += more
            return hashlib.sha256(own.memory[:got]).hexdigest()

        _compare(path, seal, get)


@contextmanager
def _opened(path: Path, seal: Seal) -> Iterator[IO[bytes]]:
    """Open a file of the right size; an OSError becomes one sentence."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != seal.bytes:
                raise DamagedError(f"{path} has {size} bytes, but {seal.bytes} were written")
            yield file
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None


def _compare(path: Path, seal: Seal, digest: Callable[[int], str]) -> None:
    if tuple(_at_once(digest, seal.blocks())) != seal.sha256:
        raise DamagedError(f"{path} is damaged: its SHA-256 differs")


def _mapped(file: IO[bytes]) -> Tensor:
    """A file as mapped memory: cached pages need not be copied, and fresh memory costs more than hashing."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _fetch(file: IO[bytes], number: int, blocks: int) -> None:
    """Ask the kernel to read blocks ahead while others are hashed."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), number * BLOCK, blocks * BLOCK, os.POSIX_FADV_WILLNEED)


def _start_writing(descriptor: int, at: int) -> None:
    """Ask the kernel to start writing a block, so that little is left for the sync at the end."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, at, BLOCK, os.POSIX_FADV_DONTNEED)


def _blocks(parts: Sequence[memoryview]) -> list[list[memoryview]]:
    """The same bytes, divided into blocks."""
    blocks: list[list[memoryview]] = [[]]
    free = BLOCK
    for part in parts:
        while part:
            if not free:
                blocks.append([])
                free = BLOCK
            blocks[-1].append(part[:free])
            free -= len(blocks[-1][-1])
            part = part[len(blocks[-1][-1]) :]
    return blocks


def _at_once(act: Callable[[int], str], count: int) -> list[str]:
    """Apply `act` to each block in parallel; hashing, reading and writing release the GIL."""
    if count == 1:
        return [act(0)]
    with ThreadPoolExecutor(min(count, _THREADS)) as several:
        return list(several.map(act, range(count)))


def _header(tensors: Mapping[str, Tensor]) -> memoryview:
    entries: dict[str, Any] = {}
    at = 0
    for name, tensor in _ordered(tensors).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _NAMES:
            raise UserError(f"{name} is {tensor.dtype}, which safetensors cannot hold; convert it before saving")
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wide dtypes first, so that every tensor is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _parsed(whole: Tensor) -> dict[str, Tensor]:
    memory = raw(whole)
    length = int.from_bytes(memory[:8], "little")
    if len(memory) < 8 or length > min(_HEADER_BYTES, len(memory) - 8):
        raise ValueError(f"a header of {length} bytes")
    data = whole[8 + length :]
    tensors = {}
    for name, entry in json.loads(bytes(memory[8 : 8 + length])).items():
        start, end = entry["data_offsets"]
        dtype, shape = getattr(torch, _DTYPES[entry["dtype"]]), entry["shape"]
        if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} lies at {start} to {end}, but is {entry['dtype']} {shape}")
        part = data[start:end]
        part = part if part.storage_offset() % dtype.itemsize == 0 else part.clone()
        tensors[name] = part.view(dtype).view(shape)
    return tensors
