// Patches: windows that do not overlap (kernel == stride) seen as fewer taps of more channels, or as a matrix product;
// one tap at every pixel, for which the pixels of all images can be one line; and images that lie between the pixels of
// a line (TBC), which are its columns.
//
// The pixels of a window that lie together in memory become channels. The folded problem is a dense one on the same
// memory: nothing of an activation is moved. Weights are used where they lie if their taps are evenly spaced along
// the new channels, otherwise they pass through the workspace in the order of the activations.
#include <algorithm>
#include <cstring>
#include <memory>

#include "conv.h"
#include "threads.h"

namespace convgrad {
namespace {

enum class Fold {
  none,
  image,        // the window is the whole image: a product of matrices, images are the pixels
  pixels,       // one tap, pixels as they are: those of all images are one line
  batch,        // one axis, images inside of a pixel: a plane with pixels as rows and images as columns
  last_columns, // channels last: the columns of a window and their channels
  first_columns // channels first: the columns of a window; the channels become planes
};

bool covers(const Geometry& g, int axis) {
  return g.kernel[axis] == g.in[axis] && g.out[axis] == 1 && g.pad[axis] == 0 &&
         (g.dilation[axis] == 1 || g.in[axis] == 1);
}
bool tiles(const Geometry& g, int axis) {
  return g.kernel[axis] == g.stride[axis] && g.out[axis] * g.stride[axis] == g.in[axis] && g.pad[axis] == 0 &&
         g.dilation[axis] == 1;
}

// The axes c d h w of one image from the innermost on, where they lie together; false where they do not.
bool memory_order(const Geometry& g, const int64_t* stride, int64_t bytes, int* order) {
  const int64_t size[5] = {1, g.C, g.in[0], g.in[1], g.in[2]};
  int64_t run = bytes;
  bool used[5] = {};
  for (int place = 0; place < 4; ++place) {
    int found = 0;
    for (int axis = 1; axis < 5; ++axis)
      if (!used[axis] && (size[axis] == 1 || stride[axis] == run) && (!found || size[axis] > 1)) found = axis;
    if (!found) return false;
    used[found] = true;
    order[place] = found;
    run *= size[found];
  }
  return true;
}

// The distance between the pixels of all images where they are evenly spaced in x and in y, in the same order: one tap
// at every pixel. Zero: they are not.
int64_t even_pixels(const Geometry& g, const int64_t* x, const int64_t* y, int64_t& y_step) {
  const int64_t size[5] = {g.N, 1, g.in[0], g.in[1], g.in[2]};
  for (int axis = 0; axis < 3; ++axis)
    if (g.kernel[axis] != 1 || g.stride[axis] != 1 || g.pad[axis] != 0 || g.out[axis] != g.in[axis]) return 0;
  std::vector<int> axes;
  for (int axis : {axis_n, axis_d, axis_h, axis_w})
    if (size[axis] > 1) axes.push_back(axis);
  if (axes.size() < 2) return 0;
  std::sort(axes.begin(), axes.end(), [&](int a, int b) { return x[a] < x[b]; });
  for (size_t i = 0; i + 1 < axes.size(); ++i)
    if (x[axes[i + 1]] != x[axes[i]] * size[axes[i]] || y[axes[i + 1]] != y[axes[i]] * size[axes[i]]) return 0;
  y_step = y[axes[0]];
  return x[axes[0]];
}

// Whether the images of each pixel of a line follow each other in x and in y, and the pixels too.
bool images_inside(const Geometry& g, const int64_t* x, const int64_t* y) {
  for (int axis : {0, 1})
    if (g.in[axis] != 1 || g.out[axis] != 1 || g.kernel[axis] != 1 || g.pad[axis] != 0) return false;
  return g.N > 1 && x[axis_n] > 0 && x[axis_w] == g.N * x[axis_n] && y[axis_n] > 0 && y[axis_w] == g.N * y[axis_n];
}

// The fold that arrays of these strides allow.
Fold fold_of(const Geometry& g, const int64_t* x, const int64_t* y, int64_t bytes) {
  int order[4];
  int64_t y_step = 0;
  if (g.G != 1) return Fold::none;
  if (g.taps() == 1) return even_pixels(g, x, y, y_step) > 0 && y_step > 0 ? Fold::pixels : Fold::none;
  if (covers(g, 0) && covers(g, 1) && covers(g, 2) && memory_order(g, x, bytes, order)) return Fold::image;
  if (images_inside(g, x, y)) return Fold::batch;
  if (!tiles(g, 2) || g.kernel[2] == 1) return Fold::none;
  if (g.C > 1 && x[axis_c] == bytes && x[axis_w] == g.C * bytes) return Fold::last_columns;
  if (x[axis_w] == bytes && (g.C == 1 || (g.in[0] == 1 && g.kernel[0] == 1 && g.pad[0] == 0 && g.out[0] == 1)))
    return Fold::first_columns;
  return Fold::none;
}

struct FoldPlan {
  Problem problem, folded;
  Fold fold;
  int order[4] = {};  // of a folded image
  Plan inner, otherwise;
  int64_t weight_bytes = 0;  // of the weights in the workspace

