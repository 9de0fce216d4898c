// The box, see dense_box.h.
#include "dense_box.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace convgrad {

AxisLayout layout_axis(int64_t step, const std::vector<int64_t>& offsets, int64_t length) {
  AxisLayout layout;
  layout.step = step;
  layout.length = length;
  layout.run_of_tap.resize(offsets.size());
  layout.position_of_tap.resize(offsets.size());
  // By residue, then by quotient: offset = quotient*step + residue.
  auto quotient = [&](size_t tap) { return floor_div(offsets[tap], step); };
  auto residue = [&](size_t tap) { return offsets[tap] - quotient(tap) * step; };
  std::vector<size_t> order(offsets.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return residue(a) != residue(b) ? residue(a) < residue(b) : quotient(a) < quotient(b);
  });
  int64_t first = 0, run_residue = -1;  // of the current run
  for (size_t tap : order) {
    const int64_t q = quotient(tap), r = residue(tap);
    if (layout.runs.empty() || r != run_residue || q > first + layout.runs.back().length) {
      layout.runs.push_back({q * step + r, length, 0});
      first = q;
      run_residue = r;
    }
    layout.runs.back().length = q - first + length;
    layout.run_of_tap[tap] = int(layout.runs.size()) - 1;
    layout.position_of_tap[tap] = q - first;
  }
  for (AxisRun& run : layout.runs) {
    run.base = layout.positions;
    layout.positions += run.length;
    layout.longest = std::max(layout.longest, run.length);
  }
  return layout;
}

BoxLayout::BoxLayout(AxisLayout d, AxisLayout h, AxisLayout w, int64_t pitch_multiple)
    : axis{std::move(d), std::move(h), std::move(w)} {
  depth = axis[0].positions;
  height = axis[1].positions;
  pitch = round_up(axis[2].longest, pitch_multiple);
}

std::vector<int64_t> cuts(int64_t extent, int64_t smallest, size_t taps) {
  std::vector<int64_t> sizes;
  for (int64_t n = 1; n <= extent; n += n < 16 ? 1 : n / 4) {
    const int64_t size = ceil_div(extent, n);
    if (size < smallest && n > 1) break;
    if (sizes.empty() || sizes.back() != size) sizes.push_back(size);
  }
  constexpr size_t most_taps_laid_out = 8192;
  const size_t most = std::max<size_t>(3, most_taps_laid_out / std::max<size_t>(1, taps));
  if (sizes.size() <= most) return sizes;
  std::vector<int64_t> some;
  for (size_t i = 0; i < most; ++i) some.push_back(sizes[i * (sizes.size() - 1) / (most - 1)]);
  return some;
}

Range landing(int64_t o0, int64_t length, int64_t step, int64_t offset, int64_t size) {
  const int64_t start = o0 * step + offset;
  if (step == 1) {  // without a division
    const int64_t first = std::clamp(-start, int64_t(0), length);
    return {first, std::clamp(size - start, first, length)};
  }
  const int64_t first = std::clamp(-floor_div(start, step), int64_t(0), length);
  const int64_t last = std::clamp(floor_div(size - 1 - start, step) + 1, first, length);
  return {first, last};
}

