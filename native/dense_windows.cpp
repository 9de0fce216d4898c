// The weight gradient from whole windows, see dense_windows.h.
#include "dense_windows.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bias.h"
#include "dense_prefetch.h"
#include "dense_store.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr int64_t cache_budget = 800 << 10;  // of L2, for both operands and the sums
constexpr int64_t fewest_tasks = 8, shortest_run = 8, shortest_row = 4, shortest_entry = 48;

// Cycles, measured on Zen 4: per element packed, and per part of a run of one row; per element of sums loaded and
// stored, and of the result; per byte of large operands that is read once more.
constexpr double copy_cycles = 0.35, transpose_cycles = 0.6, part_cycles = 30, sums_cycles = 0.12, store_cycles = 1.7;
constexpr double memory_cycles = 0.12;
constexpr int64_t large = 16 << 20;

// The runs that a window consists of: where elements [first, first + count) of it lie.
struct Runs {
  Runs(const WindowGradient& plan, const Tensor& x, const Tensor& w) : geo(plan.problem.geo), x(x), w(w) {
    columns = plan.columns;
    if (columns) {
      length = geo.kernel[2];
      x_step = geo.dilation[2] * x.stride[axis_w];
      w_step = w.stride[axis_w];
    } else {
      length = geo.C;
      x_step = x.stride[axis_c];
      w_step = w.stride[axis_i];
      joined = geo.kernel[2] > 1 && geo.dilation[2] * x.stride[axis_w] == geo.C * x_step &&
               w.stride[axis_w] == geo.C * w_step;
      if (joined) length *= geo.kernel[2];
    }
  }
  // Calls body(element of the window, elements, offset in x, offset in w) for the runs, or parts of them, of a range.
  template <typename Body>
  void each(int64_t first, int64_t last, Body body) const {
    for (int64_t at = first; at < last;) {
      const int64_t run = at / length, from = at % length, count = std::min(length - from, last - at);
      int64_t rest = run, in_x = from * x_step, in_w = from * w_step;
      if (!columns && !joined) step(rest, geo.kernel[2], 2, in_x, in_w);
      step(rest, geo.kernel[1], 1, in_x, in_w);
      step(rest, geo.kernel[0], 0, in_x, in_w);
      body(at, count, in_x + rest * x.stride[axis_c], in_w + rest * w.stride[axis_i]);
      at += count;
    }
  }
  void step(int64_t& rest, int64_t extent, int axis, int64_t& in_x, int64_t& in_w) const {
    in_x += rest % extent * geo.dilation[axis] * x.stride[axis_d + axis];
    in_w += rest % extent * w.stride[axis_d + axis];
    rest /= extent;
  }

  const Geometry& geo;
  const Tensor &x, &w;
  bool columns, joined = false;
  int64_t length, x_step, w_step;
};

template <typename T>
class WindowTask {
  using Sum = typename Packed<T>::Sum;
  static constexpr int pair = Packed<T>::pair;

 public:
  WindowTask(const WindowGradient& plan, const Arguments& arguments, const Packer<T>& packer, int64_t task, int slot)
      : plan_(plan), geo_(plan.problem.geo), arguments_(arguments), packer_(packer),
        runs_(plan, arguments.x, arguments.w) {
    out_first_ = task % plan.out_blocks * plan.out_block;
    out_count_ = std::min(plan.out_block, geo_.K - out_first_);
    window_first_ = task / plan.out_blocks * plan.window_block;
    window_count_ = std::min(plan.window_block, plan.window() - window_first_);
    char* memory = arguments.workspace + slot * plan.slot_bytes;
    dy_ = reinterpret_cast<T*>(memory);
    windows_ = reinterpret_cast<T*>(memory + plan.dy_bytes);
    sums_ = reinterpret_cast<Sum*>(memory + plan.dy_bytes + plan.window_bytes);
    pitch_ = round_up(plan.window_block, plan.gemm->cols);
    in_place_ = packer.stored_as_packed() && plan.reads_in_place(arguments.y.stride, sizeof(T)) &&
                reinterpret_cast<uintptr_t>(arguments.y.data) % sizeof(T) == 0 &&
                (arguments.y.stride[axis_n] | arguments.y.stride[axis_d]) % int64_t(sizeof(T)) == 0;
  }

