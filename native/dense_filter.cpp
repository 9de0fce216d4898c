// Packing the weight of a correlation for its micro-kernel.
#include <cstring>
#include <type_traits>
#include <vector>

#include "dense_prefetch.h"
#include "dense_run.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr int64_t tasks_wanted = 16;  // of packing: enough to share among a few threads
constexpr int64_t least_around = 1 << 20;  // bytes of a weight that is written around the caches: no L2 holds it

// Neighbouring panels of result channels of one block of summed channels, in one phase.
template <typename T>
struct Panels {
  static constexpr int pair = Packed<T>::pair, most_parts = pair == 1 ? 1 : 3;
  static constexpr int64_t room = 1024;  // elements of a line handled at once
  const Run<T>& run;
  const Packer<T>& packer;
  const Phase& phase;
  int64_t results, channels, pad;  // result channels of all panels; summed channels and their padded count
  const char* data;                // of the first result and the first summed channel
  int64_t result_stride, channel_stride;
  T* dst;
  // Element (result r, summed channel c) of a tap is at r*result_step + channel_at(c) + c%pair.
  int64_t result_step, pair_step, tap_step, panel_step;
  bool around;  // the caches, if possible: what other threads read too

  int64_t channel_at(int64_t c) const {
    if (!run.plan.taps_inside()) return c / pair * pair_step;
    const int64_t together = run.plan.gemm->k_multiple;
    return c / together * phase.tap_count * tap_step + c % together / pair * pair_step;
  }

  int64_t tap_at(int td, int th, int tw) const {
    const Tensor& w = run.arguments.w;
    return run.plan.taps[0].kernel_index[size_t(td)] * w.stride[axis_d] +
           run.plan.taps[1].kernel_index[size_t(th)] * w.stride[axis_h] +
           run.plan.taps[2].kernel_index[size_t(tw)] * w.stride[axis_w];
  }

  // The summed channels of a range of the padded ones.
  void pack_by_strides(int64_t first_channel, int64_t last_channel) const {
    std::vector<int64_t> taps;
    for (int td : phase.axis[0]->taps)
      for (int th : phase.axis[1]->taps)
        for (int tw : phase.axis[2]->taps) taps.push_back(tap_at(td, th, tw));
    // Few summed channels through all taps, which may be neighbours in memory; more where the channels are.
    const int64_t size = size_of(run.plan.problem.dtype), width = run.plan.panel;
    int64_t few = channel_stride == size ? 256 / size : 16;
    if (run.plan.taps_inside()) few = run.plan.gemm->k_multiple;
    auto part = [&](int64_t c, size_t tap, int64_t result, int64_t count) {
      const char* first = data + c * channel_stride + taps[tap] + result * result_stride;
      return Matrix{first, result_stride, channel_stride, width, 0, count, std::clamp(channels - c, int64_t(0), few),
                    std::min(few, last_channel - c)};
    };
    // What is packed a few matrices later comes into the cache meanwhile, and the memory that the next one goes to.
    const int64_t count = int64_t(taps.size()), lines = ceil_div(results * std::min(few, channels) * size, 64);
    const int64_t ahead = std::max<int64_t>(1, 64 / lines), bytes = few * width * int64_t(sizeof(T));
    for (int64_t c = first_channel; c < last_channel; c += few) {
      T* to = dst + channel_at(c);
      for (int64_t tap = 0; tap < count; ++tap, to += tap_step) {
        const int64_t later = c + (tap + ahead) / count * few;
        if (later < last_channel) fetch(part(later, size_t((tap + ahead) % count), 0, results), size);
        T* panel = to;
        for (int64_t result = 0; result < results; result += width, panel += panel_step) {
          const Matrix matrix = part(c, size_t(tap), result, std::min(width, results - result));
          if (run.plan.pixels_are_rows) {
            const T* next = result + width < results ? panel + panel_step : to + tap_step;
            for (int64_t at = 0; at < bytes; at += 64) fetch_to_write(reinterpret_cast<const char*>(next) + at);
            packer(matrix, Arrange::channel_pairs, panel, pair_step);
          } else {
            packer(matrix, Arrange::by_position, panel, result_step);
          }
        }
      }
    }
  }

