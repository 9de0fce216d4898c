// The weight gradient's loops: tasks are (block of channels, slice of the reduction), then the slices are added.
#include "dense_weight.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "bias.h"
#include "dense_prefetch.h"
#include "dense_weight_store.h"
#include "threads.h"

namespace convgrad {
namespace {

template <typename T>
class SliceTask {
  using Sum = typename Packed<T>::Sum;
  static constexpr int pair = Packed<T>::pair;

 public:
  SliceTask(const WeightGradient& plan, const Arguments& arguments, const Packer<T>& packer, int64_t task, int slot)
      : plan_(plan), geo_(plan.problem.geo), arguments_(arguments),
        box_packer_(packer.with_plane(plan.box_plane() / int64_t(sizeof(T)))),
        dy_packer_(packer.with_plane(plan.dy_plane() / int64_t(sizeof(T)))) {
    // The task that this thread will probably get next.
    next_task_ = std::min(task + 1, plan.blocks() * plan.slices - 1);
    place_task(task);
    char* memory = arguments.workspace + plan.partial_bytes + plan.bias_bytes + slot * plan.slot_bytes;
    box_ = reinterpret_cast<T*>(memory);
    dy_ = reinterpret_cast<T*>(memory + plan.box_bytes);
    sums_ = plan.slices > 1 ? partial(block_, slice_) : reinterpret_cast<Sum*>(memory + plan.box_bytes + plan.dy_bytes);
  }

  Sum* partial(int64_t block, int64_t slice) const {
    return reinterpret_cast<Sum*>(arguments_.workspace + (block * plan_.slices + slice) * plan_.sums_bytes);
  }

  // False if the parts of the operands do not suffice.
  bool work() {
    sum_all(false);
    bool stored = stores_;
    if (plan_.gemm->parts > 1) {
      if (!suffices() || !clean()) return false;
    } else if (stored ? stored_nan_ : !clean()) {
      sum_all(true);
      stored = false;
    }
    if (plan_.slices == 1 && !stored) store(sums_, 0, in_count_);
    if ((plan_.problem.wrt & wrt_bias) && in_first_ == 0) sum_bias();
    return true;
  }

  // The block's sums of `count` input channels from `first` on, converted into the result.
  void store(const Sum* sums, int64_t first, int64_t count) const {
    const Tensor& w = arguments_.w;
    const int64_t columns = round_up(plan_.out_block, plan_.gemm->cols);
    char* base = w.data + (group_ * geo_.group_out() + out_first_) * w.stride[axis_o] +
                 (in_first_ + first) * w.stride[axis_i];
    store_weight<T>(plan_, sums + first * columns, std::min(count, in_count_ - first), out_count_, base, w);
  }

 private:
  bool suffices() const { return parts_suffice(box_packer_.met(), dy_packer_.met()); }

  bool clean() const {
    const int64_t columns = round_up(plan_.out_block, plan_.gemm->cols);
    for (int64_t tap = 0; tap < geo_.taps(); ++tap)
      for (int64_t c = 0; c < in_count_; ++c) {
        const Sum* line = sums_ + (tap * plan_.in_block + c) * columns;
        if constexpr (std::is_same_v<Sum, float>) {
          if (plan_.problem.isa->gemm->any_nan(line, out_count_)) return false;
        } else {
          for (int64_t k = 0; k < out_count_; ++k)
            if (line[k] != line[k]) return false;
        }
      }
    return true;
  }