  void work() {
    // NOTE: columns beside the window are multiplied too; what was left there must not be slow (subnormals).
    if (window_count_ % plan_.gemm->cols) std::memset(static_cast<void*>(windows_), 0, size_t(plan_.window_bytes));
    for (int64_t row = 0; row < plan_.rows(); row += plan_.chunk_rows) {
      const int64_t count = std::min(plan_.chunk_rows, plan_.rows() - row);
      positions_ = count * plan_.row_positions;
      dy_offsets_.clear();
      window_offsets_.clear();
      each_plane(row, count, [&](int64_t at, const int64_t (&first)[3], int64_t rows) {
        if (in_place_ || at == 0) {
          dy_offsets_.push_back(in_place_ ? y_at(first) - arguments_.y.data : 0);
          window_offsets_.push_back(at * plan_.row_positions * plan_.gemm->cols * int64_t(sizeof(T)));
        }
        pack(at, first, rows);
      });
      prefetch_.clear();
      const int64_t next = row + count < plan_.rows() ? row + count : 0;
      each_plane(next, std::min(plan_.chunk_rows, plan_.rows() - next),
                 [&](int64_t, const int64_t (&first)[3], int64_t rows) { fetch(first, rows); });
      multiply(row > 0);
    }
    const Store<T> store(*plan_.problem.isa, plan_.problem.out_dtype);
    const Tensor& w = arguments_.w;
    runs_.each(window_first_, window_first_ + window_count_, [&](int64_t at, int64_t count, int64_t, int64_t in_w) {
      store(sums_ + at - window_first_, pitch_, out_count_, count, w.data + out_first_ * w.stride[axis_o] + in_w,
            w.stride[axis_o], runs_.w_step);
    });
    if ((plan_.problem.wrt & wrt_bias) && window_first_ == 0) sum_bias();
  }

 private:
  // Calls body(row of the chunk, image and first output row, rows) for rows of the same plane.
  template <typename Body>
  void each_plane(int64_t row, int64_t count, Body body) const {
    for (int64_t at = 0; at < count;) {
      const int64_t h = (row + at) % geo_.out[1], plane = (row + at) / geo_.out[1];
      const int64_t rows = std::min(count - at, geo_.out[1] - h);
      body(at, {plane / geo_.out[0], plane % geo_.out[0], h}, rows);
      at += rows;
    }
  }
  const char* x_at(const int64_t (&first)[3]) const {
    const Tensor& x = arguments_.x;
    return x.data + first[0] * x.stride[axis_n] + first[1] * geo_.stride[0] * x.stride[axis_d] +
           first[2] * geo_.stride[1] * x.stride[axis_h];
  }
  const char* y_at(const int64_t (&first)[3]) const {
    const Tensor& y = arguments_.y;
    return y.data + first[0] * y.stride[axis_n] + first[1] * y.stride[axis_d] + first[2] * y.stride[axis_h] +
           out_first_ * y.stride[axis_c];
  }

  void pack(int64_t at, const int64_t (&first)[3], int64_t rows) const {
    const Tensor &x = arguments_.x, &y = arguments_.y;
    const int64_t width = geo_.out[2], cols = plan_.gemm->cols;
    // Rows of dy that follow each other are one long row.
    const bool one_row = plan_.row_positions == width && y.stride[axis_h] == width * y.stride[axis_w];
    for (int64_t row = 0; !in_place_ && row < (one_row ? 1 : rows); ++row) {
      const int64_t last = one_row ? rows * width : width;
      const Matrix matrix{y_at(first) + row * y.stride[axis_h], y.stride[axis_w], y.stride[axis_c],
                          one_row ? last : plan_.row_positions, 0, last, out_count_, out_count_};
      packer_(matrix, Arrange::by_channel, dy_ + (at + row) * plan_.row_positions, plan_.dy_pitch);
    }
    for (int64_t row = 0; row < rows; ++row) {
      const char* from = x_at(first) + row * geo_.stride[1] * x.stride[axis_h];
      T* to = windows_ + (at + row) * plan_.row_positions * cols;
      runs_.each(window_first_, window_first_ + window_count_, [&](int64_t p, int64_t count, int64_t in_x, int64_t) {
        p -= window_first_;
        for (int64_t done = 0; done < count;) {  // panel by panel
          const int64_t column = (p + done) % cols, some = std::min(count - done, cols - column);
          const Matrix matrix{from + in_x + done * runs_.x_step, geo_.stride[2] * x.stride[axis_w], runs_.x_step,
                              plan_.row_positions, 0, width, some, some};
          packer_(matrix, Arrange::position_pairs, to + (p + done) / cols * cols * positions_ + column * pair,
                  cols * pair);
          done += some;
        }
      });
    }
  }

  // What these rows read comes into the cache during the products before them.
  void fetch(const int64_t (&first)[3], int64_t rows) {
    const Tensor &x = arguments_.x, &y = arguments_.y;
    const int64_t size = size_of(plan_.problem.dtype), width = geo_.out[2];
    prefetch_.add({y_at(first), y.stride[axis_c], {0, y.stride[axis_h], y.stride[axis_w]}, out_count_, {},
                   {1, rows, width}, size});
    if (runs_.x_step != size) return;
    runs_.each(window_first_, window_first_ + window_count_, [&](int64_t, int64_t count, int64_t in_x, int64_t) {
      prefetch_.add({x_at(first) + in_x, 0, {0, geo_.stride[1] * x.stride[axis_h], geo_.stride[2] * x.stride[axis_w]},
                     1, {}, {1, rows, width}, count * size});
    });
  }

