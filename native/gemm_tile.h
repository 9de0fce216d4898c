// The entry points of the gemm files.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace convgrad {

CONVGRAD_PER_ISA(GemmKernels gemm_kernels();)

extern const Gemm gemm_bf16_avx512;  // gemm_avx512_bf16.cpp: vdpbf16ps
namespace amx {                      // gemm_amx.cpp: tdpbf16ps
extern const Gemm gemm_bf16, gemm_bf16x2, gemm_bf16x3;
}
namespace amx_emulated {  // the same with tiles in software, for tests on any processor
extern const Gemm gemm_bf16, gemm_bf16x2, gemm_bf16x3;
}
// How a micro-kernel sums, so that no term passes through many roundings whatever the data (docs/contract.md): so many
// products follow each other in a register, so many of these blocks are added up beside it, and only then in C.
inline constexpr int64_t block_products = 128, most_blocks = 128;

// Spreads the lines that a call is to fetch over its products: fetched at once they would wait for each other.
// NOTE: every file has its own, compiled for its own level.
namespace {
class Fetcher {
 public:
  int64_t steps = most_steps;  // of k between two calls of `some`; a part of them where it would fetch many lines

  Fetcher(const GemmCall& call, int64_t k_steps) : line_(call.fetch), last_(call.fetch + call.fetch_count) {
    if (k_steps > steps && call.fetch_count * steps > 8 * call.batch * k_steps) steps = 16;
    const int64_t calls = call.batch * ((k_steps + steps - 1) / steps);
    if (call.fetch_count > 0 && calls > 0) each_ = int((call.fetch_count + calls - 1) / calls);
  }
  // The steps that a block of sums must have room for when so many of `k_steps` are done: those up to the next place
  // where it may end. NOTE: such places are the problem's. Steps between fetches depend on the results' addresses.
  static int64_t coming(int64_t done, int64_t k_steps) {
    if (done % most_steps) return 0;
    return k_steps - done < most_steps ? k_steps - done : most_steps;
  }
  void some() {
    for (int n = 0; n < each_ && line_ < last_; ++n, ++line_) {
      if (reinterpret_cast<uintptr_t>(*line_) & 1) {
        __builtin_prefetch(*line_, 1, 3);
      } else {
        __builtin_prefetch(*line_, 0, 2);
      }
    }
  }

 private:
  static constexpr int64_t most_steps = 64;
  const char* const* line_;
  const char* const* last_;
  int each_ = 0;
};
}  // namespace

bool amx_allowed();                  // asks the kernel for the tile state, once per process

}  // namespace convgrad