  // All chunks of the slice. Carefully means one tap at a time with boxes that hold nothing else, and dy zeroed where
  // the tap does not land: then zeros meet zeros only.
  void sum_all(bool careful) {
    const int64_t columns = round_up(plan_.out_block, plan_.gemm->cols);
    // The first chunk starts the sums, unless it adds to them in several pieces. Partial sums are not in the cache yet:
    // clearing them brings them in more evenly than the kernel would.
    const bool cleared = careful || plan_.gemm->near_k > 0 || plan_.slices > 1;
    if (cleared)
      std::memset(static_cast<void*>(sums_), 0, size_t(geo_.taps() * plan_.in_block * columns) * sizeof(Sum));
    const int64_t first = plan_.chunks * slice_ / plan_.slices, last = plan_.chunks * (slice_ + 1) / plan_.slices;
    for (int64_t chunk = first; chunk < last; ++chunk) {
      if (chunk + 1 < last) {
        place_chunk(chunk + 1);
        plan_prefetch();
      } else {
        const int64_t task = block_ * plan_.slices + slice_;
        place_task(next_task_);
        place_chunk(plan_.chunks * slice_ / plan_.slices);
        plan_prefetch();
        place_task(task);
      }
      place_chunk(chunk);
      starts_ = chunk == first && !cleared;
      // A result whose lines run along the channels of dy takes every tile of sums as soon as it is complete.
      stores_ = chunk + 1 == last && plan_.slices == 1 && plan_.gemm->near_k == 0 && !careful &&
                arguments_.w.stride[axis_o] == size_of(plan_.problem.out_dtype);
      if (!careful) {
        pack_and_multiply(plan_.box, plan_.joined_rows, nullptr);
        if (plan_.gemm->parts > 1 && !suffices()) return;
        if (stores_) finish_streams();
        continue;
      }
      for (int64_t td = 0; td < geo_.kernel[0]; ++td)
        for (int64_t th = 0; th < geo_.kernel[1]; ++th)
          for (int64_t tw = 0; tw < geo_.kernel[2]; ++tw) {
            const std::array<int64_t, 3> tap = {td, th, tw};
            AxisLayout axes[3];
            for (int axis = 0; axis < 3; ++axis)
              axes[axis] =
                  layout_axis(geo_.stride[axis], {plan_.offsets[axis][size_t(tap[size_t(axis)])]}, length_[axis]);
            pack_and_multiply(BoxLayout(axes[0], axes[1], axes[2], plan_.gemm->k_multiple), false, &tap);
          }
    }
  }

  void place_task(int64_t task) {
    slice_ = task % plan_.slices;
    block_ = task / plan_.slices;
    out_first_ = block_ % plan_.out_blocks * plan_.out_block;
    in_first_ = block_ / plan_.out_blocks % plan_.in_blocks * plan_.in_block;
    group_ = block_ / plan_.out_blocks / plan_.in_blocks;
    out_count_ = std::min(plan_.out_block, geo_.group_out() - out_first_);
    in_count_ = std::min(plan_.in_block, geo_.group_in() - in_first_);
  }

  void place_chunk(int64_t chunk) {
    for (int axis : {2, 1, 0}) {
      origin_[axis] = chunk % plan_.tiles[axis] * plan_.tile[axis];
      length_[axis] = std::min(plan_.tile[axis], geo_.out[axis] - origin_[axis]);
      chunk /= plan_.tiles[axis];
    }
    first_image_ = chunk * plan_.images;
    images_ = std::min(plan_.images, geo_.N - first_image_);
  }

