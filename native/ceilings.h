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

// Both use the instruction set level in force (current_isa). Takes about half a second:
Ceilings measure_ceilings(int threads);

// Runs multiply-adds on all threads for a millisecond or two and returns their flops: whoever times it beside other
// things knows what the machine could do at that moment. With `bf16` by bf16 instructions, where the level has them.
double run_products(bool bf16, int threads);

}  // namespace convgrad
