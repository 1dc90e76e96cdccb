"""Tiled multiplications by wgmma, for each dtype. CuTe DSL 4.8.1 has no public operation for Hopper's tf32."""

from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, TFloat32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import mma as warpgroup_mma

_TF32_K = 8  # elements of K that one instruction multiplies: 32 bytes, as for every dtype


def tiled_multiplication(
    types: tuple, majors: tuple, accumulator: Any, groups: int, columns: int, *, registers: bool = False
) -> cute.TiledMma:
    """Return a multiplication of 64 x `columns` for each of `groups` warp groups, one below the other. float32 inputs
    multiply as tf32. A comes from shared memory, or from `registers`."""
    atoms, source = (groups, 1, 1), warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    if types[0] is not Float32:
        return sm90.make_trivial_tiled_mma(*types, *majors, accumulator, atoms, (64, columns), source)
    shape = (64, columns, _TF32_K)
    op = _Tf32(TFloat32, TFloat32, accumulator, shape, warpgroup.OperandSource.SMEM, *majors)
    return cute.make_tiled_mma(cute.make_mma_atom(op), atoms)


def in_shared_memory(dtype: Any) -> Any:
    """The dtype as which TMA brings A and B, or None for their own. It rounds float32 to tf32 on the way."""
    return TFloat32 if dtype is Float32 else None


def accumulator_registers(count: int, dtype: Any) -> cute.Tensor:
    """Return registers of 32 bits for `count` accumulators of a thread. Two accumulators of float16 share a register.

    As 16-bit values they would be unpacked and packed around each block of K, and would wait for its multiplication.
    """
    return cute.make_rmem_tensor(
        count * dtype.width // Float32.width, dtype if dtype.width == Float32.width else Float32
    )


def as_accumulators(registers: cute.Tensor, shape: Any, dtype: Any) -> cute.Tensor:
    """Return the registers as the accumulators to which a multiplication adds."""
    return cute.make_tensor(cute.recast_ptr(registers.iterator, dtype=dtype), cute.make_layout(shape))


def sums(registers: cute.Tensor, dtype: Any) -> cute.Tensor:
    """Return the accumulators, to be read one by one. For float16 it is a copy, so that `registers` keep 32 bits."""
    if dtype.width == Float32.width:
        return registers
    copy = cute.make_rmem_tensor(cute.size(registers), Float32)
    for i in range(cute.size(registers)):
        copy[i] = registers[i]
    return as_accumulators(copy, cute.size(registers) * Float32.width // dtype.width, dtype)


class _Tf32(warpgroup_mma.MmaOp):
    descriptive_name = "warpgroup TF32 MMA Operation"

    def _make_trait(self, *, loc: Any = None, ip: Any = None, **_: Any) -> warpgroup_mma.MmaTraits:
        shape = warpgroup_mma._pack_shape(self.shape_mnk, loc=loc, ip=ip)
        type_ = warpgroup_mma._cute_nvgpu_ir.MmaAtomSM90Type.get(
            shape.type.attribute,
            self.a_major_mode._to_ir(),
            self.b_major_mode._to_ir(),
            self.a_dtype.mlir_type,
            self.b_dtype.mlir_type,
            self.acc_dtype.mlir_type,
            self.a_src._to_ir(),
        )
        accumulate = Boolean(False).ir_value(loc=loc, ip=ip)
        return warpgroup_mma.MmaTraits(warpgroup_mma.make_atom(type_, [accumulate], loc=loc, ip=ip))
