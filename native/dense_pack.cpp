// Packing, see dense_pack.h. Lines run along whichever axis of the matrix has the smaller stride.
#include "dense_pack.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace convgrad {

// The matrix seen as lines: `lines` of them, `length` elements each; outside of [valid) ranges all is zero.
template <typename T>
struct Packer<T>::Lines {
  const char* data;
  int64_t line_stride, step;  // bytes
  int64_t lines, line_first, line_last;
  int64_t length, first, last;
};

namespace {

constexpr int64_t block_length = 256;  // elements of a line handled at once: sixteen such lines stay in L1
constexpr int64_t block_lines = 16;
template <typename T>
constexpr int most_parts = Packed<T>::pair == 1 ? 1 : 3;

template <typename T>
void fill_zero(T* dst, int64_t n) {
  if (n <= 4)
    for (int64_t i = 0; i < n; ++i) dst[i] = T{};
  else
    std::memset(static_cast<void*>(dst), 0, size_t(n) * sizeof(T));
}

}  // namespace

template <typename T>
Packer<T>::Packer(const Isa& isa, Dtype dtype, Compute compute, int parts)
    : isa_(isa), reader_(isa, dtype, compute), dtype_(dtype), parts_(parts) {}

// A block that lies entirely inside of the array, converted and rounded.
template <typename T>
void Packer<T>::read(const char* src, int64_t line_stride, int64_t stride, int64_t lines, int64_t n, T* dst,
                     int64_t pitch, int64_t plane) const {
  if constexpr (std::is_same_v<T, double>) {
    for (int64_t line = 0; line < lines; ++line) isa_.decode64(src + line * line_stride, stride, n, dst + line * pitch);
  } else if constexpr (std::is_same_v<T, float>) {
    isa_.decode_block[int(dtype_)](src, line_stride, stride, lines, n, dst, pitch);
    if (reader_.round)
      for (int64_t line = 0; line < lines; ++line) reader_.round(dst + line * pitch, n);
  } else {
    if (dtype_ == Dtype::bf16 && !reader_.round)
      return isa_.copy16(src, line_stride, stride, lines, n, reinterpret_cast<uint16_t*>(dst), pitch);
    const auto split = isa_.gemm->split_to_bf16;
    if (parts_ > 1 && dtype_ == Dtype::f32 && !reader_.round && stride == 4)
      return split(src, line_stride, lines, n, parts_, reinterpret_cast<uint16_t*>(dst), pitch, plane, met_);
    alignas(64) float part[block_length];
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t i = 0; i < n; i += block_length) {
        const int64_t count = std::min(block_length, n - i);
        uint16_t* to = reinterpret_cast<uint16_t*>(dst + line * pitch + i);
        reader_.decode(src + line * line_stride + i * stride, stride, count, part);
        if (reader_.round && reader_.round != isa_.round_bf16) reader_.round(part, count);
        if (parts_ > 1) {
          split(reinterpret_cast<const char*>(part), 0, 1, count, parts_, to, 0, plane, met_);
        } else {
          isa_.gemm->round_to_bf16(part, count, to);
        }
      }
  }
}

// Elements [from, from + n) of `count` lines, zeros where they are not valid.
template <typename T>
void Packer<T>::read_block(const Lines& lines, int64_t line, int64_t count, int64_t from, int64_t n, T* dst,
                           int64_t pitch, int64_t plane) const {
  const int64_t top = std::clamp(lines.line_first - line, int64_t(0), count);
  const int64_t bottom = std::clamp(lines.line_last - line, top, count);
  const int64_t first = std::clamp(lines.first - from, int64_t(0), n), last = std::clamp(lines.last - from, first, n);
  const bool inside = top == 0 && bottom == count && first == 0 && last == n;
  for (int part = 0; part < parts_ && !inside; ++part)
    for (int64_t r = 0; r < count; ++r) {
      T* row = dst + part * plane + r * pitch;
      if (r < top || r >= bottom || first == last) {
        fill_zero(row, n);
      } else {
        fill_zero(row, first);
        fill_zero(row + last, n - last);
      }
    }
  if (top < bottom && first < last)
    read(lines.data + (line + top) * lines.line_stride + (from + first) * lines.step, lines.line_stride, lines.step,
         bottom - top, last - first, dst + top * pitch + first, pitch, plane);
}

// The pairs of lines that lie in the array and need no conversion: [first, last), first even.
template <typename T>
typename Packer<T>::Whole Packer<T>::whole_pairs(const Lines& lines) const {
  if (dtype_ != Dtype::bf16 || reader_.round || lines.step != 2 || lines.first != 0 || lines.last != lines.length)
    return {0, 0};
  const int64_t first = (lines.line_first + 1) / 2 * 2;
  return {first, std::max(first, lines.line_last / 2 * 2)};
}

template <typename T>
void Packer<T>::pack_same(const Lines& lines, T* dst, int64_t pitch) const {
  read_block(lines, 0, lines.lines, 0, lines.length, dst, pitch, plane_);
}