  static void fetch_line(const char* line, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) fetch_to_read(line + at);
  }

  // Words to where all threads will read them: whole lines of a large weight around the caches. The last call's may be
  // in the cache of another thread, and to take a line from there to write it costs more than memory does.
  void put(T* to, const uint32_t* words, int64_t count) const {
    char* place = reinterpret_cast<char*>(to);
    if (around && (reinterpret_cast<uintptr_t>(place) | uintptr_t(count * 4)) % 64 == 0) {
      for (int64_t i = 0; i < count; i += 16) write_line_around(place + i * 4, words + i);
    } else {
      std::memcpy(place, words, size_t(count) * 4);
    }
  }

  // Brings what will be packed next into the cache: its lines lie too far apart for the processor to guess them.
  static void fetch(const Matrix& next, int64_t size) {
    const bool by_results = next.channel_stride == size;
    if (!by_results && next.position_stride != size) return;
    const int64_t lines = by_results ? next.last : next.channels;
    const int64_t bytes = (by_results ? next.channels : next.last) * size;
    const char* line = next.data;
    for (int64_t i = 0; i < lines; ++i, line += by_results ? next.position_stride : next.channel_stride)
      fetch_line(line, bytes);
  }

  // The taps of a channel, and the channels of the inner axis, follow each other without a gap (OIDHW): every line is
  // read once, whole, and its elements are dealt out to the taps.
  Magnitudes pack_dense_taps(bool results_inside) const {
    if constexpr (sizeof(T) < 8) {
      if (results_inside) return pack_dense_words();
      if (result_step == pair) return pack_dense_results();
    }
    const int64_t all_taps = run.plan.problem.geo.taps(), size = size_of(run.plan.problem.dtype);
    alignas(64) T line[most_parts * room];
    const Packer<T> reader = packer.with_plane(room);
    const int64_t inner = results_inside ? results : channels, outer = results_inside ? channels : results;
    const int64_t outer_stride = results_inside ? channel_stride : result_stride;
    const int64_t some = std::max<int64_t>(1, room / all_taps);
    for (int64_t j = 0; j < outer; ++j)
      for (int64_t i0 = 0; i0 < inner; i0 += some) {
        const int64_t count = std::min(some, inner - i0);
        const char* from = data + j * outer_stride + i0 * all_taps * size;
        if (j + 1 < outer) fetch_line(from + outer_stride, count * all_taps * size);
        reader.line(from, count * all_taps, line);
        for (int part = 0; part < run.plan.gemm->parts; ++part)
          for_taps(dst + part * plane(), [&](int64_t tap, T* to) {
            const T* from = line + part * room + tap;
            for (int64_t i = i0; i < i0 + count; ++i, from += all_taps) {
              const int64_t result = results_inside ? i : j, channel = results_inside ? j : i;
              to[result * result_step + channel_at(channel) + channel % pair] = *from;
            }
          });
      }
    return reader.met();
  }

  // Whether the taps of the phase are all there are, in the order of the weight.
  bool takes_all_taps() const {
    int64_t next = 0;
    for_taps(nullptr, [&](int64_t tap, const T*) { next = tap == next ? next + 1 : -1; });
    return next == run.plan.problem.geo.taps();
  }

  // The same where the results are inside, by words: lines of one channel, or of a pair of them, are transposed;
  // straight from where they lie if that takes no conversion, and to their places if all taps are taken.
  Magnitudes pack_dense_words() const {
    const int64_t all_taps = run.plan.problem.geo.taps(), size = size_of(run.plan.problem.dtype);
    const GemmKernels& kernels = *run.plan.problem.isa->gemm;
    alignas(64) T lines[pair][most_parts * room];
    alignas(64) uint32_t words[room], turned[room];
    const Packer<T> reader = packer.with_plane(room);
    const bool as_they_lie = pair == 1 && packer.stored_as_packed() &&
                             (reinterpret_cast<uintptr_t>(data) | uintptr_t(channel_stride)) % 4 == 0;
    const bool to_places = result_step == pair && !around && takes_all_taps();
    const int64_t some = std::max<int64_t>(1, room / all_taps);
    const int64_t ahead = std::max<int64_t>(1, 64 * 64 / (results * all_taps * size * pair)) * pair;
    for (int64_t j = 0; j < channels; j += pair)
      for (int64_t i0 = 0; i0 < results; i0 += some) {
        const int64_t count = std::min(some, results - i0), length = count * all_taps;
        const char* line = data + j * channel_stride + i0 * all_taps * size;
        for (int64_t p = 0; p < pair; ++p) {
          if (j + ahead + p < channels) fetch_line(line + (ahead + p) * channel_stride, length * size);
          if (as_they_lie) continue;
          if (j + p < channels) reader.line(line + p * channel_stride, length, lines[p]);
          else std::fill_n(lines[p], most_parts * room, T{});
        }
        for (int part = 0; part < run.plan.gemm->parts; ++part) {
          const uint32_t* from = reinterpret_cast<const uint32_t*>(as_they_lie ? line : (const char*)lines[0]);
          if constexpr (pair == 2) {
            kernels.interleave16(&lines[0][part * room].bits, &lines[1][part * room].bits, length,
                                 reinterpret_cast<uint16_t*>(words));
            from = words;
          }
          T* first = dst + part * plane() + channel_at(j) + i0 * result_step;
          if (to_places) {
            kernels.transpose32(from, all_taps, count, all_taps, reinterpret_cast<uint32_t*>(first), tap_step / pair);
            continue;
          }
          kernels.transpose32(from, all_taps, count, all_taps, turned, count);
          for_taps(first, [&](int64_t tap, T* to) {
            const uint32_t* taken = turned + tap * count;
            if (result_step == pair) {
              put(to, taken, count);
            } else {
              for (int64_t i = 0; i < count; ++i) std::memcpy(static_cast<void*>(to + i * result_step), taken + i, 4);
            }
          });
        }
      }
    return reader.met();
  }

  // The same where the channels are inside and results become neighbours: sixteen lines are transposed by words.
  Magnitudes pack_dense_results() const {
    const int64_t all_taps = run.plan.problem.geo.taps(), size = size_of(run.plan.problem.dtype);
    const GemmKernels& kernels = *run.plan.problem.isa->gemm;
    constexpr int64_t rows = 16;
    alignas(64) T line[most_parts * pair * room];
    alignas(64) uint32_t words[most_parts][rows * room], turned[rows * room];
    const Packer<T> reader = packer.with_plane(pair * room);
    const int64_t some = std::max<int64_t>(1, 256 / all_taps) * pair;  // channels at once
    for (int64_t j0 = 0; j0 < results; j0 += rows)
      for (int64_t i0 = 0; i0 < channels; i0 += some) {
        const int64_t count = std::min(rows, results - j0), inner = std::min(some, channels - i0);
        const int64_t length = ceil_div(inner, pair) * all_taps;
        for (int64_t j = 0; j < count; ++j) {
          const char* from = data + (j0 + j) * result_stride + i0 * all_taps * size;
          if (j0 + j + 1 < results) fetch_line(from + result_stride, inner * all_taps * size);
          reader.line(from, inner * all_taps, line);
          for (int part = 0; part < run.plan.gemm->parts; ++part) {
            T* elements = line + part * pair * room;
            uint32_t* row = words[part] + j * length;
            std::fill(elements + inner * all_taps, elements + pair * length, T{});  // a pair without second channel
            if constexpr (pair == 1) {
              std::memcpy(row, elements, size_t(length) * 4);
            } else {
              for (int64_t at = 0; at < length; at += all_taps)
                kernels.interleave16(&elements[2 * at].bits, &elements[2 * at + all_taps].bits, all_taps,
                                     reinterpret_cast<uint16_t*>(row + at));
            }
          }
        }
        for (int part = 0; part < run.plan.gemm->parts; ++part) {
          kernels.transpose32(words[part], length, count, length, turned, rows);
          for_taps(dst + part * plane() + j0 * pair, [&](int64_t tap, T* to) {
            const uint32_t* from = turned + tap * rows;
            for (int64_t i = 0; i < inner; i += pair, from += all_taps * rows)
              put(to + channel_at(i0 + i), from, count);
          });
        }
      }
    return reader.met();
  }

  // Calls body(index of the tap in the weight, where it goes) for the taps of the phase.
  template <typename Body>
  void for_taps(T* to, Body body) const {
    const int64_t size = size_of(run.plan.problem.dtype);
    for (int td : phase.axis[0]->taps)
      for (int th : phase.axis[1]->taps)
        for (int tw : phase.axis[2]->taps) {
          body(tap_at(td, th, tw) / size, to);
          to += tap_step;
        }
  }

  int64_t plane() const { return run.plan.weight_plane / int64_t(sizeof(T)); }
  void clear() const {
    for (int part = 0; part < run.plan.gemm->parts; ++part)
      std::fill_n(dst + part * plane(), phase.tap_count * run.weight_pad(pad) * run.plan.panel, T{});
  }
};

