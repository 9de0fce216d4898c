// How rows of a tensor enter and leave lane form: by vectors across channels, by transposition, or one by one.
#pragma once

#include <utility>

#include "lane_elements.h"

#ifdef CONVGRAD_ISA
namespace convgrad::CONVGRAD_ISA {

// --- shuffles ---------------------------------------------------------------------------------------------------

// Exchanges the off-diagonal H x H blocks of rows i and i+H; log2(L) rounds transpose a square of L x L.
template <typename T, int H = 1>
CONVGRAD_INLINE void transpose(Vec<T>* r) {
  constexpr int L = lanes_of<T>;
  if constexpr (H < L) {
    typename LaneTypes<T>::Index low, high;
    for (int j = 0; j < L; ++j) {
      low[j] = (j & H) ? L + j - H : j;
      high[j] = (j & H) ? L + j : j + H;
    }
    for (int i = 0; i < L; ++i) {
      if (i & H) continue;
      Vec<T> a = r[i], b = r[i + H];
      r[i] = __builtin_shuffle(a, b, low);
      r[i + H] = __builtin_shuffle(a, b, high);
    }
    transpose<T, 2 * H>(r);
  }
}

// v[0..M) hold L*M elements in which M channels alternate; afterwards v[m] holds channel m. M is a power of two.
template <typename T, int M>
CONVGRAD_INLINE void deinterleave(Vec<T>* v) {
  if constexpr (M > 1) {
    typename LaneTypes<T>::Index even, odd;
    for (int j = 0; j < lanes_of<T>; ++j) {
      even[j] = 2 * j;
      odd[j] = 2 * j + 1;
    }
    Vec<T> e[M / 2], o[M / 2];
    for (int i = 0; i < M / 2; ++i) {
      e[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even);
      o[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], odd);
    }
    deinterleave<T, M / 2>(e);
    deinterleave<T, M / 2>(o);
    for (int i = 0; i < M / 2; ++i) {
      v[2 * i] = e[i];
      v[2 * i + 1] = o[i];
    }
  }
}

// The inverse of deinterleave.
template <typename T, int M>
CONVGRAD_INLINE void interleave(Vec<T>* v) {
  if constexpr (M > 1) {
    constexpr int L = lanes_of<T>;
    Vec<T> e[M / 2], o[M / 2];
    for (int i = 0; i < M / 2; ++i) {
      e[i] = v[2 * i];
      o[i] = v[2 * i + 1];
    }
    interleave<T, M / 2>(e);
    interleave<T, M / 2>(o);
    typename LaneTypes<T>::Index low, high;
    for (int j = 0; j < L; ++j) {
      low[j] = (j & 1) ? L + j / 2 : j / 2;
      high[j] = low[j] + L / 2;
    }
    for (int i = 0; i < M / 2; ++i) {
      v[2 * i] = __builtin_shuffle(e[i], o[i], low);
      v[2 * i + 1] = __builtin_shuffle(e[i], o[i], high);
    }
  }
}

// --- lines of elements --------------------------------------------------------------------------------------------

CONVGRAD_INLINE void decode_line(const ElementCode& c, const char* p, int64_t step, int64_t n, float* to) {
  c.decode(p, step, n, to);
}
CONVGRAD_INLINE void decode_line(const ElementCode& c, const char* p, int64_t step, int64_t n, double* to) {
  c.decode64(p, step, n, to);
}
CONVGRAD_INLINE void encode_line(const ElementCode& c, const float* from, int64_t n, char* p, int64_t step) {
  c.encode(from, n, p, step);
}
CONVGRAD_INLINE void encode_line(const ElementCode& c, const double* from, int64_t n, char* p, int64_t step) {
  c.encode64(from, n, p, step);
}

// How far ahead planes and runs are fetched: they are many short streams, the hardware does not see them in time.
constexpr int64_t ahead_bytes = 512, far_bytes = 3072;  // of every plane; of runs that are read

// Fetches the start of every plane of a block.
template <bool Write>
CONVGRAD_INLINE void fetch_starts(const LanePlanes& planes, int64_t block, const char* p, int64_t bytes) {
  const int lanes = planes.lanes(block, CONVGRAD_VECTOR_BYTES / 4);
  if (bytes > 2 * ahead_bytes) bytes = 2 * ahead_bytes;
  for (int l = 0; l < lanes; ++l)
    for (int64_t at = 0; at < bytes; at += 64)
      __builtin_prefetch(p + block * planes.block_step + planes.offset[l] + at, Write);
}

