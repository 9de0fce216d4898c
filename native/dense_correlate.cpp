// The correlation: packs the weight once, then every task packs boxes, multiplies and stores one tile of results.
#include "dense_prefetch.h"
#include "dense_run.h"
#include "dense_strips.h"

#include <algorithm>
#include <cstring>

#include "threads.h"

namespace convgrad {
namespace {

// One task: a tile of pixels of one image, one group, one block of result channels.
template <typename T>
class TileTask {
  using Sum = typename Packed<T>::Sum;

 public:
  TileTask(const Run<T>& run, int64_t task, int slot)
      : run_(run), plan_(run.plan), packer_(run.packer.with_plane(run.plan.box_plane / int64_t(sizeof(T)))) {
    place(task, origin_, block_, group_, image_);
    // The tile that this thread will probably get next.
    next_ = std::min(task + 1, plan_.tasks() - 1);
    char* memory = run.slots + slot * plan_.slot_bytes;
    own_box_ = reinterpret_cast<T*>(memory);
    sums_ = reinterpret_cast<Sum*>(memory + plan_.box_bytes);
    own_weight_ = reinterpret_cast<T*>(memory + plan_.box_bytes + plan_.sums_bytes);
    tile_sums_ = plan_.gemm->max_rows * plan_.gemm->cols;
  }

  // Returns false if a NaN came out although some tap met padding: then the caller repeats the task carefully.
  bool work(bool careful) {
    const Tensor& source = run_.source;
    Source view{source.data + image_ * source.stride[axis_n], source.stride[axis_c],
                {source.stride[axis_d], source.stride[axis_h], source.stride[axis_w]},
                {plan_.source_size[0], plan_.source_size[1], plan_.source_size[2]}, 0, 0};
    const char* first_channel = view.data + group_ * plan_.reduced * view.channel_stride;
    bool clean = true;
    plan_prefetch();
    direct_ = reads_directly(view);
    for (int64_t block = 0; block < plan_.channel_blocks; ++block) {
      view.data = first_channel + block * plan_.channel_block * view.channel_stride;
      view.channels = run_.block_channels(block);
      view.channels_padded = run_.block_pad(block);
      box_pitch_ = plan_.pixels_are_rows ? row_pitch(view.channels_padded, sizeof(T))
                                         : plan_.box.positions() * Packed<T>::pair;
      if (direct_) {
        read_directly(view);
      } else {
        pack_box(packer_, view, plan_.box, origin_,
                 plan_.pixels_are_rows ? Arrange::by_position : Arrange::channel_pairs, own_box_, box_pitch_);
        if (plan_.gemm->parts > 1 && !parts_suffice(packer_.met(), run_.weight_met)) return false;
        box_ = own_box_;
        if (!plan_.pixels_are_rows) clear_slack(view.channels_padded);
      }
      int64_t sums_before = 0;
      for (const Phase& phase : plan_.phases) clean &= multiply_phase(phase, block, careful, sums_before);
    }
    if (run_.large) finish_streams();
    return clean;
  }

 private:
  void place(int64_t task, int64_t (&origin)[3], int64_t& block, int64_t& group, int64_t& image) const {
    for (int axis : {2, 1, 0}) {
      origin[axis] = task % plan_.tiles[axis] * plan_.tile[axis];
      task /= plan_.tiles[axis];
    }
    if (plan_.taps_inside()) {  // what tiles read of the weight stays in L2 for all images
      image = task % plan_.problem.geo.N;
      block = task / plan_.problem.geo.N % plan_.blocks;
      group = task / plan_.problem.geo.N / plan_.blocks;
      return;
    }
    block = task % plan_.blocks;
    group = task / plan_.blocks % plan_.problem.geo.G;
    image = task / plan_.blocks / plan_.problem.geo.G;
  }

