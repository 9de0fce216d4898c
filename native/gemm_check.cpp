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

// Two batch entries with a gap, rows with a pitch, parts one after the other, sums on top of what is there. Returns the
// number of wrong sums.
template <typename T, typename Sum>
int check(const Gemm& gemm, int rows, int64_t k, bool half, bool far) {
  const int64_t lda = k + 7, cols = gemm.cols, batch = 2, groups = k / gemm.pair;
  const int64_t a_plane = batch * 40 * lda, b_plane = batch * groups * cols * gemm.pair + 64;
  std::vector<T> a(size_t(gemm.parts * a_plane)), b(size_t(gemm.parts * b_plane));
  std::vector<Sum> c(size_t(gemm.max_rows * cols), Sum(3));
  for (size_t i = 0; i < a.size(); ++i) a[i] = encode<T>(value_at(int64_t(i)));
  for (size_t i = 0; i < b.size(); ++i) b[i] = encode<T>(value_at(int64_t(i) + 1000));
  const int64_t a_offset[2] = {0, 40 * lda * int64_t(sizeof(T))};
  const int64_t b_offset[2] = {0, groups * cols * gemm.pair * int64_t(sizeof(T))};
  GemmCall call{reinterpret_cast<const char*>(a.data()), lda * int64_t(sizeof(T)),
                reinterpret_cast<const char*>(b.data()), cols * gemm.pair * int64_t(sizeof(T)),
                reinterpret_cast<char*>(c.data()), cols, a_offset, b_offset, batch, k, rows, true,
                a_plane * int64_t(sizeof(T)), b_plane * int64_t(sizeof(T))};
  call.far = far;
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
          for (int pa = 0; pa < gemm.parts; ++pa)
            for (int pb = 0; pb < gemm.parts; ++pb) {
              if (gemm.parts == 3 && pa + pb > 2) continue;  // the products that are too small to matter
              const int64_t in_b = ((i * groups + j / gemm.pair) * cols + n) * gemm.pair + j % gemm.pair;
              sum += double(value_at(pa * a_plane + (i * 40 + m) * lda + j)) *
                     double(value_at(1000 + pb * b_plane + in_b));
            }
      wrong += double(c[size_t(m * cols + n)]) != sum;
    }
  return wrong;
}

double gflops(const Gemm& gemm, int64_t element) {
  const int64_t k = 512;
  const int64_t plane = (gemm.max_rows * (k + 32) + k * gemm.cols) * element + 64;
  std::vector<char> memory(size_t(gemm.parts * plane + 4096), 0);
  std::vector<double> sums(size_t(gemm.max_rows * gemm.cols));
  const int64_t zero = 0;
  const GemmCall call{memory.data(), (k + 32) * element, memory.data() + gemm.max_rows * (k + 32) * element,
                      gemm.cols * gemm.pair * element, reinterpret_cast<char*>(sums.data()), gemm.cols, &zero, &zero, 1,
                      k, gemm.max_rows, false, plane, plane};
  const GemmScope scope(gemm);
  double best = 1e9;
  double spent = 0;
  for (int repeat = 0; repeat < 50 && spent < 0.5; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) gemm.run(call);
    spent += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::fmin(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return 2e-9 * 100 * double(gemm.max_rows * gemm.cols * k) / best;
}

template <typename T, typename Sum>
bool report(const Gemm& gemm) {
  int wrong = 0;
  for (int rows = 1; rows <= gemm.max_rows; ++rows)
    for (int64_t k : {1, 3, 8, 50})
      for (bool half : {false, true})
        for (bool far : {false, true}) wrong += check<T, Sum>(gemm, rows, k * gemm.k_multiple, half, far);
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
  for (const Gemm* gemm : {&amx::gemm_bf16, &amx::gemm_bf16x2, &amx::gemm_bf16x3}) {
    if (__builtin_cpu_supports("avx512bw") && amx_allowed()) {
      right &= report<uint16_t, float>(*gemm);
    } else {
      std::printf("%-32s not here\n", gemm->name);
    }
  }
  if (__builtin_cpu_supports("avx512bw")) {
    std::printf("with tiles in software:\n");
    for (const Gemm* gemm : {&amx_emulated::gemm_bf16, &amx_emulated::gemm_bf16x2, &amx_emulated::gemm_bf16x3})
      right &= report<uint16_t, float>(*gemm);
  }
  return right ? 0 : 1;
}