// --- runs of channels ---------------------------------------------------------------------------------------------

// Channels lie one after the other within a lane and lane after lane: a pixel is one run of L*M elements per block.
template <typename E, int M>
CONVGRAD_INLINE void load_runs(const LanePlanes& from, const char* p, int64_t pixels, typename E::T* to,
                               int64_t channel_step, int64_t block_step) {
  using T = typename E::T;
  constexpr int L = lanes_of<T>;
  const int64_t step = from.stride[axis_w], bytes = size_of(from.code.dtype);
  const int64_t whole = E::bytes ? from.planes / L : 0;
  const int64_t run_bytes = from.planes * M * bytes, far = far_bytes / run_bytes, ahead = (far < 2 ? 2 : far) * step;
  [[maybe_unused]] alignas(64) T run[L * M];
  for (int64_t x = 0; x < pixels; ++x, p += step, to += L) {
    for (int64_t at = 0; at < run_bytes; at += 64) __builtin_prefetch(p + ahead + at);
    Vec<T> v[M];
    if constexpr (E::bytes) {
      for (int64_t b = 0; b < whole; ++b) {
        for (int m = 0; m < M; ++m) v[m] = E::load(p + (b * M + m) * L * E::bytes);
        deinterleave<T, M>(v);
        for (int m = 0; m < M; ++m) store(to + b * block_step + m * channel_step, v[m]);
      }
    }
    for (int64_t b = whole; b < from.blocks; ++b) {
      const char* q = p + b * L * M * bytes;
      const int count = from.lanes(b, L) * M;
      if constexpr (E::bytes) {
        for (int m = 0; m < M; ++m)
          v[m] = count > m * L ? load_part<E>(q + m * L * E::bytes, count - m * L < L ? count - m * L : L) : Vec<T>{};
      } else {
        decode_line(from.code, q, bytes, count, run);
        for (int i = count; i < L * M; ++i) run[i] = 0;  // an Inf of the block before must meet no lane without a channel
        for (int m = 0; m < M; ++m) v[m] = load<Vec<T>>(run + m * L);
      }
      deinterleave<T, M>(v);
      for (int m = 0; m < M; ++m) store(to + b * block_step + m * channel_step, v[m]);
    }
  }
}

template <typename E, int M>
CONVGRAD_INLINE void store_runs(const LanePlanes& to, char* p, int64_t pixels, const typename E::T* from,
                                int64_t channel_step, int64_t block_step) {
  using T = typename E::T;
  constexpr int L = lanes_of<T>;
  const int64_t step = to.stride[axis_w], bytes = size_of(to.code.dtype);
  const int64_t whole = E::bytes ? to.planes / L : 0;
  const bool stream = E::bytes && to.stream && (reinterpret_cast<uintptr_t>(p) | step) % 64 == 0 &&
                      to.planes * M * bytes % 64 == 0;
  const int64_t run_bytes = stream ? 0 : to.planes * M * bytes, ahead = run_bytes < ahead_bytes ? 4 * step : 2 * step;
  [[maybe_unused]] alignas(64) T run[L * M];
  for (int64_t x = 0; x < pixels; ++x, p += step, from += L) {
    for (int64_t at = 0; at < run_bytes; at += 64) __builtin_prefetch(p + ahead + at, 1);
    Vec<T> v[M];
    if constexpr (E::bytes) {
      for (int64_t b = 0; b < whole; ++b) {
        for (int m = 0; m < M; ++m) v[m] = load<Vec<T>>(from + b * block_step + m * channel_step);
        interleave<T, M>(v);
        for (int m = 0; m < M; ++m) put<E>(p + (b * M + m) * L * E::bytes, v[m], stream);
      }
    }
    for (int64_t b = whole; b < to.blocks; ++b) {
      for (int m = 0; m < M; ++m) v[m] = load<Vec<T>>(from + b * block_step + m * channel_step);
      interleave<T, M>(v);
      char* q = p + b * L * M * bytes;
      const int count = to.lanes(b, L) * M;
      if constexpr (E::bytes) {
        for (int m = 0; m < M && count > m * L; ++m)
          store_part<E>(q + m * L * E::bytes, v[m], count - m * L < L ? count - m * L : L);
      } else {
        for (int m = 0; m < M; ++m) store(run + m * L, v[m]);
        encode_line(to.code, run, count, q, bytes);
      }
    }
  }
}

// --- squares of pixels by lanes -------------------------------------------------------------------------------------

