// Micro-kernels for f32 and f64 by vector extensions, and the rearrangements of 32-bit words; compiled once per level.
#include "gemm_tile.h"

#include "simd.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace convgrad::CONVGRAD_ISA {
namespace {

// Accumulators + two vectors of B + one broadcast fill the registers: 32 on AVX-512, 16 below.
constexpr int max_rows = CONVGRAD_VECTOR_BYTES == 64 ? 14 : 6;

// B usually comes from L2; so many k ahead it is fetched into L1.
constexpr int64_t k_ahead = 12;

template <typename V, typename T, int rows, int vectors>
void tile(const GemmCall& call) {
  V sum[rows][vectors], of_blocks[rows][vectors];
  T* c = reinterpret_cast<T*>(call.c);
  constexpr int lanes = sizeof(V) / sizeof(T);
  // NOTE: loops over the sums must all be unrolled, or the compiler keeps the sums in memory.
  const auto each = [&](auto&& body) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int m = 0; m < rows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) body(sum[m][v], of_blocks[m][v], c + m * call.ldc + v * lanes);
  };
  each([](V& now, V&, T*) { now = V{}; });
  const int64_t lda = call.lda, ldb = call.ldb;
  int64_t products = 0, blocks = 0;  // of the sums in registers, of those beside them
  bool accumulate = call.accumulate;
  Fetcher fetcher(call, call.k);
  for (int64_t i = 0, done = 0; i < call.batch;) {
    fetcher.some();
    const int64_t steps = call.k - done < fetcher.steps ? call.k - done : fetcher.steps;
    const int64_t coming = Fetcher::coming(done, call.k);
    if (products + coming > block_products) {
      if (blocks == most_blocks) {
        if (accumulate) each([](V&, V& before, T* to) { before += load<V>(to); });
        each([](V&, V& before, T* to) { store(to, before); });
        accumulate = true;
        blocks = 0;
      }
      if (blocks) each([](V& now, V& before, T*) { before += now, now = V{}; });
      else each([](V& now, V& before, T*) { before = now, now = V{}; });
      ++blocks;
      products = 0;
    }
    products += coming;
    // One pointer per three rows: the others are reached as pointer + lda and pointer + 2*lda.
    constexpr int pointers = (rows + 2) / 3;
    const char* a[pointers];
    for (int p = 0; p < pointers; ++p) a[p] = call.a + call.a_offset[i] + done * int64_t(sizeof(T)) + 3 * p * lda;
    const char* b = call.b + call.b_offset[i] + done * ldb;
#pragma GCC unroll 2
    for (int64_t k = 0; k < steps; ++k) {
      V bv[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) {
        bv[v] = load<V>(b + v * sizeof(V));
        __builtin_prefetch(b + k_ahead * ldb + v * sizeof(V));
      }
#pragma GCC unroll 16
      for (int m = 0; m < rows; ++m) {
        T value;
        memcpy(&value, a[m / 3] + (m % 3) * lda + k * int64_t(sizeof(T)), sizeof value);
        V av = splat<V>(value);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) sum[m][v] += av * bv[v];
      }
      b += ldb;
    }
    done += steps;
    if (done == call.k) ++i, done = 0;
  }
  if (blocks) each([](V& now, V& before, T*) { now += before; });
  if (accumulate) each([](V& now, V&, T* to) { now += load<V>(to); });
  each([](V& now, V&, T* to) { store(to, now); });
}

template <typename V, typename T, int vectors>
void run_tile(const GemmCall& call) {
  switch (call.rows) {
    case 1: return tile<V, T, 1, vectors>(call);
    case 2: return tile<V, T, 2, vectors>(call);
    case 3: return tile<V, T, 3, vectors>(call);
    case 4: return tile<V, T, 4, vectors>(call);
    case 5: return tile<V, T, 5, vectors>(call);
    case 6: return tile<V, T, 6, vectors>(call);
#if CONVGRAD_VECTOR_BYTES == 64
    case 7: return tile<V, T, 7, vectors>(call);
    case 8: return tile<V, T, 8, vectors>(call);
    case 9: return tile<V, T, 9, vectors>(call);
    case 10: return tile<V, T, 10, vectors>(call);
    case 11: return tile<V, T, 11, vectors>(call);
    case 12: return tile<V, T, 12, vectors>(call);
    case 13: return tile<V, T, 13, vectors>(call);
    default: return tile<V, T, 14, vectors>(call);
#endif
  }
}

