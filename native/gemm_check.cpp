// A program of its own, no Python: compares every micro-kernel this CPU can run with a plain loop, and times it.
// Build and run it with native/gemm_check.sh, for example on a machine with AMX.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gemm_tile.h"

using namespace convgrad;

namespace {

// Small integers: every order of summation gives the same bits.
template <typename T>
T encode(int value) {
  return T(value);
}
template <>
uint16_t encode<uint16_t>(int value) {
  const float f = float(value);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return uint16_t(bits >> 16);
}

int value_at(int64_t i) { return int((uint64_t(i) * 2654435761u >> 7) % 5) - 2; }

// Two batch entries with a gap, rows with a pitch, sums on top of what is there. Returns the number of wrong sums.
template <typename T, typename Sum>
int check(const Gemm& gemm, int rows, int64_t k, bool half) {
  const int64_t lda = k + 7, cols = gemm.cols, batch = 2, groups = k / gemm.pair;
  std::vector<T> a(size_t(batch * 40 * lda)), b(size_t(batch * groups * cols * gemm.pair + 64));
  std::vector<Sum> c(size_t(gemm.max_rows * cols), Sum(3));
  for (size_t i = 0; i < a.size(); ++i) a[i] = encode<T>(value_at(int64_t(i)));
  for (size_t i = 0; i < b.size(); ++i) b[i] = encode<T>(value_at(int64_t(i) + 1000));
  const int64_t a_offset[2] = {0, 40 * lda * int64_t(sizeof(T))};
  const int64_t b_offset[2] = {0, groups * cols * gemm.pair * int64_t(sizeof(T))};
  GemmCall call{reinterpret_cast<const char*>(a.data()), lda * int64_t(sizeof(T)),
                reinterpret_cast<const char*>(b.data()), cols * gemm.pair * int64_t(sizeof(T)),
                reinterpret_cast<char*>(c.data()), cols, a_offset, b_offset, batch, k, rows, true};
  {
    const GemmScope scope(gemm);
    (half ? gemm.run_half : gemm.run)(call);
  }
  int wrong = 0;
  for (int m = 0; m < rows; ++m)
    for (int64_t n = 0; n < (half ? cols / 2 : cols); ++n) {
      double sum = 3;
      for (int64_t i = 0; i < batch; ++i)
        for (int64_t j = 0; j < k; ++j)
          sum += double(value_at((i * 40 + m) * lda + j)) *
                 double(value_at(1000 + ((i * groups + j / gemm.pair) * cols + n) * gemm.pair + j % gemm.pair));
      wrong += double(c[size_t(m * cols + n)]) != sum;
    }
  return wrong;
}

double gflops(const Gemm& gemm, int64_t element) {
  const int64_t k = 512;
  std::vector<char> memory(size_t((gemm.max_rows * (k + 32) + k * gemm.cols) * element + 4096), 0);
  std::vector<double> sums(size_t(gemm.max_rows * gemm.cols));
  const int64_t zero = 0;
  const GemmCall call{memory.data(), (k + 32) * element, memory.data() + gemm.max_rows * (k + 32) * element,
                      gemm.cols * gemm.pair * element, reinterpret_cast<char*>(sums.data()), gemm.cols, &zero, &zero, 1,
                      k, gemm.max_rows, false};
  const GemmScope scope(gemm);
  double best = 1e9;
  for (int repeat = 0; repeat < 50; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) gemm.run(call);
    best = std::fmin(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return 2e-9 * 100 * double(gemm.max_rows * gemm.cols * k) / best;
}

template <typename T, typename Sum>
bool report(const Gemm& gemm) {
  int wrong = 0;
  for (int rows = 1; rows <= gemm.max_rows; ++rows)
    for (int64_t k : {1, 3, 8, 50})
      for (bool half : {false, true}) wrong += check<T, Sum>(gemm, rows, k * gemm.k_multiple, half);
  std::printf("%-32s %s, %.1f GFLOP/s on one core\n", gemm.name, wrong ? "WRONG" : "right", gflops(gemm, sizeof(T)));
  return wrong == 0;
}

}  // namespace

int main() {
  __builtin_cpu_init();
  bool right = true;
  for (const GemmKernels& kernels : {generic::gemm_kernels(), avx2::gemm_kernels(), avx512::gemm_kernels()}) {
    const bool wide = std::strstr(kernels.f32->name, "avx512"), middle = std::strstr(kernels.f32->name, "avx2");
    if (wide ? !__builtin_cpu_supports("avx512bw") : middle && !__builtin_cpu_supports("avx2")) continue;
    right &= report<float, float>(*kernels.f32);
    right &= report<double, double>(*kernels.f64);
  }
  if (__builtin_cpu_supports("avx512bf16")) right &= report<uint16_t, float>(gemm_bf16_avx512);
  if (__builtin_cpu_supports("avx512bw") && amx_allowed()) {
    right &= report<uint16_t, float>(gemm_bf16_amx);
  } else {
    std::printf("%-32s not here\n", gemm_bf16_amx.name);
  }
  return right ? 0 : 1;
}