// `rows` rows of `width` pixels that lie one after the other in the tensor, as one flat line, to rows `pitch` apart.
// Squares of L lanes by L pixels are transposed; the last one overlaps its neighbour so that it is whole.
template <typename E>
CONVGRAD_INLINE void load_squares(const LanePlanes& from, int64_t block, const char* p, int64_t rows, int64_t width,
                                  typename E::T* to, int64_t pitch) {
  using T = typename E::T;
  constexpr int L = lanes_of<T>;
  const int64_t bytes = size_of(from.code.dtype), pixels = rows * width;
  const int lanes = from.lanes(block, L);
  for (int64_t at = 0; at < pixels; at += L) {
    if (at + L > pixels && pixels >= L) at = pixels - L;
    const int64_t n = pixels - at < L ? pixels - at : L;
    const char* q = p + at * bytes;
    Vec<T> r[L];
    if (E::bytes && n == L) {
      if constexpr (E::bytes) {
        if (lanes == L) {
          for (int l = 0; l < L; ++l) {
            __builtin_prefetch(q + from.offset[l] + ahead_bytes);
            r[l] = E::load(q + from.offset[l]);
          }
        } else {
          for (int l = 0; l < L; ++l) r[l] = l < lanes ? E::load(q + from.offset[l]) : Vec<T>{};
        }
      }
    } else {
      for (int l = 0; l < L; ++l) {
        alignas(64) T part[L] = {};
        if (l < lanes) decode_line(from.code, q + from.offset[l], bytes, n, part);
        r[l] = load<Vec<T>>(part);
      }
    }
    transpose<T>(r);
    int64_t x = at % width;
    T* row = to + at / width * pitch;
    if (x + L <= width) {
      for (int i = 0; i < L; ++i) store(row + (x + i) * L, r[i]);
      continue;
    }
    for (int i = 0; i < n; ++i) {
      store(row + x * L, r[i]);
      if (++x == width) x = 0, row += pitch;
    }
  }
}

// `pixels` pixels, dense in lane form, to a flat line of the tensor.
template <typename E>
CONVGRAD_INLINE void store_squares(const LanePlanes& to, int64_t block, char* p, int64_t pixels,
                                   const typename E::T* from) {
  using T = typename E::T;
  constexpr int L = lanes_of<T>;
  const int64_t bytes = size_of(to.code.dtype);
  const int lanes = to.lanes(block, L);
  for (int64_t at = 0; at < pixels; at += L) {
    if (at + L > pixels && pixels >= L) at = pixels - L;
    const int64_t n = pixels - at < L ? pixels - at : L;
    char* q = p + at * bytes;
    Vec<T> r[L];
    for (int i = 0; i < L; ++i) r[i] = i < n ? load<Vec<T>>(from + (at + i) * L) : Vec<T>{};
    transpose<T>(r);
    if (E::bytes && n == L) {
      if constexpr (E::bytes)
        for (int l = 0; l < L; ++l) {
          if (l >= lanes) break;
          char* line = q + to.offset[l];
          put<E>(line, r[l], to.stream && E::bytes * L == 64 && reinterpret_cast<uintptr_t>(line) % 64 == 0);
        }
    } else {
      for (int l = 0; l < lanes; ++l) {
        alignas(64) T part[L];
        store(part, r[l]);
        encode_line(to.code, part, n, q + to.offset[l], bytes);
      }
    }
  }
}

// --- any strides: lane by lane, in pieces that stay in the first-level cache ---------------------------------------

template <typename T>
CONVGRAD_INLINE void load_scattered(const LanePlanes& from, int64_t block, const char* p, int64_t pixels, T* to) {
  constexpr int L = lanes_of<T>, piece = 64;
  const int64_t step = from.stride[axis_w];
  const int lanes = from.lanes(block, L);
  T line[piece];
  for (int64_t x = 0; x < pixels; x += piece) {
    const int64_t n = pixels - x < piece ? pixels - x : piece;
    for (int l = 0; l < L; ++l) {
      if (l < lanes) decode_line(from.code, p + from.offset[l] + x * step, step, n, line);
      for (int64_t i = 0; i < n; ++i) to[(x + i) * L + l] = l < lanes ? line[i] : T(0);
    }
  }
}