#if CONVGRAD_VECTOR_BYTES == 64
constexpr const char *name_f32 = "f32_f32_14x32_avx512", *name_f64 = "f64_f64_14x16_avx512";
#elif CONVGRAD_VECTOR_BYTES == 32
constexpr const char *name_f32 = "f32_f32_6x16_avx2", *name_f64 = "f64_f64_6x8_avx2";
#else
constexpr const char *name_f32 = "f32_f32_6x8_generic", *name_f64 = "f64_f64_6x4_generic";
#endif

constexpr double flops_cycle = CONVGRAD_VECTOR_BYTES == 16 ? 8 : 32;  // Zen 4: two 256-bit FMAs a cycle
const Gemm gemm_f32 = {name_f32, max_rows, 2 * lanes_f, 1, 1, flops_cycle, run_tile<VecF, float, 2>,
                       run_tile<VecF, float, 1>, nullptr, nullptr, 1, 0, 4};
const Gemm gemm_f64 = {name_f64, max_rows, 2 * lanes_d, 1, 1, flops_cycle / 2, run_tile<VecD, double, 2>,
                       run_tile<VecD, double, 1>, nullptr, nullptr, 1, 0, 4};

// ---- rearrangements ----

void transpose_words(const uint32_t* src, int64_t src_pitch, int64_t rows, int64_t cols, uint32_t* dst,
                     int64_t dst_pitch) {
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < rows; ++r) dst[c * dst_pitch + r] = src[r * src_pitch + c];
}

#if CONVGRAD_VECTOR_BYTES == 64
// 16 x 16 words; the last rows and columns of a block are masked.
void transpose_block(const uint32_t* src, int64_t src_pitch, int rows, int cols, uint32_t* dst, int64_t dst_pitch) {
  const __mmask16 in = __mmask16((1u << cols) - 1), out = __mmask16((1u << rows) - 1);
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i)
    r[i] = i < rows ? _mm512_maskz_loadu_epi32(in, src + i * src_pitch) : _mm512_setzero_si512();
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0x88);
      t[i + 4 + j] = _mm512_shuffle_i32x4(r[i + j], r[i + 4 + j], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
  }
  // Lane order after the shuffles: column c of the block is in r[c].
  for (int c = 0; c < 16; ++c)
    if (c < cols) _mm512_mask_storeu_epi32(dst + c * dst_pitch, out, r[c]);
}

// 16 rows of at most 8 words: rows i and i + 8 share a vector, which takes half the shuffles.
void transpose_narrow(const uint32_t* src, int64_t src_pitch, int cols, uint32_t* dst, int64_t dst_pitch) {
  const __mmask8 in = __mmask8((1u << cols) - 1);
  __m512i r[8], t[8];
  for (int i = 0; i < 8; ++i)
    r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi32(in, src + i * src_pitch)),
                              _mm256_maskz_loadu_epi32(in, src + (i + 8) * src_pitch), 1);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int c = 0; c < 8; ++c)
    if (c < cols)
      _mm512_storeu_si512(dst + c * dst_pitch, _mm512_permutex2var_epi64(r[c % 4], c < 4 ? low : high, r[c % 4 + 4]));
}

