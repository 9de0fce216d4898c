// Vectors of the level a file is compiled for (files listed in ISA_SOURCES), by the compiler's vector extensions.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef CONVGRAD_ISA

#if defined(__AVX512F__)
#define CONVGRAD_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define CONVGRAD_VECTOR_BYTES 32
#else
#define CONVGRAD_VECTOR_BYTES 16
#endif

namespace convgrad::CONVGRAD_ISA {

typedef float VecF __attribute__((vector_size(CONVGRAD_VECTOR_BYTES)));
typedef double VecD __attribute__((vector_size(CONVGRAD_VECTOR_BYTES)));
constexpr int lanes_f = CONVGRAD_VECTOR_BYTES / 4;
constexpr int lanes_d = CONVGRAD_VECTOR_BYTES / 8;

// Unaligned access; the struct is how GCC spells a vector that may lie anywhere.
template <typename V>
static inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <typename V>
static inline void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}
template <typename V, typename T>
static inline V splat(T value) {
  return value - V{};  // a broadcast that keeps Inf, NaN and the sign of zero
}

}  // namespace convgrad::CONVGRAD_ISA

#endif

// Declares the entry points of a function that ISA_SOURCES compile once per level, e.g.
//     CONVGRAD_PER_ISA(void depthwise_rows(const Rows& rows);)
#define CONVGRAD_PER_ISA(declaration) \
  namespace generic { declaration }   \
  namespace avx2 { declaration }      \
  namespace avx512 { declaration }

// The entry point for a level: isa_pick(isa, generic::f, avx2::f, avx512::f).
namespace convgrad {
template <typename F>
static inline F isa_pick(int level, F generic_f, F avx2_f, F avx512_f) {
  return level >= 2 ? avx512_f : level == 1 ? avx2_f : generic_f;
}
}  // namespace convgrad