// Whether the taps of a channel, and the input channels, follow each other without a gap (OIDHW).
template <typename T>
bool taps_lie_dense(const Run<T>& run) {
  const Geometry& geo = run.plan.problem.geo;
  const Tensor& w = run.arguments.w;
  const int64_t size = size_of(run.plan.problem.dtype), taps = geo.taps();
  return taps > 1 && taps <= 1024 && w.stride[axis_i] == taps * size &&
         (geo.kernel[2] == 1 || w.stride[axis_w] == size) &&
         (geo.kernel[1] == 1 || w.stride[axis_h] == geo.kernel[2] * size) &&
         (geo.kernel[0] == 1 || w.stride[axis_d] == geo.kernel[1] * geo.kernel[2] * size);
}

}  // namespace

template <typename T>
Magnitudes pack_panels(const Run<T>& run, int64_t group, int64_t block, const Phase& phase, int64_t first,
                       int64_t count, T* dst, int64_t first_channel, int64_t last_channel) {
  const Correlation& plan = run.plan;
  const Geometry& geo = plan.problem.geo;
  const Tensor& w = run.arguments.w;
  const bool forward = plan.problem.wrt & wrt_output;
  const bool dense = taps_lie_dense(run);
  const int64_t pad = run.block_pad(block), r0 = first * plan.panel;
  const Packer<T> packer = run.packer.with_plane(plan.weight_plane / int64_t(sizeof(T)));
  Panels<T> to{run, packer, phase, std::min(count * plan.panel, plan.results - r0), run.block_channels(block), pad,
               nullptr, forward ? w.stride[axis_o] : w.stride[axis_i], forward ? w.stride[axis_i] : w.stride[axis_o],
               dst, 0, 0, run.tap_step(pad), run.panel_step(phase, block),
               !plan.own_panels && run.arguments.threads > 1 && plan.weight_bytes >= least_around};
  to.data = w.data + group * geo.group_out() * w.stride[axis_o] + block * plan.channel_block * to.channel_stride +
            r0 * to.result_stride;
  to.result_step = plan.pixels_are_rows ? Packed<T>::pair : run.weight_pad(pad);
  to.pair_step = plan.pixels_are_rows ? plan.panel * Packed<T>::pair : Packed<T>::pair;
  if (!dense) {
    to.pack_by_strides(first_channel, std::min(last_channel, pad));
    return packer.met();
  }
  Magnitudes met;
  for (int64_t left = to.results; left > 0; left -= plan.panel) {
    to.results = std::min(plan.panel, left);
    if (to.results < plan.panel || to.channels < pad) to.clear();
    met.merge(to.pack_dense_taps(!forward));
    to.dst += to.panel_step;
    to.data += plan.panel * to.result_stride;
  }
  if (to.around) finish_streams();
  return met;
}