template <typename T>
void Packer<T>::pack_pairs(const Lines& lines, T* dst, int64_t pitch) const {
  if constexpr (Packed<T>::pair == 1) {
    pack_same(lines, dst, pitch);
  } else {
    if (lines.line_first >= lines.line_last) {  // padding only
      for (int part = 0; part < parts_; ++part)
        for (int64_t line = 0; line < lines.lines; line += 2)
          fill_zero(dst + part * plane_ + line / 2 * pitch, 2 * lines.length);
      return;
    }
    // Pairs of dense lines of bf16 go straight to their places.
    const Whole whole = whole_pairs(lines);
    if (whole.first < whole.last)
      isa_.pair16(lines.data + whole.first * lines.line_stride, lines.line_stride, (whole.last - whole.first) / 2,
                  lines.length, reinterpret_cast<uint16_t*>(dst + whole.first / 2 * pitch), pitch);
    alignas(64) T block[most_parts<T>][2][block_length];
    for (int64_t line = 0; line < lines.lines; line += 2) {
      if (line >= whole.first && line < whole.last) continue;
      if (whole.first < whole.last && lines.length <= block_length) {  // beside padding
        pack_edge(lines, line, dst + line / 2 * pitch);
        continue;
      }
      for (int64_t i = 0; i < lines.length; i += block_length) {
        const int64_t n = std::min(block_length, lines.length - i);
        read_block(lines, line, 2, i, n, block[0][0], block_length, 2 * block_length);
        for (int part = 0; part < parts_; ++part)
          isa_.gemm->interleave16(&block[part][0][0].bits, &block[part][1][0].bits, n,
                                  &dst[part * plane_ + line / 2 * pitch + 2 * i].bits);
      }
    }
  }
}

// A pair of dense lines of bf16 of which one at most lies in the array.
template <typename T>
void Packer<T>::pack_edge(const Lines& lines, int64_t line, T* dst) const {
  alignas(64) static const uint16_t zeros[block_length] = {};
  const auto at = [&](int64_t i) {
    return i >= lines.line_first && i < lines.line_last ? lines.data + i * lines.line_stride
                                                        : reinterpret_cast<const char*>(zeros);
  };
  const int64_t distance = int64_t(reinterpret_cast<uintptr_t>(at(line + 1)) - reinterpret_cast<uintptr_t>(at(line)));
  isa_.pair16(at(line), distance, 1, lines.length, reinterpret_cast<uint16_t*>(dst), 0);
}

// Lines of elements that need no conversion are transposed by 32-bit words straight from where they lie.
template <typename T>
bool Packer<T>::words_lie_dense(const Lines& lines) const {
  constexpr int64_t size = sizeof(T);
  return size <= 4 && stored_as_packed() && lines.step == size && lines.line_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(lines.data + lines.first * lines.step) % 4 == 0 && lines.first % (4 / size) == 0 &&
         lines.last % (4 / size) == 0;
}

// The words of the valid elements to dst[word*pitch + line], zeros elsewhere; pitches and lengths in words.
template <typename T>
void Packer<T>::transpose_words(const Lines& lines, uint32_t* dst, int64_t pitch) const {
  constexpr int64_t words = 4 / int64_t(sizeof(T) < 4 ? sizeof(T) : 4);  // elements of a word
  const int64_t first = lines.first / words, last = lines.last / words, length = (lines.length + words - 1) / words;
  const bool any = lines.line_first < lines.line_last && first < last;
  for (int64_t i = 0; i < length; ++i) {
    uint32_t* to = dst + i * pitch;
    if (!any || i < first || i >= last) {
      fill_zero(to, lines.lines);
    } else {
      fill_zero(to, lines.line_first);
      fill_zero(to + lines.line_last, lines.lines - lines.line_last);
    }
  }
  if (!any) return;
  const char* src = lines.data + lines.line_first * lines.line_stride + first * 4;
  isa_.gemm->transpose32(reinterpret_cast<const uint32_t*>(src), lines.line_stride / 4,
                         lines.line_last - lines.line_first, last - first, dst + first * pitch + lines.line_first,
                         pitch);
}

