// Positions, formats and types of the convolution objects, and the mistake that they raise.
#pragma once

#include <stdexcept>
#include <string>

#include "kernel_operator.h"

namespace ConvCommonApi {

enum class TPosition { GM, A1, A2, B1, B2, CO1 = 7, CO2 = 8 };
enum class ConvFormat { ND, NCHW, NHWC, HWCN, DHWNC, DHWCN, NDHWC, NCDHW, NC1HWC0, NDC1HWC0, FRACTAL_Z_3D, MAX };
enum class ConvDtype { FLOAT16, FLOAT32, BF16, INT4, INT8, UINT8, INT32, INT64, UINT64 };

}  // namespace ConvCommonApi

namespace ConvBackpropApi {

using ConvCommonApi::ConvDtype;
using ConvCommonApi::ConvFormat;
using ConvCommonApi::TPosition;

template <TPosition POSITION, ConvFormat FORMAT, typename T>
struct ConvType {
    constexpr static TPosition pos = POSITION;
    constexpr static ConvFormat format = FORMAT;
    using Type = T;
};

// A call that the device would answer with wrong data; `mistake` is its name in the table of the documentation.
class Misuse : public std::runtime_error {
public:
    Misuse(const char* name, const std::string& why)
        : std::runtime_error("Conv3DBackpropInput: " + why), mistake(name) {}
    const char* mistake;
};

inline std::string Text(uint64_t number) { return std::to_string(number); }
inline std::string Text(int64_t number) { return std::to_string(number); }
inline uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

}  // namespace ConvBackpropApi
