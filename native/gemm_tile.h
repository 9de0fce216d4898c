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
bool amx_allowed();                  // asks the kernel for the tile state, once per process

}  // namespace convgrad
