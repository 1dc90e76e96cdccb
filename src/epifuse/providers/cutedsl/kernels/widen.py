"""Conversion of two neighbouring numbers of 8 bits to two of 16 bits. It is exact, and NaN stays NaN.

An integer x becomes the low bits of a float whose last bit has the value one: 128 + x in bfloat16, whose fraction has
seven bits, 1024 + x in float16, 2^23 + x in float32. Then what was added is subtracted, which is exact. Hopper converts
floats of 8 bits to float16 only; from there they are converted to bfloat16 by way of float32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint16, Uint32

_INTERLEAVE_BYTES = 0x4140  # prmt's selector: the two low bytes of the first operand, each before one of the second


def widened(pair: Any, narrow: Any, wide: Any) -> Any:
    """Convert the low 16 bits of `pair`, two numbers of type `narrow`, to 32 bits, two numbers of type `wide`."""
    return _FORMS[narrow, wide](Uint32(pair))


def _int8_to_bfloat16(pair):
    """128 + the low seven bits, less 128; less 256 if the sign is set, which is the exponent bit that makes 256."""
    apart = _bytes(pair, 0, _INTERLEAVE_BYTES)
    return _pairwise("sub.rn.bf16x2", apart & 0x007F007F | 0x43004300, apart & 0x00800080 | 0x43004300)


def _uint8_to_bfloat16(pair):
    """The upper halves of two float32, whose lower halves are zero."""
    whole = [(_bytes(pair, 0x4B000000, way)).bitcast(Float32) - Float32(2.0**23) for way in (0x7650, 0x7651)]
    return _bytes(whole[0].bitcast(Uint32), whole[1].bitcast(Uint32), 0x7632)


def _int8_to_float16(pair):
    return _pairwise("sub.rn.f16x2", _bytes(pair ^ 0x8080, 0x64646464, _INTERLEAVE_BYTES), _register(0x64806480))


def _uint8_to_float16(pair):
    return _pairwise("sub.rn.f16x2", _bytes(pair, 0x64646464, _INTERLEAVE_BYTES), _register(0x64006400))


def _float_to_float16(name: str) -> Callable[[Any], Any]:
    text = f"cvt.rn.f16x2.{name}x2 {{$w0}}, {{$r0}};"
    return lambda pair: cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[Uint16(pair)])


def _float_to_bfloat16(name: str) -> Callable[[Any], Any]:
    def form(pair):
        both = _float_to_float16(name)(pair)
        low, high = (_as_float32(Uint16(half)) for half in (both & 0xFFFF, both >> 16))
        text = "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};"
        return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[high, low])

    return form


def _as_float32(half):
    return cute.arch.inline_ptx("cvt.f32.f16 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[half])


def _pairwise(operation, first, second):
    text = f"{operation} {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[first, second])


def _register(bits):
    """A constant in a register, for instructions that take no constants."""
    return cute.arch.inline_ptx(f"mov.b32 {{$w0}}, {bits:#x};", write_only_types=[Uint32])


def _bytes(first, second, which):
    """Four bytes of two words. Each hexadecimal digit of `which` selects one, from the lowest on."""
    text = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {which:#x};"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32], read_only_args=[Uint32(first), Uint32(second)])


_FORMS: Mapping[tuple[Any, Any], Callable[[Any], Any]] = {
    (cutlass.Int8, cutlass.BFloat16): _int8_to_bfloat16,
    (cutlass.Uint8, cutlass.BFloat16): _uint8_to_bfloat16,
    (cutlass.Float8E4M3FN, cutlass.BFloat16): _float_to_bfloat16("e4m3"),
    (cutlass.Float8E5M2, cutlass.BFloat16): _float_to_bfloat16("e5m2"),
    (cutlass.Int8, cutlass.Float16): _int8_to_float16,
    (cutlass.Uint8, cutlass.Float16): _uint8_to_float16,
    (cutlass.Float8E4M3FN, cutlass.Float16): _float_to_float16("e4m3"),
    (cutlass.Float8E5M2, cutlass.Float16): _float_to_float16("e5m2"),
}
