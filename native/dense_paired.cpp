// The paired weight gradient's loops: tasks are (block of channels, slice of the reduction), then the slices are added.
#include "dense_paired.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "bias.h"
#include "dense_prefetch.h"
#include "dense_store.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr int64_t pair = 2, size = sizeof(Bf16);

class PairedTask {
 public:
  PairedTask(const PairedGradient& plan, const Arguments& arguments, const Packer<Bf16>& packer, int64_t task, int slot)
      : plan_(plan), geo_(plan.problem.geo), arguments_(arguments), dy_packer_(packer.with_plane(plan.dy_plane / size)),
        box_packer_(packer.with_plane(plan.box_plane / size)) {
    slice_ = task % plan.slices;
    block_ = task / plan.slices;
    in_first_ = block_ % plan.in_blocks * plan.in_block;
    out_first_ = block_ / plan.in_blocks % plan.out_blocks * plan.out_block;
    group_ = block_ / plan.in_blocks / plan.out_blocks * plan.groups;
    groups_ = std::min(plan.groups, geo_.G - group_);
    in_count_ = std::min(plan.in_block, geo_.group_in() - in_first_);
    group_rows_ = std::min(plan.out_block, geo_.group_out() - out_first_);
    packed_in_ = groups_ * in_count_;
    out_count_ = groups_ * group_rows_;
    char* memory = arguments.workspace + plan.partial_bytes + plan.bias_bytes + slot * plan.slot_bytes;
    dy_ = reinterpret_cast<Bf16*>(memory);
    box_ = reinterpret_cast<Bf16*>(memory + plan.gemm->parts * plan.dy_plane);
    char* after = memory + plan.gemm->parts * (plan.dy_plane + plan.box_plane);
    collect_taps();
    sums_ = plan.slices > 1 ? partial(0) + slice_ * plan.sums_bytes / 4 : reinterpret_cast<float*>(after);
  }

  // The sums of the block's first slice.
  float* partial(int64_t slice) const {
    return reinterpret_cast<float*>(arguments_.workspace + (block_ * plan_.slices + slice) * plan_.sums_bytes);
  }