void transpose32(const uint32_t* src, int64_t src_pitch, int64_t rows, int64_t cols, uint32_t* dst,
                 int64_t dst_pitch) {
  if (rows == 1 || cols == 1) return transpose_words(src, src_pitch, rows, cols, dst, dst_pitch);
  for (int64_t r = 0; r < rows; r += 16) {
    const int64_t count = rows - r < 16 ? rows - r : 16;
    int64_t left = 0;  // columns of the block
    for (int64_t c = 0; c < cols; c += left) {
      const uint32_t* from = src + r * src_pitch + c;
      uint32_t* to = dst + c * dst_pitch + r;
      left = cols - c < 16 ? cols - c : 16;
      if (count == 16 && left < 11) {
        left = left < 8 ? left : 8;
        if (left == 1) transpose_words(from, src_pitch, 16, 1, to, dst_pitch);
        else transpose_narrow(from, src_pitch, int(left), to, dst_pitch);
      } else {
        transpose_block(from, src_pitch, int(count), int(left), to, dst_pitch);
      }
    }
  }
}
#elif CONVGRAD_VECTOR_BYTES == 32
void transpose32(const uint32_t* src, int64_t src_pitch, int64_t rows, int64_t cols, uint32_t* dst,
                 int64_t dst_pitch) {
  int64_t r = 0;
  for (; r + 8 <= rows; r += 8) {
    int64_t c = 0;
    for (; c + 8 <= cols; c += 8) {
      __m256 q[8], t[8];
      for (int i = 0; i < 8; ++i) q[i] = _mm256_loadu_ps((const float*)(src + (r + i) * src_pitch + c));
      for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(q[i], q[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(q[i], q[i + 1]);
      }
      for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; ++j) {
          q[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
          q[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
        }
      for (int j = 0; j < 4; ++j) {
        _mm256_storeu_ps((float*)(dst + (c + j) * dst_pitch + r), _mm256_permute2f128_ps(q[j], q[4 + j], 0x20));
        _mm256_storeu_ps((float*)(dst + (c + 4 + j) * dst_pitch + r), _mm256_permute2f128_ps(q[j], q[4 + j], 0x31));
      }
    }
    transpose_words(src + r * src_pitch + c, src_pitch, 8, cols - c, dst + c * dst_pitch + r, dst_pitch);
  }
  transpose_words(src + r * src_pitch, src_pitch, rows - r, cols, dst + r, dst_pitch);
}
#else
constexpr auto transpose32 = transpose_words;
#endif

void interleave16(const uint16_t* even, const uint16_t* odd, int64_t n, uint16_t* dst) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t word = uint32_t(even[i]) | uint32_t(odd[i]) << 16;
    memcpy(dst + 2 * i, &word, 4);
  }
}

void shift_pairs(const uint32_t* __restrict src, int64_t n, int64_t distance, uint32_t* __restrict dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = src[i] >> 16 | src[i + distance] << 16;
}

void round_to_bf16(const float* src, int64_t n, uint16_t* dst) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t u;
    memcpy(&u, src + i, 4);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    dst[i] = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
  }
}

// The first part is the nearest bf16 (which of two that are equally near does not matter), and so on with what is left;
// after two parts of 8 bits at most 8 of the 24 bits are left, so the last part is exact.
#if CONVGRAD_VECTOR_BYTES != 64
inline void split_one(uint32_t bits, int parts, uint16_t* dst, int64_t plane) {
  float rest;
  memcpy(&rest, &bits, 4);
  for (int part = 0; part < parts; ++part) {
    uint32_t u;
    memcpy(&u, &rest, 4);
    const uint32_t near = part + 1 < parts ? (u + 0x8000u) & 0xffff0000u : u & 0xffff0000u;
    dst[part * plane] = uint16_t(near >> 16);
    float value;
    memcpy(&value, &near, 4);
    rest -= value;
  }
}
#endif

