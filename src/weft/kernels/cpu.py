"""The functions of cpu.cpp for tensors in CPU memory, compiled once per machine if there is a compiler.

A call releases the GIL, so that the training loop continues in parallel.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from weft.environment import UserSettings
from weft.errors import PayloadError
from weft.native import load

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno"]
_FLAGS += ["-fno-trapping-math"]
_WATCHED = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined,float-cast-overflow"]
_WATCHED += ["-fno-sanitize-recover=all"]
_P, _I, _F, _N, _K = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int, ctypes.c_uint32
_SIGNATURES = {
    "int8_encode": (None, [_P, _I, _I, _P, _P, _P, _N, _N, _K]),
    "int8_decode": (None, [_P, _P, _I, _I, _P, _N]),
    "sign_encode": (None, [_P, _I, _P, _P, _N, _P, _N]),
    "thin_right": (None, [_P, _I, _I, _P, _N, _P, _P]),
    "thin_left": (None, [_P, _I, _I, _P, _N, _P]),
    "thin_product": (None, [_P, _P, _I, _I, _N, _P, _P]),
    "bf16_encode": (None, [_P, _I, _P, _P]),
    "onebit_encode": (None, [_P, _I, _I, _P, _P, _P, _N]),
    "onebit_decode": (None, [_P, _P, _I, _I, _P, _N]),
    "qsgd_encode": (None, [_P, _I, _I, _N, _N, _N, _P, _P, _P, _N, _K]),
    "qsgd_decode": (None, [_P, _P, _I, _I, _N, _N, _P, _N]),
    "ternary_encode": (None, [_P, _I, _F, _N, _K, _P, _P, _N]),
    "ternary_decode": (None, [_P, _I, _F, _P, _N]),
    "moments": (None, [_P, _I, _P]),
    "places_from": (_I, [_P, _I, _F, _P, _I]),
    "topk_encode": (None, [_P, _I, _I, _P, _I, _P, _P]),
    "sparse_add": (_N, [_P, _P, _I, _P, _I]),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None if they cannot be built, which is logged once."""
    loaded = load(_SOURCE, _flags(), "compressors use plain PyTorch: correct, but several times slower")
    for name, (result, arguments) in _SIGNATURES.items() if loaded else ():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _flags() -> list[str]:
    """With WEFT_SANITIZE=1, build with AddressSanitizer and UBSan; libasan must be preloaded into the process."""
    return [*_FLAGS, *_WATCHED] if UserSettings.from_env().sanitize else _FLAGS


def _at(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


def _lib() -> ctypes.CDLL:
    found = library()
    assert found is not None, "called only if the library was built"
    return found


def int8_encode(
    x: Tensor,
    block: int,
    codes: Tensor,
    scales: Tensor,
    residual: Tensor | None,
    pending: bool,
    key: int | None,
) -> None:
    random, key = key is not None, key or 0
    _lib().int8_encode(_at(x), x.numel(), block, _at(codes), _at(scales), _at(residual), pending, random, key)


def int8_decode(codes: Tensor, scales: Tensor, block: int, out: Tensor, add: bool) -> None:
    _lib().int8_decode(_at(codes), _at(scales), out.numel(), block, _at(out), add)


def sign_encode(x: Tensor, bits: Tensor, scale: Tensor, scaled: bool, residual: Tensor | None, pending: bool) -> None:
    _lib().sign_encode(_at(x), x.numel(), _at(bits), _at(scale), scaled, _at(residual), pending)


def thin_right(m: Tensor, q: Tensor, p: Tensor, residual: Tensor | None) -> None:
    """p = m q'; with `residual`: p = (residual + m) q', and residual + m is stored in `residual`."""
    _lib().thin_right(_at(m), *m.shape, _at(q), q.shape[0], _at(p), _at(residual))


def thin_left(m: Tensor, p: Tensor, q: Tensor) -> None:
    """q = p' m."""
    q.zero_()
    _lib().thin_left(_at(m), *m.shape, _at(p), p.shape[1], _at(q))


def thin_product(p: Tensor, q: Tensor, out: Tensor, taken_from: Tensor | None = None) -> None:
    """out = p q, or `taken_from` - p q."""
    _lib().thin_product(_at(p), _at(q), *out.shape, p.shape[1], _at(taken_from), _at(out))


def bf16_encode(x: Tensor, out: Tensor, residual: Tensor | None) -> None:
    _lib().bf16_encode(_at(x), x.numel(), _at(out), _at(residual))


def onebit_encode(x: Tensor, width: int, bits: Tensor, values: Tensor, residual: Tensor | None, pending: bool) -> None:
    _lib().onebit_encode(_at(x), x.numel() // width, width, _at(bits), _at(values), _at(residual), pending)


def onebit_decode(bits: Tensor, values: Tensor, width: int, out: Tensor, add: bool) -> None:
    _lib().onebit_decode(_at(bits), _at(values), out.numel() // width, width, _at(out), add)


def qsgd_encode(
    x: Tensor,
    bucket: int,
    levels: int,
    width: int,
    largest: bool,
    codes: Tensor,
    norms: Tensor,
    residual: Tensor | None,
    pending: bool,
    key: int,
) -> None:
    _lib().qsgd_encode(
        _at(x), x.numel(), bucket, levels, width, largest, _at(codes), _at(norms), _at(residual), pending, key
    )


def qsgd_decode(codes: Tensor, norms: Tensor, bucket: int, levels: int, width: int, out: Tensor, add: bool) -> None:
    _lib().qsgd_decode(_at(codes), _at(norms), out.numel(), bucket, levels, width, _at(out), add)


def ternary_encode(
    x: Tensor, scale: Tensor, codes: Tensor, residual: Tensor | None, pending: bool, key: int | None
) -> None:
    random, key = key is not None, key or 0
    _lib().ternary_encode(_at(x), x.numel(), float(scale), random, key, _at(codes), _at(residual), pending)


def ternary_decode(codes: Tensor, scale: Tensor, out: Tensor, add: bool) -> None:
    _lib().ternary_decode(_at(codes), out.numel(), float(scale), _at(out), add)


def moments(x: Tensor) -> Tensor:
    """The largest absolute value, the sum, and the sum of squares, in float64."""
    found = torch.empty(3, dtype=torch.float64)
    _lib().moments(_at(x), x.numel(), _at(found))
    return found


def places_from(x: Tensor, least: Tensor, places: Tensor) -> int:
    """Write the first indices of values of at least this magnitude, as far as there is room; returns how many."""
    return int(_lib().places_from(_at(x), x.numel(), float(least), _at(places), places.numel()))


def topk_encode(x: Tensor, candidates: Tensor, places: Tensor, values: Tensor) -> int:
    """The indices and values of the largest values, as many as fit; `candidates` is scratch memory."""
    k = values.numel()
    _lib().topk_encode(_at(x), x.numel(), k, _at(candidates), candidates.numel(), _at(places), _at(values))
    return k


def sparse_add(places: Tensor, values: Tensor, out: Tensor) -> None:
    """Add values at their indices in `out`. If an index is outside of it, nothing is added."""
    assert places.dtype is torch.int32 and places.numel() == values.numel()
    if not _lib().sparse_add(_at(places), _at(values), places.numel(), _at(out), out.numel()):
        raise PayloadError(f"a payload has an index outside of its parameter of {out.numel()} values")