// dst[i*pitch + line]
template <typename T>
void Packer<T>::pack_transposed(const Lines& lines, T* dst, int64_t pitch) const {
  if constexpr (Packed<T>::pair == 1) {
    if constexpr (std::is_same_v<T, float>)
      if (words_lie_dense(lines)) return transpose_words(lines, reinterpret_cast<uint32_t*>(dst), pitch);
    alignas(64) T block[block_lines][block_length];
    for (int64_t line = 0; line < lines.lines; line += block_lines)
      for (int64_t i = 0; i < lines.length; i += block_length) {
        const int64_t n = std::min(block_length, lines.length - i), rows = std::min(block_lines, lines.lines - line);
        read_block(lines, line, rows, i, n, block[0], block_length, 0);
        T* to = dst + i * pitch + line;
        if constexpr (std::is_same_v<T, float>) {
          isa_.gemm->transpose32(reinterpret_cast<const uint32_t*>(block), block_length, rows, n,
                                 reinterpret_cast<uint32_t*>(to), pitch);
        } else {
          for (int64_t c = 0; c < n; ++c)
            for (int64_t r = 0; r < rows; ++r) to[c * pitch + r] = block[r][c];
        }
      }
  } else {
    // Zeros beside the array are whole rows of the result; what is left lies inside.
    if (lines.first > 0 || lines.last < lines.length) {
      const int64_t first = lines.line_first < lines.line_last ? lines.first : lines.length;
      const int64_t last = std::max(first, lines.last);
      for (int part = 0; part < parts_; ++part)
        for (int64_t i = 0; i < lines.length; ++i)
          if (i < first || i >= last) fill_zero(dst + part * plane_ + i * pitch, (lines.lines + 1) / 2 * 2);
      if (first == last) return;
      Lines inside = lines;
      inside.data += first * lines.step;
      inside.first = 0;
      inside.last = inside.length = last - first;
      return pack_transposed(inside, dst + first * pitch, pitch);
    }
    // Pairs of lines become words, then words are transposed.
    constexpr int64_t length = block_length / 2;
    alignas(64) T pair[most_parts<T>][2][length], block[most_parts<T>][block_lines][2 * length];
    const Whole whole = whole_pairs(lines);
    for (int64_t line = 0; line < lines.lines; line += 2 * block_lines)
      for (int64_t i = 0; i < lines.length; i += length) {
        const int64_t n = std::min(length, lines.length - i);
        const int64_t rows = std::min(block_lines, (lines.lines - line + 1) / 2);
        const int64_t top = std::clamp((whole.first - line) / 2, int64_t(0), rows);
        const int64_t bottom = std::clamp((whole.last - line) / 2, top, rows);
        if (top < bottom)
          isa_.pair16(lines.data + (line + 2 * top) * lines.line_stride + i * lines.step, lines.line_stride,
                      bottom - top, n, &block[0][top][0].bits, 2 * length);
        for (int64_t r = 0; r < rows; ++r) {
          if (r >= top && r < bottom) continue;
          read_block(lines, line + 2 * r, 2, i, n, pair[0][0], length, 2 * length);
          for (int part = 0; part < parts_; ++part)
            isa_.gemm->interleave16(&pair[part][0][0].bits, &pair[part][1][0].bits, n, &block[part][r][0].bits);
        }
        for (int part = 0; part < parts_; ++part)
          isa_.gemm->transpose32(reinterpret_cast<const uint32_t*>(block[part]), length, rows, n,
                                 reinterpret_cast<uint32_t*>(dst + part * plane_ + i * pitch + line), pitch / 2);
      }
  }
}

// dst[(i/pair)*pitch + line*pair + i%pair]
template <typename T>
void Packer<T>::pack_pairs_transposed(const Lines& lines, T* dst, int64_t pitch) const {
  if constexpr (Packed<T>::pair == 1) {
    pack_transposed(lines, dst, pitch);
  } else {
    if (words_lie_dense(lines)) return transpose_words(lines, reinterpret_cast<uint32_t*>(dst), pitch / 2);
    alignas(64) T block[most_parts<T>][block_lines][block_length];
    for (int64_t line = 0; line < lines.lines; line += block_lines)
      for (int64_t i = 0; i < lines.length; i += block_length) {
        const int64_t n = std::min(block_length, (lines.length - i + 1) / 2 * 2);
        const int64_t rows = std::min(block_lines, lines.lines - line);
        read_block(lines, line, rows, i, n, block[0][0], block_length, block_lines * block_length);
        for (int part = 0; part < parts_; ++part)
          isa_.gemm->transpose32(reinterpret_cast<const uint32_t*>(block[part]), block_length / 2, rows, n / 2,
                                 reinterpret_cast<uint32_t*>(dst + part * plane_ + i / 2 * pitch + 2 * line),
                                 pitch / 2);
      }
  }
}

template <typename T>
void Packer<T>::operator()(const Matrix& m, Arrange arrange, T* dst, int64_t pitch) const {
  const bool along_positions = std::abs(m.position_stride) < std::abs(m.channel_stride) ||
                               (std::abs(m.position_stride) == std::abs(m.channel_stride) && m.positions > m.channels);
  if (along_positions) {
    const Lines lines = {m.data, m.channel_stride, m.position_stride, m.channels_padded, 0, m.channels,
                         m.positions, m.first, m.last};
    switch (arrange) {
      case Arrange::by_channel: return pack_same(lines, dst, pitch);
      case Arrange::channel_pairs: return pack_pairs(lines, dst, pitch);
      case Arrange::by_position: return pack_transposed(lines, dst, pitch);
      case Arrange::position_pairs: return pack_pairs_transposed(lines, dst, pitch);
    }
  }
  const Lines lines = {m.data, m.position_stride, m.channel_stride, m.positions, m.first, m.last,
                       m.channels_padded, 0, m.channels};
  switch (arrange) {
    case Arrange::by_position: return pack_same(lines, dst, pitch);
    case Arrange::position_pairs: return pack_pairs(lines, dst, pitch);
    case Arrange::by_channel: return pack_transposed(lines, dst, pitch);
    case Arrange::channel_pairs: return pack_pairs_transposed(lines, dst, pitch);
  }
}

template class Packer<float>;
template class Packer<double>;
template class Packer<Bf16>;

}  // namespace convgrad
