// Loads, stores and conversions of elements, in PTX.
//
// The compiler does not know the address space of addresses from tables, so a plain `*p` becomes LD/ST, not LDG/STG.
// The assembly names the address space. It is volatile, so loads stay where they are written, before the arithmetic. An
// SM uses no element twice, so the wide accesses do not allocate in L1.
#pragma once

#include "math/types.h"

#define AMP_DEVICE __device__ __forceinline__

namespace amp_engine::cuda {

AMP_DEVICE bool is_aligned(void const* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % unsigned(bytes) == 0; }

// 16 bytes; the address is a multiple of 16.
AMP_DEVICE void load_16(uint32_t* to, void const* from) {
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(__cvta_generic_to_global(from)));
}

AMP_DEVICE void store_16(void* to, uint32_t const* from) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]));
}

// 8 bytes; the address is a multiple of 8.
AMP_DEVICE void load_8(uint32_t* to, void const* from) {
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "l"(__cvta_generic_to_global(from)));
}

AMP_DEVICE void store_8(void* to, uint32_t const* from) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(from[0]),
               "r"(from[1]));
}

AMP_DEVICE uint32_t load_4(void const* from) {
  uint32_t bits;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(__cvta_generic_to_global(from)));
  return bits;
}

// The accesses have a predicate, because for each `if` the compiler would compute the address again. If `exists` is
// false, a load gives 0 and a store does nothing.
AMP_DEVICE uint32_t load_4_if(bool exists, void const* from) {
  uint32_t bits = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u32 %0, [%1]; }"
               : "+r"(bits)
               : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(exists)));
  return bits;
}

AMP_DEVICE void store_4_if(bool exists, void* to, uint32_t bits) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1; }" ::"l"(__cvta_generic_to_global(to)),
               "r"(bits), "r"(uint32_t(exists)));
}

AMP_DEVICE uint32_t load_2_if(bool exists, void const* from) {
  uint16_t bits = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u16 %0, [%1]; }"
               : "+h"(bits)
               : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(exists)));
  return bits;
}

AMP_DEVICE void store_2_if(bool exists, void* to, uint32_t bits) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u16 [%0], %1; }" ::"l"(__cvta_generic_to_global(to)),
               "h"(uint16_t(bits)), "r"(uint32_t(exists)));
}

AMP_DEVICE void store_4(void* to, uint32_t bits) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(bits));
}

AMP_DEVICE uint32_t load_1_if(bool exists, void const* from) {
  uint32_t bits = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.u8 %0, [%1]; }"
               : "+r"(bits)
               : "l"(__cvta_generic_to_global(from)), "r"(uint32_t(exists)));
  return bits;
}

AMP_DEVICE void store_1_if(bool exists, void* to, uint32_t bits) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u8 [%0], %1; }" ::"l"(__cvta_generic_to_global(to)),
               "r"(bits), "r"(uint32_t(exists)));
}

// Like float_from_f16 and the others in math/types.h, except that a NaN becomes 0x7fff or 0x7fffffff.
AMP_DEVICE float widened_f16(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(uint16_t(bits)));
  return x;
}

AMP_DEVICE uint32_t packed_f16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

AMP_DEVICE uint32_t packed_bf16(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

}  // namespace amp_engine::cuda