  // The next tile's source comes into the cache during this tile's products. NOTE: not beside tiles, which lose more
  // by the loads that wait for a free line buffer than packing gains.
  void plan_prefetch() {
    prefetch_.clear();
    if (plan_.gemm->near_k > 0) return;
    const Tensor& source = run_.source;
    int64_t origin[3], block, group, image;
    place(next_, origin, block, group, image);
    Region region{source.data + image * source.stride[axis_n] + group * plan_.reduced * source.stride[axis_c],
                  source.stride[axis_c], {source.stride[axis_d], source.stride[axis_h], source.stride[axis_w]},
                  std::min(plan_.reduced, plan_.channel_block), {}, {}, size_of(plan_.problem.dtype)};
    for (int axis = 0; axis < 3; ++axis) {
      const AxisLayout& layout = plan_.box.axis[axis];
      int64_t first = INT64_MAX, last = INT64_MIN;
      for (const AxisRun& run : layout.runs) {
        first = std::min(first, origin[axis] * layout.step + run.start);
        last = std::max(last, (origin[axis] + run.length - 1) * layout.step + run.start + 1);
      }
      region.first[axis] = std::clamp(first, int64_t(0), plan_.source_size[axis]);
      region.last[axis] = std::clamp(last, int64_t(0), plan_.source_size[axis]);
    }
    prefetch_.add(region);
    const int64_t pixels = plan_.tile[0] * plan_.tile[1] * plan_.tile[2];
    const int64_t most = plan_.pixels_are_rows ? plan_.gemm->max_rows : plan_.gemm->cols;
    prefetch_.spread(ceil_div(pixels, most) * plan_.panels_block * plan_.channel_blocks * int64_t(plan_.phases.size()));
  }

  // A task that packs panels for itself: what it packs next comes into the cache during so many calls. All such tasks
  // read the same source, which needs no fetching.
  void fetch_weight(int64_t block, int64_t panel, int64_t first_panel, int64_t last_panel, int64_t calls) {
    prefetch_.clear();
    if (panel >= last_panel) panel = first_panel, ++block;
    if (block == plan_.channel_blocks) {
      block = 0;
      panel = first_panel + plan_.panels_block;
      if (panel >= plan_.panels) return;  // of another group, or nothing at all
    }
    fetch_panels(run_, group_, block, panel, prefetch_);
    prefetch_.spread(calls);
  }

  // Where channels lie as the micro-kernel reads them there is no packing at all: strips are cut so that no tap leaves
  // the tensor. Not where pixels lie so far apart that all of a strip would fall into one set of the first-level cache.
  bool reads_directly(const Source& view) const {
    const int64_t size = sizeof(T), pixel = view.stride[2] * plan_.taps[2].step;
    if (!plan_.pixels_are_rows || !run_.packer.stored_as_packed()) return false;
    if (plan_.gemm->near_k > 0 && !plan_.taps_lie_apart()) return false;
    if (view.channel_stride != size || pixel <= 0 || pixel % size || pixel % 4096 == 0) return false;
    if (plan_.reduced != plan_.padded(plan_.reduced) || reinterpret_cast<uintptr_t>(view.data) % size) return false;
    return view.stride[0] % size == 0 && view.stride[1] % size == 0;
  }
  void read_directly(const Source& view) {
    box_pitch_ = view.stride[2] * plan_.taps[2].step / int64_t(sizeof(T));
    const char* at = view.data;
    for (int axis = 0; axis < 3; ++axis) {
      step_[axis] = plan_.taps[axis].step * view.stride[axis];
      stride_[axis] = view.stride[axis];
      at += origin_[axis] * step_[axis];
    }
    box_ = reinterpret_cast<const T*>(at);
  }
  // Whether the rows of a tile follow each other as they do in a box.
  bool rows_touch() const { return !direct_ || step_[1] == plan_.box.pitch * step_[2]; }
  // Bytes from the start of the box (or of the tensor) to a strip.
  int64_t strip_at(const Strip& strip) const {
    if (!direct_) return strip.position * box_pitch_ * int64_t(sizeof(T));
    const int64_t start = strip.position - strip.depth * plan_.box.height * plan_.box.pitch;
    return strip.depth * step_[0] + start / plan_.box.pitch * step_[1] + start % plan_.box.pitch * step_[2];
  }

  // NOTE: the last strip of a box reads past its end; the sums are dropped, but must not be slow (subnormals).
  void clear_slack(int64_t channels) {
    for (int part = 0; part < plan_.gemm->parts; ++part)
      std::memset(static_cast<void*>(own_box_ + part * plan_.box_plane / int64_t(sizeof(T)) +
                                     channels / Packed<T>::pair * box_pitch_),
                  0, size_t(plan_.gemm->cols) * Packed<T>::pair * sizeof(T));
  }