  void multiply(bool accumulate) {
    const Gemm& gemm = *plan_.gemm;
    const int64_t panels = ceil_div(out_count_, gemm.max_rows);
    prefetch_.spread(panels * ceil_div(window_count_, gemm.cols));
    const char* lines[Prefetch::most_taken];
    GemmCall call{};
    call.lda = in_place_ ? arguments_.y.stride[axis_c] : plan_.dy_pitch * int64_t(sizeof(T));
    call.ldb = gemm.cols * pair * int64_t(sizeof(T));
    call.ldc = pitch_;
    call.a_offset = dy_offsets_.data();
    call.b_offset = window_offsets_.data();
    call.batch = int64_t(dy_offsets_.size());
    call.k = positions_ / call.batch;
    call.accumulate = accumulate;
    call.fetch = lines;
    for (int64_t m = 0; m < out_count_; m += gemm.max_rows)
      for (int64_t n = 0; n < window_count_; n += gemm.cols) {
        call.a = (in_place_ ? arguments_.y.data : reinterpret_cast<const char*>(dy_)) + m * call.lda;
        call.b = reinterpret_cast<const char*>(windows_ + n * positions_);
        call.c = reinterpret_cast<char*>(sums_ + m * pitch_ + n);
        call.rows = int(std::min<int64_t>(gemm.max_rows, out_count_ - m));
        call.fetch_count = prefetch_.take(lines);
        (gemm.run_half && window_count_ - n <= gemm.cols / 2 ? gemm.run_half : gemm.run)(call);
      }
  }

  void sum_bias() const {
    std::vector<double> total(size_t(out_count_), 0.0);
    const int64_t origin[3] = {}, length[3] = {geo_.out[0], geo_.out[1], geo_.out[2]};
    add_bias_of_box(plan_.problem, arguments_.y, {0, out_first_, out_count_, {}, {}}, geo_.N, origin, length,
                    total.data());
    store_bias(plan_.problem, arguments_.db, out_first_, out_count_, total.data());
  }

  const WindowGradient& plan_;
  const Geometry& geo_;
  const Arguments& arguments_;
  const Packer<T>& packer_;
  const Runs runs_;
  int64_t out_first_, out_count_, window_first_, window_count_, pitch_, positions_ = 0;
  bool in_place_;  // dy is read where it lies
  std::vector<int64_t> dy_offsets_, window_offsets_;  // of the batch of a call: the planes of the chunk, or all at once
  T *dy_, *windows_;
  Sum* sums_;
  Prefetch prefetch_;
};

}  // namespace

WindowGradient::WindowGradient(const Problem& asked, const Gemm* kernel) : problem(asked), gemm(kernel) {
  columns = std::abs(problem.x_nominal[axis_w]) < std::abs(problem.x_nominal[axis_c]);
}

// About so many pixels: planes, or an even part of one, if there is one that is not too short.
int64_t WindowGradient::rows_of(int64_t pixels) const {
  const int64_t plane = problem.geo.out[1], most = std::clamp(pixels / row_positions, int64_t(1), rows());
  if (most >= plane) return most / plane * plane;
  int64_t even = most;
  while (plane % even) --even;
  return 2 * even >= most ? even : most;
}

bool WindowGradient::reads_in_place(const int64_t* y, int64_t element_bytes) const {
  const Geometry& geo = problem.geo;
  const bool even = chunk_rows % geo.out[1] == 0 || geo.out[1] % chunk_rows == 0;
  const int64_t together = std::min(chunk_rows, geo.out[1]) * geo.out[2];  // pixels of one batch entry
  return even && row_positions == geo.out[2] && together >= shortest_entry && together % gemm->k_multiple == 0 &&
         size_of(problem.dtype) == element_bytes && y[axis_w] == element_bytes &&
         (geo.out[1] == 1 || y[axis_h] == geo.out[2] * element_bytes) && y[axis_c] % element_bytes == 0 &&
         y[axis_c] > 0 && y[axis_c] % 512 != 0;
}