  bool weight_is_result() const { return problem.wrt & wrt_weight; }
  int64_t weight_size() const { return size_of(weight_is_result() ? problem.out_dtype : problem.dtype); }

  // The folded view of x, and of y where images become pixels.
  void view(const int64_t* from_x, const int64_t* from_y, int64_t x_bytes, int64_t* x, int64_t* y) const {
    if (fold != Fold::pixels && fold != Fold::batch) {
      view_x(from_x, x_bytes, x);
      return view_y(from_y, y);
    }
    std::copy_n(from_x, 5, x);
    std::copy_n(from_y, 5, y);
    if (fold == Fold::batch) {
      for (int64_t* stride : {x, y}) {
        stride[axis_h] = stride[axis_w];
        stride[axis_w] = stride[axis_n];
      }
      x[axis_n] = x[axis_d] = problem.geo.in[2] * x[axis_h];
      y[axis_n] = y[axis_d] = problem.geo.out[2] * y[axis_h];
      return;
    }
    x[axis_w] = even_pixels(problem.geo, from_x, from_y, y[axis_w]);
    const int64_t pixels = folded.geo.in[2];
    x[axis_n] = x[axis_d] = x[axis_h] = pixels * x[axis_w];
    y[axis_n] = y[axis_d] = y[axis_h] = pixels * y[axis_w];
  }
  void view_x(const int64_t* from, int64_t bytes, int64_t* to) const {
    const Geometry& g = problem.geo;
    std::copy_n(from, 5, to);
    to[axis_c] = bytes;
    if (fold == Fold::image) {
      to[axis_w] = from[axis_n];
      to[axis_n] = to[axis_d] = to[axis_h] = g.N * from[axis_n];
    } else {
      to[axis_w] = g.kernel[2] * from[axis_w];
      if (fold == Fold::first_columns && g.C > 1) to[axis_d] = from[axis_c];
    }
  }
  void view_y(const int64_t* from, int64_t* to) const {
    std::copy_n(from, 5, to);
    if (fold != Fold::image) return;
    to[axis_w] = from[axis_n];
    to[axis_n] = to[axis_d] = to[axis_h] = problem.geo.N * from[axis_n];
  }
  // Whether weights of these strides can be used where they lie; their view then.
  bool view_w(const int64_t* from, int64_t* to) const {
    const Geometry& g = problem.geo;
    std::copy_n(from, 5, to);
    if (fold == Fold::pixels) return true;
    if (fold == Fold::batch) {
      to[axis_h] = from[axis_w];
      return true;
    }
    if (fold == Fold::first_columns) {
      to[axis_i] = from[axis_w];
      if (g.C > 1) to[axis_d] = from[axis_i];
      to[axis_w] = g.kernel[2] * from[axis_w];
      return true;
    }
    if (fold == Fold::last_columns) return false;  // [tap][channel] never lies like [channel][tap]
    // NOTE: a stride of 0 is a stride like others (a broadcast weight): it does not say that no axis was met yet.
    int64_t run = 0;
    bool first = true;
    for (int place = 0; place < 4; ++place) {
      const int64_t size = extent(order[place]);
      if (size == 1) continue;
      if (first) to[axis_i] = run = from[order[place]];
      first = false;
      if (from[order[place]] != run) return false;
      run *= size;
    }
    to[axis_d] = to[axis_h] = to[axis_w] = run;
    return true;
  }
  int64_t extent(int axis) const { return axis == axis_c ? problem.geo.C : problem.geo.kernel[axis - axis_d]; }