template <typename T>
CONVGRAD_INLINE void store_scattered(const LanePlanes& to, int64_t block, char* p, int64_t pixels, const T* from) {
  constexpr int L = lanes_of<T>, piece = 64;
  const int64_t step = to.stride[axis_w];
  T line[piece];
  for (int64_t x = 0; x < pixels; x += piece) {
    const int64_t n = pixels - x < piece ? pixels - x : piece;
    for (int l = 0; l < to.lanes(block, L); ++l) {
      for (int64_t i = 0; i < n; ++i) line[i] = from[(x + i) * L + l];
      encode_line(to.code, line, n, p + to.offset[l] + x * step, step);
    }
  }
}

// --- rows of a plane ------------------------------------------------------------------------------------------------

// Calls body.template operator()<M>() for the channel count of a run, if runs apply to these planes.
template <typename Body>
CONVGRAD_INLINE bool as_runs(const LanePlanes& planes, const Body& body) {
  const int64_t bytes = size_of(planes.code.dtype), m = planes.channels;
  if (planes.lane_step != m * bytes || (m > 1 && planes.stride[axis_c] != bytes)) return false;
  if (m == 1) return body.template operator()<1>(), true;
  if (m == 2) return body.template operator()<2>(), true;
  if (m == 4) return body.template operator()<4>(), true;
  if (m == 8) return body.template operator()<8>(), true;
  if (m == 16) return body.template operator()<16>(), true;
  return false;
}

// Rows in lane form: `pitch` elements apart in channels and blocks of these steps.
struct LaneRows {
  int64_t count, width, pitch, channel_step, block_step;
};

// `p` is the address of the first pixel of the first row in a plane of offset 0.
template <typename E>
static void load_rows(const LanePlanes& from, const char* p, typename E::T* to, const LaneRows& rows) {
  const int64_t row_step = from.stride[axis_h], bytes = size_of(from.code.dtype);
  const bool runs = as_runs(from, [&]<int M>() {
    for (int64_t y = 0; y < rows.count; ++y)
      load_runs<E, M>(from, p + from.offset[0] + y * row_step, rows.width, to + y * rows.pitch, rows.channel_step,
                      rows.block_step);
  });
  if (runs) return;
  const bool dense = from.stride[axis_w] == bytes, flat = dense && row_step == rows.width * bytes;
  for (int64_t b = 0; b < from.blocks; ++b)
    for (int64_t c = 0; c < from.channels; ++c) {
      const char* q = p + b * from.block_step + c * from.stride[axis_c];
      typename E::T* plane = to + b * rows.block_step + c * rows.channel_step;
      if (flat) {  // the next plane comes while this one is transposed
        const int64_t next = c + 1 < from.channels ? b : b + 1, next_channel = c + 1 < from.channels ? c + 1 : 0;
        if (b + c == 0) fetch_starts<false>(from, 0, p, rows.count * row_step);
        if (next < from.blocks)
          fetch_starts<false>(from, next, p + next_channel * from.stride[axis_c], rows.count * row_step);
        load_squares<E>(from, b, q, rows.count, rows.width, plane, rows.pitch);
        continue;
      }
      for (int64_t y = 0; y < rows.count; ++y, q += row_step, plane += rows.pitch) {
        if (dense) load_squares<E>(from, b, q, 1, rows.width, plane, rows.pitch);
        else load_scattered(from, b, q, rows.width, plane);
      }
    }
}

// The rows must be dense in lane form: pitch == width vectors.
template <typename E>
static void store_rows(const LanePlanes& to, char* p, const typename E::T* from, const LaneRows& rows) {
  const int64_t row_step = to.stride[axis_h], bytes = size_of(to.code.dtype);
  const bool runs = as_runs(to, [&]<int M>() {
    for (int64_t y = 0; y < rows.count; ++y)
      store_runs<E, M>(to, p + to.offset[0] + y * row_step, rows.width, from + y * rows.pitch, rows.channel_step,
                       rows.block_step);
  });
  if (runs) return;
  const bool dense = to.stride[axis_w] == bytes, flat = dense && row_step == rows.width * bytes;
  for (int64_t b = 0; b < to.blocks; ++b)
    for (int64_t c = 0; c < to.channels; ++c) {
      char* q = p + b * to.block_step + c * to.stride[axis_c];
      const typename E::T* plane = from + b * rows.block_step + c * rows.channel_step;
      if (flat) {
        store_squares<E>(to, b, q, rows.count * rows.width, plane);
        continue;
      }
      for (int64_t y = 0; y < rows.count; ++y, q += row_step, plane += rows.pitch) {
        if (dense) store_squares<E>(to, b, q, rows.width, plane);
        else store_scattered(to, b, q, rows.width, plane);
      }
    }
}

}  // namespace convgrad::CONVGRAD_ISA
#endif