template <typename T>
void fetch_panels(const Run<T>& run, int64_t group, int64_t block, int64_t panel, Prefetch& prefetch) {
  const Correlation& plan = run.plan;
  const Geometry& geo = plan.problem.geo;
  const Tensor& w = run.arguments.w;
  const bool forward = plan.problem.wrt & wrt_output;
  const int64_t size = size_of(plan.problem.dtype), channels = run.block_channels(block);
  const int64_t results = std::min(plan.own_panels * plan.panel, plan.results - panel * plan.panel);
  const int64_t to = w.stride[forward ? axis_o : axis_i], from = w.stride[forward ? axis_i : axis_o];
  const char* first = w.data + group * geo.group_out() * w.stride[axis_o] + block * plan.channel_block * from +
                      panel * plan.panel * to;
  if (taps_lie_dense(run))
    return prefetch.add({first, from, {to, size, size}, channels, {}, {results, geo.taps(), 1}, size});
  if ((from == size ? channels : to == size ? results : 0) * size < 128) return;
  for (int64_t depth = 0; depth < geo.kernel[0]; ++depth)
    prefetch.add({first + depth * w.stride[axis_d], from, {to, w.stride[axis_h], w.stride[axis_w]}, channels,
                  {0, 0, 0}, {results, geo.kernel[1], geo.kernel[2]}, size});
}

