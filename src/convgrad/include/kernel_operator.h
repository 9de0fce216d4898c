// The few names of Ascend C that a convolution kernel uses, for a CPU: number formats, GlobalTensor, block index.
// Every access of a GlobalTensor is bounds-checked; what was written where is remembered by memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define __aicore__
#define __global__
#define __gm__
using GM_ADDR = uint8_t*;

// IEEE half precision in 16 bits; arithmetic is done in float, each result is rounded once, to nearest even.
struct half {
    uint16_t bits = 0;
    half() = default;
    half(float value) {
        uint32_t x;
        std::memcpy(&x, &value, 4);
        const uint32_t sign = x >> 16 & 0x8000u, magnitude = x & 0x7fffffffu;
        if (magnitude >= 0x7f800000u) {
            bits = static_cast<uint16_t>(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u));
        } else if (magnitude >= 0x477ff000u) {  // 65520 and above
            bits = static_cast<uint16_t>(sign | 0x7c00u);
        } else if (magnitude < 0x38800000u) {  // below the smallest normal number: a multiple of 2^-24
            float scaled;
            std::memcpy(&scaled, &magnitude, 4);
            scaled = scaled * 16777216.0f + 8388608.0f;  // rounds to a whole number, to nearest even
            uint32_t y;
            std::memcpy(&y, &scaled, 4);
            bits = static_cast<uint16_t>(sign | (y & 0x7fffffu));
        } else {
            const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
            bits = static_cast<uint16_t>(sign | rounded >> 13);
        }
    }
    operator float() const {
        const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
        if (exponent == 0) {
            const float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
            return sign ? -value : value;
        }
        const uint32_t x = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | fraction << 13;
        float value;
        std::memcpy(&value, &x, 4);
        return value;
    }
};

struct bfloat16_t {
    uint16_t bits = 0;
    bfloat16_t() = default;
    bfloat16_t(float value) {
        uint32_t x;
        std::memcpy(&x, &value, 4);
        bits = value != value ? static_cast<uint16_t>(x >> 16 | 0x40u)
                              : static_cast<uint16_t>((x + 0x7fffu + (x >> 16 & 1u)) >> 16);
    }
    operator float() const {
        const uint32_t x = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &x, 4);
        return value;
    }
};

namespace AscendC {

// The memory behind one or more GlobalTensors.
struct Buffer {
    uint64_t size = 0;
    std::vector<uint8_t> written, read;  // per element, by blocks and by GetValue
    bool touched = false, zeroChecked = false;
    std::map<uint64_t, std::pair<uint64_t, const void*>> slots;  // blocks that wait to be transposed
    std::vector<std::weak_ptr<bool>> writers;                    // whether each object that wrote has ended
};

inline std::shared_ptr<Buffer> BufferOf(const void* memory, uint64_t size) {
    static std::map<std::pair<const void*, uint64_t>, std::weak_ptr<Buffer>> known;
    std::weak_ptr<Buffer>& place = known[{memory, size}];
    std::shared_ptr<Buffer> found = place.lock();
    if (!found) {
        found = std::make_shared<Buffer>();
        found->size = size;
        found->written.assign(size, 0);
        found->read.assign(size, 0);
        place = found;
    }
    return found;
}

template <typename T>
class GlobalTensor {
public:
    void SetGlobalBuffer(T* memory, uint64_t size) {
        memory_ = memory;
        offset_ = 0;
        buffer_ = BufferOf(memory, size);
    }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor shifted = *this;
        shifted.offset_ += offset;
        if (shifted.offset_ > buffer().size) {
            throw std::out_of_range("GlobalTensor offset " + std::to_string(shifted.offset_) + " lies outside its " +
                                    std::to_string(buffer().size) + " elements");
        }
        return shifted;
    }
    T GetValue(uint64_t place) const {
        buffer().read[at(place)] = 1;
        return memory_[offset_ + place];
    }
    void SetValue(uint64_t place, T value) {
        memory_[at(place)] = value;
        buffer().touched = true;
        buffer().written[offset_ + place] = 1;
    }
    uint64_t GetSize() const { return buffer().size - offset_; }
    T* GetPhyAddr() const { return memory_ + offset_; }

    // For the convolution objects.
    Buffer& buffer() const {
        if (!buffer_) throw std::logic_error("the GlobalTensor has no memory yet: call SetGlobalBuffer first");
        return *buffer_;
    }
    uint64_t offset() const { return offset_; }
    const T* memory() const { return memory_; }

private:
    uint64_t at(uint64_t place) const {
        if (offset_ + place >= buffer().size) {
            throw std::out_of_range("GlobalTensor element " + std::to_string(offset_ + place) + " of " +
                                    std::to_string(buffer().size));
        }
        return offset_ + place;
    }
    T* memory_ = nullptr;
    uint64_t offset_ = 0;
    std::shared_ptr<Buffer> buffer_;
};

// The core that runs; a program sets it before each launch of its kernel.
inline int64_t& BlockIdx() {
    static int64_t index = 0;
    return index;
}
inline int64_t GetBlockIdx() { return BlockIdx(); }

}  // namespace AscendC