  // Weights in the workspace: [out channel][t][r][folded channel].
  void workspace_w(int64_t bytes, int64_t* to) const {
    const Geometry& f = folded.geo;
    to[axis_i] = bytes;
    to[axis_w] = f.C * to[axis_i];
    to[axis_h] = to[axis_w] * f.kernel[2];
    to[axis_d] = to[axis_h] * f.kernel[1];
    to[axis_o] = to[axis_d] * f.kernel[0];
  }
  // Where the weights of one out channel lie in the caller's tensor, in the order of the workspace.
  std::vector<int64_t> places(const int64_t* stride) const {
    const Geometry& g = problem.geo;
    std::vector<int64_t> list;
    int axes[4] = {axis_c, axis_w, axis_h, axis_d};
    if (fold == Fold::image) std::copy_n(order, 4, axes);
    const int64_t n[4] = {extent(axes[0]), extent(axes[1]), extent(axes[2]), extent(axes[3])};
    list.reserve(size_t(g.C * g.taps()));
    for (int64_t d = 0; d < n[3]; ++d)
      for (int64_t c = 0; c < n[2]; ++c)
        for (int64_t b = 0; b < n[1]; ++b)
          for (int64_t a = 0; a < n[0]; ++a)
            list.push_back(a * stride[axes[0]] + b * stride[axes[1]] + c * stride[axes[2]] + d * stride[axes[3]]);
    return list;
  }
  template <typename T>
  void move_weights(const Tensor& w, char* workspace, bool out, int threads) const {
    const std::vector<int64_t> places = this->places(w.stride);
    const int64_t n = int64_t(places.size());
    parallel_for(problem.geo.K, threads, [&](int64_t k, int) {
      char *theirs = w.data + k * w.stride[axis_o], *ours = workspace + k * n * int64_t(sizeof(T));
      for (int64_t i = 0; i < n; ++i) {
        if (out) std::memcpy(theirs + places[i], ours + i * int64_t(sizeof(T)), sizeof(T));
        else std::memcpy(ours + i * int64_t(sizeof(T)), theirs + places[i], sizeof(T));
      }
    });
  }
  void move_weights(const Tensor& w, char* workspace, bool out, int threads) const {
    switch (weight_size()) {
      case 8: return move_weights<uint64_t>(w, workspace, out, threads);
      case 4: return move_weights<uint32_t>(w, workspace, out, threads);
      case 2: return move_weights<uint16_t>(w, workspace, out, threads);
      default: return move_weights<uint8_t>(w, workspace, out, threads);
    }
  }