  bool multiply_phase(const Phase& phase, int64_t block, bool careful, int64_t& sums_before) {
    int64_t length[3];
    for (int axis = 0; axis < 3; ++axis) {
      length[axis] = std::min(plan_.tile[axis], phase.axis[axis]->count - origin_[axis]);
      if (length[axis] <= 0) return true;
    }
    cutter_.cut(plan_, phase, origin_, length, rows_touch(), direct_);
    collect_offsets(phase, run_.block_pad(block));
    rows_.locate(plan_, phase, cutter_.strips(), run_.result, origin_, length);
    const bool last_block = block + 1 == plan_.channel_blocks;
    const int64_t first_panel = block_ * plan_.panels_block;
    const int64_t last_panel = std::min(plan_.panels, first_panel + plan_.panels_block);
    bool clean = true;
    // NOTE: a strip is stored after the products of the next one have begun: tiles take their time to come out.
    const Strip* waiting = nullptr;
    int64_t waiting_panel = 0, turn = 0;
    const Sum* waiting_sums = nullptr;
    const auto store_waiting = [&] {
      if (waiting)
        clean &= store(phase, waiting_panel, *waiting, waiting_sums) || careful || waiting->whole;
      waiting = nullptr;
    };
    const auto weight_of = [&](int64_t panel) {
      return plan_.own_panels ? own_weight_ + (panel - first_panel) % plan_.own_panels * run_.panel_step(phase, block)
                              : run_.weight + run_.weight_at(group_, block, phase, panel);
    };
    const auto compute = [&](int64_t panel, const Strip& strip, int64_t next_panel) {
      Sums sums{sums_ + tile_sums_ * (plan_.channel_blocks > 1 ? sums_before++ : turn++ % 2), plan_.gemm->cols};
      rounded_ = nullptr;
      const bool in_place = goes_to_result(phase, panel, strip, length, last_block, sums);
      line_count_ = 0;
      if (last_block && !rounded_) fetch_result(phase, panel, strip);
      line_count_ += prefetch_.take(lines_ + line_count_);
      multiply(weight_of(panel), weight_of(next_panel), panel, strip, block, careful, sums, phase, length);
      store_waiting();
      if (!last_block || in_place) return;
      waiting = &strip;
      waiting_panel = panel;
      waiting_sums = sums.data;
    };
    if (plan_.strips_outside) {
      for (const Strip& strip : cutter_.strips())
        for (int64_t panel = first_panel; panel < last_panel; ++panel)
          compute(panel, strip, panel + 1 < last_panel ? panel + 1 : first_panel);
    } else {
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        if (plan_.own_panels && (panel - first_panel) % plan_.own_panels == 0) {
          const int64_t count = std::min(plan_.own_panels, last_panel - panel);
          pack_panels(run_, group_, block, phase, panel, count, own_weight_);
          fetch_weight(block, panel + count, first_panel, last_panel, count * int64_t(cutter_.strips().size()));
        }
        for (const Strip& strip : cutter_.strips()) compute(panel, strip, panel);
      }
    }
    store_waiting();
    return clean;
  }

  // For every set of taps that the strips use, the offsets of its taps into the box and into the packed weight.
  void collect_offsets(const Phase& phase, int64_t pad) {
    const std::vector<int>&taps_d = phase.axis[0]->taps, &taps_h = phase.axis[1]->taps, &taps_w = phase.axis[2]->taps;
    const int64_t box_step = plan_.pixels_are_rows ? box_pitch_ : Packed<T>::pair;
    const std::vector<TapSet>& sets = cutter_.tap_sets();
    offsets_.resize(sets.size());
    for (size_t i = 0; i < sets.size(); ++i) {
      const TapSet& set = sets[i];
      offsets_[i].box.clear();
      offsets_[i].weight.clear();
      for (int td = set.first[0]; td < set.last[0]; ++td)
        for (int th = set.first[1]; th < set.last[1]; ++th)
          for (int tw = set.first[2]; tw < set.last[2]; ++tw) {
            const int64_t index = (td * int64_t(taps_h.size()) + th) * int64_t(taps_w.size()) + tw;
            const int tap[3] = {taps_d[size_t(td)], taps_h[size_t(th)], taps_w[size_t(tw)]};
            int64_t offset = 0;
            if (direct_) {
              for (int axis = 0; axis < 3; ++axis) offset += plan_.taps[axis].offset[size_t(tap[axis])] * stride_[axis];
            } else {
              offset = plan_.box.tap_position(tap[0], tap[1], tap[2]) * box_step * int64_t(sizeof(T));
            }
            offsets_[i].box.push_back(offset);
            offsets_[i].weight.push_back(index * run_.tap_step(pad) * int64_t(sizeof(T)));
          }
    }
  }

