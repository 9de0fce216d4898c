// One run of a correlation: its arrays, its memory, and the packing of its weight.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>

#include "dense_correlate.h"
#include "dense_prefetch.h"
#include "dense_store.h"

namespace convgrad {

template <typename T>
struct Run {
  const Correlation& plan;
  const Arguments& arguments;
  const Tensor& source;
  const Tensor& result;
  Packer<T> packer;
  Store<T> store;
  T* weight;
  char* slots;
  bool large;  // the result: see writes_around_caches
  // Of operands in parts: what the weight holds, and whether the parts do not suffice.
  mutable std::mutex mutex;
  mutable Magnitudes weight_met;
  mutable std::atomic<bool> outside{false};

  Run(const Correlation& correlation, const Arguments& args)
      : plan(correlation), arguments(args),
        source(correlation.problem.wrt & wrt_output ? args.x : args.y),
        result(correlation.problem.wrt & wrt_output ? args.y : args.x),
        packer(*correlation.problem.isa, correlation.problem.dtype, correlation.problem.compute,
               correlation.gemm->parts),
        store(*correlation.problem.isa, correlation.problem.out_dtype),
        weight(reinterpret_cast<T*>(args.workspace)), slots(args.workspace + correlation.weight_bytes),
        large(writes_around_caches(correlation.result_bytes())) {}

  // Elements of the packed weight before [group][channel block][phase][panel][tap].
  int64_t weight_at(int64_t group, int64_t block, const Phase& phase, int64_t panel) const {
    const int64_t row = plan.tap_total * plan.panels * plan.panel;  // elements per summed channel
    const int64_t before = group * plan.channel_pad + block * weight_pad(plan.channel_block);
    const int64_t taps = phase.tap_base * plan.panels + panel * phase.tap_count;
    return before * row + weight_pad(block_pad(block)) * taps * plan.panel;
  }
  // Elements from one panel to the next.
  int64_t panel_step(const Phase& phase, int64_t block) const {
    return weight_pad(block_pad(block)) * phase.tap_count * plan.panel;
  }
  int64_t block_channels(int64_t block) const {
    return std::min(plan.channel_block, plan.reduced - block * plan.channel_block);
  }
  int64_t block_pad(int64_t block) const { return plan.padded(block_channels(block)); }
  // Elements between two taps of the packed weight.
  int64_t tap_step(int64_t pad) const {
    return (plan.taps_inside() ? plan.gemm->k_multiple : weight_pad(pad)) * plan.panel;
  }
  // Summed channels, as the packed weight spaces them: its rows are read at the same time where pixels are columns.
  int64_t weight_pad(int64_t pad) const { return plan.pixels_are_rows ? pad : row_pitch(pad, sizeof(T)); }
};

// Packs the whole weight, once per call: [group][channel block][phase][panel][tap][micro-kernel's layout].
template <typename T>
void pack_weight(const Run<T>& run);
// Packs `count` panels of it, from `first` on, one after the other; says what it met. Weights whose taps do not lie
// side by side can be packed for some of the (padded) summed channels of the block at a time.
template <typename T>
Magnitudes pack_panels(const Run<T>& run, int64_t group, int64_t block, const Phase& phase, int64_t first,
                       int64_t count, T* dst, int64_t first_channel = 0, int64_t last_channel = INT64_MAX);

// Queues what packing the task's own panels from `panel` on will read, where it lies in runs of more than a cache line.
template <typename T>
void fetch_panels(const Run<T>& run, int64_t group, int64_t block, int64_t panel, Prefetch& prefetch);

}  // namespace convgrad