template <typename T>
void pack_weight(const Run<T>& run) {
  const Correlation& plan = run.plan;
  const int64_t phases = int64_t(plan.phases.size()), others = plan.problem.geo.G * plan.channel_blocks * phases;
  // Results that are neighbours in memory: some of the summed channels for all panels. Otherwise panel by panel.
  const bool by_channels = plan.panels_together() > 1 && !taps_lie_dense(run);
  const int64_t grain = std::max<int64_t>(16, plan.gemm->k_multiple), pad = plan.padded(plan.channel_block);
  const int64_t some = by_channels ? round_up(ceil_div(pad, ceil_div(tasks_wanted, others)), grain) : pad;
  const int64_t parts = by_channels ? ceil_div(pad, some) : plan.panels, count = by_channels ? plan.panels : 1;
  parallel_for(others * parts, run.arguments.threads, [&](int64_t task, int) {
    const int64_t part = task % parts, rest = task / parts, panel = by_channels ? 0 : part;
    const int64_t from = by_channels ? part * some : 0;
    const Phase& phase = plan.phases[size_t(rest % phases)];
    const int64_t block = rest / phases % plan.channel_blocks, group = rest / phases / plan.channel_blocks;
    const Magnitudes met = pack_panels(run, group, block, phase, panel, count,
                                       run.weight + run.weight_at(group, block, phase, panel), from, from + some);
    if (plan.gemm->parts == 1) return;
    std::lock_guard lock(run.mutex);
    run.weight_met.merge(met);
  });
}

template Magnitudes pack_panels(const Run<float>&, int64_t, int64_t, const Phase&, int64_t, int64_t, float*, int64_t,
                                int64_t);
template Magnitudes pack_panels(const Run<double>&, int64_t, int64_t, const Phase&, int64_t, int64_t, double*, int64_t,
                                int64_t);
template Magnitudes pack_panels(const Run<Bf16>&, int64_t, int64_t, const Phase&, int64_t, int64_t, Bf16*, int64_t,
                                int64_t);
template void fetch_panels(const Run<float>&, int64_t, int64_t, int64_t, Prefetch&);
template void fetch_panels(const Run<double>&, int64_t, int64_t, int64_t, Prefetch&);
template void fetch_panels(const Run<Bf16>&, int64_t, int64_t, int64_t, Prefetch&);
template void pack_weight(const Run<float>&);
template void pack_weight(const Run<double>&);
template void pack_weight(const Run<Bf16>&);

}  // namespace convgrad