  // Where a tile of sums lies.
  struct Sums {
    Sum* data;
    int64_t pitch;  // elements from one row to the next
  };

  // Sums of one row of pixels that need no check for NaN and no other order go where the result lies: sums that need no
  // rounding are made there, and some kernels round them on the way.
  bool goes_to_result(const Phase& phase, int64_t panel, const Strip& strip, const int64_t (&length)[3],
                      bool last_block, Sums& sums) {
    const Gemm& gemm = *plan_.gemm;
    const Dtype dtype = plan_.problem.out_dtype;
    const int64_t pixel = phase.axis[2]->stride * run_.result.stride[axis_w];
    const int64_t channels = std::min(plan_.panel, plan_.results - panel * plan_.panel);
    const bool as_they_are = dtype == (sizeof(Sum) == 8 ? Dtype::f64 : Dtype::f32) && pixel % int64_t(sizeof(Sum)) == 0;
    const bool rounded = dtype == Dtype::bf16 && gemm.rounds && strip.pieces == 1;
    if (!direct_ || !strip.whole || run_.result.stride[axis_c] != size_of(dtype)) return false;
    if (!(rounded ? last_block : as_they_are && plan_.channel_blocks == 1)) return false;
    if (channels != gemm.cols && !(gemm.run_half && channels == gemm.cols / 2)) return false;
    const int64_t column = strip.position % plan_.box.pitch;
    if (column + strip.count > length[2]) return false;  // of several rows
    each_row(panel, strip, [&](int64_t, int64_t, char* dst) {
      if (rounded) {
        rounded_ = dst;
        rounded_stride_ = pixel;
        stream_ = run_.large && (reinterpret_cast<uintptr_t>(dst) | uintptr_t(pixel)) % 64 == 0;
      } else {
        sums = {reinterpret_cast<Sum*>(dst), pixel / int64_t(sizeof(Sum))};
      }
    });
    return true;
  }

  // `next_weight`: what the call after this one will probably multiply with.
  void multiply(const T* weight, const T* next_weight, int64_t panel, const Strip& strip, int64_t block, bool careful,
                const Sums& sums, const Phase& phase, const int64_t (&length)[3]) {
    const Gemm& gemm = *plan_.gemm;
    const int64_t pad = run_.block_pad(block), channels = std::min(plan_.panel, plan_.results - panel * plan_.panel);
    GemmCall call;
    const char* box = reinterpret_cast<const char*>(box_);
    if (plan_.pixels_are_rows) {
      call.a = box + strip_at(strip);
      call.lda = box_pitch_ * int64_t(sizeof(T));
      call.b = reinterpret_cast<const char*>(weight);
      call.next_b = reinterpret_cast<const char*>(next_weight);
      call.ldb = plan_.panel * Packed<T>::pair * int64_t(sizeof(T));
      call.a_plane = plan_.box_plane;
      call.b_plane = plan_.weight_plane;
      if (plan_.taps_inside()) call.b_step = phase.tap_count * run_.tap_step(pad) * int64_t(sizeof(T));
    } else {
      call.a = reinterpret_cast<const char*>(weight);
      call.lda = run_.weight_pad(pad) * int64_t(sizeof(T));
      call.b = box + strip.position * Packed<T>::pair * int64_t(sizeof(T));
      call.ldb = box_pitch_ * int64_t(sizeof(T));
      call.rows = int(channels);
      call.a_plane = plan_.weight_plane;
      call.b_plane = plan_.box_plane;
    }
    const int64_t columns = plan_.pixels_are_rows ? channels : strip.count;
    const auto kernel = gemm.run_half && columns <= gemm.cols / 2 ? gemm.run_half : gemm.run;
    call.ldc = sums.pitch;
    call.k = pad;
    call.accumulate = block > 0;
    call.apart = sums_stay_apart(gemm, plan_.reduced * phase.tap_count);
    call.fetch = lines_;
    call.fetch_count = line_count_;
    call.rounded = rounded_;
    call.rounded_stride = rounded_stride_;
    call.nan = &nan_;
    call.stream = stream_;
    const char* strip_a = call.a;
    for (size_t i = 0; i < strip.pieces; ++i, call.accumulate = true) {
      const Piece& piece = cutter_.pieces()[strip.piece + i];
      const Offsets& taps = offsets_[piece.taps];
      call.a_offset = plan_.pixels_are_rows ? taps.box.data() : taps.weight.data();
      call.b_offset = plan_.pixels_are_rows ? taps.weight.data() : taps.box.data();
      call.batch = int64_t(taps.box.size());
      call.c = reinterpret_cast<char*>(sums.data + piece.first * sums.pitch);
      if (plan_.pixels_are_rows) {
        call.a = strip_a + piece.first * call.lda;
        call.rows = int(piece.count);
      }
      if (careful && !strip.whole) {
        multiply_carefully(call, kernel, strip, piece.taps, block, sums.data, phase, length);
      } else {
        kernel(call);
        if (call.batch > 0) call.fetch_count = 0;
      }
    }
  }

