#!/bin/sh
# Builds gemm_check.cpp with g++ alone and runs it: are the micro-kernels right on this CPU, and how fast?
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
avx2="-mavx2 -mfma -mf16c"
avx512="$avx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512"
build() { g++ -std=c++20 -O3 -w -ffp-contract=fast -fno-math-errno -fno-trapping-math -I"$here" "$@"; }
build -DCONVGRAD_ISA=generic -c "$here/gemm_tile.cpp" -o "$out/generic.o"
build -DCONVGRAD_ISA=avx2 $avx2 -c "$here/gemm_tile.cpp" -o "$out/avx2.o"
build -DCONVGRAD_ISA=avx512 $avx512 -c "$here/gemm_tile.cpp" -o "$out/avx512.o"
build $avx512 -mavx512bf16 -c "$here/gemm_avx512_bf16.cpp" -o "$out/avx512_bf16.o"
build $avx512 -mavx512bf16 -mamx-tile -mamx-bf16 -c "$here/gemm_amx.cpp" -o "$out/amx.o"
build $avx512 -DCONVGRAD_EMULATED_TILES -c "$here/gemm_amx.cpp" -o "$out/amx_emulated.o"
build "$here/gemm_check.cpp" "$out"/*.o -o "$out/gemm_check"
"$out/gemm_check"
