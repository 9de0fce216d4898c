// The entry points of lines.cpp, one per level, and the table it shares.
#pragma once

#include "isa.h"
#include "simd.h"

namespace convgrad {

extern float hif8_values[256];  // filled when the library is loaded (isa.cpp)

// Fills the conversions of a level's table.
CONVGRAD_PER_ISA(void fill_lines(Isa& isa);)

}  // namespace convgrad