  // What the chunk in place reads comes into the cache during the products before it.
  void plan_prefetch() {
    const Tensor &x = arguments_.x, &y = arguments_.y;
    const int64_t size = size_of(plan_.problem.dtype);
    prefetch_.clear();
    for (int64_t i = 0; i < images_; ++i) {
      Region in{x.data + (first_image_ + i) * x.stride[axis_n] +
                    (group_ * geo_.group_in() + in_first_) * x.stride[axis_c],
                x.stride[axis_c], {x.stride[axis_d], x.stride[axis_h], x.stride[axis_w]}, in_count_, {}, {}, size};
      Region out{y.data + (first_image_ + i) * y.stride[axis_n] +
                     (group_ * geo_.group_out() + out_first_) * y.stride[axis_c],
                 y.stride[axis_c], {y.stride[axis_d], y.stride[axis_h], y.stride[axis_w]}, out_count_, {}, {}, size};
      for (int axis = 0; axis < 3; ++axis) {
        const int64_t stride = geo_.stride[axis];
        in.first[axis] = std::clamp(origin_[axis] * stride + plan_.offsets[axis].front(), int64_t(0), geo_.in[axis]);
        in.last[axis] = std::clamp((origin_[axis] + length_[axis] - 1) * stride + plan_.offsets[axis].back() + 1,
                                   in.first[axis], geo_.in[axis]);
        out.first[axis] = origin_[axis];
        out.last[axis] = origin_[axis] + length_[axis];
      }
      prefetch_.add(in);
      prefetch_.add(out);
    }
    prefetch_.spread(ceil_div(out_count_, plan_.gemm->cols) * ceil_div(in_count_, plan_.row_panel) * geo_.taps() *
                     std::max<int64_t>(1, plan_.gemm->near_k ? images_ * length_[0] * length_[1] * length_[2] /
                                                                   plan_.gemm->near_k : 0));
  }

  void pack_and_multiply(const BoxLayout& box, bool joined, const std::array<int64_t, 3>* only) {
    const Tensor &x = arguments_.x, &y = arguments_.y;
    const int64_t positions = box.positions();
    box_pitch_ = row_pitch(round_up(images_ * positions, 2), sizeof(T));
    // One row of dy takes `row_pitch` positions; the positions of one plane are summed in one or in length[1] pieces.
    const int64_t row_pitch = joined ? box.pitch : round_up(length_[2], plan_.gemm->k_multiple);
    const int64_t plane = round_up(length_[1] * row_pitch, plan_.gemm->k_multiple);
    const int64_t dy_positions = images_ * length_[0] * plane;
    Range valid[3];
    for (int axis = 0; axis < 3; ++axis)
      valid[axis] = only ? landing(origin_[axis], length_[axis], geo_.stride[axis],
                                   plan_.offsets[axis][size_t((*only)[size_t(axis)])], geo_.in[axis])
                         : Range{0, length_[axis]};
    if (valid[0].empty() || valid[1].empty() || valid[2].empty()) return;
    for (int64_t i = 0; i < images_; ++i) {
      const char* x_image = x.data + (first_image_ + i) * x.stride[axis_n] +
                            (group_ * geo_.group_in() + in_first_) * x.stride[axis_c];
      const Source source{x_image, x.stride[axis_c], {x.stride[axis_d], x.stride[axis_h], x.stride[axis_w]},
                          {geo_.in[0], geo_.in[1], geo_.in[2]}, in_count_, in_count_};
      pack_box(box_packer_, source, box, origin_, Arrange::by_channel, box_ + i * positions, box_pitch_);
      const char* y_image = y.data + (first_image_ + i) * y.stride[axis_n] +
                            (group_ * geo_.group_out() + out_first_) * y.stride[axis_c];
      for (int64_t d = 0; d < length_[0]; ++d) {
        const int64_t at = (i * length_[0] + d) * plane;
        pack_dy_plane(y_image, d, row_pitch, plane, at, dy_positions, valid);
      }
    }
    collect_rows(box, joined, row_pitch, plane, only != nullptr);
    // Reads past the last channel's box meet zeros of dy.
    for (int part = 0; part < plan_.gemm->parts; ++part)
      std::memset(static_cast<void*>(box_ + part * plan_.box_plane() / int64_t(sizeof(T)) + in_count_ * box_pitch_), 0,
                  size_t(slack()) * sizeof(T));
    multiply(box, joined, joined ? plane : row_pitch, dy_positions, only);
  }

  int64_t slack() const { return plan_.slack(); }