void split_to_bf16(const char* src, int64_t line_stride, int64_t lines, int64_t n, int parts, uint16_t* dst,
                   int64_t pitch, int64_t plane, Magnitudes& met) {
  Magnitudes found;
#if CONVGRAD_VECTOR_BYTES == 64
  // The upper halves of two vectors' words, in order.
  alignas(64) static constexpr uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                   33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i pick = _mm512_load_si512(odd), upper = _mm512_set1_epi32(int(0xffff0000u));
  const __m512i half = _mm512_set1_epi32(0x8000), magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i one = _mm512_set1_epi32(1);
  __m512i smallest = _mm512_set1_epi32(-1), largest = _mm512_setzero_si512();
  for (int64_t line = 0; line < lines; ++line, src += line_stride, dst += pitch)
    for (int64_t i = 0; i < n; i += 32) {
      const int64_t left = n - i;
      const __mmask16 low = __mmask16(left >= 16 ? 0xffffu : (1u << left) - 1);
      const __mmask16 high = __mmask16(left >= 32 ? 0xffffu : left <= 16 ? 0u : (1u << (left - 16)) - 1);
      const __mmask32 all = left >= 32 ? 0xffffffffu : (1u << left) - 1;
      __m512i a = _mm512_maskz_loadu_epi32(low, src + 4 * i), b = _mm512_maskz_loadu_epi32(high, src + 4 * i + 64);
      const __m512i size_a = _mm512_and_si512(a, magnitude), size_b = _mm512_and_si512(b, magnitude);
      largest = _mm512_max_epu32(largest, _mm512_max_epu32(size_a, size_b));
      const __m512i below = _mm512_min_epu32(_mm512_sub_epi32(size_a, one), _mm512_sub_epi32(size_b, one));
      smallest = _mm512_min_epu32(smallest, below);
      uint16_t* to = dst + i;
      for (int part = 0; part + 1 < parts; ++part, to += plane) {
        const __m512i near_a = _mm512_and_si512(_mm512_add_epi32(a, half), upper);
        const __m512i near_b = _mm512_and_si512(_mm512_add_epi32(b, half), upper);
        _mm512_mask_storeu_epi16(to, all, _mm512_permutex2var_epi16(near_a, pick, near_b));
        a = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(near_a)));
        b = _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(b), _mm512_castsi512_ps(near_b)));
      }
      _mm512_mask_storeu_epi16(to, all, _mm512_permutex2var_epi16(a, pick, b));
    }
  found.smallest = _mm512_reduce_min_epu32(smallest);
  found.largest = _mm512_reduce_max_epu32(largest);
#else
  for (int64_t line = 0; line < lines; ++line, src += line_stride, dst += pitch)
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      memcpy(&bits, src + 4 * i, 4);
      const uint32_t size = bits & 0x7fffffffu;
      found.largest = size > found.largest ? size : found.largest;
      found.smallest = size - 1 < found.smallest ? size - 1 : found.smallest;
      split_one(bits, parts, dst + i, plane);
    }
#endif
  met.merge(found);
}

bool any_nan(const float* line, int64_t n) {
  int found = 0;
  for (int64_t i = 0; i < n; ++i) found |= line[i] != line[i];
  return found != 0;
}

double sum(const float* line, int64_t n) {
  VecF lanes[2] = {};
  int64_t i = 0;
  for (; i + 2 * lanes_f <= n; i += 2 * lanes_f) {
    lanes[0] += load<VecF>(line + i);
    lanes[1] += load<VecF>(line + i + lanes_f);
  }
  double total = 0;
  for (int lane = 0; lane < lanes_f; ++lane) total += double(lanes[0][lane]) + double(lanes[1][lane]);
  for (; i < n; ++i) total += double(line[i]);
  return total;
}

void add_lines(float* line, int64_t n, int64_t step, int64_t others) {
  int64_t i = 0;
  for (; i + 4 * lanes_f <= n; i += 4 * lanes_f) {
    VecF total[4];
    for (int v = 0; v < 4; ++v) total[v] = load<VecF>(line + i + v * lanes_f);
    const float* from = line + i;
    for (int64_t other = 0; other < others; ++other) {
      from += step;
      for (int v = 0; v < 4; ++v) total[v] += load<VecF>(from + v * lanes_f);
    }
    for (int v = 0; v < 4; ++v) store(line + i + v * lanes_f, total[v]);
  }
  for (; i < n; ++i)
    for (int64_t other = 1; other <= others; ++other) line[i] += line[i + other * step];
}

}  // namespace

GemmKernels gemm_kernels() {
  return {&gemm_f32,   &gemm_f64,     nullptr,       nullptr, nullptr, transpose32, interleave16,
          shift_pairs, round_to_bf16, split_to_bf16, any_nan, sum,     add_lines};
}

}  // namespace convgrad::CONVGRAD_ISA