  // One tap at a time, adding only the pixels for which it lands: a zero that stands for padding never meets a weight.
  void multiply_carefully(GemmCall call, void (*kernel)(const GemmCall&), const Strip& strip, size_t tap_set,
                          int64_t block, Sum* sums, const Phase& phase, const int64_t (&length)[3]) {
    const Gemm& gemm = *plan_.gemm;
    const int64_t plane = plan_.box.height * plan_.box.pitch, start = strip.position % plane, count = strip.count;
    const TapSet& taps = cutter_.tap_sets()[tap_set];
    // A tap adds to the sums of some taps, and these to all: no long chain, see docs/contract.md.
    std::vector<Sum> part(size_t(gemm.max_rows * gemm.cols)), some(part.size(), Sum(0));
    if (block == 0) std::fill(sums, sums + tile_sums_, Sum(0));
    call.c = reinterpret_cast<char*>(part.data());
    call.accumulate = false;
    call.batch = 1;
    int tap[3] = {taps.first[0], taps.first[1], taps.first[2]};
    for (size_t n = 0; n < offsets_[tap_set].box.size(); ++n) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t pixel[3] = {strip.depth, (start + i) / plan_.box.pitch, (start + i) % plan_.box.pitch};
        bool lands = true;
        for (int axis = 0; axis < 3; ++axis) {
          const int64_t at = (origin_[axis] + pixel[axis]) * plan_.taps[axis].step +
                             plan_.taps[axis].offset[size_t(phase.axis[axis]->taps[size_t(tap[axis])])];
          lands &= pixel[axis] < length[axis] && at >= 0 && at < plan_.source_size[axis];
        }
        lands_[i] = lands;
      }
      for (int axis = 2; axis >= 0 && ++tap[axis] == taps.last[axis]; --axis) tap[axis] = taps.first[axis];
      kernel(call);
      ++call.a_offset;
      ++call.b_offset;
      for (int64_t row = 0; row < call.rows; ++row)
        for (int64_t column = 0; column < gemm.cols; ++column) {
          const int64_t pixel = plan_.pixels_are_rows ? row : column;
          const size_t at = size_t(row * gemm.cols + column);
          if (pixel < count && lands_[pixel]) some[at] += part[at];
        }
      if (n % 128 != 127 && n + 1 < offsets_[tap_set].box.size()) continue;
      for (size_t at = 0; at < some.size(); ++at) sums[at] += some[at];
      std::fill(some.begin(), some.end(), Sum(0));
    }
  }

  // Calls body(first pixel of the strip, pixels, where the first one's result lies) for every row that the strip meets.
  template <typename Body>
  void each_row(int64_t panel, const Strip& strip, Body&& body) const {
    const int64_t channel = group_ * plan_.results + panel * plan_.panel;
    char* first = run_.result.data + image_ * run_.result.stride[axis_n] + channel * run_.result.stride[axis_c];
    rows_.each(size_t(&strip - cutter_.strips().data()),
               [&](const ResultRow& row) { body(row.from, row.count, first + row.offset); });
  }

  // Writes the pixels of a strip; false if one of them is NaN.
  bool store(const Phase& phase, int64_t panel, const Strip& strip, const Sum* sums) {
    const int64_t channels = std::min(plan_.panel, plan_.results - panel * plan_.panel), ldc = plan_.gemm->cols;
    const int64_t channel_stride = run_.result.stride[axis_c];
    const int64_t pixel_stride = phase.axis[2]->stride * run_.result.stride[axis_w];
    const bool whole = plan_.gemm->store_bf16 && plan_.pixels_are_rows && channels == ldc && channel_stride == 2 &&
                       plan_.problem.out_dtype == Dtype::bf16;
    bool clean = true;
    each_row(panel, strip, [&](int64_t from, int64_t count, char* dst) {
      if (whole) {
        const float* first = reinterpret_cast<const float*>(sums + from * ldc);
        clean &= !plan_.gemm->store_bf16(first, ldc, count, dst, pixel_stride);
      } else if (plan_.pixels_are_rows) {
        clean &= run_.store(sums + from * ldc, ldc, count, channels, dst, pixel_stride, channel_stride);
      } else {
        clean &= run_.store(sums + from, ldc, channels, count, dst, channel_stride, pixel_stride);
      }
    });
    return clean;
  }

  // Where a strip's results will be stored comes into the cache while they are being computed.
  void fetch_result(const Phase& phase, int64_t panel, const Strip& strip) {
    const int64_t channels = std::min(plan_.panel, plan_.results - panel * plan_.panel);
    const int64_t channel_stride = run_.result.stride[axis_c], size = size_of(plan_.problem.out_dtype);
    const int64_t pixel_stride = phase.axis[2]->stride * run_.result.stride[axis_w];
    each_row(panel, strip, [&](int64_t, int64_t count, char* dst) {
      if (channel_stride == size) {
        fetch_rows(dst, count, pixel_stride, channels * size);
      } else if (pixel_stride > 0 && pixel_stride <= 64) {
        fetch_rows(dst, channels, channel_stride, count * pixel_stride);
      }
    });
  }
  void fetch_rows(const char* row, int64_t rows, int64_t stride, int64_t bytes) {
    line_count_ += lines_to_write(row, rows, stride, bytes, lines_ + line_count_, most_result_lines - line_count_);
  }

  const Run<T>& run_;
  const Correlation& plan_;
  Packer<T> packer_;
  bool direct_ = false;  // the tensor itself is read
  int64_t step_[3], stride_[3];  // then: bytes from a pixel, or a coordinate of the source, to the next one
  int64_t origin_[3], block_, group_, image_, next_, box_pitch_ = 0, tile_sums_;
  T *own_box_, *own_weight_;
  const T* box_ = nullptr;  // own_box_, or the tensor itself
  Prefetch prefetch_;
  static constexpr int64_t most_result_lines = 512;
  const char* lines_[most_result_lines + Prefetch::most_taken];  // to be fetched during the next call
  int64_t line_count_ = 0;
  char* rounded_ = nullptr;  // where the kernel rounds the sums of the strip to, if it does
  int64_t rounded_stride_ = 0;
  bool nan_ = false;  // which does not matter then
  bool stream_ = false;
  Sum* sums_;
  struct Offsets {
    std::vector<int64_t> box, weight;
  };
  std::vector<Offsets> offsets_;  // of the cutter's sets of taps
  StripCutter cutter_;
  ResultRows rows_;
  bool lands_[64];
};

}  // namespace