  // dy of one plane into every panel of result channels: [panel][position/pair][channel][pair].
  void pack_dy_plane(const char* image, int64_t d, int64_t row_pitch, int64_t plane, int64_t at, int64_t dy_positions,
                     const Range (&valid)[3]) {
    const Tensor& y = arguments_.y;
    const int64_t cols = plan_.gemm->cols;
    const bool channels_last = std::abs(y.stride[axis_c]) < std::abs(y.stride[axis_w]);
    // Rows that follow each other in memory and in the pack are one long row.
    const bool one_row = row_pitch == length_[2] && y.stride[axis_h] == length_[2] * y.stride[axis_w] &&
                         valid[2].first == 0 && valid[2].last == length_[2];
    auto pack = [&](int64_t k, int64_t h) {
      const bool inside = d >= valid[0].first && d < valid[0].last && h >= valid[1].first && h < valid[1].last;
      if (one_row) {
        const bool any = d >= valid[0].first && d < valid[0].last;
        const Matrix matrix{image + (origin_[0] + d) * y.stride[axis_d] + origin_[1] * y.stride[axis_h] +
                                origin_[2] * y.stride[axis_w] + k * y.stride[axis_c],
                            y.stride[axis_w], y.stride[axis_c], length_[1] * row_pitch,
                            any ? valid[1].first * row_pitch : 0, any ? valid[1].last * row_pitch : 0,
                            std::min(cols, out_count_ - k), cols};
        return dy_packer_(matrix, Arrange::position_pairs, dy_ + k * dy_positions + at * cols, cols * pair);
      }
      const Matrix matrix{image + (origin_[0] + d) * y.stride[axis_d] + (origin_[1] + h) * y.stride[axis_h] +
                              origin_[2] * y.stride[axis_w] + k * y.stride[axis_c],
                          y.stride[axis_w], y.stride[axis_c], row_pitch, inside ? valid[2].first : 0,
                          inside ? valid[2].last : 0, std::min(cols, out_count_ - k), cols};
      dy_packer_(matrix, Arrange::position_pairs, dy_ + k * dy_positions + (at + h * row_pitch) * cols, cols * pair);
    };
    if (channels_last) {
      for (int64_t h = 0; h < (one_row ? 1 : length_[1]); ++h)
        for (int64_t k = 0; k < out_count_; k += cols) pack(k, h);
    } else {
      for (int64_t k = 0; k < out_count_; k += cols)
        for (int64_t h = 0; h < (one_row ? 1 : length_[1]); ++h) pack(k, h);
    }
    const int64_t used = length_[1] * row_pitch;
    for (int part = 0; part < plan_.gemm->parts; ++part)
      for (int64_t k = 0; k < out_count_; k += cols)
        std::memset(static_cast<void*>(dy_ + part * plan_.dy_plane() / int64_t(sizeof(T)) + k * dy_positions +
                                       (at + used) * cols),
                    0, size_t((plane - used) * cols) * sizeof(T));
  }

  // For every pair of taps along D and H the rows of pixels that land, as offsets into the box and into dy.
  void collect_rows(const BoxLayout& box, bool joined, int64_t row_pitch, int64_t plane, bool all) {
    rows_.resize(size_t(geo_.kernel[0] * geo_.kernel[1]));
    for (int64_t td = 0; td < geo_.kernel[0]; ++td)
      for (int64_t th = 0; th < geo_.kernel[1]; ++th) {
        Rows& rows = rows_[size_t(td * geo_.kernel[1] + th)];
        rows.a_offset.clear();
        rows.b_offset.clear();
        rows.place.clear();
        const Range d = all ? Range{0, length_[0]} : landing_of(0, td);
        const Range h = all ? Range{0, length_[1]} : landing_of(1, th);
        if (h.empty()) continue;
        for (int64_t i = 0; i < images_; ++i)
          for (int64_t depth = d.first; depth < d.last; ++depth)
            for (int64_t row = joined ? 0 : h.first; row < (joined ? 1 : h.last); ++row) {
              const int64_t in_box = i * box.positions() + (depth * box.height + row) * box.pitch;
              const int64_t in_dy = (i * length_[0] + depth) * plane + row * row_pitch;
              rows.place.push_back((i * length_[0] + depth) * length_[1] + row);
              rows.a_offset.push_back(in_box * int64_t(sizeof(T)));
              rows.b_offset.push_back(in_dy * plan_.gemm->cols * int64_t(sizeof(T)));
            }
      }
  }

