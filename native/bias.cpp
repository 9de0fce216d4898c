// The bias gradient as a family of its own, and its parts for the weight gradient's pass.
#include "bias.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "dense_box.h"
#include "gemm.h"
#include "threads.h"

namespace convgrad {
namespace {

constexpr int64_t line_length = 512;  // elements summed in f32 before they join the total in double

// One line of dy, from memory to its exact values.
template <typename Value>
void read(const Problem& problem, const char* src, int64_t stride, int64_t n, Value* dst) {
  if constexpr (sizeof(Value) == 8) {
    problem.isa->decode64(src, stride, n, dst);
  } else {
    problem.isa->decode[int(problem.dtype)](src, stride, n, dst);
  }
}

double sum_line(const Isa& isa, const float* line, int64_t n) { return isa.gemm->sum(line, n); }
double sum_line(const Isa&, const double* line, int64_t n) {
  double lane[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int l = 0; l < 8; ++l) lane[l] += line[i + l];
  for (int l = 0; i + l < n; ++l) lane[l] += line[i + l];
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

template <typename Value>
void add_part(const Problem& problem, const Tensor& dy, const BiasPart& part, BiasSums& sums) {
  const Isa& isa = *problem.isa;
  const char* image = dy.data + part.image * dy.stride[axis_n] + part.channel * dy.stride[axis_c];
  const bool channels_last = std::abs(dy.stride[axis_c]) < std::abs(dy.stride[axis_w]);
  constexpr int64_t lines_together = 64;
  double* total = sums.now();
  alignas(64) Value line[line_length];
  for (int64_t d = part.first[0]; d < part.last[0]; ++d)
    for (int64_t h = part.first[1]; h < part.last[1]; ++h) {
      const char* row = image + d * dy.stride[axis_d] + h * dy.stride[axis_h];
      if (channels_last) {
        for (int64_t w = part.first[2]; w < part.last[2]; ++w) {
          for (int64_t c = 0; c < part.channels; c += line_length) {
            const int64_t n = std::min(line_length, part.channels - c);
            read(problem, row + w * dy.stride[axis_w] + c * dy.stride[axis_c], dy.stride[axis_c], n, line);
            for (int64_t i = 0; i < n; ++i) total[c + i] += double(line[i]);
          }
          sums.added(1);
        }
      } else {
        for (int64_t from = part.first[2]; from < part.last[2]; from += lines_together * line_length) {
          const int64_t to = std::min(part.last[2], from + lines_together * line_length);
          for (int64_t c = 0; c < part.channels; ++c) {
            double some = 0;
            for (int64_t w = from; w < to; w += line_length) {
              const int64_t n = std::min(line_length, to - w);
              read(problem, row + w * dy.stride[axis_w] + c * dy.stride[axis_c], dy.stride[axis_w], n, line);
              some += sum_line(isa, line, n);
            }
            total[c] += some;
          }
          sums.added(1);
        }
      }
    }
}

}  // namespace

void add_bias(const Problem& problem, const Tensor& dy, const BiasPart& part, BiasSums& sums) {
  if (problem.dtype == Dtype::f64) {
    add_part<double>(problem, dy, part, sums);
  } else {
    add_part<float>(problem, dy, part, sums);
  }
}

void add_bias_of_box(const Problem& problem, const Tensor& dy, BiasPart part, int64_t images, const int64_t (&origin)[3],
                     const int64_t (&length)[3], double* total) {
  for (int axis = 0; axis < 3; ++axis) {
    part.first[axis] = origin[axis];
    part.last[axis] = origin[axis] + length[axis];
  }
  BiasSums sums(total, part.channels);
  for (int64_t i = 0; i < images; ++i, ++part.image) add_bias(problem, dy, part, sums);
}

void store_bias(const Problem& problem, const Tensor& db, int64_t channel, int64_t channels, const double* total) {
  problem.isa->encode64[int(problem.out_dtype)](total, channels, db.data + channel * db.stride[0], db.stride[0]);
}

// Tasks are (block of channels, slice of the images and rows); the slices' totals are added in order.
std::optional<Plan> plan_bias(const Problem& problem, std::string& why_not) {
  if (problem.wrt != wrt_bias) {
    why_not = "computes the bias gradient alone";
    return std::nullopt;
  }
  const Geometry& geo = problem.geo;
  const int64_t rows = geo.N * geo.out[0] * geo.out[1];
  const bool channels_last = std::abs(problem.y_nominal[axis_c]) < std::abs(problem.y_nominal[axis_w]);
  const int64_t block = channels_last ? 512 : 16;  // channels of a task
  const int64_t blocks = ceil_div(geo.K, block);
  const int64_t elements = rows * geo.out[2] * geo.K;
  int64_t slices = std::clamp(elements / std::max<int64_t>(1, blocks) / 65536, int64_t(1), std::max<int64_t>(1, rows));
  slices = std::min<int64_t>(slices, 64);
  while (slices > 1 && slices * geo.K * 8 > problem.max_workspace) slices /= 2;
  Plan plan;
  plan.kernel = std::string("bias_f64_") + problem.isa->name;
  plan.workspace_bytes = slices * geo.K * 8;
  plan.threads = elements < 32768 ? 1 : problem.threads;
  plan.seconds = 1e-9 * double(elements);
  plan.notes.push_back("dense sums: " + std::to_string(blocks) + " blocks of channels, " + std::to_string(slices) +
                       " slices of " + std::to_string(rows) + " rows");
  if (plan.workspace_bytes > problem.max_workspace) {
    why_not = "needs at least " + std::to_string(plan.workspace_bytes) + " bytes of workspace, max_workspace_bytes=" +
              std::to_string(problem.max_workspace);
    return std::nullopt;
  }
  plan.run = [problem, rows, block, blocks, slices](const Arguments& arguments) {
    const Geometry& geo = problem.geo;
    double* totals = reinterpret_cast<double*>(arguments.workspace);
    std::fill(totals, totals + slices * geo.K, 0.0);
    parallel_for(blocks * slices, arguments.threads, [&](int64_t task, int) {
      const int64_t slice = task / blocks, channel = task % blocks * block;
      BiasPart part{0, channel, std::min(block, geo.K - channel), {0, 0, 0}, {0, 0, geo.out[2]}};
      BiasSums sums(totals + slice * geo.K + channel, part.channels);
      for (int64_t row = rows * slice / slices; row < rows * (slice + 1) / slices; ++row) {
        part.image = row / (geo.out[0] * geo.out[1]);
        part.first[0] = row / geo.out[1] % geo.out[0];
        part.first[1] = row % geo.out[1];
        part.last[0] = part.first[0] + 1;
        part.last[1] = part.first[1] + 1;
        add_bias(problem, arguments.y, part, sums);
      }
    });
    for (int64_t slice = 1; slice < slices; ++slice)
      for (int64_t k = 0; k < geo.K; ++k) totals[k] += totals[slice * geo.K + k];
    store_bias(problem, arguments.db, 0, geo.K, totals);
  };
  return plan;
}

}  // namespace convgrad