  // False if the sums cannot be used.
  bool work() {
    // The first products of a tile need no sums to add to; but slices are added whole, with what no product reaches.
    const bool ragged = plan_.slices > 1 && (out_count_ < plan_.out_block || in_count_ < plan_.columns());
    if (ragged) std::memset(sums_, 0, size_t(plan_.sums_bytes));
    const int64_t first = plan_.chunks * slice_ / plan_.slices, last = plan_.chunks * (slice_ + 1) / plan_.slices;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      place_chunk(chunk);
      pack_dy();
      pack_box_copies();
      if (plan_.gemm->parts > 1 && !parts_suffice(dy_packer_.met(), box_packer_.met())) return false;
      multiply(chunk == first && !ragged);
    }
    if (plan_.slices == 1 && !store(sums_)) return false;
    if ((plan_.problem.wrt & wrt_bias) && in_first_ == 0) sum_bias(first, last);
    return true;
  }

  // Sums [tap][k][c] to the result by its strides; false if one is NaN.
  bool store(const float* sums) const {
    const Tensor& w = arguments_.w;
    const Store<Bf16> encode(*plan_.problem.isa, plan_.problem.out_dtype);
    const int64_t columns = plan_.columns(), taps = geo_.taps(), tap_sums = plan_.out_block * columns;
    char* base = w.data + (group_ * geo_.group_out() + out_first_) * w.stride[axis_o] + in_first_ * w.stride[axis_i];
    auto tap_at = [&](int64_t tap) {
      const int64_t tw = tap % geo_.kernel[2], th = tap / geo_.kernel[2] % geo_.kernel[1];
      return tap / geo_.kernel[2] / geo_.kernel[1] * w.stride[axis_d] + th * w.stride[axis_h] + tw * w.stride[axis_w];
    };
    const int64_t step = taps > 1 ? tap_at(1) : 0;
    bool lines_of_taps = taps > 1 && w.stride[axis_i] == taps * step;  // OIDHW: the taps of a channel are neighbours
    for (int64_t tap = 0; tap < taps; ++tap) lines_of_taps &= tap_at(tap) == tap * step;
    bool clean = true;
    if (!lines_of_taps) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        fetch_result(base + tap_at(std::min(tap + 1, taps - 1)));
        clean &= encode(sums + tap * tap_sums, columns, out_count_, in_count_, base + tap_at(tap), w.stride[axis_o],
                        w.stride[axis_i]);
      }
      return clean;
    }
    std::vector<float> line(size_t(taps * in_count_));
    for (int64_t k = 0; k < out_count_; ++k) {
      plan_.problem.isa->gemm->transpose32(reinterpret_cast<const uint32_t*>(sums + k * columns), tap_sums, taps,
                                           in_count_, reinterpret_cast<uint32_t*>(line.data()), taps);
      clean &= encode(line.data(), taps * in_count_, 1, taps * in_count_, base + k * w.stride[axis_o], 0, step);
    }
    return clean;
  }

 private:
  void place_chunk(int64_t chunk) {
    for (int axis : {2, 1, 0}) {
      origin_[axis] = chunk % plan_.tiles[axis] * plan_.tile[axis];
      length_[axis] = std::min(plan_.tile[axis], geo_.out[axis] - origin_[axis]);
      chunk /= plan_.tiles[axis];
    }
    first_image_ = chunk * plan_.images;
    images_ = std::min(plan_.images, geo_.N - first_image_);
  }

  const char* x_image(int64_t i) const {
    const Tensor& x = arguments_.x;
    return x.data + (first_image_ + i) * x.stride[axis_n] + (group_ * geo_.group_in() + in_first_) * x.stride[axis_c];
  }
  const char* y_image(int64_t i) const {
    const Tensor& y = arguments_.y;
    return y.data + (first_image_ + i) * y.stride[axis_n] + (group_ * geo_.group_out() + out_first_) * y.stride[axis_c];
  }

  // dy: [channel][entry][position], zeros behind every row and plane.
  void pack_dy() {
    const Tensor& y = arguments_.y;
    // NOTE: the last chunk of an axis is shorter, but its rows and planes keep the pitch of a whole one.
    const int64_t rows = length_[1], used = rows * plan_.row_pitch;
    for (int64_t i = 0; i < images_; ++i)
      for (int64_t d = 0; d < length_[0]; ++d) {
        const int64_t at = entry_at(i, d, 0);
        const char* from = y_image(i) + (origin_[0] + d) * y.stride[axis_d] + origin_[1] * y.stride[axis_h] +
                           origin_[2] * y.stride[axis_w];
        Matrix row{from, y.stride[axis_w], y.stride[axis_c], plan_.row_pitch, 0, length_[2], out_count_, out_count_};
        if (plan_.row_pitch == length_[2] && y.stride[axis_h] == length_[2] * y.stride[axis_w]) {
          row.positions = row.last = used;  // rows that follow each other in memory are one long row
          dy_packer_(row, Arrange::by_channel, dy_ + at, plan_.dy_pitch);
        } else {
          for (int64_t h = 0; h < rows; ++h, row.data += y.stride[axis_h])
            dy_packer_(row, Arrange::by_channel, dy_ + at + h * plan_.row_pitch, plan_.dy_pitch);
        }
        if (plan_.joined_rows && used < plan_.entry)
          for (int part = 0; part < plan_.gemm->parts; ++part)
            for (int64_t k = 0; k < out_count_; ++k)
              std::memset(static_cast<void*>(dy_ + part * plan_.dy_plane / size + k * plan_.dy_pitch + at + used), 0,
                          size_t((plan_.entry - used) * size));
      }
  }
  int64_t entry_at(int64_t image, int64_t d, int64_t h) const {
    const int64_t plane = image * length_[0] + d;
    return (plan_.joined_rows ? plane : plane * length_[1] + h) * plan_.entry;
  }

  // x: [copy][panel of channels][pair of positions][channel][pair].
  void pack_box_copies() {
    const Tensor& x = arguments_.x;
    const int64_t cols = plan_.gemm->cols, positions = plan_.box.positions(), panel = images_ * positions * cols;
    for (int64_t i = 0; i < images_; ++i) {
      const Source source{x_image(i), x.stride[axis_c], {x.stride[axis_d], x.stride[axis_h], x.stride[axis_w]},
                          {geo_.in[0], geo_.in[1], geo_.in[2]}, packed_in_, round_up(packed_in_, cols)};
      pack_box(box_packer_, source, plan_.box, origin_, Arrange::position_pairs, box_ + i * positions * cols,
               cols * pair, cols, panel);
    }
    const int64_t used = ceil_div(packed_in_, cols) * panel;
    for (int part = 0; part < plan_.gemm->parts; ++part) {
      Bf16* first = box_ + part * plan_.box_plane / size;
      // Reads past the end meet zeros of dy.
      std::memset(static_cast<void*>(first + used), 0, size_t((plan_.copy_elements - used) * size));
      if (plan_.copies > 1)
        plan_.problem.isa->gemm->shift_pairs(reinterpret_cast<const uint32_t*>(first),
                                             (plan_.copy_elements - cols * pair) / pair, cols,
                                             reinterpret_cast<uint32_t*>(first + plan_.copy_elements));
    }
  }

  // `fresh`: there are no sums yet.
  void multiply(bool fresh) {
    const Gemm& gemm = *plan_.gemm;
    const int64_t cols = gemm.cols, columns = plan_.columns(), near = gemm.near_k;
    const int64_t panel = images_ * plan_.box.positions() * cols, word = cols * size;  // bytes of a position of B
    collect_entries();
    GemmCall call{};
    call.lda = plan_.dy_pitch * size;
    call.ldb = cols * pair * size;
    call.ldc = columns;
    call.far = false;
    call.apart = sums_stay_apart(gemm, geo_.N * geo_.out_pixels() / plan_.slices);
    call.a_plane = plan_.dy_plane;
    call.b_plane = plan_.box_plane;
    const int64_t piece = plan_.piece(), joined = std::max<int64_t>(1, near / plan_.entry);
    const int64_t count = plan_.entries(images_, length_[0], length_[1]);
    for (int64_t first = 0; first < count; first += joined)
      for (int64_t from = 0; from < plan_.entry; from += piece) {
        call.k = std::min(piece, plan_.entry - from);
        for (int64_t group = 0; group < groups_; ++group)
          for (int64_t n = 0; n < in_count_; n += cols) {
            const auto kernel = in_count_ - n <= cols / 2 ? gemm.run_half : gemm.run;
            const int64_t channel = group * in_count_ + n;
            const char* b = reinterpret_cast<const char*>(box_ + channel / cols * panel + channel % cols * pair) +
                            from * word;
            for (int64_t m = 0; m < group_rows_; m += gemm.max_rows) {
              const int64_t row = group * group_rows_ + m;
              call.rows = int(std::min<int64_t>(gemm.max_rows, group_rows_ - m));
              call.a = reinterpret_cast<const char*>(dy_ + row * plan_.dy_pitch + from);
              const auto sums_of = [&](const TapPlace& place) {
                return reinterpret_cast<char*>(sums_ + (place.index * plan_.out_block + row) * columns + n);
              };
              for (size_t i = 0; i < taps_.size(); ++i) {
                const Entries& entries = entries_[taps_[i].entries];
                const auto begin = std::lower_bound(entries.index.begin(), entries.index.end(), first);
                const auto end = std::lower_bound(begin, entries.index.end(), first + joined);
                call.c = sums_of(taps_[i]);
                call.accumulate = !fresh || first > 0 || from > 0;
                if (begin == end) {
                  for (int line = 0; line < call.rows && !call.accumulate; ++line)
                    std::memset(call.c + line * columns * 4, 0, size_t(cols) * 4);
                  continue;
                }
                call.batch = end - begin;
                call.a_offset = entries.a_offset.data() + (begin - entries.index.begin());
                call.b_offset = entries.b_offset.data() + (begin - entries.index.begin());
                call.b = b + taps_[i].in_box;
                call.b_right = call.c_right = 64;
                call.next_c = i + 1 < taps_.size() ? sums_of(taps_[i + 1]) : nullptr;
                if (!share_pixels(i)) {
                  kernel(call);
                  continue;
                }
                // Half of the columns for this tap and for the next one, then the other half.
                call.b_right = taps_[i + 1].in_box - taps_[i].in_box;
                call.c_right = sums_of(taps_[i + 1]) - sums_of(taps_[i]);
                gemm.run(call);
                if (kernel == gemm.run) {
                  call.b += 64;
                  call.c += 64;
                  call.next_c = nullptr;
                  gemm.run(call);
                }
                ++i;
              }
            }
          }
      }
  }

  // Whether tap `i` and the next one read the same entries of dy and, a little later, the same pixels: then what both
  // need of half of the columns comes from L2 once. Less than this many bytes further it is still in L1.
  bool share_pixels(size_t i) const {
    constexpr int64_t near = 16 << 10;
    if (i + 1 >= taps_.size()) return false;
    const TapPlace &tap = taps_[i], &next = taps_[i + 1];
    return std::abs(next.in_box - tap.in_box) <= near &&
           (tap.entries == next.entries || entries_[tap.entries].index == entries_[next.entries].index);
  }

  // The taps, those that read the first copy of the box before the others: half as much competes for L1.
  void collect_taps() {
    taps_.clear();
    for (int64_t odd : {0, 1})
      for (int64_t index = 0; index < geo_.taps(); ++index) {
        const int64_t tw = index % geo_.kernel[2], th = index / geo_.kernel[2] % geo_.kernel[1];
        const int64_t at = plan_.box.tap_position(index / geo_.kernel[2] / geo_.kernel[1], th, tw);
        if (at % 2 == odd)
          taps_.push_back({index, size_t(index / geo_.kernel[2]),
                           (odd * plan_.copy_elements + (at - odd) * plan_.gemm->cols) * size});
      }
  }

  // For every pair of taps along D and H the entries that land, as offsets (bytes) into dy and into the box.
  void collect_entries() {
    entries_.resize(size_t(geo_.kernel[0] * geo_.kernel[1]));
    for (size_t taps = 0; taps < entries_.size(); ++taps) {
      Entries& entries = entries_[taps];
      entries.index.clear();
      entries.a_offset.clear();
      entries.b_offset.clear();
      const Range d = landing_of(0, int64_t(taps) / geo_.kernel[1]), h = landing_of(1, int64_t(taps) % geo_.kernel[1]);
      if (h.empty()) continue;
      for (int64_t i = 0; i < images_; ++i)
        for (int64_t depth = d.first; depth < d.last; ++depth)
          for (int64_t row = plan_.joined_rows ? 0 : h.first; row < (plan_.joined_rows ? 1 : h.last); ++row) {
            const int64_t at = entry_at(i, depth, row);
            const int64_t in_box = i * plan_.box.positions() + (depth * plan_.box.height + row) * plan_.box.pitch;
            entries.index.push_back(at / plan_.entry);
            entries.a_offset.push_back(at * size);
            entries.b_offset.push_back(in_box * plan_.gemm->cols * size);
          }
    }
  }
  Range landing_of(int axis, int64_t tap) const {
    return landing(origin_[axis], length_[axis], geo_.stride[axis], plan_.offsets[axis][size_t(tap)], geo_.in[axis]);
  }

  // Where the block's results of one tap will be stored comes into the cache, if channels are neighbours there.
  void fetch_result(const char* tap) const {
    const Tensor& w = arguments_.w;
    const int64_t element = size_of(plan_.problem.out_dtype), bytes = in_count_ * element;
    if (w.stride[axis_i] != element) return;
    for (int64_t k = 0; k < out_count_; ++k, tap += w.stride[axis_o])
      for (int64_t byte = 0; byte < bytes; byte += 64) fetch_to_write(tap + byte);
  }

  void sum_bias(int64_t first, int64_t last) {
    double* total = reinterpret_cast<double*>(arguments_.workspace + plan_.partial_bytes) + slice_ * geo_.K +
                    group_ * geo_.group_out() + out_first_;
    std::fill(total, total + out_count_, 0.0);
    for (int64_t chunk = first; chunk < last; ++chunk) {
      place_chunk(chunk);
      const BiasPart part{first_image_, group_ * geo_.group_out() + out_first_, out_count_, {}, {}};
      add_bias_of_box(plan_.problem, arguments_.y, part, images_, origin_, length_, total);
    }
  }

  const PairedGradient& plan_;
  const Geometry& geo_;
  const Arguments& arguments_;
  Packer<Bf16> dy_packer_, box_packer_;
  // Channels of one group's block, and of all groups of the block together.
  int64_t slice_, block_, group_, groups_, in_first_, in_count_, packed_in_, out_first_, group_rows_, out_count_;
  int64_t origin_[3] = {}, length_[3] = {}, first_image_ = 0, images_ = 1;
  Bf16 *dy_, *box_;
  float* sums_;
  struct TapPlace {
    int64_t index;
    size_t entries;  // which of entries_
    int64_t in_box;  // bytes
  };
  struct Entries {
    std::vector<int64_t> index, a_offset, b_offset;
  };
  std::vector<TapPlace> taps_;
  std::vector<Entries> entries_;
};

}  // namespace