  Range landing_of(int axis, int64_t tap) const {
    return landing(origin_[axis], length_[axis], geo_.stride[axis], plan_.offsets[axis][size_t(tap)], geo_.in[axis]);
  }

  void multiply(const BoxLayout& box, bool joined, int64_t k, int64_t dy_positions,
                const std::array<int64_t, 3>* only) {
    const Gemm& gemm = *plan_.gemm;
    const int64_t columns = round_up(plan_.out_block, gemm.cols);
    GemmCall call;
    constexpr int64_t most_lines = 128;
    const char* lines[most_lines + Prefetch::most_taken];
    call.fetch = lines;
    alignas(64) Sum tile[32 * 32];
    call.lda = box_pitch_ * int64_t(sizeof(T));
    call.ldb = gemm.cols * pair * int64_t(sizeof(T));
    call.ldc = columns;
    call.accumulate = !starts_;
    call.apart = sums_stay_apart(gemm, geo_.N * geo_.out_pixels() / plan_.slices);
    call.a_plane = plan_.box_plane();
    call.b_plane = plan_.dy_plane();
    call.rounded_stride = arguments_.w.stride[axis_i];
    call.nan = &stored_nan_;
    call.stream = streams_weight(geo_, arguments_.w, group_ * geo_.group_out() + out_first_);
    // Row by row, a tap needs only the columns for which it lands.
    const int64_t grain = gemm.k_multiple;
    columns_.clear();
    for (int64_t tw = 0; tw < geo_.kernel[2]; ++tw) {
      Range range = landing_of(2, tw);
      if (joined || only) {
        range = range.empty() && !only ? Range{0, 0} : Range{0, k};
      } else if (!range.empty()) {
        range = {range.first / grain * grain, round_up(range.last, grain)};
      }
      columns_.push_back(range);
    }
    // Where the kernel likes its operands in L1, a few rows of pixels go through all taps before the next ones.
    const int64_t taps = only ? 1 : geo_.taps();
    const int64_t all_places = images_ * length_[0] * length_[1];
    const bool near = gemm.near_k > 0 && (taps > 1 || in_count_ <= 64);
    const int64_t places = !near ? all_places : joined ? length_[1] : std::max<int64_t>(1, gemm.near_k / k);
    const int64_t step = near ? std::min<int64_t>(k, gemm.near_k) : k;
    for (int64_t place = 0; place < all_places; place += places)
      for (int64_t from = 0; from < k; from += step)
        for (int64_t n = 0; n < out_count_; n += gemm.cols) {
          const char* panel = reinterpret_cast<const char*>(dy_ + n * dy_positions);
          const auto kernel = gemm.run_half && out_count_ - n <= gemm.cols / 2 ? gemm.run_half : gemm.run;
          const bool rounds = stores_ && gemm.rounds && plan_.problem.out_dtype == Dtype::bf16 &&
                              out_count_ - n >= (kernel == gemm.run ? gemm.cols : gemm.cols / 2);
          for (int64_t m = 0; m < in_count_; m += plan_.row_panel) {
            call.rows = int(std::min(plan_.row_panel, in_count_ - m));
            call.far = true;
            int64_t tap = 0;
            for (int64_t td = 0; td < geo_.kernel[0]; ++td)
              for (int64_t th = 0; th < geo_.kernel[1]; ++th) {
                const Rows& rows = rows_[size_t(td * geo_.kernel[1] + th)];
                const auto first = std::lower_bound(rows.place.begin(), rows.place.end(), place);
                const auto last = std::lower_bound(first, rows.place.end(), place + places);
                const auto skipped = first - rows.place.begin();
                call.batch = last - first;
                call.a_offset = rows.a_offset.data() + skipped;
                call.b_offset = rows.b_offset.data() + skipped;
                for (int64_t tw = 0; tw < geo_.kernel[2]; ++tw, ++tap) {
                  if (only && (td != (*only)[0] || th != (*only)[1] || tw != (*only)[2])) continue;
                  const Range& lands = columns_[size_t(tw)];
                  const Range range = {std::max(lands.first, from), std::min(lands.last, from + step)};
                  const bool alone = starts_ && stores_;  // these products are all
                  Sum* sums = alone ? tile : sums_ + (tap * plan_.in_block + m) * columns + n;
                  call.ldc = alone ? gemm.cols : columns;
                  if (range.empty() || call.batch == 0) {
                    for (int64_t row = 0; starts_ && row < call.rows; ++row)
                      std::fill_n(sums + row * call.ldc, gemm.cols, Sum(0));
                    if (stores_) store_tile(sums, call, m, n, td, th, tw);
                    continue;
                  }
                  const int64_t at = only ? 0 : box.tap_position(td, th, tw);
                  call.a = reinterpret_cast<const char*>(box_ + m * box_pitch_ + at + range.first);
                  call.b = panel + range.first * gemm.cols * int64_t(sizeof(T));
                  call.k = range.last - range.first;
                  call.c = reinterpret_cast<char*>(sums);
                  if (near) call.next_c = call.c + plan_.in_block * columns * int64_t(sizeof(Sum));
                  call.fetch_count = 0;
                  call.rounded = rounds ? tile_at(m, n, td, th, tw) : nullptr;
                  if (stores_ && !rounds)
                    call.fetch_count = lines_to_write(tile_at(m, n, td, th, tw), call.rows, arguments_.w.stride[axis_i],
                                                      gemm.cols * size_of(plan_.problem.out_dtype), lines, most_lines);
                  call.fetch_count += prefetch_.take(lines + call.fetch_count);
                  kernel(call);
                  call.far = !near;
                  if (stores_ && !rounds) store_tile(sums, call, m, n, td, th, tw);
                }
              }
          }
        }
  }

