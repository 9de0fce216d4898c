// What this machine can do at most: the figures that a benchmark divides by.
#pragma once

namespace convgrad {

struct Ceilings {
  double f32_flops;   // multiply-adds times two per second, all threads together
  double bf16_flops;  // 0 where the machine has no bf16 products
  double copy_bytes;  // bytes per second read plus written, from and to memory
  const char* f32_instructions;
  const char* bf16_instructions;
};

// Takes about half a second. Uses the instruction set level in force (current_isa).
Ceilings measure_ceilings(int threads);

}  // namespace convgrad
