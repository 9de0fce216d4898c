// The contract of the dense micro-kernels, and the rearrangements that feed them.
//
// A micro-kernel computes a small tile C[m][n] (+)= sum over batch, k of A[m][k] * B[k][n], n = 0 .. cols-1:
//   A  rows of k, `lda` bytes apart; k runs contiguously
//   B  groups of `pair` consecutive k, `ldb` bytes apart; inside a group [n][pair], n contiguous
//   C  float (double for f64) rows, `ldc` elements apart, always `cols` wide: the caller gives it room
// A kernel of several parts takes each operand as a sum of so many bf16 values: part p of A lies p*a_plane bytes after
// the first, and likewise for B.
// The batch is what makes it a convolution: entry i of the batch reads A at a_offset[i] and B at b_offset[i] (bytes),
// so a tap, or a row of pixels, is a pair of offsets and the accumulators stay in registers over all of them.
#pragma once

#include <cstdint>

namespace convgrad {

struct GemmCall {
  const char* a;
  int64_t lda;  // bytes
  const char* b;
  int64_t ldb;  // bytes
  char* c;
  int64_t ldc;  // elements
  const int64_t* a_offset;
  const int64_t* b_offset;
  int64_t batch;
  int64_t k;  // elements, a multiple of Gemm::k_multiple
  int rows;   // 1 .. Gemm::max_rows
  bool accumulate;
  // For tiles, which go on with the sums in C: those are added when the products are done. Slower, but no sum passes
  // through the roundings of all calls; see sums_stay_apart.
  bool apart = false;
  int64_t a_plane = 0, b_plane = 0;  // bytes between the parts of an operand
  int64_t b_step = 0;  // bytes of B between one step of k_multiple and the next, for tiles (0: they follow each other)
  int64_t b_right = 64, c_right = 64;  // bytes from the left half of the columns to the right one, for tiles
  // Hints for kernels that fetch from L2 to L1 themselves: whether B comes from L2, and the next call's B (if it is
  // another) and C.
  bool far = true;
  const char *next_b = nullptr, *next_c = nullptr;
  // Cache lines that others will need, to be brought in on the way: to L2, or where bit 0 is set to L1 to be written.
  const char* const* fetch = nullptr;
  int64_t fetch_count = 0;
  // Of kernels that round: where not null, the sums are not left in C but rounded to rows of bf16, so many bytes apart.
  char* rounded = nullptr;
  int64_t rounded_stride = 0;
  bool stream = false;  // written around the caches where a row is a whole cache line; the caller knows that it is one
  bool* nan = nullptr;  // set if one of them is NaN
};

// Magnitudes met while operands were split: the bits of the smallest that is not zero (less one) and of the largest.
struct Magnitudes {
  uint32_t smallest = UINT32_MAX, largest = 0;
  void merge(const Magnitudes& other) {
    smallest = other.smallest < smallest ? other.smallest : smallest;
    largest = other.largest > largest ? other.largest : largest;
  }
};

struct Gemm {
  const char* name;     // types, tile, level: f32_f32_14x32_avx512
  int max_rows, cols;   // the largest tile
  int pair;             // consecutive k kept together in B (1 or 2)
  int k_multiple;       // k must be a multiple of this; callers pad both operands with zeros
  double flops_cycle;   // what one core does per cycle, for the cost model
  void (*run)(const GemmCall&);
  void (*run_half)(const GemmCall&);  // the same with cols/2 columns; null where there is none
  void (*enter)();                    // called by a thread before its calls of a task (null: nothing to do), and after
  void (*leave)();
  int parts = 1;                      // bf16 values that an operand is the sum of
  int near_k = 0;                     // of kernels on tiles: k that a call of a weight gradient sums at most, from L2
  double latency_cycles = 0;          // of one k when its sums wait for those of the last one, for the cost model
  bool rounds = false;                // see GemmCall::rounded
  // Whole rows of sums, `pitch` floats apart, rounded to bf16; whether one is a NaN. Null: as others store them.
  bool (*store_bf16)(const float* sums, int64_t pitch, int64_t rows, char* dst, int64_t row_stride) = nullptr;
};

// How many roundings in a row a sum on tiles may pass through: one for every product of tiles.
inline constexpr int64_t most_tile_roundings = 384;
inline int64_t tile_products(int parts) { return parts == 1 ? 1 : parts == 2 ? 4 : 6; }

// Whether the calls that sum so many terms would make a chain that is too long.
inline bool sums_stay_apart(const Gemm& gemm, int64_t terms) {
  return gemm.near_k > 0 && terms / gemm.k_multiple * tile_products(gemm.parts) > most_tile_roundings;
}

// For the length of a task the thread is ready to run the kernel (tile registers are configured, and given back).
class GemmScope {
 public:
  explicit GemmScope(const Gemm& gemm) : gemm_(gemm) {
    if (gemm_.enter) gemm_.enter();
  }
  ~GemmScope() {
    if (gemm_.leave) gemm_.leave();
  }
  GemmScope(const GemmScope&) = delete;

 private:
  const Gemm& gemm_;
};

// The kernels of one level, and its rearrangements of 32-bit words and of 16-bit pairs.
struct GemmKernels {
  const Gemm* f32;
  const Gemm* f64;
  const Gemm* bf16;  // null below avx512_bf16: bf16 operands are then packed as f32
  const Gemm *bf16x2, *bf16x3;  // null where f32 operands in two or three bf16 parts are no faster than f32
  // dst[c][r] = src[r][c]; pitches in words.
  void (*transpose32)(const uint32_t* src, int64_t src_pitch, int64_t rows, int64_t cols, uint32_t* dst,
                      int64_t dst_pitch);
  void (*interleave16)(const uint16_t* even, const uint16_t* odd, int64_t n, uint16_t* dst);
  // dst[i] = the upper half of src[i], then the lower half of src[i + distance]
  void (*shift_pairs)(const uint32_t* src, int64_t n, int64_t distance, uint32_t* dst);
  void (*round_to_bf16)(const float* src, int64_t n, uint16_t* dst);  // nearest, ties to even
  // The bf16 parts of lines of n floats, `line_stride` bytes apart (any alignment): part p of a line goes to
  // dst + line*pitch + p*plane. Their sum is the float, exactly, but for parts that would be subnormal.
  void (*split_to_bf16)(const char* src, int64_t line_stride, int64_t lines, int64_t n, int parts, uint16_t* dst,
                        int64_t pitch, int64_t plane, Magnitudes& met);
  bool (*any_nan)(const float* line, int64_t n);
  double (*sum)(const float* line, int64_t n);  // in f32 lanes, then in double
  // line[i] += element i of so many other lines, in their order; they lie `step` floats apart, from line + step on.
  void (*add_lines)(float* line, int64_t n, int64_t step, int64_t others);
};

}  // namespace convgrad