  // Where the sums of a tap for the input channels from m on and the result channels from n on go.
  char* tile_at(int64_t m, int64_t n, int64_t td, int64_t th, int64_t tw) const {
    const Tensor& w = arguments_.w;
    return w.data + (group_ * geo_.group_out() + out_first_ + n) * w.stride[axis_o] +
           (in_first_ + m) * w.stride[axis_i] + td * w.stride[axis_d] + th * w.stride[axis_h] + tw * w.stride[axis_w];
  }
  void store_tile(const Sum* sums, const GemmCall& call, int64_t m, int64_t n, int64_t td, int64_t th, int64_t tw) {
    const Store<T> encode(*plan_.problem.isa, plan_.problem.out_dtype);
    const int64_t count = std::min<int64_t>(plan_.gemm->cols, out_count_ - n);
    stored_nan_ |= !encode(sums, call.ldc, call.rows, count, tile_at(m, n, td, th, tw), arguments_.w.stride[axis_i],
                           arguments_.w.stride[axis_o]);
  }

  void sum_bias() {
    double* total = reinterpret_cast<double*>(arguments_.workspace + plan_.partial_bytes) + slice_ * geo_.K +
                    group_ * geo_.group_out() + out_first_;
    std::fill(total, total + out_count_, 0.0);
    const int64_t last = plan_.chunks * (slice_ + 1) / plan_.slices;
    for (int64_t chunk = plan_.chunks * slice_ / plan_.slices; chunk < last; ++chunk) {
      place_chunk(chunk);
      const BiasPart part{first_image_, group_ * geo_.group_out() + out_first_, out_count_, {}, {}};
      add_bias_of_box(plan_.problem, arguments_.y, part, images_, origin_, length_, total);
    }
  }