namespace {

// Where a position starts in the destination.
template <typename T>
int64_t place(Arrange arrange, int64_t position, int64_t pitch) {
  constexpr int pair = Packed<T>::pair;
  switch (arrange) {
    case Arrange::by_position: return position * pitch;
    case Arrange::by_channel: return position;
    case Arrange::channel_pairs: return position * pair;
    default: return position / pair * pitch;
  }
}

// Starts to bring the row of pixels that lies `distance` bytes further into the cache, channels last.
void fetch_row(const Matrix& matrix, int64_t distance) {
  const int64_t bytes = matrix.channels * std::abs(matrix.channel_stride);
  for (int64_t p = matrix.first; p < matrix.last; ++p) {
    const char* pixel = matrix.data + p * matrix.position_stride + distance;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(pixel + at);
  }
}

// The rows of the box one after the other, for some of the channels.
template <typename T>
void pack_rows(const Packer<T>& packer, const Source& source, const BoxLayout& layout, const int64_t (&o0)[3],
               Arrange arrange, T* dst, int64_t pitch, int64_t panel, int64_t panel_step) {
  const AxisLayout &axis_d = layout.axis[0], &axis_h = layout.axis[1], &axis_w = layout.axis[2];
  const bool channels_last = std::abs(axis_w.step * source.stride[2]) >= std::abs(source.channel_stride);
  // All panels of a row one after the other: what lies side by side in memory is read together.
  const auto pack = [&](Matrix matrix, int64_t row) {
    T* to = dst + place<T>(arrange, row * layout.pitch, pitch);
    for (int64_t c = 0; c < source.channels_padded; c += panel, to += panel_step) {
      matrix.channels = std::clamp(source.channels - c, int64_t(0), panel);
      matrix.channels_padded = std::min(panel, source.channels_padded - c);
      packer(matrix, arrange, to, pitch);
      matrix.data += panel * source.channel_stride;
    }
  };
  struct RunW {
    int64_t start, row;  // its first coordinate, its first row in the box
    Range valid;
    bool one_row;  // rows that follow each other in memory are one long row
  };
  std::vector<RunW> runs_w;
  runs_w.reserve(axis_w.runs.size());
  for (const AxisRun& run : axis_w.runs) {
    const int64_t start = o0[2] * axis_w.step + run.start;
    const Range valid = landing(0, run.length, axis_w.step, start, source.size[2]);
    const bool one_row = axis_h.runs.size() == 1 && axis_h.step == 1 && axis_w.step == 1 && valid.first == 0 &&
                         valid.last == layout.pitch && source.stride[1] == layout.pitch * source.stride[2];
    runs_w.push_back({start, int64_t(runs_w.size()) * layout.depth * layout.height, valid, one_row});
  }
  // The runs of a row one after the other: they read the same cache lines.
  int64_t row = 0;  // index of the row in the box, for the first of the runs
  for (const AxisRun& run_d : axis_d.runs)
    for (int64_t i = 0; i < run_d.length; ++i, row += layout.height) {
      const int64_t d = (o0[0] + i) * axis_d.step + run_d.start;
      const bool in_d = d >= 0 && d < source.size[0];
      for (const RunW& run_w : runs_w) {
        if (!run_w.one_row) continue;
        const int64_t start_h = o0[1] + axis_h.runs[0].start, rows = axis_h.runs[0].length;
        const Range inside = in_d ? landing(0, rows, 1, start_h, source.size[1]) : Range{0, 0};
        const int64_t at = d * source.stride[0] + start_h * source.stride[1] + run_w.start * source.stride[2];
        pack({source.data + at, source.stride[2], source.channel_stride, rows * layout.pitch,
              inside.first * layout.pitch, inside.last * layout.pitch, source.channels, source.channels_padded},
             row + run_w.row);
      }
      int64_t row_h = row;
      for (const AxisRun& run_h : axis_h.runs)
        for (int64_t j = 0; j < run_h.length; ++j, ++row_h) {
          const int64_t h = (o0[1] + j) * axis_h.step + run_h.start;
          const bool inside = in_d && h >= 0 && h < source.size[1];
          for (const RunW& run_w : runs_w) {
            if (run_w.one_row) continue;
            Matrix matrix{source.data, axis_w.step * source.stride[2], source.channel_stride, layout.pitch, 0, 0,
                          source.channels, source.channels_padded};
            if (inside) {
              matrix.data += d * source.stride[0] + h * source.stride[1] + run_w.start * source.stride[2];
              matrix.first = run_w.valid.first;
              matrix.last = run_w.valid.last;
            }
            if (inside && channels_last && h + axis_h.step < source.size[1])
              fetch_row(matrix, axis_h.step * source.stride[1]);
            pack(matrix, row_h + run_w.row);
          }
        }
    }
}

}  // namespace

template <typename T>
void pack_box(const Packer<T>& packer, const Source& source, const BoxLayout& layout, const int64_t (&o0)[3],
              Arrange arrange, T* dst, int64_t pitch, int64_t panel, int64_t panel_step) {
  panel = std::min(panel, source.channels_padded);
  if (std::abs(layout.axis[2].step * source.stride[2]) >= std::abs(source.channel_stride))
    return pack_rows(packer, source, layout, o0, arrange, dst, pitch, panel, panel_step);
  // Channels first: a few channels through all rows, so that memory is read in long runs.
  const int64_t few = std::min(panel, 16 * int64_t(Packed<T>::pair));
  for (int64_t c = 0; c < source.channels_padded; c += few) {
    Source part = source;
    part.data += c * source.channel_stride;
    part.channels = std::clamp(source.channels - c, int64_t(0), few);
    part.channels_padded = std::min(few, source.channels_padded - c);
    const int64_t inside = c % panel;
    const int64_t at = arrange == Arrange::by_position     ? inside
                       : arrange == Arrange::by_channel    ? inside * pitch
                       : arrange == Arrange::channel_pairs ? inside / Packed<T>::pair * pitch
                                                           : inside * Packed<T>::pair;
    pack_rows(packer, part, layout, o0, arrange, dst + c / panel * panel_step + at, pitch, few, 0);
  }
}

template void pack_box(const Packer<float>&, const Source&, const BoxLayout&, const int64_t (&)[3], Arrange, float*,
                       int64_t, int64_t, int64_t);
template void pack_box(const Packer<double>&, const Source&, const BoxLayout&, const int64_t (&)[3], Arrange, double*,
                       int64_t, int64_t, int64_t);
template void pack_box(const Packer<Bf16>&, const Source&, const BoxLayout&, const int64_t (&)[3], Arrange, Bf16*,
                       int64_t, int64_t, int64_t);

}  // namespace convgrad