double WindowGradient::choose_blocking(int64_t element_bytes, int64_t limit) {
  const Geometry& geo = problem.geo;
  if (geo.G != 1 || gemm->near_k > 0 || gemm->parts > 1) return -1;
  for (int axis = 0; axis < 3; ++axis)
    if (geo.pad[axis] != 0 || (geo.out[axis] - 1) * geo.stride[axis] + (geo.kernel[axis] - 1) * geo.dilation[axis] >=
                                  geo.in[axis])
      return -1;
  Tensor x, w;
  std::copy_n(problem.x_nominal, 5, x.stride);
  std::copy_n(problem.w_nominal, 5, w.stride);
  const int64_t run = Runs(*this, x, w).length, sum_bytes = element_bytes == 8 ? 8 : 4;
  if (run < shortest_run || geo.out[2] < shortest_row) return -1;
  const bool y_last = std::abs(problem.y_nominal[axis_c]) < std::abs(problem.y_nominal[axis_w]);
  row_positions = round_up(geo.out[2], gemm->k_multiple);
  const double pixels = double(rows() * row_positions), part = double(std::min<int64_t>(run, gemm->cols));
  const double dy_all = double(geo.N * geo.K * geo.out_pixels() * size_of(problem.dtype));
  const double x_all = double(geo.N * geo.C * geo.in_pixels() * size_of(problem.dtype));
  double best = -1;
  WindowGradient chosen = *this;
  for (int64_t outs = 1; outs <= 16 && outs * gemm->max_rows <= geo.K; ++outs)
    for (int64_t windows = 1; windows <= 32 && windows * gemm->cols <= window(); ++windows)
      for (int64_t wanted : {128, 192, 256, 384, 512}) {
        out_block = round_up(ceil_div(geo.K, outs), gemm->max_rows);
        out_blocks = ceil_div(geo.K, out_block);
        window_block = round_up(ceil_div(window(), windows), gemm->cols);
        window_blocks = ceil_div(window(), window_block);
        chunk_rows = rows_of(wanted);
        // The sums of chunks are added one after the other.
        if (double(ceil_div(rows(), chunk_rows)) > 256 + 2 * std::sqrt(pixels)) continue;
        const int64_t positions = chunk_rows * row_positions;
        const bool in_place = reads_in_place(problem.y_nominal, element_bytes);
        dy_pitch = row_pitch(positions, element_bytes);
        dy_bytes = round_up(out_block * dy_pitch * element_bytes, 64);
        window_bytes = round_up(positions * window_block * element_bytes, 64);
        sums_bytes = round_up(out_block * window_block * sum_bytes, 64);
        slot_bytes = dy_bytes + window_bytes + sums_bytes;
        const int64_t used = slot_bytes - (in_place ? dy_bytes : 0);
        if (tasks() < fewest_tasks || slot_bytes > limit || used > cache_budget) continue;
        const double channels = double(geo.K), elements = double(window());
        const double panels = std::ceil(channels / gemm->max_rows);
        const double widths = std::ceil(elements / (gemm->cols / 2)) * (gemm->cols / 2);
        const double step = (channels + 0.5 * panels) * widths * 2.0 / gemm->flops_cycle;
        double cycles = pixels * std::max(step, panels * widths / gemm->cols * gemm->latency_cycles);
        const double dy_reads = double(window_blocks), x_reads = double(out_blocks);
        if (!in_place) cycles += pixels * channels * dy_reads * (y_last ? transpose_cycles : copy_cycles);
        if (!in_place) cycles += channels * dy_reads * double(rows());
        cycles += x_reads * elements * (pixels * copy_cycles + double(rows()) * part_cycles / part);
        if (dy_all + x_all > large) cycles += memory_cycles * (dy_all * (dy_reads - 1) + x_all * (x_reads - 1));
        cycles += channels * elements * (sums_cycles * double(ceil_div(rows(), chunk_rows)) + store_cycles);
        cycles *= 0.75 + 0.25 * double(round_up(tasks(), 4)) / double(tasks());
        if (best >= 0 && cycles >= best) continue;
        best = cycles;
        chosen = *this;
      }
  *this = chosen;
  return best;
}

std::string WindowGradient::describe() const {
  char text[300];
  std::snprintf(text, sizeof text,
                "whole windows: %lld of %lld result channels x %lld of %lld elements of a window, %lld of %lld rows of "
                "%lld pixels at a time; %lld tasks",
                (long long)out_block, (long long)problem.geo.K, (long long)window_block, (long long)window(),
                (long long)chunk_rows, (long long)rows(), (long long)problem.geo.out[2], (long long)tasks());
  return text;
}

template <typename T>
void run_window_gradient(const WindowGradient& plan, const Arguments& arguments) {
  const Packer<T> packer(*plan.problem.isa, plan.problem.dtype, plan.problem.compute);
  parallel_for(plan.tasks(), arguments.threads,
               [&](int64_t task, int slot) { WindowTask<T>(plan, arguments, packer, task, slot).work(); });
}

template void run_window_gradient<float>(const WindowGradient&, const Arguments&);
template void run_window_gradient<double>(const WindowGradient&, const Arguments&);
template void run_window_gradient<Bf16>(const WindowGradient&, const Arguments&);

}  // namespace convgrad