  const WeightGradient& plan_;
  const Geometry& geo_;
  const Arguments& arguments_;
  Packer<T> box_packer_, dy_packer_;
  int64_t next_task_, slice_, block_, group_, out_first_, out_count_, in_first_, in_count_;
  int64_t origin_[3] = {}, length_[3] = {}, first_image_ = 0, images_ = 1, box_pitch_ = 0;
  T *box_, *dy_;
  Sum* sums_;
  bool starts_ = false;  // the chunk in place is the first to give sums
  bool stores_ = false, stored_nan_ = false;  // the chunk in place stores its sums; one of those stored was NaN
  struct Rows {
    std::vector<int64_t> a_offset, b_offset, place;  // place: number of the row in the chunk
  };
  std::vector<Rows> rows_;
  Prefetch prefetch_;
  std::vector<Range> columns_;
};

}  // namespace

template <typename T>
bool run_weight_gradient(const WeightGradient& plan, const Arguments& arguments) {
  const Geometry& geo = plan.problem.geo;
  const Packer<T> packer(*plan.problem.isa, plan.problem.dtype, plan.problem.compute, plan.gemm->parts);
  std::atomic<bool> outside{false};
  parallel_for(plan.blocks() * plan.slices, arguments.threads, [&](int64_t task, int slot) {
    if (outside.load(std::memory_order_relaxed)) return;
    const GemmScope scope(*plan.gemm);
    if (!SliceTask<T>(plan, arguments, packer, task, slot).work()) outside.store(true, std::memory_order_relaxed);
  });
  if (outside) return false;
  if (plan.slices > 1) {
    // The sums of a few input channels are added, in the order of the slices, into the first slice's, and stored.
    using Sum = typename Packed<T>::Sum;
    const int64_t size = plan.sums_bytes / int64_t(sizeof(Sum)), columns = round_up(plan.out_block, plan.gemm->cols);
    const int64_t rows = std::min(plan.in_block, std::max<int64_t>(32, 32768 / (geo.taps() * columns) / 32 * 32));
    const int64_t pieces = ceil_div(plan.in_block, rows);
    parallel_for(plan.blocks() * pieces, arguments.threads, [&](int64_t number, int slot) {
      const int64_t block = number / pieces, first = number % pieces * rows;
      const int64_t count = std::min(rows, plan.in_block - first);
      SliceTask<T> task(plan, arguments, packer, block * plan.slices, slot);
      for (int64_t tap = 0; tap < geo.taps(); ++tap) {
        Sum* total = task.partial(block, 0) + (tap * plan.in_block + first) * columns;
        if constexpr (std::is_same_v<Sum, float>) {
          plan.problem.isa->gemm->add_lines(total, count * columns, size, plan.slices - 1);
        } else {
          for (int64_t slice = 1; slice < plan.slices; ++slice)
            for (int64_t i = 0; i < count * columns; ++i) total[i] += total[slice * size + i];
        }
      }
      task.store(task.partial(block, 0), first, count);
    });
  }
  if (plan.problem.wrt & wrt_bias) {
    double* totals = reinterpret_cast<double*>(arguments.workspace + plan.partial_bytes);
    for (int64_t slice = 1; slice < plan.slices; ++slice)
      for (int64_t k = 0; k < geo.K; ++k) totals[k] += totals[slice * geo.K + k];
    store_bias(plan.problem, arguments.db, 0, geo.K, totals);
  }
  return true;
}

template bool run_weight_gradient<float>(const WeightGradient&, const Arguments&);
template bool run_weight_gradient<double>(const WeightGradient&, const Arguments&);
template bool run_weight_gradient<Bf16>(const WeightGradient&, const Arguments&);

}  // namespace convgrad