template <typename T>
bool run_correlation(const Correlation& plan, const Arguments& arguments) {
  const Geometry& geo = plan.problem.geo;
  const Run<T> run(plan, arguments);
  if (plan.zeros_first) {
    const bool forward = plan.problem.wrt & wrt_output;
    const int64_t* size = forward ? geo.out : geo.in;
    const int64_t extent[5] = {geo.N, forward ? geo.K : geo.C, size[0], size[1], size[2]};
    write_zeros(run.result, extent, plan.problem.out_dtype, arguments.threads);
  }
  if (plan.phases.empty()) return true;
  if (!plan.own_panels) pack_weight(run);
  parallel_for(plan.tasks(), arguments.threads, [&](int64_t task, int slot) {
    if (run.outside.load(std::memory_order_relaxed)) return;
    const GemmScope scope(*plan.gemm);
    TileTask<T> tile(run, task, slot);
    if (tile.work(false)) return;
    if (plan.gemm->parts > 1) {
      run.outside.store(true, std::memory_order_relaxed);
    } else {
      tile.work(true);
    }
  });
  return !run.outside;
}

template bool run_correlation<float>(const Correlation&, const Arguments&);
template bool run_correlation<double>(const Correlation&, const Arguments&);
template bool run_correlation<Bf16>(const Correlation&, const Arguments&);

}  // namespace convgrad
