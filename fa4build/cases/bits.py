"""Values as the bits that kernels read and write, and back."""

import numpy as np

from fa4build.cases.forward import FP8_MANTISSA_BITS, round_to

FP8_NAN = 0x7F  # of both types


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Bit patterns of values rounded to nearest even: u16 of `bf16` and `fp16`, u8 of fp8, u32 of `f32` and `i32`."""
    if dtype in ("f32", "i32"):
        return np.ascontiguousarray(x, {"f32": np.float32, "i32": np.int32}[dtype]).view(np.uint32)
    if dtype in FP8_MANTISSA_BITS:
        return _fp8_bits(round_to(x, dtype), dtype)
    if dtype == "fp16":
        return round_to(x, dtype).astype(np.float16).view(np.uint16)
    return (round_to(x, dtype).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _fp8_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Codes of values that are exact in the type: sign, exponent field and mantissa."""
    mantissa = FP8_MANTISSA_BITS[dtype]
    bias = 2 ** (6 - mantissa) - 1
    magnitude = np.abs(np.where(np.isnan(x), 0, x))
    exponents = np.frexp(magnitude)[1] - 1  # 2^exponent <= magnitude
    fields = np.where(magnitude > 0, np.maximum(exponents + bias, 0), 0)
    steps = np.ldexp(magnitude, mantissa + bias - np.maximum(fields, 1)).astype(np.int64)  # with the hidden one
    codes = np.where(fields > 0, (fields - 1) * 2**mantissa, 0) + steps
    codes = np.where(np.isnan(x), FP8_NAN, codes | np.where(np.signbit(x), 0x80, 0))
    return codes.astype(np.uint8)


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Values in float64 of u16 bit patterns of `bf16` and `fp16`, u32 of `f32`."""
    bits = np.ascontiguousarray(bits)
    if dtype == "f32":
        return bits.view(np.float32).astype(np.float64)
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