  void fold_geometry();
  void run(const Arguments& args) const;
};

void FoldPlan::fold_geometry() {
  Geometry& f = folded.geo;
  const Geometry& g = problem.geo;
  if (fold == Fold::pixels) {
    const int64_t pixels = g.N * g.in[0] * g.in[1] * g.in[2];
    f.N = 1;
    for (int axis = 0; axis < 3; ++axis) f.in[axis] = f.out[axis] = axis < 2 ? 1 : pixels;
  } else if (fold == Fold::batch) {
    f = {1, g.C, g.K, 1, {1, g.in[2], g.N}, {1, g.out[2], g.N}, {1, g.kernel[2], 1}, {1, g.stride[2], 1},
         {1, g.dilation[2], 1}, {0, g.pad[2], 0}};
  } else if (fold == Fold::image) {
    f = {1, g.C * g.taps(), g.K, 1, {1, 1, g.N}, {1, 1, g.N}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
  } else {
    const bool last = fold == Fold::last_columns;
    f.C = g.kernel[2] * (last ? g.C : 1);
    f.in[2] = g.out[2];
    f.kernel[2] = f.stride[2] = 1;
    if (!last && g.C > 1) f.in[0] = f.kernel[0] = f.stride[0] = g.C;
  }
}

void FoldPlan::run(const Arguments& args) const {
  const int64_t x_bytes = size_of(problem.wrt & wrt_input ? problem.out_dtype : problem.dtype);
  int now[4];
  bool same = fold_of(problem.geo, args.x.stride, args.y.stride, x_bytes) == fold;
  if (same && fold == Fold::image)
    same = memory_order(problem.geo, args.x.stride, x_bytes, now) && std::equal(now, now + 4, order);
  if (!same) return otherwise.run(args);
  Arguments view = args;
  this->view(args.x.stride, args.y.stride, x_bytes, view.x.stride, view.y.stride);
  view.threads = std::min(args.threads, inner.threads);
  if (view_w(args.w.stride, view.w.stride)) return inner.run(view);
  view.workspace = args.workspace + weight_bytes;
  view.w.data = args.workspace;
  workspace_w(weight_size(), view.w.stride);
  if (!weight_is_result()) move_weights(args.w, args.workspace, false, args.threads);
  inner.run(view);
  if (weight_is_result()) move_weights(args.w, args.workspace, true, args.threads);
}

}  // namespace

std::optional<Plan> plan_fold(const Problem& problem, std::string& why_not) {
  const Geometry& g = problem.geo;
  auto p = std::make_shared<FoldPlan>();
  p->problem = p->folded = problem;
  const int64_t bytes = size_of(problem.dtype);  // nominal strides count in operands, also those of results
  p->fold = fold_of(g, problem.x_nominal, problem.y_nominal, bytes);
  if (p->fold == Fold::none || (problem.wrt & wrt_bias && !(problem.wrt & wrt_weight))) {
    why_not = "folds windows that tile the input of one group";
    return std::nullopt;
  }
  if (p->fold == Fold::image) memory_order(g, problem.x_nominal, bytes, p->order);
  p->fold_geometry();
  p->view(problem.x_nominal, problem.y_nominal, bytes, p->folded.x_nominal, p->folded.y_nominal);
  const bool in_place = p->view_w(problem.w_nominal, p->folded.w_nominal);
  if (!in_place) p->workspace_w(bytes, p->folded.w_nominal);
  // NOTE: counted also where nominal weights lie well, because those of a run may lie differently.
  const bool never_moved = p->fold == Fold::pixels || p->fold == Fold::batch;
  p->weight_bytes = never_moved ? 0 : (g.K * g.C * g.taps() * p->weight_size() + 63) / 64 * 64;
  p->folded.max_workspace = problem.max_workspace - p->weight_bytes;
  if (p->folded.max_workspace <= 0) {
    why_not = "needs more than " + std::to_string(p->weight_bytes) + " bytes of workspace, max_workspace_bytes=" +
              std::to_string(problem.max_workspace);
    return std::nullopt;
  }
  std::optional<Plan> inner = plan_dense(p->folded, why_not), otherwise = plan_dense(problem, why_not);
  if (!inner || !otherwise) return std::nullopt;
  p->inner = std::move(*inner);
  p->otherwise = std::move(*otherwise);

  constexpr double seconds_per_weight = 0.7e-9;
  Plan plan;
  plan.kernel = "patch_" + p->inner.kernel;
  plan.doubt = 1.1;  // the dense family's own estimate
  plan.threads = std::min(p->inner.threads, p->otherwise.threads);
  plan.workspace_bytes = std::max(p->inner.workspace_bytes + p->weight_bytes, p->otherwise.workspace_bytes);
  plan.seconds = p->inner.seconds + (in_place ? 0 : double(g.K) * g.C * g.taps() * seconds_per_weight);
  const char* const names[] = {"", "images are pixels", "pixels are one line", "images are columns",
                               "columns and channels are channels", "columns are channels, channels are planes"};
  plan.notes.push_back(std::string(names[int(p->fold)]) + ": " + std::to_string(p->folded.geo.C) +
                       " channels of a dense problem; weights " + (in_place ? "where they lie" : "reordered"));
  plan.notes.insert(plan.notes.end(), p->inner.notes.begin(), p->inner.notes.end());
  plan.run = [p](const Arguments& args) { p->run(args); };
  return plan;
}

}  // namespace convgrad