bool run_paired_gradient(const PairedGradient& plan, const Arguments& arguments) {
  const Packer<Bf16> packer(*plan.problem.isa, plan.problem.dtype, plan.problem.compute, plan.gemm->parts);
  std::atomic<bool> unusable{false};
  parallel_for(plan.blocks() * plan.slices, arguments.threads, [&](int64_t task, int slot) {
    if (unusable.load(std::memory_order_relaxed)) return;
    const GemmScope scope(*plan.gemm);
    if (!PairedTask(plan, arguments, packer, task, slot).work()) unusable.store(true, std::memory_order_relaxed);
  });
  if (unusable) return false;
  if (plan.slices > 1) {
    // Pieces of every block's sums are added, in the order of the slices, into the first; then it is stored.
    constexpr int64_t piece = 16384;
    const int64_t count = plan.sums_bytes / 4, pieces = ceil_div(count, piece);
    parallel_for(plan.blocks() * pieces, arguments.threads, [&](int64_t task, int) {
      const int64_t first = task % pieces * piece, n = std::min(piece, count - first);
      char* sums = arguments.workspace + task / pieces * plan.slices * plan.sums_bytes;
      float* total = reinterpret_cast<float*>(sums) + first;
      for (int64_t slice = 1; slice < plan.slices; ++slice) {
        const float* part = total + slice * count;
        for (int64_t i = 0; i < n; ++i) total[i] += part[i];
      }
    });
    parallel_for(plan.blocks(), arguments.threads, [&](int64_t block, int slot) {
      const PairedTask task(plan, arguments, packer, block * plan.slices, slot);
      if (!task.store(task.partial(0))) unusable.store(true, std::memory_order_relaxed);
    });
    if (unusable) return false;
  }
  if (plan.problem.wrt & wrt_bias) {
    const int64_t channels = plan.problem.geo.K;
    double* totals = reinterpret_cast<double*>(arguments.workspace + plan.partial_bytes);
    for (int64_t slice = 1; slice < plan.slices; ++slice)
      for (int64_t k = 0; k < channels; ++k) totals[k] += totals[slice * channels + k];
    store_bias(plan.problem, arguments.db, 0, channels, totals);
  }
  return true;
}

}  // namespace convgrad
